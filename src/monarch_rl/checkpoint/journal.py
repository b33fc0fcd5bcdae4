"""The journal of a run: each step's batch as the trainer ranks took it, and what the step made of it.

    journal/plan-0.json                          model, settings and functions of the trainer (trainer/plan_file.py)
            plan-1.json ...                      the same after each resume of the run
            rank0/000000.journal, 000001...      of each rank: records (:class:`Record`), the oldest files are dropped

For each step a rank writes a record ``BTCH``, its share of the batch (:class:`PackedShard`), before it computes, and a
record ``STEP``, the checksum of its weights after the update and the metrics, after that. So the batch of a step that
was never made is there, too. ``tools/replay.py`` makes the updates again.
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
from typing import Annotated, Any

import numpy as np

from monarch_rl.episode.serialization import FORMAT
from monarch_rl.episode.shard import MiniBatch, PackedShard, SupervisedShard
from monarch_rl.settings.ranges import CheckedSettings, Range

logger = logging.getLogger("monarch_rl")

BATCH, STEP, OPENED = "BTCH", "STEP", "OPEN"
FOLDER = "journal"
LOST = "journal/lost"
"""The metric of records that could not be written."""
PLAN, PLAN_OF_0_1 = "plan-{generation}.json", "plan-{generation}.pickle"
"""The plan's file, and that of version 0.1, which this one does not read."""
_PLAN_NAME = re.compile(r"plan-(\d+)\.(?:json|pickle)")
QUEUED = 8
"""Records that wait for the disk; further ones are left out and counted. A step makes two."""
FILES = 8
"""Files of a rank within its bytes: the oldest is dropped as a whole."""
COMPRESSION = 1
"""zlib's fastest: on the batches of the main job 6 was 5 % smaller and took three times as long."""
END_S = 30.0
"""Seconds for the last records when the rank ends."""


@dataclass(frozen=True)
class JournalSettings(CheckedSettings, flags="journal"):
    """What a run keeps to make its updates again (docs/journal.md)."""

    mib: Annotated[int, Range(0, 10**9, "0 keeps none")] = 0
    """MiB of the newest batches that each trainer rank keeps in the run's folder; 0 keeps none. A run that goes on from
    a checkpoint trains those after it again. A trained token takes 5 to 10 bytes, its prompt less; the
    checksum of the weights reads them once a step."""


@dataclass(frozen=True, slots=True)
class Made:
    """What a step has made."""

    checksums: np.ndarray
    """int64[tensors]: of this rank's part of each trained weight after the update, in the order of the model's
    parameters, then of the critic's."""
    figures: dict[str, float]
    """The metrics of the update."""


class JournalWriter:
    """Appends to one rank's part of the journal, on a thread of its own: callers never wait for the disk.

    What cannot be written is left out, said once, and counted.

    Args:
        folder: ``journal/`` of the run.
        rank: of the trainer.
        most_bytes: of this rank's files.
        about: plain values that a reader needs to know of the writer.
    """

    def __init__(self, folder: Path, rank: int, most_bytes: int, about: dict[str, Any] | None = None) -> None:
        self._folder = folder / f"rank{rank}"
        self._most = max(most_bytes, 1)
        self._about = {"format": FORMAT.decode(), **(about or {})}
        self.lost = 0
        """Records that could not be written."""
        self._file: FileIO | None = None
        self._written = 0
        """Bytes of the file, in whole records."""
        self._waiting: queue.Queue[tuple[str, int, Any] | None] = queue.Queue(QUEUED)
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def batch(self, shard: PackedShard) -> None:
        """Append this rank's share of the batch that updates ``shard.version``."""
        self._append(BATCH, shard.version, shard)

    def made(self, version: int, made: Made) -> None:
        """Append what the update of ``version`` has made."""
        self._append(STEP, version, made)

    def close(self) -> None:
        """Write what waits, within :data:`END_S`, and end."""
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
            except Exception as error:  # whatever it is, training goes on
                self._lose(f"{type(error).__name__}: {error}")
                self._take_back()
        self._end_file()

    def _write(self, record: Record) -> None:
        data = pack_record(record)
        if self._file is None or self._written + len(data) > self._most // FILES:
            data = self._begin_file(record.version) + data
        assert self._file is not None
        view = memoryview(data)
        while view:  # a disk that is nearly full takes a part
            view = view[self._file.write(view) :]
        self._written += len(data)

    def _take_back(self) -> None:
        """Remove what a failed write has left behind the last whole record, or the file if it has none: a disk that
        stays full would get another file with each record."""
        if self._file is None:
            return
        try:
            if self._written:
                self._file.truncate(self._written)
                self._file.seek(self._written)
                return
            Path(self._file.name).unlink()
        except OSError:  # another file follows; half of a record at the end of one is not read
            pass
        file, self._file = self._file, None
        with suppress(OSError):  # the record is counted already
            file.close()

    def _begin_file(self, version: int) -> bytes:
        """The next file, after the oldest are dropped for which there is no room; returns what it begins with."""
        self._end_file()
        self._folder.mkdir(parents=True, exist_ok=True)
        known = files_of(self._folder)
        sizes = [path.stat().st_size for path in known]
        while known and sum(sizes) > self._most - self._most // FILES:
            known.pop(0).unlink()
            sizes.pop(0)
        number = int(known[-1].stem) + 1 if known else 0
        # Without a buffer, whose bytes a later write or close() would try to write once more.
        self._file, self._written = (self._folder / f"{number:06d}.journal").open("xb", buffering=0), 0
        return MAGIC + pack_record(Record(OPENED, version, zlib.compress(encode(self._about), COMPRESSION)))

    def _end_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._lose(error)


