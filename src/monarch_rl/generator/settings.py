"""Settings of the generators, and the SGLang arguments that follow from them."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from monarch_rl.errors import SettingsError
from monarch_rl.generator.gpu import check_dtype, gpu_arguments
from monarch_rl.generator.version_kind import LOADERS
from monarch_rl.model.config import ModelConfig
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings
from monarch_rl.runtime.deadlines import bytes_s
from monarch_rl.runtime.device_work import COMPILATION_S
from monarch_rl.settings.cli import NotAFlag
from monarch_rl.settings.ranges import FOREVER_S, SEED, TWO, CheckedSettings, Range

InFlight = Literal["continue", "recompute", "resume", "drain"]


@dataclass(frozen=True)
class GeneratorSettings(CheckedSettings, flags="generator"):
    """The generator replicas and their SGLang engines."""

    replicas: Annotated[int, Range(1, 100_000)] = TWO
    """Engines, one process mesh each, each with a whole copy of the model. More replicas generate more tokens/s. If it
    is not given: 1 without GPUs on at most two cores, where that is faster, otherwise 2; a resumed run keeps its
    number."""
    tp: Annotated[int, Range(1, 1024)] = 1
    """Engine ranks per replica (tensor parallel), each with its own device and a shard of every layer. More ranks fit a
    larger model and decode a sequence faster, but communicate in each layer. Must divide the number of heads."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Served dtype. `auto` is bfloat16 on a GPU, which supports no other, and float32 on a CPU, which is slow in
    bfloat16."""
    context_length: Annotated[int, Range(0, 100_000_000, "0 is the model's own")] = 0
    """Maximum tokens of prompt and answer together; 0 takes the model's own limit."""
    max_running_requests: Annotated[int | None, Range(1, 65_536)] = None
    """Sequences that a replica decodes at once; further requests wait. More give more tokens/s and need more KV cache.
    None is 256 on a GPU, and 128 on a CPU."""
    max_total_tokens: Annotated[int, Range(0, 10**9, "0 is automatic")] = 0
    """Tokens in the KV cache of a replica. 0 lets SGLang size it from free memory on a GPU, and is 65,536 on a CPU.
    With fewer than the running sequences need, the engine retracts and recomputes some of them."""
    memory_fraction: Annotated[float, Range(0, 0.99, "0 is automatic")] = 0.0
    """Share of a GPU's memory for weights and KV cache; more gives a larger cache. The rest is for activations, graphs
    and arriving versions. 0 computes it from model, GPU and settings (docs/memory.md). No effect on a CPU."""
    attention_backend: str = "auto"
    """SGLang's `--attention-backend`; `auto` lets SGLang choose on a GPU and is `torch_native` on a CPU."""
    in_flight: InFlight = "continue"
    """How a commit of new weights treats running sequences. `continue`: they continue with the keys and values of older
    weights, at no cost; so do conversations with their next turn. `recompute`: keys and values of prompt and sampled
    tokens are computed again. `resume`: sequences are ended and resumed from their sampled tokens, which costs the same
    and one more step. `drain`: the commit waits until all have ended, and new requests wait for the commit; nothing is
    computed twice, but part of the batch is idle."""
    drain_deadline_s: NotAFlag[Annotated[float, Range(0.1, FOREVER_S)]] = 600.0
    """Seconds that a commit may wait for running sequences to end under `drain`, before it fails."""
    part_tokens: NotAFlag[Annotated[int, Range(1, 1_000_000)]] = 64
    """A request's tokens are sent to its caller in steps of this many; if the replica is lost, another one continues
    from there, so at most this many tokens per request are sampled again. Smaller steps cost more messages. Shorter
    answers are sent once, when they are complete. SGLang's scheduler reports in such steps anyway, of 50 by default."""
    random_seed: Annotated[int, SEED] = 0
    """Seed of the engines' sampling; replica r uses random_seed + r."""
    deterministic: NotAFlag[bool] = False
    """SGLang's deterministic mode, on a GPU: a seeded request samples the same tokens whatever else is in the batch, at
    SGLang's cost in speed. On a CPU, seeds are always honoured and this has no effect."""
    start_deadline_s: NotAFlag[Annotated[float | None, Range(30, FOREVER_S)]] = None
    """Seconds within which an engine must start. It takes 10 to 30 on two CPU cores, minutes for a large model on a
    cold disk. On a GPU the first start also compiles kernels and captures graphs. None is 1200 on a GPU, 300 on a CPU,
    and 20 more per GB of the model."""

    def running_requests(self, on_gpu: bool) -> int:
        """Sequences that a replica decodes at once."""
        return self.max_running_requests or RUNNING_REQUESTS["cuda" if on_gpu else "cpu"]

    def start_limit_s(self, on_gpu: bool, model_bytes: int = 0) -> float:
        """Seconds within which an engine must start. ``model_bytes``: size of the weights that it reads."""
        return self.start_deadline_s or START_DEADLINE_S["cuda" if on_gpu else "cpu"] + bytes_s(model_bytes)


