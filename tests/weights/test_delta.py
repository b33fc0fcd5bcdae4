from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.errors import DeltaError
from monarch_rl.weights.delta import apply, encode, stats, wire_bound

SIZES = st.sampled_from([1, 2, 4, 8])


def pair(seed: int, nbytes: int, itemsize: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two versions of arbitrary bits; each element differs with probability ``share``, in one bit or in many."""
    random = np.random.default_rng(seed)
    previous = random.integers(0, 256, nbytes, dtype=np.uint8)
    current = previous.copy()
    for first in range(0, nbytes, itemsize):
        if random.random() < share:
            where = random.integers(first, min(first + itemsize, nbytes))
            current[where] ^= random.integers(1, 256, dtype=np.uint8)
    return torch.from_numpy(previous), torch.from_numpy(current)


def encoded(previous: torch.Tensor, current: torch.Tensor, itemsize: int, bucket_bytes: int) -> torch.Tensor:
    out = torch.full((wire_bound(current.numel(), bucket_bytes),), 0xA5, dtype=torch.uint8)
    return out[: encode(previous, current, itemsize, bucket_bytes, out)]


@settings(deadline=None)
@given(
    seed=st.integers(0, 10_000),
    nbytes=st.integers(0, 3000),
    itemsize=SIZES,
    bucket_bytes=st.integers(1, 1500),
    share=st.sampled_from([0.0, 0.002, 0.02, 0.06, 0.2, 0.9, 0.97, 1.0]),
)
def test_any_bits_arrive_within_the_bound(
    seed: int, nbytes: int, itemsize: int, bucket_bytes: int, share: float
) -> None:
    previous, current = pair(seed, nbytes, itemsize, share)
    wire = encoded(previous, current, itemsize, bucket_bytes)
    target = previous.clone()
    apply(wire, target)
    assert torch.equal(target, current)
    body = nbytes - nbytes % (8 * itemsize)
    differs = (previous[:body] != current[:body]).view(-1, itemsize).any(1)
    sizes = stats(wire)
    assert (sizes.changed, sizes.elements) == (int(differs.sum()), nbytes // itemsize)
    assert (sizes.wire_bytes, sizes.dense_bytes) == (wire.numel(), nbytes)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10_000),
    nbytes=st.integers(0, 3000),
    itemsize=SIZES,
    buckets=st.tuples(st.integers(1, 1500), st.integers(1, 1500)),
    share=st.sampled_from([0.0, 0.02, 0.2, 0.97, 1.0]),
)
def test_larger_buckets_fit_where_smaller_ones_would(
    seed: int, nbytes: int, itemsize: int, buckets: tuple[int, int], share: float
) -> None:
    """Memory is planned for the smallest buckets; on a device they are larger."""
    previous, current = pair(seed, nbytes, itemsize, share)
    out = torch.full((wire_bound(nbytes, min(buckets)),), 0xA5, dtype=torch.uint8)
    apply(out[: encode(previous, current, itemsize, max(buckets), out)], previous)
    assert torch.equal(previous, current)


def test_nans_and_zeros_of_either_sign_are_compared_by_their_bits() -> None:
    bits = [0x7FC0, 0x7FC1, 0xFFC0, 0x0000, 0x8000, 0x7F80, 0x7F81, 0x0001]
    previous = torch.tensor(bits * 8, dtype=torch.int32).to(torch.int16)
    current = previous.clone()
    current[1], current[3], current[4] = 0x7FC2, -0x8000, 0
    wire = encoded(previous.view(torch.uint8), current.view(torch.uint8), 2, 1 << 20)
    assert stats(wire).changed == 3
    target = previous.clone()
    apply(wire, target.view(torch.uint8))
    assert torch.equal(target, current)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 0.0), (0.01, 0.02), (0.05, 0.1), (0.1, 0.1625), (0.5, 0.5625), (1.0, 1.0)]
)
def test_each_share_takes_the_smallest_form(share: float, expected: float) -> None:
    """2 bytes per offset and 2 per value of bf16, or an eighth of a byte per element and 2 per value, or everything."""
    n = 1 << 20
    previous = torch.randint(0, 256, (2 * n,), dtype=torch.uint8)
    current = previous.clone()
    words = current.view(torch.int16)
    words[torch.randperm(n)[: round(share * n)]] ^= 1
    wire = encoded(previous, current, 2, 1 << 19)
    assert stats(wire).changed_share == pytest.approx(share, abs=1e-6)
    assert stats(wire).wire_bytes / stats(wire).dense_bytes == pytest.approx(expected, abs=2e-4)
    apply(wire, previous)
    assert torch.equal(previous, current)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10_000), itemsize=SIZES, share=st.sampled_from([0.0, 0.01, 0.3, 1.0]), truncated=st.booleans()
)
def test_a_damaged_update_is_an_error_or_writes_only_to_the_target(
    seed: int, itemsize: int, share: float, truncated: bool
) -> None:
    """Any byte of the wire may be wrong, or bytes may be missing: nothing outside of the target is touched."""
    previous, current = pair(seed, 1200, itemsize, share)
    wire = encoded(previous, current, itemsize, 512).clone()
    random = np.random.default_rng(seed)
    if truncated:
        wire = wire[: random.integers(0, wire.numel())]
    else:
        # half of the time in the header and the table, which determine where values are written
        place = random.integers(0, wire.numel() if random.random() < 0.5 else 80)
        wire[place] ^= int(random.integers(1, 256))
    memory = torch.full((8 + 1200 + 8,), 0x5A, dtype=torch.uint8)
    target = memory[8:-8]
    target.copy_(previous)
    try:
        apply(wire, target)
    except DeltaError:
        pass
    else:
        assert not truncated
    assert set(memory[:8].tolist() + memory[-8:].tolist()) == {0x5A}


def test_an_offset_beyond_the_bucket_is_refused() -> None:
    previous = torch.zeros(2048, dtype=torch.uint8)
    current = previous.clone()
    current[100] = 1
    wire = encoded(previous, current, 2, 4096)
    offset = wire.numel() - 16  # before the only value; both are padded to 8 bytes
    assert wire[offset : offset + 2].tolist() == [50, 0]
    wire[offset + 1] = 0xFF
    with pytest.raises(DeltaError, match=r"bucket 1 of 1: .*65330.*1024"):
        apply(wire, previous)
    assert not previous.any()


def test_an_update_of_another_size_is_refused() -> None:
    wire = encoded(torch.zeros(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8), 1, 64)
    with pytest.raises(DeltaError, match="64.*65"):
        apply(wire, torch.zeros(65, dtype=torch.uint8))
    with pytest.raises(DeltaError, match="not an encoded update"):
        apply(torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8))


def test_buffers_that_do_not_fit_are_refused() -> None:
    eight = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="out .*56"):
        encode(eight, eight, 1, 64, torch.zeros(55, dtype=torch.uint8))
    with pytest.raises(ValueError, match="itemsize.* 3"):
        encode(eight, eight, 3, 64, torch.zeros(100, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"previous.*8.*7"):
        encode(eight[1:], eight, 1, 64, torch.zeros(100, dtype=torch.uint8))
    with pytest.raises(ValueError, match="current.* 1 "):
        encode(eight[1:].clone(), eight[1:], 1, 64, torch.zeros(100, dtype=torch.uint8))
