"""Which tensors a policy version consists of, where each lies in a flat staging area, and who owns what.

A version is a set of Hugging Face tensors in the dtype that is served. Every receiver holds them in one flat
buffer of bytes, laid out by the :class:`Manifest`; every sender owns contiguous runs of elements of them, its
:class:`Shard` s. Both are planned once, at start, not at each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

ALIGNMENT = 16
"""Bytes to which each tensor is aligned in staging: the widest vector load a copy kernel uses."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a version and its place in staging."""

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
    """A contiguous run of elements (row-major) of one tensor, owned by one sender."""

    tensor: int
    """Index into ``Manifest.tensors``."""
    start: int
    """First element, in elements of the whole tensor."""
    numel: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """All tensors of a version, the size of a staging area, and each sender's shards."""

    tensors: tuple[TensorSpec, ...]
    nbytes: int
    """Bytes of one staging area."""
    shards: tuple[tuple[Shard, ...], ...]
    """``shards[r]``: what trainer rank r sends. Together they cover every element exactly once."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.tensors)


def lay_out(tensors: Iterable[tuple[str, Sequence[int], torch.dtype]]) -> tuple[tuple[TensorSpec, ...], int]:
    """Place tensors one after the other; returns their specs and the bytes they take together."""
    specs, offset = [], 0
    for name, shape, dtype in tensors:
        spec = TensorSpec(name, tuple(shape), dtype, offset)
        specs.append(spec)
        offset += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(specs), offset


def make_manifest(
    tensors: Sequence[tuple[str, Sequence[int], torch.dtype]], owned: Sequence[Sequence[tuple[str, int, int]]]
) -> Manifest:
    """Plan a version from the tensors and each trainer rank's ``(name, first element, elements)`` runs.

    Raises ValueError if some element is owned by nobody or by two ranks.
    """
    specs, nbytes = lay_out(tensors)
    index = {spec.name: i for i, spec in enumerate(specs)}
    shards = tuple(tuple(Shard(index[name], start, numel) for name, start, numel in runs if numel) for runs in owned)
    found: list[list[tuple[int, int]]] = [[] for _ in specs]
    for rank in shards:
        for shard in rank:
            found[shard.tensor].append((shard.start, shard.numel))
    for spec, runs in zip(specs, found, strict=True):
        end = 0
        for start, numel in sorted(runs):
            if start != end:
                word = "by two ranks" if start < end else "by no rank"
                raise ValueError(f"{spec.name}: elements from {min(start, end)} on are owned {word}")
            end = start + numel
        if end != spec.numel:
            raise ValueError(f"{spec.name}: {end} of {spec.numel} elements are owned by a trainer rank")
    return Manifest(specs, nbytes, shards)


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes that one bucket carries for one tensor. Buckets are consecutive runs of a sender's snapshot."""

    bucket: int
    """Byte offset in the bucket."""
    staging: int
    """Byte offset in the receiver's staging area."""
    nbytes: int


def plan_buckets(manifest: Manifest, rank: int, bucket_bytes: int, alone_bytes: int) -> list[list[Piece]]:
    """Cut what trainer rank ``rank`` owns into buckets of at most ``bucket_bytes``.

    Shards of at least ``alone_bytes`` have buckets of their own, which are one piece each: such a bucket can arrive
    where it belongs. Smaller ones share buckets.
    """
    buckets: list[list[Piece]] = []
    used = bucket_bytes
    alone = False
    for shard in manifest.shards[rank]:
        spec = manifest.tensors[shard.tensor]
        staging = spec.offset + shard.start * spec.dtype.itemsize
        left = shard.numel * spec.dtype.itemsize
        if alone or left >= alone_bytes:
            used = bucket_bytes
        alone = left >= alone_bytes
        while left:
            if used == bucket_bytes:
                buckets.append([])
                used = 0
            take = min(left, bucket_bytes - used)
            buckets[-1].append(Piece(used, staging, take))
            used, staging, left = used + take, staging + take, left - take
    return buckets


def shard_bytes(manifest: Manifest, rank: int) -> int:
    """Bytes that trainer rank ``rank`` owns: the size of its snapshot of a version."""
    return sum(s.numel * manifest.tensors[s.tensor].dtype.itemsize for s in manifest.shards[rank])


NAMED_IN_ERROR = 8


def list_names(names: Iterable[str]) -> str:
    """The first few names for an error message, and how many more there are."""
    listed = list(names)
    more = len(listed) - NAMED_IN_ERROR
    return ", ".join(listed[:NAMED_IN_ERROR]) + (f" and {more} more" if more > 0 else "")
