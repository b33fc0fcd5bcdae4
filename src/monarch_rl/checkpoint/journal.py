"""The journal of a run: each step's batch as the trainer ranks received it, and the result of the step.

    journal/plan-0.json                          model, settings and functions of the trainer (trainer/plan.py)
            plan-1.json ...                      the same after each resume of the run
            rank0/000000.journal, 000001...      per rank: records (:class:`Record`); the oldest files are removed

For each step a rank writes a ``BTCH`` record with its shard of the batch (:class:`PackedShard`) before it computes, and
afterwards a ``STEP`` record with the checksums of its weights after the update and the metrics. So the journal also has
the batch of a step that was interrupted. ``tools/replay.py`` replays the updates.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import queue
import re
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from monarch_rl.episode.serialization import FORMAT
from monarch_rl.episode.shard import MiniBatch, PackedShard, SupervisedShard
from monarch_rl.settings.ranges import CheckedSettings, Range

logger = logging.getLogger("monarch_rl")

BATCH, STEP, OPENED = "BTCH", "STEP", "OPEN"
FOLDER = "journal"
LOST = "journal/lost"
"""Name of the metric that counts records that could not be written."""
PLAN, PLAN_OF_0_1 = "plan-{generation}.json", "plan-{generation}.pickle"
"""File name of the plan, and its name in version 0.1 of this program, which this version does not read."""
_PLAN_NAME = re.compile(r"plan-(\d+)\.(?:json|pickle)")
QUEUED = 8
"""Maximum records that wait for the disk; further ones are skipped and counted. A step has two."""
FILES = 8
"""Number of files into which a rank's bytes are divided; the oldest file is removed as a whole."""
COMPRESSION = 1
"""zlib's fastest level: on the batches of the main job, level 6 was 5 % smaller and took three times as long."""
END_S = 30.0
"""Seconds to write the last records when the rank ends."""


@dataclass(frozen=True)
class JournalSettings(CheckedSettings, flags="journal"):
    """Batches that a run keeps on disk to replay its updates (docs/journal.md)."""

    mib: Annotated[int, Range(0, 10**9, "0 keeps none")] = 0
    """MiB of the newest batches that each trainer rank keeps in the run's folder; 0 keeps none. A run that resumes from
    a checkpoint replays the batches after it. A trained token takes 5 to 10 bytes, a prompt token less; the checksums
    read all weights once per step."""


@dataclass(frozen=True, slots=True)
class Made:
    """The result of a step."""

    checksums: np.ndarray
    """int64[tensors]: checksum of this rank's shard of each trained weight after the update, in the order of the
    model's parameters, then of the critic's."""
    figures: dict[str, float]
    """The metrics of the update."""


@dataclass(frozen=True, slots=True)
class StepReplay:
    """A step that a rank has replayed from the journal."""

    metrics: dict[str, float]
    """Metrics of the update, as the trainer's ``update`` returns them."""
    group_ids: list[int]
    """Ids of the groups of the whole batch."""
    lag_counts: np.ndarray
    """int64[L]: tokens of the whole batch, by policy lag."""
    equal: bool | None
    """Whether this rank's weights are bit-identical to those of the original step; None if that was not recorded."""


class JournalBatch(NamedTuple):
    """A batch of the journal that a rank can replay. Equal on all ranks if it is the same batch."""

    version: int
    generation: int
    """Generation of the run that trained on it."""
    sum: int
    """CRC-32 of what all ranks have in common: its groups, and its numbers of tokens, episodes and rows."""


