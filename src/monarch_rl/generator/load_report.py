"""The sheet in shared memory through which the engine's process and its ranks report on a commit, without messages.

Before the pause the engine's process writes the trainer's checksums. Each engine rank then writes which box of each
tensor it holds, and the checksum of that box in its own parameters. From these numbers every process can judge the
version. Each rank does so before it resumes decoding, and all reach the same verdict from the same numbers.
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
"""Maximum size of a rank's error message, which names tensors; longer ones are truncated."""
NOT_RUN, LOADED, FAILED = range(3)
"""Values of ``state[rank, STATUS]``."""
STATUS, COPY_NANOSECONDS, CHECKSUM_NANOSECONDS, BYTES, PAUSED_NANOSECONDS = range(5)
"""Columns of ``state``."""
_STATE_COLUMNS = 5
_INT = 8
"""Bytes of an int64."""


@dataclass(frozen=True, slots=True)
class Box:
    """The rectangle of a tensor that a rank holds, with the tensor viewed as ``[rows, elements per row]``."""

    first_row: int
    rows: int
    first_column: int
    columns: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Cost of a commit."""

    copy_seconds: float
    """Copy from the area to the engine's parameters, on the slowest engine rank."""
    checksum_seconds: float
    """Checksums of the engine's parameters, on the slowest engine rank."""
    paused_seconds: float
    """Time without decoding, from pause to continuation, by the clock of rank 0's scheduler."""
    nbytes: int
    """Bytes copied by all ranks together."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a version may not be served."""

    message: str
    differs: bool
    """Whether everything was loaded, but differs from the trainer's weights."""


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and elements per row of a tensor. Rows of a one-dimensional tensor have one element."""
    rows = shape[0] if shape else 1
    elements = int(np.prod(shape[1:], dtype=np.int64))
    return rows, elements


class LoadSheet:
    """Shared numbers for one engine and one manifest. Construct it in the engine's process, :meth:`open` it in its
    ranks."""

    def __init__(self, manifest: Manifest, ranks: int) -> None:
        specs = encode_specs(manifest.tensors)
        sizes = np.array([matrix_shape(spec.shape) for spec in manifest.tensors], np.int64).reshape(-1, 2)
        area = Area(_INT * (3 + _numbers(len(sizes), ranks)) + ranks * MESSAGE_BYTES + len(specs))
        self._owned = area  # other processes can attach while this reference exists
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
        """Specs of the tensors. Decoded on demand: a replayed commit needs only the layout's hash."""
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
        """int64[tensors, 2]: rows and elements per row."""
        self.expected = views["expected"]
        """int64[tensors]: the trainer's checksums."""
        self.state = views["state"]
        """int64[ranks, columns]: status and cost of each rank."""
        self.boxes = views["boxes"]
        """int64[ranks, tensors, 4]: the fields of each :class:`Box`."""
        self.checksums = views["checksums"]
        """int64[ranks, tensors]: checksums of these boxes in the ranks' parameters."""
        self._messages = rest[: ranks * MESSAGE_BYTES].reshape(ranks, MESSAGE_BYTES)
        self._specs = rest[ranks * MESSAGE_BYTES :][:specs]

    def ask(self, expected: np.ndarray) -> None:
        """Before a commit, write the trainer's checksums and erase the results of the previous one.

        Args:
            expected: int64[tensors], in the manifest's order.

        Raises ValueError if the number of checksums is not the manifest's number of tensors.
        """
        if expected.shape != self.expected.shape:
            raise ValueError(f"got checksums of {len(expected)} tensors, but the manifest has {len(self.expected)}")
        self.expected[:] = expected
        self.state[:] = 0
        self._messages[:] = 0

    def fail(self, rank: int, message: str) -> None:
        """Record that a rank could not load."""
        data = message.encode()[:MESSAGE_BYTES]
        self._messages[rank, : len(data)] = np.frombuffer(data, np.uint8)
        self.state[rank, STATUS] = FAILED

    def judge(self) -> Refusal | None:
        """Why the version may not be served; None if the ranks' weights equal the trainer's bit for bit."""
        failures = self._failures()
        if failures:
            return Refusal("; ".join(failures), differs=False)
        leaders = self._leaders()
        missing = self._not_covered(leaders)
        if missing:
            return Refusal(
                f"the engine's ranks do not hold every element of these tensors exactly once: {list_names(missing)}. "
                "Either the engine has no such parameter (tied weights are sent once), or stores it in another form.",
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
        """Cost of the last commit."""
        copy, checksum = self.state[:, [COPY_NANOSECONDS, CHECKSUM_NANOSECONDS]].max(0) / 1e9
        paused = self.state[0, PAUSED_NANOSECONDS] / 1e9
        return LoadReport(float(copy), float(checksum), float(paused), int(self.state[:, BYTES].sum()))

    def _failures(self) -> list[str]:
        failures = []
        for rank, status in enumerate(self.state[:, STATUS]):
            where = f"engine rank {rank}: " if len(self.state) > 1 else ""
            if status == NOT_RUN:
                failures.append(f"{where}the loader did not run")
            elif status == FAILED:
                failures.append(where + bytes(self._messages[rank]).rstrip(b"\0").decode(errors="replace"))
        return failures

    def _leaders(self) -> np.ndarray:
        """int64[ranks, tensors]: the first rank that holds the same box as this rank."""
        ranks, tensors = self.checksums.shape
        leaders = np.repeat(np.arange(ranks)[:, None], tensors, 1)
        for rank in range(1, ranks):
            for other in range(rank - 1, -1, -1):
                leaders[rank, (self.boxes[rank] == self.boxes[other]).all(1)] = other
        return leaders

    def _not_covered(self, leaders: np.ndarray) -> list[str]:
        """Names of the tensors that the ranks' boxes do not cover exactly once."""
        # Boxes cover a tensor exactly once if they lie within it, are disjoint, and add up to its size.
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
    # A hash, because comparing tuples of many specs would take long.
    return hashlib.sha256(specs).digest()


def encode_specs(specs: tuple[TensorSpec, ...]) -> bytes:
    """JSON of the tensors' names, shapes, dtypes and offsets."""
    rows = [[spec.name, list(spec.shape), str(spec.dtype).removeprefix("torch."), spec.offset] for spec in specs]
    return json.dumps(rows).encode()


def decode_specs(data: bytes) -> tuple[TensorSpec, ...]:
    """The inverse of :func:`encode_specs`."""
    return tuple(
        TensorSpec(name, tuple(shape), getattr(torch, dtype), offset) for name, shape, dtype, offset in json.loads(data)
    )
