from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from monarch_rl.generator.settings import (
    ATTENTION_BACKENDS,
    CPU_KV_TOKENS,
    ENGINE_RESERVE,
    GeneratorSettings,
    check_attention,
    check_served,
    cores_of_ranks,
    engine_arguments,
    engine_limits,
)
from monarch_rl.model.config import ModelConfig
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings
from monarch_rl.pipeline.memory import check_cache, cpu_memory
from monarch_rl.runtime.machine_memory import check_free
from tests.model.configs import deepseek, qwen3, qwen3_moe


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("generator.replicas", 0),
        ("generator.tp", 0),
        ("generator.in-flight", "restart"),
        ("GeneratorSettings.drain_deadline_s", 0),
        ("generator.context-length", -1),
        ("generator.max-running-requests", 0),
        ("generator.max-total-tokens", -1),
        ("generator.memory-fraction", 1.0),
        ("GeneratorSettings.start_deadline_s", 0),
        ("GeneratorSettings.part_tokens", 0),
    ],
)
def test_an_invalid_value_is_refused_naming_its_flag_or_field(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(name)} "):
        GeneratorSettings(**{name.partition(".")[2].replace("-", "_"): value})


def test_automatic_values_follow_the_device() -> None:
    on_cpu = engine_arguments("m", GeneratorSettings(random_seed=3), 2, on_gpu=False)
    assert (on_cpu["dtype"], on_cpu["attention_backend"]) == ("float32", "torch_native")
    assert on_cpu["max_total_tokens"] == CPU_KV_TOKENS
    assert on_cpu["random_seed"] == 5
    on_gpu = engine_arguments("m", GeneratorSettings(), 0, on_gpu=True)
    assert on_gpu["dtype"] == "bfloat16"
    assert not {"device", "attention_backend", "max_total_tokens", "disable_cuda_graph"} & set(on_gpu)


def test_every_engine_starts_as_version_zero_and_sleeps_when_idle() -> None:
    arguments = engine_arguments("m", GeneratorSettings(), 0, on_gpu=True)
    assert arguments["weight_version"] == "0"
    assert arguments["sleep_on_idle"] is True


def test_an_engine_has_room_for_the_policys_adapter_and_for_the_model_without_it() -> None:
    assert "enable_lora" not in engine_arguments("m", GeneratorSettings(), 0, on_gpu=False)
    lora = LoraSettings(rank=4, targets=("q_proj", "o_proj"))
    arguments = engine_arguments("m", GeneratorSettings(), 0, on_gpu=False, lora=lora)
    assert (arguments["enable_lora"], arguments["max_lora_rank"], arguments["max_loras_per_batch"]) == (True, 4, 2)
    assert arguments["lora_target_modules"] == ["q_proj", "o_proj"]
    assert arguments["lora_backend"] == "torch_native"
    assert "lora_backend" not in engine_arguments("m", GeneratorSettings(), 0, on_gpu=True, lora=lora)


@pytest.mark.parametrize(
    ("tp", "config", "culprit"),
    [
        (2, qwen3(num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536), "num_attention_heads"),
        (3, qwen3(num_attention_heads=12, num_key_value_heads=2, intermediate_size=1536), "num_key_value_heads"),
        (2, qwen3(intermediate_size=15), "intermediate_size"),
        (4, qwen3_moe(num_attention_heads=8, intermediate_size=16, moe_intermediate_size=6), "moe_intermediate_size"),
    ],
)
def test_a_tp_that_does_not_divide_the_model_is_refused(tp: int, config: ModelConfig, culprit: str) -> None:
    with pytest.raises(ValueError, match=rf"tp {tp} .*\b{culprit}\b"):
        check_served(config, GeneratorSettings(tp=tp), on_gpu=False)


def test_a_tp_that_divides_is_accepted_and_kv_heads_may_be_repeated() -> None:
    check_served(
        qwen3(num_attention_heads=8, num_key_value_heads=2, intermediate_size=16),
        GeneratorSettings(tp=4),
        on_gpu=False,
    )
    check_served(
        qwen3(num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536),
        GeneratorSettings(tp=3),
        on_gpu=False,
    )


def test_ranks_of_replicas_take_cores_in_turn() -> None:
    assert [cores_of_ranks(replica, 2, [0, 1, 4, 5]) for replica in range(3)] == ["0|1", "4|5", "0|1"]
    assert cores_of_ranks(1, 3, [0, 1]) == "1|0|1"


def test_a_tied_mixture_of_experts_is_refused() -> None:
    """SGLang would sample from a head of random numbers."""
    with pytest.raises(ValueError, match="LM head"):
        check_served(qwen3_moe(tie_word_embeddings=True), GeneratorSettings(tp=1), on_gpu=False)
    check_served(qwen3_moe(tie_word_embeddings=False), GeneratorSettings(tp=1), on_gpu=False)


