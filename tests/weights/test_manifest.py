from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.weights.manifest import lay_out, make_manifest, plan_buckets, shard_bytes

SHAPES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=8)


def rows_of(height: int, rank: int, ranks: int) -> tuple[int, int]:
    """First row and number of rows of a rank, as FSDP2 shards: equal for all but the last ranks (maybe 0)."""
    share = -(-height // ranks)
    first = min(rank * share, height)
    return first, min(share, height - first)


@given(
    shapes=SHAPES, ranks=st.integers(1, 4), bucket=st.integers(1, 16), alone=st.integers(1, 40), seed=st.integers(0, 9)
)
def test_buckets_transfer_every_byte_of_every_shard_to_its_place(
    shapes: list[tuple[int, int]], ranks: int, bucket: int, alone: int, seed: int
) -> None:
    tensors = [(f"t{i}", shape, torch.float32) for i, shape in enumerate(shapes)]
    owned = []
    for rank in range(ranks):
        of_rank = [(name, shape[1], *rows_of(shape[0], rank, ranks)) for name, shape, _ in tensors]
        owned.append([(name, first * width, rows * width) for name, width, first, rows in of_rank])
    manifest = make_manifest(tensors, owned)
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(seed + i)) for i, shape in enumerate(shapes)]
    staging = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    bucket_bytes = bucket * 4
    for rank in range(ranks):
        runs = [values[s.tensor].flatten()[s.start : s.start + s.numel] for s in manifest.shards[rank]]
        snapshot = torch.cat([torch.zeros(0), *runs]).view(torch.uint8)
        assert snapshot.numel() == shard_bytes(manifest, rank)
        plan = plan_buckets(manifest, rank, bucket_bytes, alone * 4)
        sizes = [sum(entry.nbytes for entry in entries) for entries in plan]
        assert all(0 < size <= bucket_bytes for size in sizes)
        in_place = [(entries[0].staging, entries[0].nbytes) for entries in plan if len(entries) == 1]
        for s in (s for s in manifest.shards[rank] if s.numel >= alone):
            first = manifest.tensors[s.tensor].offset + s.start * 4
            covered = [range(max(at, first), min(at + n, first + s.numel * 4)) for at, n in in_place]
            assert sum(map(len, covered)) == s.numel * 4  # all of a large shard is received in place
        for sent, entries in zip(snapshot.split(sizes), plan, strict=True):
            for entry in entries:
                part = sent[entry.bucket : entry.bucket + entry.nbytes]
                staging[entry.staging : entry.staging + entry.nbytes] = part
    for spec, value in zip(manifest.tensors, values, strict=True):
        assert torch.equal(spec.view(staging), value)


def test_messages_and_copies_do_not_grow_with_the_number_of_experts() -> None:
    """Two ranks with half of the experts each: one range of bytes per stacked parameter, in one bucket or in full
    ones."""
    for experts in (4, 400):
        names = [f"{layer}.{part}.{e}" for layer in range(3) for part in ("gate", "down") for e in range(experts)]
        owned = [[(n, 0, 64) for n in names if (int(n.split(".")[-1]) >= experts // 2) == rank] for rank in range(2)]
        manifest = make_manifest([(name, (8, 8), torch.float32) for name in names], owned)
        for rank in range(2):
            (bucket,) = plan_buckets(manifest, rank, 1 << 30, 1 << 30)
            assert len(bucket) == 6
            half = experts // 2 * 256
            assert [len(entries) for entries in plan_buckets(manifest, rank, half, half)] == [1] * 6


def test_tensors_do_not_overlap_and_are_aligned() -> None:
    specs, nbytes = lay_out([("a", (3, 3), torch.bfloat16), ("b", (5,), torch.float32)])
    assert [spec.offset for spec in specs] == [0, 32]
    assert nbytes == 64


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        ([[("a", 0, 4)]], "4 of 6"),
        ([[("a", 0, 4)], [("a", 3, 3)]], " 3 .* two ranks"),
        ([[("a", 0, 2)], [("a", 3, 3)]], " 2 .* no rank"),
    ],
)
def test_a_plan_with_gaps_or_overlaps_is_refused(owned: list[list[tuple[str, int, int]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_manifest([("a", (2, 3), torch.float32)], owned)
