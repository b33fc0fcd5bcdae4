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
from monarch_rl.errors import SettingsError
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
        about: plain values that describe the writer to readers; ``generation`` is that of the run, 0 without one.
    """

    def __init__(self, folder: Path, rank: int, most_bytes: int, about: dict[str, Any] | None = None) -> None:
        self._folder = folder / f"rank{rank}"
        self._most = max(most_bytes, 1)
        self._about = {"format": FORMAT.decode(), "generation": 0, **(about or {})}
        self._records = 0
        """Records so far, including those that could not be written."""
        self.lost = 0
        """Records that could not be written."""
        self._file: FileIO | None = None
        self._written = 0
        """Bytes of the whole records in the current file."""
        self._waiting: queue.Queue[tuple[str, int, int, Any] | None] = queue.Queue(QUEUED)
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
        index, self._records = self._records, self._records + 1
        try:
            self._waiting.put_nowait((kind, version, index, value))
        except queue.Full:
            self._lose(f"the disk is slower than training: {QUEUED} records wait")

    def _lose(self, why: object) -> None:
        self.lost += 1
        if self.lost == 1:
            logger.warning("the journal in %s has gaps from here on: %s", self._folder, why)

    def _write_all(self) -> None:
        while (waiting := self._waiting.get()) is not None:  # waits: as long as the rank lives
            kind, version, index, value = waiting
            try:
                self._write(self._record(kind, version, index, value))
            except Exception as error:  # training continues after any error
                self._lose(f"{type(error).__name__}: {error}")
                self._take_back()
        self._end_file()

    def _record(self, kind: str, version: int, index: int, value: Any) -> Record:
        return Record(kind, version, zlib.compress(encode(value), COMPRESSION), self._about["generation"], index)

    def _write(self, record: Record) -> None:
        data = serialize_record(record)
        if self._file is None or self._written + len(data) > self._most // FILES:
            data = self._begin_file(record.version, record.index) + data
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

    def _begin_file(self, version: int, index: int) -> bytes:
        """Open the next file, after removing the oldest ones to stay within the limit; returns its first bytes, with a
        record that has the version and index of the one that follows it."""
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
        return MAGIC + serialize_record(self._record(OPENED, version, index, self._about))

    def _end_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._lose(error)


def files_of(folder: Path) -> list[Path]:
    """The journal files in one rank's folder, oldest first, without copies and other programs' files."""
    return sorted(path for path in folder.glob("*.journal") if path.stem.isdecimal())


class JournalReader:
    """Reads one rank's files of a journal.

    A resumed run makes some versions again: a record of a version invalidates earlier records of that version and of
    all later ones. Where records are missing that may have done so, the batches that they concern are left out, too.

    Args:
        folder: ``journal/`` of the run.
        rank: trainer rank.
        since: first version to keep in memory.

    Raises:
        SettingsError: a file has another format.
    """

    def __init__(self, folder: Path, rank: int, since: int = 0) -> None:
        self.folder = folder / f"rank{rank}"
        self._since = since
        self._batches: dict[int, Record] = {}
        self._made: dict[int, Record] = {}
        self._abouts: dict[int, dict[str, Any]] = {}
        """Description of the writer, by generation."""
        self.damage: list[str] = []
        """What is damaged or missing, one text for each place: file, record and offset."""
        self._unread: list[Damage] = []
        """Unreadable places since the last record."""
        self._generation, self._next, self._version = -1, 0, -1
        """Generation of the last record, index of the next one of this generation, and version of the last one."""
        self._has_batch = False
        """Whether a batch of this generation was read."""
        self._opened = False
        """Whether the last record opened a file: it was written together with a record that should follow."""
        previous: Path | None = None
        for path in files_of(self.folder):
            if previous is not None and int(path.stem) != int(previous.stem) + 1:
                missing = path.with_stem(f"{int(previous.stem) + 1:06d}")
                self._unread.append(Damage(missing, 0, 0, 0, "the file is missing"))
            self._read(path)
            previous = path
        # Incomplete bytes at the end may be those of a record whose writer was killed, or damaged.
        self.damage += map(str, self._unread)
        self._distrust(other_generation=True)
        self._batches = {version: batch for version, batch in self._batches.items() if batch.generation in self._abouts}

    def _read(self, path: Path) -> None:
        ordered = True
        try:
            for item in read_records(path):
                if isinstance(item, Damage):
                    self._unread.append(item)
                elif (item.generation, item.index) >= (self._generation, self._next):
                    self._note_missing(path, item)
                    self._take(path, item)
                else:
                    if ordered:  # once per file
                        self.damage.append(f"{path}: record {item.index} of resume {item.generation} is out of order")
                        ordered = False
                    # It may have invalidated records of earlier generations.
                    self._batches = {v: own for v, own in self._batches.items() if own.generation >= item.generation}
        except OSError as error:
            self._unread.append(Damage(path, 0, 0, 0, f"the file cannot be read ({error.strerror or error})"))

    def _note_missing(self, path: Path, record: Record) -> None:
        """Note what is missing or damaged before a record."""
        other = record.generation != self._generation
        expected = 0 if other else self._next
        # Before the first record of all, older files were removed to stay within the limit.
        missing = self._generation >= 0 and record.index > expected
        if not self._unread and not missing:
            if other:
                self._distrust(other)
            return
        # Cut off at the end of a file, it is the last record of a killed writer: no damage, unless others are missing.
        noted = [str(unread) for unread in self._unread if missing or not unread.cut_off or unread.whole_file]
        if not self._unread:
            noted.append(
                f"{path}: before record {record.index} of resume {record.generation}, {record.index - expected} are "
                "missing: they were removed, or left out because the disk was full or slow"
            )
        self.damage += noted
        self._distrust(other, beginning=other and missing)
        self._unread = []

    def _distrust(self, other_generation: bool, beginning: bool = False) -> None:
        """Leave out batches that unread records may have invalidated. Within a generation, its first batch invalidates
        all that later ones could.

        Args:
            other_generation: whether another generation may follow the unread places.
            beginning: whether the beginning of that generation is missing.
        """
        if not self._has_batch and (self._unread or self._opened or not other_generation):
            self._forget(self._version)
        if beginning or (other_generation and any(unread.whole_file for unread in self._unread)):
            self._forget(-1)

    def _take(self, path: Path, record: Record) -> None:
        if record.generation != self._generation:
            self._has_batch = False
        self._generation, self._version = record.generation, record.version
        self._opened = record.kind == OPENED
        self._next = record.index + (not self._opened)
        if record.kind == OPENED:
            about = decode(zlib.decompress(record.data))
            if about["format"] != FORMAT.decode():
                raise SettingsError(
                    f"{path} has episodes of format {about['format']}, but this program reads {FORMAT.decode()}"
                )
            self._abouts[record.generation] = about
        elif record.kind == BATCH:
            self._has_batch = True
            self._forget(record.version)
            if record.version >= self._since:
                self._batches[record.version] = record
        elif record.kind == STEP and record.version >= self._since:
            self._made[record.version] = record

    def _forget(self, version: int) -> None:
        """Leave out the records of this version and of later ones."""
        if version <= max([*self._batches, *self._made], default=-1):
            self._batches = {own: record for own, record in self._batches.items() if own < version}
            self._made = {own: record for own, record in self._made.items() if own < version}

    @property
    def versions(self) -> list[int]:
        """The versions whose batch is in the journal, ascending."""
        return sorted(self._batches)

    def batch(self, version: int) -> PackedShard:
        """The batch that updates ``version``. Raises KeyError if the journal does not have it."""
        classes = PackedShard, MiniBatch, SupervisedShard
        shard: PackedShard = decode(zlib.decompress(self._batches[version].data), *classes)
        return shard

    def about_batch(self, version: int) -> dict[str, Any]:
        """Description of the writer of this batch. Raises KeyError if the journal does not have the batch."""
        return self._abouts[self._batches[version].generation]

    def about_made(self, version: int) -> dict[str, Any] | None:
        """Description of the writer of this result; None if the journal does not have the result."""
        return self._abouts.get(self._made[version].generation) if version in self._made else None

    def made(self, version: int) -> Made | None:
        """Result of the update of ``version``; None if the journal does not have it."""
        record = self._made.get(version)
        made: Made | None = None if record is None else decode(zlib.decompress(record.data), Made)
        return made

    @property
    def about(self) -> dict[str, Any]:
        """Description of the last writer (``about`` of :class:`JournalWriter`)."""
        return self._abouts[max(self._abouts)] if self._abouts else {}

    @property
    def nbytes(self) -> int:
        """Bytes of the batches and results that are kept in memory, compressed."""
        return sum(len(record.data) for records in (self._batches, self._made) for record in records.values())


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
#     8 bytes "MRLJNL02", then the records one after the other. A record is
#
#     4 bytes kind, 8 bytes version, 8 bytes length, 4 bytes generation, 4 bytes index among the generation's records,
#     4 bytes CRC-32 of these and of the data, the data
#
# all little-endian. After bytes that are no whole record, reading continues at the next whole one.

MAGIC = b"MRLJNL02"
"""The last two characters are the version of the format."""
_HEAD = struct.Struct("<4sqQII")
_CHECK = struct.Struct("<I")
OVERHEAD = _HEAD.size + _CHECK.size
"""Bytes of a record besides its data."""
_KINDS = re.compile("|".join((BATCH, STEP, OPENED)).encode())


@dataclass(frozen=True, slots=True)
class Record:
    """One record."""

    kind: str
    """Four characters."""
    version: int
    """Policy version that the record describes."""
    data: bytes
    generation: int = 0
    """Generation of the run that wrote it."""
    index: int = 0
    """Number of records that the generation wrote before. A file's first record has that of the second one."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a journal file that are no whole record."""

    path: Path
    offset: int
    nbytes: int
    record: int
    """Position in the file, counted from 0, of the first record that they were part of."""
    problem: str
    at_the_end: bool = False
    """Whether no record follows in the file."""
    cut_off: bool = False
    """Whether the file ends within the record."""

    @property
    def whole_file(self) -> bool:
        """Whether no record of the file can be read, so that its generation is unknown."""
        return not self.nbytes or (self.at_the_end and not self.record)

    def __str__(self) -> str:
        where = f"record {self.record}, at byte {self.offset}: " if self.nbytes else ""
        return f"{self.path}: {where}{self.problem}"