def files_of(folder: Path) -> list[Path]:
    """The files of one rank, oldest first."""
    return sorted(folder.glob("*.journal"))


class JournalReader:
    """One rank's part of a journal: what is there of each step.

    A run that was resumed makes some versions anew: what was written of a version, and of all later ones, before it was
    written again does not count.

    Args:
        folder: ``journal/`` of the run.
        since: of earlier versions nothing is kept in memory.

    Raises ValueError if a file has another format.
    """

    def __init__(self, folder: Path, rank: int, since: int = 0) -> None:
        self._since = since
        self._batches: dict[int, bytes] = {}
        self._made: dict[int, bytes] = {}
        self._made_by: dict[int, dict[str, Any]] = {}
        self._abouts: dict[int, dict[str, Any]] = {}
        self.about: dict[str, Any] = {}
        """What the writer said of itself last."""
        for path in files_of(folder / f"rank{rank}"):
            for record in read_records(path):
                self._take(path, record)

    def _take(self, path: Path, record: Record) -> None:
        if record.kind == OPENED:
            self.about = decode(zlib.decompress(record.data))
            if self.about["format"] != FORMAT.decode():
                raise ValueError(
                    f"{path} holds episodes of format {self.about['format']}; this program reads {FORMAT.decode()}"
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
        """The versions of which the batch is here, ascending."""
        return sorted(self._batches)

    def batch(self, version: int) -> PackedShard:
        """The batch that updates ``version``. Raises KeyError if it is not here."""
        classes = PackedShard, MiniBatch, SupervisedShard
        shard: PackedShard = decode(zlib.decompress(self._batches[version]), *classes)
        return shard

    def about_batch(self, version: int) -> dict[str, Any]:
        """What the writer of this batch said of itself. Raises KeyError if the batch is not here."""
        return self._abouts[version]

    def about_made(self, version: int) -> dict[str, Any] | None:
        """What the writer of :meth:`made` said of itself; None if that is not here."""
        return self._made_by.get(version) if version in self._made else None

    def made(self, version: int) -> Made | None:
        """What the update of ``version`` has made; None if that is not here."""
        data = self._made.get(version)
        made: Made | None = None if data is None else decode(zlib.decompress(data), Made)
        return made

    @property
    def nbytes(self) -> int:
        """Of the records of all batches and steps."""
        return sum(len(data) for kept in (self._batches, self._made) for data in kept.values())


def journal_of(folder: Path, rank: int, tp: int, since: int = 0) -> tuple[JournalReader, JournalReader]:
    """What a rank's steps have made, and the batches that it took. Tensor-parallel neighbours take the same part of a
    batch, which the first of them has written."""
    own, writer = JournalReader(folder, rank, since), rank - rank % tp
    return own, own if writer == rank else JournalReader(folder, writer, since)


def plans_of(folder: Path) -> list[int]:
    """The generations whose plan is here."""
    found = (_PLAN_NAME.fullmatch(path.name) for path in folder.glob("plan-*"))
    return [int(match[1]) for match in found if match]


# -- files of records that are there whole or not at all, however the process that wrote them ended -------------------
#     8 bytes "MRLJNL01", then the records one after the other. A record is
#
#     4 bytes kind, 8 bytes version, 8 bytes length, 4 bytes CRC-32 of these and of the data, the data
#
# all little-endian. What follows the last whole record, because a write was cut off, is not read.

MAGIC = b"MRLJNL01"
"""The last two characters are the version of the format."""
_HEAD = struct.Struct("<4sqQ")
_CHECK = struct.Struct("<I")
OVERHEAD = _HEAD.size + _CHECK.size
"""Bytes of a record beside its data."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record."""

    kind: str
    """Four characters."""
    version: int
    """The policy version that it is about."""
    data: bytes


def pack_record(record: Record) -> bytes:
    """The bytes of a record. Raises ValueError if its kind has not four characters."""
    kind = record.kind.encode("ascii")
    if len(kind) != 4:
        raise ValueError(f"the kind of a record has four characters, {record.kind!r} has {len(kind)}")
    head = _HEAD.pack(kind, record.version, len(record.data))
    return head + _CHECK.pack(zlib.crc32(record.data, zlib.crc32(head))) + record.data


def read_records(path: Path) -> Iterator[Record]:
    """The whole records of a file, up to the first one that is not.

    Raises ValueError if the file has another format. One that was cut off within its first bytes has no records.
    """
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
        if magic != MAGIC:
            if MAGIC.startswith(magic.rstrip(b"\0")):
                return
            raise ValueError(f"{path} has format {magic!r}; this program reads {MAGIC!r}")
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


# -- plain values with NumPy arrays in them as bytes, without pickle --------------------------------------------------
#     4 bytes length of the text, the text (JSON, in which an array is its dtype and shape), the arrays' bytes, in order
#
# All little-endian. Tuples come back as lists; of a dataclass or named tuple there are its name and its fields, and
# whoever reads it knows the class.

_LENGTH = struct.Struct("<I")
_ARRAY, _BYTES, _MAPPING, _DATACLASS = "array", "bytes", "mapping", "dataclass"
"""The one key of an object that stands for something else."""


def encode(value: Any) -> bytes:
    """The bytes of a value: None, numbers, text, bytes, arrays, and lists, mappings, dataclasses and named tuples
    of these.

    Raises TypeError for anything else, and for keys that are no text.
    """
    arrays: list[bytes] = []
    text = json.dumps(_plain(value, arrays), separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *arrays])


