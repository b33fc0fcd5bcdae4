"""The quick probe of blocks of tensors finds exactly the blocks that torch calls not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.errors import NotFinite
from monarch_rl.weights import checksum
from monarch_rl.weights.checksum import FiniteProbe, ShardChecksums, not_finite, tensor_checksum
from monarch_rl.weights.manifest import Manifest, make_manifest
from tests.weights.test_checksum import HEIGHTS, SEEDS, WIDTHS, random_bits

FLOATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def extreme(seed: int, height: int, width: int, dtype: torch.dtype, share: float) -> torch.Tensor:
    """Random bits, of whose values that are not finite all but about ``share`` are replaced by the greatest finite
    value: sums of such values overflow."""
    generator = torch.Generator().manual_seed(seed)
    x = random_bits(seed, height, width, dtype)
    keep = torch.rand(x.shape, generator=generator) < share
    greatest = torch.full_like(x, torch.finfo(dtype).max) * torch.where(torch.isnan(x) | (x > 0), 1, -1).to(dtype)
    return torch.where(x.isfinite() | keep, x, greatest)


@given(SEEDS, HEIGHTS, WIDTHS, FLOATS, st.sampled_from([0.0, 0.1, 1.0]))
def test_every_block_that_is_not_finite_is_a_suspect_and_its_index_is_found(
    seed: int, height: int, width: int, dtype: torch.dtype, share: float
) -> None:
    x = extreme(seed, height, width, dtype, share)
    probe = FiniteProbe([x[row : row + 1] for row in range(height)])
    for row in range(height):
        probe.look(row)
    wrong = (~torch.isfinite(x)).any(1).nonzero().flatten().tolist()
    assert set(wrong) <= set(probe.suspects())
    message = not_finite(x[1:], width, x.shape)
    outside = ~torch.isfinite(x[1:])
    if outside.any():
        place = [int(outside.nonzero()[0][0]) + 1, int(outside.nonzero()[0][1])]
        assert message == f"holds {int(outside.sum())} values that are not finite, the first at {place}"
    else:
        assert message is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_one_value_among_zeros_of_either_sign_is_found(dtype: torch.dtype, value: float) -> None:
    for others in (0.0, -0.0, 1e-40, torch.finfo(dtype).max, torch.finfo(dtype).min):
        x = torch.full((4, 4), others, dtype=dtype)
        probe = FiniteProbe([x])
        probe.look(0)
        overflown = dtype == torch.float32 and abs(others) > 1  # 16-bit floats are compared by their bits
        assert probe.suspects() == ([0] if overflown else [])
        for present, suspects in ((value, [0]), (1.0, [0] if overflown else [])):
            x[2, 1] = present
            probe.look(0)
            assert probe.suspects() == suspects


def planned(dtype: torch.dtype) -> Manifest:
    """Two experts and a vector; the first expert is split between two ranks."""
    tensors = [("experts.0.up", (6, 5), dtype), ("experts.1.up", (6, 5), dtype), ("norm", (7,), dtype)]
    return make_manifest(
        tensors, [[("experts.0.up", 0, 20), ("norm", 0, 7)], [("experts.0.up", 20, 10), ("experts.1.up", 0, 30)]]
    )


@given(SEEDS, st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([0.0, 0.05]), st.booleans())
def test_a_rank_names_the_first_of_its_tensors_that_is_not_finite(
    seed: int, dtype: torch.dtype, share: float, whole: bool
) -> None:
    manifest = planned(dtype)
    tensors = [extreme(seed, spec.shape[0], spec.numel // spec.shape[0], dtype, share) for spec in manifest.tensors]
    views = []
    for shard in manifest.shards[1]:
        views.append(tensors[shard.tensor].flatten()[shard.start : shard.start + shard.numel].view(torch.uint8))
    with pytest.MonkeyPatch.context() as patched:
        if not whole:
            patched.setattr(checksum, "_CACHED_WORDS", 4)
        sums = ShardChecksums(manifest, 1, views)
    for shard in manifest.shards[1]:
        x = tensors[shard.tensor]
        message = not_finite(x.flatten()[shard.start : shard.start + shard.numel], shard.start, x.shape)
        if message is not None:
            with pytest.raises(NotFinite) as caught:
                sums.take()
            assert str(caught.value).startswith(manifest.tensors[shard.tensor].name) and message in str(caught.value)
            return
    expected = [0, int(tensor_checksum(tensors[1])), 0]
    expected[0] = int(tensor_checksum(tensors[0][4:], 4))
    assert sums.take().tolist() == sums.take().tolist() == expected
