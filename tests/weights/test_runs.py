"""Neighbouring tensors of one kind are handled together: with the same result, in a fixed number of kernels."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.errors import NotFinite
from monarch_rl.weights.blocks import TensorBox, find_spans, memory_kind, stack_span
from monarch_rl.weights.checksum import Checksums, ShardChecksums, tensor_checksum
from monarch_rl.weights.manifest import Manifest, make_manifest
from tests.kernels import Kernels
from tests.weights.test_checksum import DTYPES, HEIGHTS, SEEDS, WIDTHS, random_bits

PLACES = st.lists(st.tuples(st.sampled_from("ab"), st.integers(-2, 3), st.integers(-2, 3)), max_size=20)


@given(PLACES)
def test_runs_are_neighbours_of_one_kind_at_equal_distances(items: list[tuple[str, int, int]]) -> None:
    kinds = [kind for kind, _, _ in items]
    first = list(accumulate(step for _, step, _ in items))
    second = list(accumulate(step for _, _, step in items))
    runs = find_spans(kinds, first, second)
    assert [index for run in runs for index in run] == list(range(len(items)))
    for run in runs:
        assert len({kinds[i] for i in run}) == 1
        for places in (first, second):
            steps = {places[i + 1] - places[i] for i in run[:-1]}
            assert len(steps) <= 1 and all(step > 0 for step in steps)


@given(st.integers(1, 5), HEIGHTS, WIDTHS, st.integers(0, 3), DTYPES)
def test_a_run_equals_its_members(count: int, height: int, width: int, gap: int, dtype: torch.dtype) -> None:
    memory = random_bits(0, count * (height + gap), width + 1, dtype)
    members = [memory[i * (height + gap) :][:height, 1:] for i in range(count)]
    assert len({memory_kind(member) for member in members}) == 1
    run = stack_span(members[:2], count)
    assert run.shape == (count, height, width)
    for held, member in zip(run, members, strict=True):
        assert held.data_ptr() == member.data_ptr() and torch.equal(held.view(torch.uint8), member.view(torch.uint8))


@given(
    seed=SEEDS,
    boxes=st.lists(
        st.tuples(st.integers(1, 5), HEIGHTS, WIDTHS, DTYPES, st.integers(0, 9), st.integers(0, 9)),
        min_size=1,
        max_size=4,
    ),
    whole_rows=st.booleans(),
    cached=st.sampled_from([4, 64, 1 << 18]),
)
def test_tensors_of_a_run_have_their_own_checksums(
    seed: int,
    boxes: list[tuple[int, int, int, torch.dtype, int, int]],
    whole_rows: bool,
    cached: int,
) -> None:
    """As shards of tensors, as slices of fused parameters, small or large, in cache or not."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("monarch_rl.weights.checksum._CACHED_WORDS", cached)
        held = []
        for count, height, width, dtype, *_ in boxes:
            memory = random_bits(seed, count * (height + 2), width + (0 if whole_rows else 3), dtype)
            held.append(memory.view(count, height + 2, -1)[:, 1:-1, :width])
        firsts = [(first_row, first_column) for *_, first_row, first_column in boxes]
        planned = Checksums([TensorBox(data, *first) for data, first in zip(held, firsts, strict=True)])
        for repetition in range(2):
            for data in held:
                data.copy_(random_bits(seed + repetition, data.numel(), 1, data.dtype).view(data.shape))
            for block in planned.blocks:
                block.add()
            expected = [
                tensor_checksum(rows, *first).item() for data, first in zip(held, firsts, strict=True) for rows in data
            ]
            assert planned.take().tolist() == expected
            # The probe for values that are not finite covers all values, and zeros.
            for block in planned.blocks:
                sums = sum(int(tensor_bits(data).sum()) for data in block.data)
                assert int(tensor_bits(block.values).sum()) == sums


def tensor_bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes, as integers whose sums can be compared."""
    return x.contiguous().view(torch.uint8).to(torch.int64)


def experts(count: int, dtype: torch.dtype = torch.float32) -> tuple[Manifest, list[torch.Tensor]]:
    """Three layers of stacked experts with a norm each, as one rank sends them, and the memory of each shard."""
    shapes = dict[str, tuple[int, ...]]()
    for layer in range(3):
        shapes |= {f"{layer}.{e}.{part}": (8, 6) for part in ("gate", "up") for e in range(count)}
        shapes |= {f"{layer}.{e}.down": (6, 8) for e in range(count)} | {f"{layer}.norm": (6,)}
    tensors = [(name, shape, dtype) for name, shape in shapes.items()]
    manifest = make_manifest(tensors, [[(name, 0, torch.Size(shape).numel()) for name, shape in shapes.items()]])
    sizes = [shard.numel * dtype.itemsize for shard in manifest.shards[0]]
    memory = random_bits(1, sum(sizes) // 4, 1).nan_to_num(1).clamp(-9, 9).view(torch.uint8).flatten()
    return manifest, list(memory.split(sizes))


def test_kernels_do_not_grow_with_the_number_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a layer has far more experts than are gathered as small tensors."""
    monkeypatch.setattr("monarch_rl.weights.checksum._SMALL_SHARE", 1 << 18)
    counted = []
    for count in (2, 100):
        manifest, views = experts(count)
        sums = ShardChecksums(manifest, 0, views)
        with Kernels() as kernels:
            taken = sums.take()
        counted.append(kernels.count)
        assert taken.tolist() == [
            int(tensor_checksum(view.view(spec.dtype).view(spec.shape)))
            for spec, view in zip(manifest.tensors, views, strict=True)
        ]
    assert counted[0] == counted[1] < 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("small_share", [32, 1 << 18])
def test_a_value_of_one_expert_that_is_not_finite_is_named(
    dtype: torch.dtype, small_share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarch_rl.weights.checksum._SMALL_SHARE", small_share)
    manifest, views = experts(5, dtype)
    for view in views:
        view.view(dtype).fill_(1.5)
    sums = ShardChecksums(manifest, 0, views)
    sums.take()
    index = manifest.names.index("1.3.up")
    values: Any = views[index].view(dtype)
    values[13] = torch.inf
    with pytest.raises(NotFinite, match=r"1\.3\.up .*\[2, 1\]"):
        sums.take()
    values[13] = 1.5
    sums.take()