RUNNING_REQUESTS = {"cuda": 256, "cpu": 128}
"""Default sequences decoded at once. On a GPU this is also the largest batch for which SGLang captures a graph; 256 is
SGLang's own choice for GPUs of 60 to 160 GB (``arg_groups/memory_hook.py``). It runs fewer if the KV cache is full.
On a CPU a batch of a small model costs more than its rows: with 64 the main job's tokens take twice as many batches and
a third more CPU time than with 128 (``benchmarks/engine_cpu.py --playing 64 --max-running-requests 64``). With 256 they
take hardly less, and are trained later."""
START_DEADLINE_S = {"cuda": 1200.0, "cpu": 300.0}
ATTENTION_BACKENDS = (
    *("aiter", "ascend", "compressed", "cutedsl_mla", "dsa", "dsv4", "fa3", "fa4", "flashinfer", "flashmla"),
    *("flex_attention", "hpc_ops", "intel_amx", "intel_xpu", "llada2_cfg_flashinfer", "minicpm_flashattn"),
    *("minicpm_flashinfer", "nsa", "qsa", "tokenspeed_mla", "torch_native", "triton", "trtllm_mha", "trtllm_mla"),
    "wave",
)
"""Backends of SGLang 0.5.23."""
ENGINE_RESERVE = 6
"""Tokens of context and KV cache that SGLang does not give to a sequence: it refuses prompts of more tokens than its
limit - 7, and the prompt of a resumed request may hold all tokens of the sequence but the last."""
UNLIMITED_FRACTION = 0.98
"""SGLang's ``mem_fraction_static`` where ``max_total_tokens`` bounds the KV cache, on CPUs and on devices shared with
the trainer: so high that it does not reduce the cache further."""
CPU_KV_TOKENS = 65_536
"""KV cache of a replica on a CPU: 128 sequences of 512 tokens; 1.5 GB for SmolLM2-135M in float32."""


CPU_BATCH_S = 3000.0
"""Seconds per batch after which SGLang's scheduler ends itself: ten times SGLang's default, the factor by which
deadlines are extended on a machine without free cores (``runtime/deadlines.py``)."""
GPU_BATCH_S = 10 * COMPILATION_S
"""The same on a GPU, where a batch may compile kernels. The run's own watch ends hanging engines, and knows how long a
batch may take (docs/failures.md); SGLang's default of 300 s would end an engine that compiles."""
CPU_DECODES_PER_PREFILL = 2
"""Decoding steps between two batches of prompts, on a CPU. Requests arrive one by one as others end. If every batch of
prompts ran at once, as in SGLang, most steps of a small model would be nearly empty. With the main job's shape, 2 saved
a quarter of the scheduler's CPU time, and 1 to 4 were within 10 % of that. A request waits at most 2 steps longer, in
which others decode."""