class JournalWriter:
    """Appends to one rank's files of the journal, on its own thread, so that callers never wait for the disk.

    Records that cannot be written are skipped and counted; the first one is logged.

    Args:
        folder: ``journal/`` of the run.
        rank: trainer rank.
        most_bytes: maximum bytes of this rank's files.
        about: plain values that describe the writer to readers.
    """

    def __init__(self, folder: Path, rank: int, most_bytes: int, about: dict[str, Any] | None = None) -> None:
        self._folder = folder / f"rank{rank}"
        self._most = max(most_bytes, 1)
        self._about = {"format": FORMAT.decode(), **(about or {})}
        self.lost = 0
        """Records that could not be written."""
        self._file: FileIO | None = None
        self._written = 0
        """Bytes of the whole records in the current file."""
        self._waiting: queue.Queue[tuple[str, int, Any] | None] = queue.Queue(QUEUED)
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def batch(self, shard: PackedShard) -> None:
        """Append this rank's shard of the batch that updates ``shard.version``."""
        self._append(BATCH, shard.version, shard)

    def made(self, version: int, made: Made) -> None:
        """Append the result of the update of ``version``."""
        self._append(STEP, version, made)

    def close(self) -> None:
        """Write the queued records, within :data:`END_S`, and end the thread."""
        atexit.unregister(self.close)
        try:
            self._waiting.put(None, timeout=END_S)
        except queue.Full:
            return
        self._thread.join(END_S)

    def _append(self, kind: str, version: int, value: Any) -> None:
        try:
            self._waiting.put_nowait((kind, version, value))
        except queue.Full:
            self._lose(f"the disk is slower than training: {QUEUED} records wait")

    def _lose(self, why: object) -> None:
        self.lost += 1
        if self.lost == 1:
            logger.warning("the journal in %s has gaps from here on: %s", self._folder, why)

    def _write_all(self) -> None:
        while (waiting := self._waiting.get()) is not None:  # waits: as long as the rank lives
            kind, version, value = waiting
            try:
                self._write(Record(kind, version, zlib.compress(encode(value), COMPRESSION)))
            except Exception as error:  # training continues after any error
                self._lose(f"{type(error).__name__}: {error}")
                self._take_back()
        self._end_file()

    def _write(self, record: Record) -> None:
        data = serialize_record(record)
        if self._file is None or self._written + len(data) > self._most // FILES:
            data = self._begin_file(record.version) + data
        assert self._file is not None
        view = memoryview(data)
        while view:  # a disk that is nearly full accepts only some of the bytes
            view = view[self._file.write(view) :]
        self._written += len(data)

    def _take_back(self) -> None:
        """Truncate the file after its last whole record, following a failed write; without any whole record, remove the
        file."""
        # Otherwise a disk that stays full would get another file with each record.
        if self._file is None:
            return
        try:
            if self._written:
                self._file.truncate(self._written)
                self._file.seek(self._written)
                return
            Path(self._file.name).unlink()
        except OSError:  # the next record begins another file; readers ignore half a record at the end of a file
            pass
        file, self._file = self._file, None
        with suppress(OSError):  # the record is counted already
            file.close()

    def _begin_file(self, version: int) -> bytes:
        """Open the next file, after removing the oldest ones to stay within the limit; returns its first bytes."""
        self._end_file()
        self._folder.mkdir(parents=True, exist_ok=True)
        existing = files_of(self._folder)
        sizes = [path.stat().st_size for path in existing]
        while existing and sum(sizes) > self._most - self._most // FILES:
            existing.pop(0).unlink()
            sizes.pop(0)
        number = int(existing[-1].stem) + 1 if existing else 0
        # Unbuffered: a later write or close() would retry the bytes that a buffer still holds after a failed write.
        self._file, self._written = (self._folder / f"{number:06d}.journal").open("xb", buffering=0), 0
        return MAGIC + serialize_record(Record(OPENED, version, zlib.compress(encode(self._about), COMPRESSION)))

    def _end_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._lose(error)


def files_of(folder: Path) -> list[Path]:
    """The journal files in one rank's folder, oldest first."""
    return sorted(folder.glob("*.journal"))