def decode(data: bytes | memoryview, *classes: type) -> Any:
    """The inverse of :func:`encode`.

    Args:
        classes: the dataclasses and named tuples that there may be.

    Raises ValueError if that did not make ``data``, or a dataclass is another one, or has other fields.
    """
    view = memoryview(data)
    if len(view) < _LENGTH.size:
        raise ValueError(f"{len(view)} bytes hold no value")
    start = _LENGTH.size + _LENGTH.unpack_from(view)[0]
    reader = _Reader(view, start, {one.__name__: one for one in classes})
    value = reader.value(json.loads(bytes(view[_LENGTH.size : start])))
    if reader.place != len(view):
        raise ValueError(f"a value of {reader.place} bytes has {len(view)}")
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
            raise TypeError(f"a mapping has keys that are no text: {list(value)[:3]}")
        return {_MAPPING: {key: _plain(item, arrays) for key, item in value.items()}}
    if names := _field_names(value):
        return {_DATACLASS: [type(value).__name__, {name: _plain(getattr(value, name), arrays) for name in names}]}
    if isinstance(value, list | tuple):
        return [_plain(item, arrays) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r:.80} is no plain value")


def _field_names(value: Any) -> list[str]:
    """Of a dataclass or a named tuple; none of anything else."""
    if is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in fields(value)]
    return list(getattr(value, "_fields", ()))


class _Reader:
    """Reads the arrays of a value in order."""

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
            name, known = inner
            try:
                return self._classes[name](**{key: self.value(item) for key, item in known.items()})
            except (KeyError, TypeError) as error:
                raise ValueError(f"a {name} was written by another version of this program ({error})") from error
        dtype, *shape = inner
        little = np.dtype("<" + dtype)
        array = np.frombuffer(self._take(math.prod(shape) * little.itemsize), little)
        return array.reshape(shape).astype(little.newbyteorder("="))  # of its own memory

    def _take(self, nbytes: int) -> memoryview:
        start, self.place = self.place, self.place + nbytes
        if self.place > len(self._view):
            raise ValueError(f"a value of at least {self.place} bytes has {len(self._view)}")
        return self._view[start : self.place]