def engine_arguments(
    model_path: str, settings: GeneratorSettings, replica: int, on_gpu: bool, lora: LoraSettings = FULL_TRAINING
) -> dict[str, object]:
    """SGLang ``ServerArgs`` for a token-in token-out engine that serves version 0.

    Args:
        model_path: Hugging Face folder or Hub name.
        settings: settings of all replicas.
        replica: index of this replica.
        on_gpu: whether the engine has a GPU.
        lora: settings of the LoRA adapter that the engine serves besides the base weights; rank 0 is none.
    """
    arguments: dict[str, object] = {
        "model_path": model_path,
        "skip_tokenizer_init": True,
        "dtype": resolve_dtype(settings.dtype, on_gpu),
        "max_running_requests": settings.running_requests(on_gpu),
        "random_seed": settings.random_seed + replica,
        "weight_version": "0",
        "custom_weight_loader": LOADERS,
        "tp_size": settings.tp,
        "sleep_on_idle": True,
        "log_level": "error",
    }
    if settings.context_length:
        arguments["context_length"] = settings.context_length
    if settings.max_total_tokens or not on_gpu:
        arguments["max_total_tokens"] = settings.max_total_tokens or CPU_KV_TOKENS
    if settings.attention_backend != "auto" or not on_gpu:
        backend = settings.attention_backend
        arguments["attention_backend"] = "torch_native" if backend == "auto" else backend
    if lora.rank:
        arguments.update(enable_lora=True, max_lora_rank=lora.rank, lora_target_modules=list(lora.targets))
        # One pool entry for the policy's adapter, one for the bare model: both stay, neither evicts the other.
        arguments["max_loras_per_batch"] = 2
        if not on_gpu:
            arguments["lora_backend"] = "torch_native"
    if on_gpu:
        arguments.update(gpu_arguments())
        if settings.memory_fraction:  # SGLang's default leaves no memory for arriving versions
            arguments["mem_fraction_static"] = settings.memory_fraction
        arguments["enable_deterministic_inference"] = settings.deterministic
        arguments["watchdog_timeout"] = GPU_BATCH_S
    else:
        # The overlap scheduler hides CPU work behind a device; with a model on the CPU it only adds a step of delay.
        arguments.update(device="cpu", disable_cuda_graph=True, disable_overlap_schedule=True)
        arguments["mem_fraction_static"] = UNLIMITED_FRACTION
        arguments["watchdog_timeout"] = CPU_BATCH_S
        arguments["prefill_decode_interval"] = CPU_DECODES_PER_PREFILL
    return arguments


def resolve_dtype(dtype: str, on_gpu: bool) -> str:
    """Name of the served dtype for a value of the ``dtype`` setting."""
    return dtype if dtype != "auto" else ("bfloat16" if on_gpu else "float32")


def check_served(config: ModelConfig, settings: GeneratorSettings, on_gpu: bool) -> None:
    """Check that SGLang can serve a model, sharded over ``tp`` engine ranks.

    Args:
        settings: settings of the replicas.
        on_gpu: whether the engines have GPUs.

    Raises:
        ValueError: ``tp`` does not divide heads or MLP (names the numbers), or SGLang would not start or would serve a
            different model.
    """
    tp = settings.tp
    family = config.architecture
    if family.float32_only and on_gpu:
        raise SettingsError(
            f"a {family.label} cannot be served on a GPU: it needs float32, because {family.float32_only}, but "
            "SGLang's norms support only half precision on GPUs. Run it on CPUs"
        )
    if family.float32_only and resolve_dtype(settings.dtype, on_gpu) != "float32":
        raise SettingsError(
            f"a {family.label} is served in float32 only: {family.float32_only}. Set generator.dtype float32"
        )
    scaled_rope = config.rope_parameters["rope_type"] != "default"
    if family.cpu_needs_scaled_rope and not on_gpu and not scaled_rope:
        raise SettingsError(
            f"on a CPU SGLang serves a {family.label} only with YaRN rotary embeddings, as in {family.label}'s own "
            "models, but this model's config.json has no rope_scaling: take another model, or run it on a GPU"
        )
    if family.needs_lm_head and config.tie_word_embeddings:
        raise SettingsError(
            f"the model is a {family.name} with tie_word_embeddings, for which SGLang creates a separate LM head that "
            "no tensor fills: untie it, that is, save its embeddings as lm_head.weight too"
        )
    # Sizes that the config of an unsupported architecture does not state are 0, and pass.
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    problems = [
        f"{name} is {size}"
        for name in ("num_attention_heads", "intermediate_size", "moe_intermediate_size")
        if (size := getattr(config, name)) % tp
    ]
    if kv_heads % tp and tp % kv_heads:
        problems.append(f"num_key_value_heads is {kv_heads}")
    if problems:
        raise SettingsError(
            f"generator.tp {tp} does not divide the model: {', '.join(problems)}. All ranks take equally many heads "
            f"and columns; use a tp that divides {heads} heads (KV heads may be repeated)."
        )


