from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.weights.checksum import tensor_checksum

MODULUS = 1 << 64
SEEDS = st.integers(0, 2**31)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(x: torch.Tensor) -> int:
    """The formula of the docstring, in Python integers."""

    def spread(x: int) -> int:
        x = x * 0x9E3779B97F4A7C15 % MODULUS
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % MODULUS
        return x ^ (x >> 31)

    row_bytes = [x[r].contiguous().view(torch.uint8).tolist() for r in range(len(x))]
    size = 8 if len(row_bytes[0]) % 8 == 0 else 4
    total = 0
    for r, data in enumerate(row_bytes):
        words = [int.from_bytes(data[i : i + size], "little", signed=True) for i in range(0, len(data), size)]
        for c, word in enumerate(words):
            total += word * ((spread(1 + r) | 1) + (spread(-(1 + c) % MODULUS) & ~1))
    return total % MODULUS


@given(SEEDS, st.integers(1, 12), st.integers(1, 9))
def test_equals_the_formula(seed: int, height: int, width: int) -> None:
    x = drawn(seed, height, width)
    assert tensor_checksum(x).item() % MODULUS == reference(x)


@given(SEEDS, st.integers(1, 12), st.integers(1, 9), st.integers(0, 12))
def test_adds_up_over_shards_of_rows(seed: int, height: int, width: int, cut: int) -> None:
    x = drawn(seed, height, width).bfloat16()
    cut = min(cut, height)
    parts = tensor_checksum(x[:cut]) + tensor_checksum(x[cut:], cut)
    assert parts.item() == tensor_checksum(x).item()


@given(SEEDS, st.integers(1, 12), st.integers(1, 9), st.integers(0, 31), st.data())
def test_any_flipped_bit_changes_it(seed: int, height: int, width: int, bit: int, data: st.DataObject) -> None:
    x = drawn(seed, height, width)
    flipped = x.clone()
    place = data.draw(st.integers(0, x.numel() - 1))
    flipped.view(torch.int32).view(-1)[place] ^= -(2**31) if bit == 31 else 1 << bit
    assert tensor_checksum(x).item() != tensor_checksum(flipped).item()


@pytest.mark.parametrize("dim", [0, 1])
def test_swapped_rows_or_columns_change_it(dim: int) -> None:
    x = drawn(0, 4, 4)
    order = torch.tensor([1, 0, 2, 3])
    assert tensor_checksum(x).item() != tensor_checksum(x.index_select(dim, order)).item()


def test_a_slice_of_a_fused_parameter_has_the_checksum_of_the_tensor() -> None:
    fused = drawn(1, 10, 6)
    assert tensor_checksum(fused[3:7]).item() == tensor_checksum(fused[3:7].clone()).item()
    assert tensor_checksum(fused[:, 2:5]).item() == tensor_checksum(fused[:, 2:5].clone()).item()


def test_large_tensors_are_summed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(2, 100, 30)
    whole = tensor_checksum(x).item()
    monkeypatch.setattr("monarch_rl.weights.checksum._CHUNK", 64)
    assert tensor_checksum(x).item() == whole
