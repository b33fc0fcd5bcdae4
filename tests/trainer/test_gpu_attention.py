"""Which kernels compute attention on which GPU: the capability is faked, and nothing runs on a device."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monarch_rl.trainer.platform import prepare

prepare()

from torch.nn.attention import _registry, current_flash_attention_impl  # noqa: E402
from torchtitan.tools import utils  # noqa: E402

from monarch_rl.trainer import attention  # noqa: E402
from monarch_rl.trainer.attention import PackedAttention, PrefixVarlenAttention  # noqa: E402
from monarch_rl.trainer.model_config import model_config  # noqa: E402
from monarch_rl.trainer.settings import TrainerSettings  # noqa: E402

CONFIG: dict[str, Any] = {
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
GPUS = {"A100": (8, 0), "H100": (9, 0), "B200": (10, 0), "RTX PRO 6000": (12, 0)}


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts with torch's own kernels and leaves them."""
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
def test_a_gpu_without_further_kernels_takes_what_torch_has(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither FlashAttention 3 nor 4 is installed here, and no package of the GPU set has the first."""
    built = build_on(gpu, monkeypatch)
    assert len(built) == CONFIG["num_hidden_layers"]
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
def test_a_gpu_takes_the_kernels_that_are_made_for_it(
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


def test_kernels_without_a_backward_pass_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def register() -> Any:
        raise RuntimeError("Module 'flash_attn_interface' does not expose FA3 backward kernels")

    _registry.register_flash_attention_impl("FA3", register_fn=register)
    assert build_on("H100", monkeypatch) and current_flash_attention_impl() is None


@pytest.mark.parametrize("half_on_gpu, kind", [(True, PrefixVarlenAttention), (False, PackedAttention)])
def test_float32_is_computed_by_a_kind_of_attention_that_takes_it(half_on_gpu: bool, kind: Any) -> None:
    """Flash attention takes half precision only; the other kind keeps the dtype of its input."""
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
    """An episode is at most a micro-batch long, and at most as long as the model can read."""
    config = model_config(CONFIG, logprob_chunk=16, longest=longest, half_on_gpu=False)
    assert {layer.attention.rope.max_seq_len for layer in config.layers} == {length}