def engine_limits(config: ModelConfig, settings: GeneratorSettings, on_gpu: bool) -> dict[str, int]:
    """Maximum tokens of a sequence in the engine, by a description of each limit, for messages.

    Args:
        settings: settings of the replicas.
        on_gpu: whether the engines have GPUs.
    """
    limits = {"generator.context-length": settings.context_length or config.max_position_embeddings}
    if settings.max_total_tokens or not on_gpu:
        limits["generator.max-total-tokens"] = settings.max_total_tokens or CPU_KV_TOKENS
    reserve = f"minus {ENGINE_RESERVE} that SGLang reserves"
    return {f"{flag} {tokens}, {reserve}": tokens - ENGINE_RESERVE for flag, tokens in limits.items()}


def check_attention(settings: GeneratorSettings, on_gpu: bool) -> None:
    """Raise ValueError for an attention backend that SGLang does not have on this kind of machine, and for float32 on a
    GPU."""
    allowed = ATTENTION_BACKENDS if on_gpu else ("torch_native",)
    if settings.attention_backend not in ("auto", *allowed):
        where = "SGLang has" if on_gpu else "on a CPU there is only"
        raise SettingsError(
            f"generator.attention-backend {settings.attention_backend!r} cannot be used: {where} {', '.join(allowed)}. "
            "Give one of these, or auto"
        )
    if on_gpu:
        check_dtype(resolve_dtype(settings.dtype, on_gpu))


def check_context(config: ModelConfig, settings: GeneratorSettings) -> None:
    """Raise ValueError for a context longer than the model's own limit."""
    if settings.context_length > config.max_position_embeddings:
        raise SettingsError(
            f"generator.context-length {settings.context_length} exceeds the model's own limit of "
            f"{config.max_position_embeddings} tokens: give at most that, or 0"
        )


def cores_of_ranks(replica: int, tp: int, cores: Sequence[int]) -> str:
    """One core per engine rank of a replica on a CPU, as a value of ``SGLANG_CPU_OMP_THREADS_BIND``.

    Replicas take the machine's ``cores`` in order, and start over when all are taken.
    """
    return "|".join(str(cores[(replica * tp + rank) % len(cores)]) for rank in range(tp))


# -- translating SGLang's flags in messages to a recipe's flags -------------------------------------------------------

FLAGS = {
    "attention-backend": "attention-backend",
    "context-length": "context-length",
    "dtype": "dtype",
    "max-running-requests": "max-running-requests",
    "max-total-tokens": "max-total-tokens",
    "random-seed": "random-seed",
    "tensor-parallel-size": "tp",
    "tp-size": "tp",
}
"""SGLang's flags, and the ``generator`` flags that set the same options."""
GPU_FLAGS = FLAGS | {"mem-fraction-static": "memory-fraction"}
SENTENCES = {
    "Use a shorter input or enable --allow-auto-truncate.": (
        "Use shorter prompts, or raise --generator.context-length or --generator.max-total-tokens."
    ),
}
"""Sentences of SGLang, and their replacements."""
_FLAG = re.compile(r"(?<![\w.-])--(?!generator\.)([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")


def recipe_flags(text: str, on_gpu: bool | None = None) -> str:
    """A message of SGLang with its flags replaced by a recipe's, or marked as having no counterpart.

    Args:
        text: SGLang's message.
        on_gpu: whether the engine has a GPU; None asks torch.
    """
    for sentence, ours in SENTENCES.items():
        text = text.replace(sentence, ours)
    if _FLAG.search(text) is None:
        return text
    if on_gpu is None:
        import torch

        on_gpu = torch.accelerator.is_available()
    flags = GPU_FLAGS if on_gpu else FLAGS

    def name(match: re.Match[str]) -> str:
        ours = flags.get(match[1])
        return f"--generator.{ours}" if ours is not None else f"SGLang's {match[1]} (a recipe has no flag for it)"

    return _FLAG.sub(name, text)


def rename_in(error: BaseException) -> None:
    """Translate the flags in an error of SGLang; see :func:`recipe_flags`."""
    error.args = tuple(recipe_flags(part) if isinstance(part, str) else part for part in error.args)


def rename_in_log() -> None:
    """Translate the flags in all further log messages of SGLang in this process; see :func:`recipe_flags`."""
    make = logging.getLogRecordFactory()

    def renamed(name: str, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(name, *args, **kwargs)
        if name.startswith("sglang"):
            record.msg, record.args = recipe_flags(record.getMessage()), ()
        return record

    logging.setLogRecordFactory(renamed)