def serialize_record(record: Record) -> bytes:
    """The bytes of a record. Raises ValueError unless its kind has four characters."""
    kind = record.kind.encode("ascii")
    if len(kind) != 4:
        raise ValueError(f"the kind of a record must have four characters, {record.kind!r} has {len(kind)}")
    head = _HEAD.pack(kind, record.version, len(record.data), record.generation, record.index)
    return head + _CHECK.pack(zlib.crc32(record.data, zlib.crc32(head))) + record.data


def read_records(path: Path) -> Iterator[Record | Damage]:
    """The records of a file, and between them the places that are damaged or cut off.

    Raises SettingsError if the file has another format, and OSError.
    """
    data = path.read_bytes()
    place, number = len(MAGIC), 0
    if len(data) <= place:
        yield Damage(path, 0, 0, 0, "the file has no records")
        return
    if data[:place] != MAGIC and _record_at(data, place) is None:  # otherwise only these bytes are damaged
        if data.startswith(MAGIC[:-2]) and data[len(MAGIC) - 2 : len(MAGIC)].isdigit():
            raise SettingsError(
                f"{path} has format {data[:place]!r}, but this program reads {MAGIC!r}: use the version of monarch_rl "
                "that wrote it"
            )
        place = 0
    while place < len(data):
        if (record := _record_at(data, place)) is not None:
            yield record
            place += OVERHEAD + len(record.data)
        else:
            found = (match.start() for match in _KINDS.finditer(data, place + 1))
            after = next((start for start in found if _record_at(data, start) is not None), len(data))
            ends, cut_off = after == len(data), after == len(data) < _end_at(data, place)
            problem = "it is cut off" if cut_off else f"{after - place} bytes are damaged"
            yield Damage(path, place, after - place, number, problem, at_the_end=ends, cut_off=cut_off)
            place = after
        number += 1


def _end_at(data: bytes, place: int) -> int:
    """Where the record ends that begins at ``place``, by its length; it may not be whole."""
    start = place + OVERHEAD
    return start if start > len(data) else start + int(_HEAD.unpack_from(data, place)[2])


def _record_at(data: bytes, place: int) -> Record | None:
    """The whole record that begins at ``place``, if there is one."""
    if (end := _end_at(data, place)) > len(data):
        return None
    kind, version, _, generation, index = _HEAD.unpack_from(data, place)
    (check,) = _CHECK.unpack_from(data, place + _HEAD.size)
    content = data[place + OVERHEAD : end]
    if zlib.crc32(content, zlib.crc32(data[place : place + _HEAD.size])) != check:
        return None
    return Record(kind.decode("ascii", "replace"), version, content, generation, index)


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
