from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.weights.blocks import TensorBox
from monarch_rl.weights.checksum import Checksums, tensor_checksum

MODULUS = 1 << 64
SEEDS = st.integers(0, 2**31)
HEIGHTS = st.integers(1, 20)
WIDTHS = st.integers(1, 11)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float64])


def random_bits(seed: int, height: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random bits: also NaNs, infinities and both zeros."""
    generator = torch.Generator().manual_seed(seed)
    shape = (height, width * dtype.itemsize)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(dtype)


def reference(x: torch.Tensor) -> int:
    """The formula of the docstring, in Python integers."""

    def spread(x: int) -> int:
        x = x * 0x9E3779B97F4A7C15 % MODULUS
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % MODULUS
        return x ^ (x >> 31)

    total = 0
    for r in range(len(x)):
        data = bytes(x[r].contiguous().view(torch.uint8).tolist())
        for c, start in enumerate(range(0, len(data), 8)):
            factor = (spread(1 + r) | 1) + ((spread(-(1 + c) % MODULUS) & ~1) if r % 8 == 0 else 0)
            total += int.from_bytes(data[start : start + 8], "little") * factor
    return total % MODULUS


@given(SEEDS, HEIGHTS, WIDTHS, DTYPES)
def test_equals_the_formula(seed: int, height: int, width: int, dtype: torch.dtype) -> None:
    x = random_bits(seed, height, width, dtype)
    assert tensor_checksum(x).item() % MODULUS == reference(x)


@given(SEEDS, HEIGHTS, WIDTHS, DTYPES, st.integers(0, 20), st.lists(st.integers(0, 11), min_size=2, max_size=2))
def test_adds_up_over_boxes_however_they_are_split(
    seed: int, height: int, width: int, dtype: torch.dtype, row: int, columns: list[int]
) -> None:
    """Rows above the split are divided at one column, those below at another; words may be split in two."""
    x, row = random_bits(seed, height, width, dtype), min(row, height)
    parts = []
    for column, first, rows in ((columns[0], 0, x[:row]), (columns[1], row, x[row:])):
        column = min(column, width)
        parts += [tensor_checksum(rows[:, :column], first), tensor_checksum(rows[:, column:], first, column)]
    assert sum(parts).item() == tensor_checksum(x).item()  # type: ignore[union-attr]


@given(SEEDS, HEIGHTS, WIDTHS, DTYPES, st.integers(0, 7), st.data())
def test_any_flipped_bit_changes_it(
    seed: int, height: int, width: int, dtype: torch.dtype, bit: int, data: st.DataObject
) -> None:
    x = random_bits(seed, height, width, dtype)
    flipped = x.clone()
    place = data.draw(st.integers(0, x.nbytes - 1))
    flipped.view(torch.uint8).view(-1)[place] ^= 1 << bit
    assert tensor_checksum(x).item() != tensor_checksum(flipped).item()


@given(SEEDS, st.integers(2, 20), st.integers(2, 11), st.data())
def test_swapped_rows_and_swapped_columns_change_it(seed: int, height: int, width: int, data: st.DataObject) -> None:
    x = random_bits(seed, height, width, torch.float64)
    for dim, size in enumerate(x.shape):
        first, second = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
        order = torch.arange(size)
        order[[first, second]] = order[[second, first]]
        assert tensor_checksum(x).item() != tensor_checksum(x.index_select(dim, order)).item()


def test_a_slice_of_a_fused_parameter_has_the_checksum_of_the_tensor() -> None:
    fused = random_bits(1, 10, 6)
    assert tensor_checksum(fused[3:7]).item() == tensor_checksum(fused[3:7].clone()).item()
    assert tensor_checksum(fused[:, 2:5]).item() == tensor_checksum(fused[:, 2:5].clone()).item()


@pytest.mark.parametrize("width", [30, 31])
def test_large_tensors_are_summed_in_chunks(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_bits(2, 100, width)
    whole = tensor_checksum(x).item()
    monkeypatch.setattr("monarch_rl.weights.checksum._CACHED_WORDS", 64)
    assert tensor_checksum(x).item() == whole


@given(SEEDS, st.lists(st.tuples(HEIGHTS, WIDTHS, DTYPES), min_size=1, max_size=4))
def test_planned_checksums_are_of_the_tensors_current_contents(
    seed: int, shapes: list[tuple[int, int, torch.dtype]]
) -> None:
    held = [random_bits(seed, *shape) for shape in shapes]
    planned = Checksums([TensorBox(x) for x in held])
    for repetition in range(2):
        for x, shape in zip(held, shapes, strict=True):
            x.copy_(random_bits(seed + repetition, *shape))
        for block in planned.blocks:
            block.add()
        assert planned.take().tolist() == [tensor_checksum(x).item() for x in held]


@pytest.mark.parametrize("sizes", [[4], [600], [4, 600]], ids=["small", "large", "both"])
def test_on_a_device_checksums_involve_no_host_data(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without memory only shapes are computed: no data of the host may be involved."""
    monkeypatch.setattr("monarch_rl.weights.checksum._CACHED_WORDS", 1 << 12)
    boxes = [TensorBox(torch.empty((3, size, 5), dtype=torch.bfloat16, device="meta")) for size in sizes]
    planned = Checksums(boxes)
    for block in planned.blocks:
        block.add()
    sums = planned.take()
    assert (sums.device.type, sums.dtype, len(sums)) == ("meta", torch.int64, 3 * len(sizes))
