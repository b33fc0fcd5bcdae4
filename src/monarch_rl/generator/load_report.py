"""What the engine's process and its ranks report of a commit to each other, in shared memory, without a message.

Before the pause the engine's process writes the trainer's checksums. Each engine rank then writes which box of each
tensor it holds and that box's checksum, of its own parameters. From this each process can judge the version: every rank
does so before it decodes on, and all come to the same verdict, because they read the same numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from monarch_rl.weights.area import Area, attach
from monarch_rl.weights.manifest import Manifest, TensorSpec, list_names

MESSAGE_BYTES = 4096
"""Room for a rank's error message; it names tensors, longer ones are cut."""
NOT_RUN, LOADED, FAILED = range(3)
"""Values of ``state[rank, STATUS]``."""
STATUS, COPY_NANOSECONDS, CHECKSUM_NANOSECONDS, BYTES, STOOD_NANOSECONDS = range(5)
"""Columns of ``state``."""
_STATE_COLUMNS = 5
_INT = 8
"""Bytes of an int64."""


@dataclass(frozen=True, slots=True)
class Box:
    """The rectangle of a tensor that a rank holds; the tensor seen as ``[rows, elements of a row]``."""

    first_row: int
    rows: int
    first_column: int
    columns: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a commit cost, in seconds: the copy and the checksums of the slowest engine rank."""

    copy_seconds: float
    """From the area to the engine's parameters."""
    checksum_seconds: float
    """Checksums of the engine's parameters."""
    stood_seconds: float
    """From the pause to the continuation, by the clock of rank 0's scheduler: no token was drawn in between."""
    nbytes: int
    """Bytes copied, by all ranks together."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a version may not be served."""

    message: str
    differs: bool
    """All was loaded, but it is not what the trainer has."""


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """A tensor as ``[rows, elements of a row]``; rows of a one-dimensional tensor have one element."""
    rows = shape[0] if shape else 1
    elements = int(np.prod(shape[1:], dtype=np.int64))
    return rows, elements