def test_a_deepseek_that_sglang_does_not_serve_is_refused() -> None:
    yarn = deepseek(rope_scaling={"type": "yarn", "factor": 4.0})
    check_served(yarn, GeneratorSettings(), on_gpu=False)
    with pytest.raises(ValueError, match="float32"):
        check_served(yarn, GeneratorSettings(dtype="bfloat16"), on_gpu=False)
    for dtype in ("auto", "float32"):
        with pytest.raises(ValueError, match="DeepSeek-V3 .*GPU"):
            check_served(yarn, GeneratorSettings(dtype=dtype), on_gpu=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="YaRN"):
        check_served(deepseek(), GeneratorSettings(), on_gpu=False)


def test_sglang_has_exactly_our_attention_backends() -> None:
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES

    assert sorted(ATTENTION_BACKEND_CHOICES) == sorted(ATTENTION_BACKENDS)


def test_an_attention_backend_that_cannot_be_used_is_refused() -> None:
    for backend, on_gpu in (("auto", False), ("torch_native", False), ("fa3", True), ("auto", True)):
        check_attention(GeneratorSettings(attention_backend=backend), on_gpu)
    with pytest.raises(ValueError, match="attention-backend 'fa3' .*torch_native"):
        check_attention(GeneratorSettings(attention_backend="fa3"), on_gpu=False)
    with pytest.raises(ValueError, match="attention-backend 'flash' .*flashinfer"):
        check_attention(GeneratorSettings(attention_backend="flash"), on_gpu=True)


def small(config_of: Callable[..., ModelConfig] = qwen3, **change: Any) -> ModelConfig:
    sizes = {"vocab_size": 100, "intermediate_size": 128, "num_hidden_layers": 3, "tie_word_embeddings": True}
    return config_of(**sizes | change)


def test_a_kv_cache_that_does_not_fit_is_refused_with_the_tokens_that_do() -> None:
    token_bytes = 3 * 2 * 2 * 16 * 4
    settings = GeneratorSettings(replicas=2, max_total_tokens=1000)
    check_cache(small(), settings, memory_bytes=2 * 1000 * token_bytes)
    with pytest.raises(ValueError, match=r"generator\.max-total-tokens 1000\b.*\b999\b"):
        check_cache(small(), settings, memory_bytes=2 * 1000 * token_bytes - 1)


def test_an_engine_without_memory_reports_its_needs_by_purpose() -> None:
    """Weights and arriving versions, float32: with LoRA adapters, or with LoRA on experts merged tensors; a KV cache of
    keys and values."""
    config = small()
    layer = 64 + 64 + 64 * (4 * 16) + 2 * 64 * (2 * 16) + (4 * 16) * 64 + 16 + 16 + 3 * 64 * 128
    weights = 4 * (100 * 64 + 64 + 3 * layer)
    settings, cache = GeneratorSettings(max_total_tokens=1000), 1000 * 3 * 2 * 2 * 16 * 4
    check_free(cpu_memory(config, settings, FULL_TRAINING), 2 * weights + cache)
    with pytest.raises(RuntimeError, match=r"\b1000 tokens \(generator\.max-total-tokens\)"):
        check_free(cpu_memory(config, settings, FULL_TRAINING), 2 * weights + cache - 1)
    adapters = 4 * 3 * 4 * (2 * (64 + 64) + 2 * (32 + 64) + 3 * (128 + 64))
    check_free(cpu_memory(config, settings, LoraSettings(rank=4)), weights + adapters + cache)
    with pytest.raises(RuntimeError, match="free"):
        check_free(cpu_memory(config, settings, LoraSettings(rank=4)), weights + adapters + cache - 1)
    sparse = small(qwen3_moe, num_experts=8)
    own = weights + 4 * 3 * (8 * 3 * 64 * 32 + 8 * 64 - 3 * 64 * 128)
    merged, lora = 4 * 3 * 8 * 64 * 32, LoraSettings(rank=4, targets=("up_proj",))
    check_free(cpu_memory(sparse, settings, lora), own + merged + cache)
    with pytest.raises(RuntimeError, match="versions"):
        check_free(cpu_memory(sparse, settings, lora), own + merged + cache - 1)
    check_free(cpu_memory(config, settings, FULL_TRAINING), 3 * (2 * weights + cache), engines=3)
    with pytest.raises(RuntimeError, match=r"\b3 of them"):
        check_free(cpu_memory(config, settings, FULL_TRAINING), 3 * (2 * weights + cache) - 1, engines=3)


def test_a_sequence_may_use_the_context_and_cache_that_sglang_leaves() -> None:
    limits = engine_limits(small(), GeneratorSettings(max_total_tokens=100), on_gpu=True)
    assert sorted(limits.values()) == [100 - ENGINE_RESERVE, 512 - ENGINE_RESERVE]
    assert all("generator." in name for name in limits)
    assert len(engine_limits(small(), GeneratorSettings(), on_gpu=True)) == 1