class JournalReader:
    """Reads one rank's files of a journal.

    A resumed run makes some versions again: a record of a version invalidates earlier records of that version and of
    all later ones.

    Args:
        folder: ``journal/`` of the run.
        rank: trainer rank.
        since: first version to keep in memory.

    Raises:
        ValueError: a file has another format.
    """

    def __init__(self, folder: Path, rank: int, since: int = 0) -> None:
        self._since = since
        self._batches: dict[int, bytes] = {}
        self._made: dict[int, bytes] = {}
        self._made_by: dict[int, dict[str, Any]] = {}
        self._abouts: dict[int, dict[str, Any]] = {}
        self.about: dict[str, Any] = {}
        """Description of the last writer (``about`` of :class:`JournalWriter`)."""
        for path in files_of(folder / f"rank{rank}"):
            for record in read_records(path):
                self._take(path, record)

    def _take(self, path: Path, record: Record) -> None:
        if record.kind == OPENED:
            self.about = decode(zlib.decompress(record.data))
            if self.about["format"] != FORMAT.decode():
                raise ValueError(
                    f"{path} has episodes of format {self.about['format']}, but this program reads {FORMAT.decode()}"
                )
        elif record.kind == BATCH:
            if record.version <= max(self._batches, default=-1):
                self._batches = {version: data for version, data in self._batches.items() if version < record.version}
                self._made = {version: data for version, data in self._made.items() if version < record.version}
            if record.version >= self._since:
                self._batches[record.version] = record.data
                self._abouts[record.version] = self.about
        elif record.kind == STEP and record.version >= self._since:
            self._made[record.version] = record.data
            self._made_by[record.version] = self.about

    @property
    def versions(self) -> list[int]:
        """The versions whose batch is in the journal, ascending."""
        return sorted(self._batches)

    def batch(self, version: int) -> PackedShard:
        """The batch that updates ``version``. Raises KeyError if the journal does not have it."""
        classes = PackedShard, MiniBatch, SupervisedShard
        shard: PackedShard = decode(zlib.decompress(self._batches[version]), *classes)
        return shard

    def about_batch(self, version: int) -> dict[str, Any]:
        """Description of the writer of this batch. Raises KeyError if the journal does not have the batch."""
        return self._abouts[version]

    def about_made(self, version: int) -> dict[str, Any] | None:
        """Description of the writer of this result; None if the journal does not have the result."""
        return self._made_by.get(version) if version in self._made else None

    def made(self, version: int) -> Made | None:
        """Result of the update of ``version``; None if the journal does not have it."""
        data = self._made.get(version)
        made: Made | None = None if data is None else decode(zlib.decompress(data), Made)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of the batches and results that are kept in memory, compressed."""
        return sum(len(data) for records in (self._batches, self._made) for data in records.values())


def journal_of(folder: Path, rank: int, tp: int, since: int = 0) -> tuple[JournalReader, JournalReader]:
    """Readers of a rank's results and of its batches. Ranks of a tensor-parallel group take the same shard of a batch,
    which only the first of them writes."""
    own, writer = JournalReader(folder, rank, since), rank - rank % tp
    return own, own if writer == rank else JournalReader(folder, writer, since)


def plans_of(folder: Path) -> list[int]:
    """The generations whose plan is in ``folder``."""
    found = (_PLAN_NAME.fullmatch(path.name) for path in folder.glob("plan-*"))
    return [int(match[1]) for match in found if match]


# -- files of records: a record is read whole or not at all, however the process that wrote it ended ------------------
#     8 bytes "MRLJNL01", then the records one after the other. A record is
#
#     4 bytes kind, 8 bytes version, 8 bytes length, 4 bytes CRC-32 of these and of the data, the data
#
# all little-endian. Bytes after the last whole record, left by a write that was cut off, are not read.

MAGIC = b"MRLJNL01"
"""The last two characters are the version of the format."""
_HEAD = struct.Struct("<4sqQ")
_CHECK = struct.Struct("<I")
OVERHEAD = _HEAD.size + _CHECK.size
"""Bytes of a record besides its data."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record."""

    kind: str
    """Four characters."""
    version: int
    """Policy version that the record describes."""
    data: bytes