class LoadSheet:
    """The shared numbers of one engine and one manifest; make it in the engine's process, ``open`` it in its ranks."""

    def __init__(self, manifest: Manifest, ranks: int) -> None:
        specs = encode_specs(manifest.tensors)
        sizes = np.array([matrix_shape(spec.shape) for spec in manifest.tensors], np.int64).reshape(-1, 2)
        area = Area(_INT * (3 + _numbers(len(sizes), ranks)) + ranks * MESSAGE_BYTES + len(specs))
        self._owned = area  # others can attach as long as it is kept
        self.handle = area.handle
        area.buffer[: 3 * _INT].view(torch.int64).copy_(torch.tensor([len(sizes), ranks, len(specs)]))
        self._map(area.buffer)
        self.sizes[:] = sizes
        self._specs[:] = np.frombuffer(specs, np.uint8)
        self.specs, self.layout = manifest.tensors, _digest(specs)

    @classmethod
    def open(cls, handle: bytes) -> LoadSheet:
        """Open the sheet that another process of this machine made. Raises RuntimeError if that process is gone."""
        sheet = cls.__new__(cls)
        sheet.handle = handle
        sheet._map(attach(handle))
        sheet.layout = _digest(sheet._specs.tobytes())
        return sheet

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Of the tensors. Read when they are needed: a replayed commit needs the layout's hash only."""
        return decode_specs(self._specs.tobytes())

    def _map(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        tensors, ranks, specs = buffer[: 3 * _INT].view(torch.int64).tolist()
        numbers = buffer.numpy()[3 * _INT :]
        ints = numbers[: _INT * _numbers(tensors, ranks)].view(np.int64)
        rest = numbers[len(ints) * _INT :]
        shapes = {
            "sizes": (tensors, 2),
            "expected": (tensors,),
            "state": (ranks, _STATE_COLUMNS),
            "boxes": (ranks, tensors, 4),
            "checksums": (ranks, tensors),
        }
        parts = np.split(ints, np.cumsum([np.prod(shape) for shape in shapes.values()])[:-1])
        views = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        self.sizes = views["sizes"]
        """int64[tensors, 2]: rows and elements of a row."""
        self.expected = views["expected"]
        """int64[tensors]: the trainer's checksums."""
        self.state = views["state"]
        self.boxes = views["boxes"]
        """int64[ranks, tensors, 4]: :class:`Box` es."""
        self.checksums = views["checksums"]
        """int64[ranks, tensors]: of those boxes, as the ranks hold them."""
        self._messages = rest[: ranks * MESSAGE_BYTES].reshape(ranks, MESSAGE_BYTES)
        self._specs = rest[ranks * MESSAGE_BYTES :][:specs]

    def ask(self, expected: np.ndarray) -> None:
        """Before a commit, write the trainer's checksums and erase all answers, so that none is taken for a new one.

        Args:
            expected: int64[tensors], in the manifest's order.

        Raises ValueError if it is of another number of tensors.
        """
        if expected.shape != self.expected.shape:
            raise ValueError(f"there are checksums of {len(expected)} tensors; the manifest has {len(self.expected)}")
        self.expected[:] = expected
        self.state[:] = 0
        self._messages[:] = 0

    def fail(self, rank: int, message: str) -> None:
        """Record that a rank could not load."""
        data = message.encode()[:MESSAGE_BYTES]
        self._messages[rank, : len(data)] = np.frombuffer(data, np.uint8)
        self.state[rank, STATUS] = FAILED

    def judge(self) -> Refusal | None:
        """Why the version may not be served, or ``None`` if every rank holds the trainer's bit for bit."""
        failures = self._failures()
        if failures:
            return Refusal("; ".join(failures), differs=False)
        leaders = self._leaders()
        missing = self._not_covered(leaders)
        if missing:
            return Refusal(
                f"the engine's ranks do not hold every element of these tensors exactly once: {list_names(missing)}. "
                "Either the engine has no such parameter (tied weights are sent once), or it stores them otherwise.",
                differs=False,
            )
        ranks = np.arange(len(leaders))[:, None]
        alike = (self.checksums == np.take_along_axis(self.checksums, leaders, 0)).all(0)
        totals = np.where(leaders == ranks, self.checksums, 0).sum(0)
        wrong = [self.specs[i].name for i in np.flatnonzero(~alike | (totals != self.expected))]
        if not wrong:
            return None
        return Refusal(
            f"{len(wrong)} of {len(self.specs)} tensors differ from the trainer's: {list_names(wrong)}", True
        )

    def report(self) -> LoadReport:
        """What the last commit cost."""
        copy, checksum = self.state[:, [COPY_NANOSECONDS, CHECKSUM_NANOSECONDS]].max(0) / 1e9
        stood = self.state[0, STOOD_NANOSECONDS] / 1e9
        return LoadReport(float(copy), float(checksum), float(stood), int(self.state[:, BYTES].sum()))

    def _failures(self) -> list[str]:
        failures = []
        for rank, status in enumerate(self.state[:, STATUS]):
            where = f"engine rank {rank}: " if len(self.state) > 1 else ""
            if status == NOT_RUN:
                failures.append(f"{where}its loader did not run")
            elif status == FAILED:
                failures.append(where + bytes(self._messages[rank]).rstrip(b"\0").decode(errors="replace"))
        return failures

    def _leaders(self) -> np.ndarray:
        """int64[ranks, tensors]: the first rank that holds the same box as each rank."""
        ranks, tensors = self.checksums.shape
        leaders = np.repeat(np.arange(ranks)[:, None], tensors, 1)
        for rank in range(1, ranks):
            for other in range(rank - 1, -1, -1):
                leaders[rank, (self.boxes[rank] == self.boxes[other]).all(1)] = other
        return leaders

    def _not_covered(self, leaders: np.ndarray) -> list[str]:
        """Names of the tensors that the ranks' boxes do not cover exactly once.

        A box lies in its tensor, so boxes cover it exactly if they are disjoint and add up to its size.
        """
        ranks = len(leaders)
        first, size = self.boxes[..., [0, 2]], self.boxes[..., [1, 3]]
        mine = leaders == np.arange(ranks)[:, None]
        covered = np.where(mine, size.prod(2), 0).sum(0)
        bad = (covered != self.sizes.prod(1)) | ((first < 0) | (first + size > self.sizes)).any((0, 2))
        for rank in range(1, ranks):
            for other in range(rank):
                start = np.maximum(first[rank], first[other])
                end = np.minimum(first[rank] + size[rank], first[other] + size[other])
                bad |= mine[rank] & mine[other] & (start < end).all(1)
        return [self.specs[i].name for i in np.flatnonzero(bad)]


def _numbers(tensors: int, ranks: int) -> int:
    return tensors * (3 + ranks * 5) + ranks * _STATE_COLUMNS


def _digest(specs: bytes) -> bytes:
    """Equal for equal specs: tuples of many would take a while to compare."""
    return hashlib.sha256(specs).digest()


def encode_specs(specs: tuple[TensorSpec, ...]) -> bytes:
    """JSON of the tensors' names, shapes, dtypes and offsets."""
    rows = [[spec.name, list(spec.shape), str(spec.dtype).removeprefix("torch."), spec.offset] for spec in specs]
    return json.dumps(rows).encode()


def decode_specs(data: bytes) -> tuple[TensorSpec, ...]:
    """Read :func:`encode_specs`."""
    return tuple(
        TensorSpec(name, tuple(shape), getattr(torch, dtype), offset) for name, shape, dtype, offset in json.loads(data)
    )
