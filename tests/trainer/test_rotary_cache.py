"""The rotary cache of a model: one tensor for all layers, as long as the longest episode, with torchtitan's values."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from monarch_rl.trainer.platform import prepare

prepare()

from torchtitan.models.common import ComplexRoPE, CosSinRoPE  # noqa: E402

from monarch_rl.trainer import modules  # noqa: E402
from monarch_rl.trainer.modules import HalfRotaryEmbedding, PairRotaryEmbedding  # noqa: E402

LENGTH, DIM = 48, 16
LLAMA: dict[str, Any] = dict(
    scaling="llama", scaling_factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
YARN: dict[str, Any] = dict(scaling="yarn", rope_factor=4.0, original_seq_len=16)


@pytest.mark.parametrize(
    "ours, theirs, scaling",
    [
        (HalfRotaryEmbedding, CosSinRoPE, {}),
        (PairRotaryEmbedding, ComplexRoPE, {}),
        (PairRotaryEmbedding, ComplexRoPE, YARN),
    ],
)
def test_the_values_equal_torchtitans(ours: Any, theirs: Any, scaling: dict[str, Any]) -> None:
    settings = dict(dim=DIM, max_seq_len=LENGTH, theta=1e4, **scaling)
    assert torch.equal(ours.Config(**settings).build().cache, theirs.Config(**settings).build().cache)


def test_llamas_scaled_values_equal_torchtitans_in_the_other_layout() -> None:
    settings = dict(dim=DIM, max_seq_len=LENGTH, theta=1e4, **LLAMA)
    phases = ComplexRoPE.Config(**settings).build().cache
    cos, sin = HalfRotaryEmbedding.Config(**settings).build().cache.split(DIM, -1)
    for half in (slice(DIM // 2), slice(DIM // 2, None)):
        assert torch.equal(cos[:, half], phases.real) and torch.equal(sin[:, half], phases.imag)


@pytest.mark.parametrize("kind", [HalfRotaryEmbedding, PairRotaryEmbedding])
def test_layers_share_one_tensor_also_after_they_are_moved_off_meta(kind: Any) -> None:
    config = kind.Config(dim=DIM, max_seq_len=LENGTH, theta=12345.0)
    with torch.device("meta"):
        layers = [config.build() for _ in range(3)]
    for layer in layers:
        layer.to_empty(device="cpu")
        layer.init_states()
    assert len({layer.cache.data_ptr() for layer in layers}) == 1
    other = kind.Config(dim=DIM, max_seq_len=LENGTH, theta=54321.0).build()
    assert other.cache.data_ptr() != layers[0].cache.data_ptr() and not torch.equal(other.cache, layers[0].cache)


def test_a_cache_is_freed_with_its_last_layer() -> None:
    gc.collect()
    before = len(modules._rotary_caches)
    layer = HalfRotaryEmbedding.Config(dim=DIM, max_seq_len=LENGTH, theta=777.0).build()
    assert len(modules._rotary_caches) == before + 1
    del layer
    gc.collect()
    assert len(modules._rotary_caches) == before