def serialize_record(record: Record) -> bytes:
    """The bytes of a record. Raises ValueError unless its kind has four characters."""
    kind = record.kind.encode("ascii")
    if len(kind) != 4:
        raise ValueError(f"the kind of a record must have four characters, {record.kind!r} has {len(kind)}")
    head = _HEAD.pack(kind, record.version, len(record.data))
    return head + _CHECK.pack(zlib.crc32(record.data, zlib.crc32(head))) + record.data


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, up to the first one that is damaged or cut off.

    A file that was cut off within its first bytes has no records. Raises ValueError if the file has another format.
    """
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
        if magic != MAGIC:
            if MAGIC.startswith(magic.rstrip(b"\0")):
                return
            raise ValueError(f"{path} has format {magic!r}, but this program reads {MAGIC!r}")
        size = path.stat().st_size
        while len(head := file.read(OVERHEAD)) == OVERHEAD:
            kind, version, length = _HEAD.unpack_from(head)
            if file.tell() + length > size:
                return
            data = file.read(length)
            (check,) = _CHECK.unpack_from(head, _HEAD.size)
            if zlib.crc32(data, zlib.crc32(head[: _HEAD.size])) != check:
                return
            yield Record(kind.decode("ascii", "replace"), version, data)


# -- values: plain values that contain NumPy arrays, as bytes, without pickle -----------------------------------------
#     4 bytes length of the text, the text (JSON, in which an array is its dtype and shape), the arrays' bytes, in order
#
# All little-endian. Tuples are read as lists. A dataclass or named tuple is stored as its name and fields, and the
# reader must know the class.

_LENGTH = struct.Struct("<I")
_ARRAY, _BYTES, _MAPPING, _DATACLASS = "array", "bytes", "mapping", "dataclass"
"""The only key of a JSON object that encodes a value of this type."""


def encode(value: Any) -> bytes:
    """Encode a value: None, numbers, text, bytes, arrays, and lists, mappings, dataclasses and named tuples of these.

    Raises TypeError for anything else, and for keys that are not strings.
    """
    arrays: list[bytes] = []
    text = json.dumps(_plain(value, arrays), separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *arrays])


def decode(data: bytes | memoryview, *classes: type) -> Any:
    """The inverse of :func:`encode`.

    Args:
        data: the encoded value.
        classes: the dataclasses and named tuples that the value may contain.

    Raises:
        ValueError: ``data`` is not an encoded value, or contains another class, or a class with other fields.
    """
    view = memoryview(data)
    if len(view) < _LENGTH.size:
        raise ValueError(f"{len(view)} bytes are too few for an encoded value")
    start = _LENGTH.size + _LENGTH.unpack_from(view)[0]
    reader = _Reader(view, start, {one.__name__: one for one in classes})
    value = reader.value(json.loads(bytes(view[_LENGTH.size : start])))
    if reader.place != len(view):
        raise ValueError(f"an encoded value of {reader.place} bytes is followed by {len(view) - reader.place} more")
    return value


def _plain(value: Any, arrays: list[bytes]) -> Any:
    if isinstance(value, np.ndarray):
        little = value.astype(value.dtype.newbyteorder("<"), copy=False)
        arrays.append(np.ascontiguousarray(little).tobytes())
        return {_ARRAY: [value.dtype.str[1:], *value.shape]}
    if isinstance(value, bytes | memoryview):
        arrays.append(bytes(value))
        return {_BYTES: len(value)}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"a mapping has keys that are not strings: {list(value)[:3]}")
        return {_MAPPING: {key: _plain(item, arrays) for key, item in value.items()}}
    if names := _field_names(value):
        return {_DATACLASS: [type(value).__name__, {name: _plain(getattr(value, name), arrays) for name in names}]}
    if isinstance(value, list | tuple):
        return [_plain(item, arrays) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r:.80} cannot be encoded")


def _field_names(value: Any) -> list[str]:
    """Field names of a dataclass or a named tuple; empty for anything else."""
    if is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in fields(value)]
    return list(getattr(value, "_fields", ()))


class _Reader:
    """Rebuilds a value from its JSON, reading the arrays in order."""

    def __init__(self, view: memoryview, place: int, classes: dict[str, type]) -> None:
        self._view, self.place, self._classes = view, place, classes

    def value(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return [self.value(item) for item in plain]
        if not isinstance(plain, dict):
            return plain
        ((kind, inner),) = plain.items()
        if kind == _MAPPING:
            return {key: self.value(item) for key, item in inner.items()}
        if kind == _BYTES:
            return bytes(self._take(inner))
        if kind == _DATACLASS:
            name, own_fields = inner
            try:
                return self._classes[name](**{key: self.value(item) for key, item in own_fields.items()})
            except (KeyError, TypeError) as error:
                raise ValueError(f"a {name} was written by another version of this program ({error})") from error
        dtype, *shape = inner
        little = np.dtype("<" + dtype)
        array = np.frombuffer(self._take(math.prod(shape) * little.itemsize), little)
        return array.reshape(shape).astype(little.newbyteorder("="))  # a copy, which does not keep ``data`` alive

    def _take(self, nbytes: int) -> memoryview:
        start, self.place = self.place, self.place + nbytes
        if self.place > len(self._view):
            raise ValueError(f"an encoded value is cut off: it has {len(self._view)} of at least {self.place} bytes")
        return self._view[start : self.place]
