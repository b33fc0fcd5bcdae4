"""Which kernels compute attention on which GPU: the capability is faked, and nothing runs on a device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from monarch_rl.trainer.platform import prepare

prepare()

from torch.nn.attention import _registry, current_flash_attention_impl  # noqa: E402
from torchtitan.tools import utils  # noqa: E402

from monarch_rl.model.config import parse_config  # noqa: E402
from monarch_rl.trainer import attention  # noqa: E402
from monarch_rl.trainer.attention import PackedAttention, PrefixVarlenAttention  # noqa: E402
from monarch_rl.trainer.attention_layout import AttentionLayout, Segment, separate_layout  # noqa: E402
from monarch_rl.trainer.model_config import model_config  # noqa: E402
from monarch_rl.trainer.settings import TrainerSettings  # noqa: E402

CONFIG = parse_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
    }
)
GPUS = {"A100": (8, 0), "H100": (9, 0), "B200": (10, 0), "RTX PRO 6000": (12, 0)}


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts with torch's own kernels and restores them."""
    monkeypatch.setattr(attention, "_lacking", set())
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", dict(_registry._FLASH_ATTENTION_IMPLS))
    yield
    if current_flash_attention_impl() is not None:
        _registry.restore_flash_attention_impl()


def build_on(gpu: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The attention modules of a small Qwen3, built as for a GPU with this name."""
    monkeypatch.setattr(utils, "has_cuda_capability", lambda *wanted: GPUS[gpu] >= wanted)
    with torch.device("meta"):
        module = model_config(CONFIG, logprob_chunk=16, longest=64, half_on_gpu=True).build()
    return [found for found in module.modules() if isinstance(found, PrefixVarlenAttention)]


@pytest.mark.parametrize("gpu", GPUS)
def test_a_gpu_without_further_kernels_uses_torchs_own(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither FlashAttention 3 nor 4 is installed here, and no package of the GPU set has the first."""
    built = build_on(gpu, monkeypatch)
    assert len(built) == CONFIG.num_hidden_layers
    assert all(module.window_size == (-1, 0) for module in built)
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize(
    "gpu, installed, taken",
    [
        ("A100", {"FA3", "FA4"}, None),
        ("H100", {"FA3", "FA4"}, "FA3"),
        ("H100", {"FA4"}, None),
        ("B200", {"FA3", "FA4"}, "FA4"),
        ("RTX PRO 6000", {"FA3", "FA4"}, None),
    ],
)
def test_a_gpu_uses_the_kernels_made_for_it(
    gpu: str, installed: set[str], taken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def kernels(name: str) -> Any:
        def register() -> Any:
            asked.append(name)
            if name not in installed:
                raise ModuleNotFoundError(f"No module named {name}")
            return SimpleNamespace(remove=lambda: None)

        return register

    for name in ("FA3", "FA4"):
        _registry.register_flash_attention_impl(name, register_fn=kernels(name))
    build_on(gpu, monkeypatch)
    assert current_flash_attention_impl() == taken
    assert len(asked) <= 1  # not once a layer


@pytest.mark.parametrize(
    "error",
    [RuntimeError("Module 'flash_attn_interface' does not expose FA3 backward kernels"), TypeError("no such dialect")],
)
def test_kernels_that_do_not_start_are_not_used_and_the_cause_is_logged(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They may lack a backward pass; FlashAttention 4 includes a compiler, which may raise any exception."""

    def register() -> Any:
        raise error

    _registry.register_flash_attention_impl("FA3", register_fn=register)
    with caplog.at_level(logging.WARNING, "monarch_rl"):
        assert build_on("H100", monkeypatch) and current_flash_attention_impl() is None
    assert [f"FA3 does not start: {type(error).__name__}: {error}" in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_in_float32_a_device_gets_keys_repeated_per_query_head(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's memory-efficient kernel does not support grouped heads. Tensors on no device replace tensors on a GPU."""
    calls: list[tuple[int, int, int, bool]] = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def record(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, enable_gqa: bool, **others: Any) -> torch.Tensor:
        calls.append((q.shape[1], k.shape[1], v.shape[1], enable_gqa))
        return sdpa(q, k, v, enable_gqa=enable_gqa, **others)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", record)
    q, k, v = (torch.randn(1, 10, heads, 16).to(device) for heads in (4, 2, 2))
    shared = [Segment(0, np.arange(7), 7), Segment(7, np.r_[:5, 7:9], 2), Segment(9, np.r_[:5, 9], 1)]
    layout = AttentionLayout(shared, torch.device(device))
    result = PackedAttention(PackedAttention.Config())(q, k, v, attention_masks=layout, enable_gqa=True)
    assert result.shape == q.shape and len(calls) > 1  # causal, and with a mask
    assert set(calls) == {(4, 2, 2, True) if device == "cpu" else (4, 4, 4, False)}


def test_keys_repeated_per_query_head_equal_grouped_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 10, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    layout = separate_layout([6, 4], torch.device("cpu"))
    module = PackedAttention(PackedAttention.Config())
    found = []
    for repeated in (False, True):
        monkeypatch.setattr(attention, "_repeats_heads", lambda _, repeated=repeated: repeated)
        result = module(q, k, v, attention_masks=layout, enable_gqa=True)
        found.append((result, *torch.autograd.grad(result.square().sum(), (q, k, v))))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("half_on_gpu, kind", [(True, PrefixVarlenAttention), (False, PackedAttention)])
def test_float32_is_computed_by_a_kind_of_attention_that_supports_it(half_on_gpu: bool, kind: Any) -> None:
    """Flash attention supports half precision only; the other kind keeps the dtype of its input."""
    config = model_config(CONFIG, logprob_chunk=16, longest=64, half_on_gpu=half_on_gpu)
    assert {type(layer.attention.inner_attention) for layer in config.layers} == {kind.Config}


@pytest.mark.parametrize(
    "compute_dtype, on_gpu, expected",
    [
        ("auto", True, "bfloat16"),
        ("auto", False, "float32"),
        ("float32", True, "float32"),
        ("bfloat16", False, "bfloat16"),
    ],
)
def test_the_dtype_of_the_computation(compute_dtype: Any, on_gpu: bool, expected: str) -> None:
    assert TrainerSettings(compute_dtype=compute_dtype).computes_in(on_gpu) == expected


@pytest.mark.parametrize("longest, length", [(64, 64), (8192, 512)])
def test_rotary_embeddings_reach_to_the_longest_episode(longest: int, length: int) -> None:
    """An episode is at most a micro-batch long, and at most as long as the model's context."""
    config = model_config(CONFIG, logprob_chunk=16, longest=longest, half_on_gpu=False)
    assert {layer.attention.rope.max_seq_len for layer in config.layers} == {length}
