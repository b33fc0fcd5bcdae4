"""The switch of what makes SGLang lean without an accelerator: :func:`install`; the package says what it does."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from monarch_rl.generator.cpu import admission, gloo, prefix_cache, results
from monarch_rl.generator.cpu.sampling import draw_if_unseeded
from monarch_rl.generator.patch import check_parameters, replace_method


def install() -> None:
    """Apply all of it. Raises RuntimeError if SGLang is not the one that this was written for."""
    from sglang.srt.environ import EnvField
    from sglang.srt.layers import sampler
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.models.llama import LlamaModel
    from sglang.srt.models.qwen2 import Qwen2Model
    from sglang.srt.models.qwen3 import Qwen3Model

    from monarch_rl.generator.cpu.attention import BatchedAttention
    from monarch_rl.generator.cpu.forward import forward_model

    check_parameters(BatchedAttention.forward_extend, "q k v layer forward_batch save_kv_cache")
    check_parameters(BatchedAttention.forward_decode, "q k v layer forward_batch save_kv_cache")
    attention_registry.ATTENTION_BACKENDS["torch_native"] = BatchedAttention
    for model in (Qwen2Model, Qwen3Model, LlamaModel):
        replace_method(
            model, "forward", forward_model, "input_ids positions forward_batch input_embeds pp_proxy_tensors"
        )
    replace_method(Scheduler, "get_new_batch_prefill", admission.get_new_batch_prefill, "running_batch")
    replace_method(Scheduler, "_arm_prefill_decode_interval", admission.arm_interval, "batch")
    replace_method(Scheduler, "maybe_sleep_on_idle", admission.gather_after_idle, "")
    replace_method(SchedulerBatchResultProcessor, "process_batch_result_decode", results.process_decode, "batch result")
    check_parameters(sampler.sampling_from_probs_torch, "probs sampling_seed positions")
    sampler.sampling_from_probs_torch = draw_if_unseeded(sampler.sampling_from_probs_torch)
    prefix_cache.install()
    gloo.install()
    replace_method(EnvField, "get", _read_variable, "")
    os.environ["SGLANG_EAGER_INPUT_NO_COPY"] = "1"


def _read_variable(field: Any, original: Callable[..., Any]) -> Any:
    """An environment variable of SGLang: parsed again only if it was set since."""
    raw = os.environ._data.get(field.name.encode())  # type: ignore[attr-defined]
    seen = field.__dict__.get("_monarch_rl_seen")
    if seen is not None and seen[0] is raw:
        return seen[1]
    value = original(field)
    if raw is not None or not callable(field.default):
        field._monarch_rl_seen = (raw, value)
    return value
