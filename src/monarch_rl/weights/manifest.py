"""The tensors of a policy version, their offsets in a flat staging area, and the trainer rank that owns each element.

A version is a set of Hugging Face tensors in the served dtype. Every receiver holds them in one flat buffer of bytes,
laid out by the :class:`Manifest`. Every sender owns contiguous ranges of their elements (:class:`Shard`). Both are
planned once, at the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

ALIGNMENT = 16
"""Alignment of each tensor in staging, in bytes: the widest vector load of a copy kernel."""

INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by element size in bytes, as which elements are viewed to compare or move their bits."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a version, and its offset in staging."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """The served dtype."""
    offset: int
    """Bytes from the start of staging."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def view(self, staging: torch.Tensor) -> torch.Tensor:
        """This tensor as a view of the flat uint8 buffer ``staging``."""
        return staging[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous range of elements (row-major) of one tensor, owned by one sender."""

    tensor: int
    """Index into ``Manifest.tensors``."""
    start: int
    """Index of the first element in the whole tensor."""
    numel: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """All tensors of a version, the size of a staging area, and each sender's shards."""

    tensors: tuple[TensorSpec, ...]
    nbytes: int
    """Bytes of one staging area."""
    shards: tuple[tuple[Shard, ...], ...]
    """``shards[r]``: the shards that trainer rank r sends. All ranks' shards cover every element exactly once."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.tensors)


def lay_out(tensors: Iterable[tuple[str, Sequence[int], torch.dtype]]) -> tuple[tuple[TensorSpec, ...], int]:
    """Lay out tensors one after the other; returns their specs and the total bytes."""
    specs, offset = [], 0
    for name, shape, dtype in tensors:
        spec = TensorSpec(name, tuple(shape), dtype, offset)
        specs.append(spec)
        offset += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(specs), offset


def make_manifest(
    tensors: Sequence[tuple[str, Sequence[int], torch.dtype]], owned: Sequence[Sequence[tuple[str, int, int]]]
) -> Manifest:
    """Plan the layout and shards of all versions.

    Args:
        tensors: name, shape and dtype of each tensor.
        owned: for each trainer rank, the ranges that it owns: ``(name, first element, number of elements)``.

    Raises:
        ValueError: an element is owned by no rank or by two.
    """
    specs, nbytes = lay_out(tensors)
    index = {spec.name: i for i, spec in enumerate(specs)}
    shards = tuple(
        tuple(Shard(index[name], start, numel) for name, start, numel in ranges if numel) for ranges in owned
    )
    ranges_by_tensor: list[list[tuple[int, int]]] = [[] for _ in specs]
    for rank in shards:
        for shard in rank:
            ranges_by_tensor[shard.tensor].append((shard.start, shard.numel))
    for spec, ranges in zip(specs, ranges_by_tensor, strict=True):
        end = 0
        for start, numel in sorted(ranges):
            if start != end:
                owners = "two ranks" if start < end else "no rank"
                raise ValueError(f"{spec.name}: elements from {min(start, end)} on are owned by {owners}")
            end = start + numel
        if end != spec.numel:
            raise ValueError(f"{spec.name}: only {end} of {spec.numel} elements are owned by a trainer rank")
    return Manifest(specs, nbytes, shards)


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """A contiguous range of bytes in one bucket. Buckets are consecutive slices of a sender's snapshot."""

    bucket: int
    """Byte offset in the bucket."""
    staging: int
    """Byte offset in the receiver's staging area."""
    nbytes: int


def plan_buckets(manifest: Manifest, rank: int, bucket_bytes: int, alone_bytes: int) -> list[list[BucketEntry]]:
    """Split the shards of trainer rank ``rank`` into buckets of at most ``bucket_bytes``.

    Shards that are contiguous both in the snapshot and in staging, such as all experts of a rank, form one range of
    bytes. Ranges of at least ``alone_bytes`` have their own buckets with one entry each, which can be received in
    place. Smaller ranges share buckets.
    """
    buckets: list[list[BucketEntry]] = []
    used = bucket_bytes
    alone = False
    for staging, remaining in _byte_ranges(manifest, rank):
        if alone or remaining >= alone_bytes:
            used = bucket_bytes
        alone = remaining >= alone_bytes
        while remaining:
            if used == bucket_bytes:
                buckets.append([])
                used = 0
            nbytes = min(remaining, bucket_bytes - used)
            buckets[-1].append(BucketEntry(used, staging, nbytes))
            used, staging, remaining = used + nbytes, staging + nbytes, remaining - nbytes
    return buckets


def _byte_ranges(manifest: Manifest, rank: int) -> list[tuple[int, int]]:
    """Ranges of a rank's shards in staging, in order, contiguous shards merged: first byte and number of bytes."""
    ranges: list[tuple[int, int]] = []
    for shard in manifest.shards[rank]:
        spec = manifest.tensors[shard.tensor]
        start, nbytes = spec.offset + shard.start * spec.dtype.itemsize, shard.numel * spec.dtype.itemsize
        if ranges and sum(ranges[-1]) == start:
            start, nbytes = ranges[-1][0], ranges.pop()[1] + nbytes
        ranges.append((start, nbytes))
    return ranges


def shard_bytes(manifest: Manifest, rank: int) -> int:
    """Number of bytes that trainer rank ``rank`` owns: the size of its snapshot of a version."""
    return sum(s.numel * manifest.tensors[s.tensor].dtype.itemsize for s in manifest.shards[rank])


NAMED_IN_ERROR = 8


def list_names(names: Iterable[str]) -> str:
    """The first few names and the number of the others, for an error message."""
    listed = list(names)
    more = len(listed) - NAMED_IN_ERROR
    return ", ".join(listed[:NAMED_IN_ERROR]) + (f" and {more} more" if more > 0 else "")
