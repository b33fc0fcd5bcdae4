"""Reads a run's folder into memory. Whatever the run left is read: a folder of a run that was killed, is still running,
or was written by an earlier version. Damaged lines are left out and counted."""

from __future__ import annotations

import json
import re
import socket
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from monarch_rl.errors import SettingsError
from monarch_rl.observe.pieces import pieces_of
from monarch_rl.runtime import folder_lock
from monarch_rl.settings.ranges import flattened

FORMAT = 1
"""The newest format of ``run.json`` that is understood."""
EPISODE_BYTES = 128 << 20
"""Bytes of the newest episodes, and of the newest token arrays, that are read."""
SPAN_BYTES = 32 << 20
LOG_BYTES = 64 << 10
"""Bytes of the end of ``console.log``."""
RECIPE_BYTES = 256 << 10
COMPARED_BYTES = 64 << 10
"""Bytes at the end of what was read of a file, by which one that was truncated and has grown again is recognised."""


@dataclass(slots=True)
class Column:
    """The values of one metric, in the order of the rows that have it."""

    rows: array[int] = field(default_factory=lambda: array("I"))
    """Indices into :attr:`Metrics.steps`."""
    values: array[float] = field(default_factory=lambda: array("d"))
    """NaN where the run wrote null."""


@dataclass(slots=True)
class Metrics:
    """``metrics.jsonl`` as columns. Rows are steps and evaluations, in the order of the file."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    """Since the start; they do not fall, even if a resumed run counts from 0."""
    columns: dict[str, Column] = field(default_factory=dict)


@dataclass(slots=True)
class RunRecord:
    """What a run's folder holds.

    Episodes have the keys that docs/run_folder.md describes. Those of earlier versions are converted. Arrays stay
    encoded (base64).
    """

    folder: Path
    name: str
    state: dict[str, Any] = field(default_factory=dict)
    """``run.json``: see :func:`state_of`."""
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    episodes: list[dict[str, Any]] = field(default_factory=list)
    """The newest sequences, oldest first. An entry has its trained tokens' arrays under ``trained``, if any were
    written, the step that trained it under ``step``, if that is known, and the size of its lines under ``bytes``."""
    spans: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    resumes: list[dict[str, Any]] = field(default_factory=list)
    recipe: str = ""
    log: str = ""
    """End of the console's log."""
    notes: list[str] = field(default_factory=list)
    """Sentences on what could not be read, for the user."""


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, of which at least one of its first files was written."""
    return any((folder / name).is_file() for name in ("run.json", "settings.json", "metrics.jsonl"))


def read_run(folder: Path, episode_bytes: int = EPISODE_BYTES) -> RunRecord:
    """Read a run's folder.

    Args:
        folder: run folder.
        episode_bytes: bytes of episodes, and of token arrays, that are read; older ones are left out, with a note.

    Raises:
        SettingsError: the folder holds no file of a run.
    """
    return RunReader(folder, episode_bytes).read()


_Row = tuple[dict[str, Any], int]
"""A row, and the bytes of its line."""
_Convert = Callable[[dict[str, Any]], dict[str, Any] | None]
"""Returns None for a row that cannot be shown."""


def _as_it_is(row: dict[str, Any]) -> dict[str, Any]:
    return row


class RunReader:
    """Reads a run's folder again and again: of files to which lines were appended, only these lines.

    Only one thread may use it, and the record that it returned last: rows and arrays are shared with the next one.

    Args:
        folder: run folder.
        episode_bytes: as of :func:`read_run`.
    """

    def __init__(self, folder: Path, episode_bytes: int = EPISODE_BYTES) -> None:
        self.folder = folder
        self._limit = episode_bytes
        self._forget()

    @property
    def nbytes(self) -> int:
        """Bytes of the lines and values that it holds for the next time."""
        values = sum(len(column.values) for column in self._metrics.columns.values())
        return sum(lines.nbytes for lines in self._files.values()) + 12 * values

    def read(self) -> RunRecord:
        """The run as it is now.

        Raises:
            SettingsError: the folder holds no file of a run.
        """
        try:
            return self._read()
        except _ChangedError:
            self._forget()
            return self._read()

    def _forget(self) -> None:
        self._files: dict[Path, _Lines] = {}
        self._earlier_files: dict[Path, _Lines] = {}
        """Those of the record before, which this one has not needed yet."""
        self._metrics = Metrics()
        self._earlier_s = 0.0
        """Seconds before the newest resume."""

    def _read(self) -> RunRecord:
        folder = self.folder
        if not is_run(folder):
            raise SettingsError(
                f"{folder} holds no run (no run.json, settings.json or metrics.jsonl): give a run's folder"
            )
        self._earlier_files, self._files = self._files, {}
        record = RunRecord(folder, folder.resolve().name)
        notes = record.notes
        record.state = state_of(folder, notes)
        if isinstance(name := record.state.get("name"), str) and name:
            record.name = name
        written = record.state.get("format", 0)
        if not isinstance(written, int) or written > FORMAT:
            notes.append(
                f"{folder / 'run.json'} has format {written!r}, and this version reads up to {FORMAT}: update "
                "monarch_rl if something is missing here"
            )
        record.settings = read_object(folder / "settings.json", notes)
        record.settings.pop("crc32", None)
        for row, _ in self._lines(folder / "metrics.jsonl").new(notes):
            self._add_metrics(row)
        record.metrics = self._metrics
        record.episodes = self._episodes(notes)
        record.spans = [row for row, _ in self._newest(folder / "timeline", "spans", SPAN_BYTES, notes, _span)]
        record.failures = [row for row, _ in self._lines(folder / "failures.jsonl").rows(notes)]
        record.resumes = [row for row, _ in self._lines(folder / "resumes.jsonl").rows(notes)]
        record.recipe = _text(folder / "recipe.py", notes)[:RECIPE_BYTES]
        record.log = _end_of(folder / "console.log", notes)
        self._earlier_files = {}
        return record

    def _lines(self, path: Path) -> _Lines:
        self._files[path] = lines = self._earlier_files.pop(path, None) or _Lines(path)
        return lines

    def _add_metrics(self, row: dict[str, Any]) -> None:
        metrics = self._metrics
        step, seconds = row.pop("step", None), row.pop("seconds", None)
        if not isinstance(step, int):
            return
        latest = metrics.seconds[-1] if metrics.seconds else 0.0
        if _is_number(seconds):
            if self._earlier_s + seconds < latest:
                self._earlier_s = latest
            latest = self._earlier_s + seconds
        index = len(metrics.steps)
        metrics.steps.append(step)
        metrics.seconds.append(latest)
        for name, value in row.items():
            if value is None or _is_number(value):
                column = metrics.columns.get(name) or metrics.columns.setdefault(name, Column())
                column.rows.append(index)
                column.values.append(float("nan") if value is None else value)

    def _episodes(self, notes: list[str]) -> list[dict[str, Any]]:
        rollouts, old = self.folder / "rollouts", self.folder / "rollouts.jsonl"
        found = self._newest(rollouts, "episodes", self._limit, notes, _episode)
        trained = {_key(row): (row, nbytes) for row, nbytes in self._newest(rollouts, "tokens", self._limit, notes)}
        if not found and old.exists():
            found = self._lines(old).rows(notes, self._limit, _old_episode)
        for episode, nbytes in found:
            episode["bytes"] = nbytes
            # An entry of the record before may have had tokens that were truncated since.
            if episode.pop("trained", None) is not None:
                episode.pop("step", None)
                episode.pop("advantage", None)
            if episode["kind"] == "train" and (tokens := trained.get(_key(episode))) is not None:
                arrays, nbytes = tokens
                episode["trained"] = arrays
                episode["step"] = arrays.get("step")
                episode["advantage"] = arrays.get("advantage")
                episode["bytes"] += nbytes
        return [episode for episode, _ in found]

    def _newest(
        self,
        folder: Path,
        stem: str,
        limit: int,
        notes: list[str],
        convert: _Convert = _as_it_is,
    ) -> list[_Row]:
        """Rows of the newest pieces of a log, oldest first, with their sizes; at most ``limit`` bytes, but at least
        the newest piece."""
        pieces, chosen, nbytes = pieces_of(folder, stem) if folder.is_dir() else [], list[Path](), 0
        for piece in reversed(pieces):
            with suppress(FileNotFoundError):  # a running run may just have deleted it
                nbytes += piece.stat().st_size
            if chosen and nbytes > limit:
                left_out = len(pieces) - len(chosen)
                notes.append(f"{folder}: the {left_out} oldest files {stem}-*.jsonl are left out (size)")
                break
            chosen.insert(0, piece)
        return [row for piece in chosen for row in self._lines(piece).rows(notes, limit, convert)]


class _ChangedError(Exception):
    """A file is not what it was with lines added."""


class _Lines:
    """The JSON objects in the lines of a file, each of which is read once. An incomplete last line is left for the next
    time: the run is writing it, or was killed while it did."""

    def __init__(self, path: Path) -> None:
        self.nbytes = 0
        """Bytes of the lines whose rows are held."""
        self._path = path
        self._rows = deque[_Row]()
        self._end = 0
        """Position in the file after the last line that was read."""
        self._last = b""
        """The last bytes of that line."""
        self._damaged = 0
        self._is_cut = False
        """Whether lines at its beginning were left out."""

    def rows(self, notes: list[str], limit: int | None = None, convert: _Convert = _as_it_is) -> list[_Row]:
        """All rows, converted; of a file larger than ``limit`` bytes, those at its end.

        Raises _ChangedError.
        """
        for row, nbytes in self.new(notes, limit):
            if (converted := convert(row)) is not None:
                self._rows.append((converted, nbytes))
                self.nbytes += nbytes
        return list(self._rows)

    def new(self, notes: list[str], limit: int | None = None) -> Iterator[_Row]:
        """Rows that were not read before. Rows that are held are dropped as far as the file exceeds ``limit`` bytes.

        Raises _ChangedError.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._end - len(self._last))
                if file.read(len(self._last)) != self._last:
                    raise _ChangedError
                if limit is not None:
                    self._skip(file, self._path.stat().st_size - limit)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._end += len(line)
                    self._last = line
                    try:
                        row = json.loads(line.decode(), parse_constant=_null)
                        self._damaged += not isinstance(row, dict)
                        if isinstance(row, dict):
                            yield row, len(line)
                    except (ValueError, RecursionError):
                        self._damaged += 1
        except FileNotFoundError:
            if self._end:
                raise _ChangedError from None
            return
        except OSError as error:
            notes.append(f"{self._path} cannot be read ({error.strerror or error})")
        self._last = self._last[-COMPARED_BYTES:]
        if self._is_cut and limit is not None:
            notes.append(f"{self._path}: only the newest {limit >> 20} MiB are read")
        if self._damaged:
            notes.append(f"{self._path}: {self._damaged} damaged line{'s' * (self._damaged > 1)} left out")

    def _skip(self, file: BinaryIO, start: int) -> None:
        """Leave out lines that begin before ``start``."""
        if start <= 0:
            return
        self._is_cut = True
        if start > self._end:
            file.seek(start - 1)  # a line may begin at start
            skipped = file.readline()
            self._end = start - 1 + len(skipped) if skipped.endswith(b"\n") else 0
            self._last, self.nbytes = b"", 0
            self._rows.clear()
        while self._rows and self._end - self.nbytes < start:
            self.nbytes -= self._rows.popleft()[1]


def state_of(folder: Path, notes: list[str]) -> dict[str, Any]:
    """``run.json``. What was killed could not write that it ended: if this machine's run has left the lock of its
    folder, ``state`` is ``"killed"``, which no file says."""
    state = read_object(folder / "run.json", notes)
    hosts = state.get("hosts")
    controller = hosts[0] if isinstance(hosts, list) and hosts and isinstance(hosts[0], dict) else {}
    here = controller.get("name") == socket.gethostname()  # another machine may not see its lock
    if state.get("state") == "running" and here and folder_lock.is_held(folder) is False:
        state |= {"state": "killed", "cause": "its process has ended without a word"}
    return state


def flat_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by flag without dashes: ``{"trainer.lr": 1e-6}``."""
    return {name.replace("_", "-"): value for name, value in flattened(values)}


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(repr(row.get(name, 0)) for name in ("group", "attempt", "episode"))


def _episode(row: dict[str, Any]) -> dict[str, Any] | None:
    """The row, if it can be shown: with a group, and with turns and messages that are lists of objects."""
    if not isinstance(row.get("group"), int):
        return None
    for name in ("turns", "messages"):
        values = row.get(name)
        row[name] = [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []
    if not _is_number(row.get("reward")):
        row["reward"] = None
    row.setdefault("kind", "train")
    return row


def _old_episode(row: dict[str, Any]) -> dict[str, Any] | None:
    """A row of ``rollouts.jsonl`` in today's format."""
    row["kind"], row["attempt"], row["rollout"] = "train", 0, row.pop("play", 0)
    episode = _episode(row)
    if episode is not None:
        for turn in episode["turns"]:
            turn["sampled"] = turn.pop("drawn", "")
        if isinstance(advantage := episode.get("advantage"), list):
            numbers = [value for value in advantage if _is_number(value)]
            episode["advantage"] = sum(numbers) / len(numbers) if numbers else None
    return episode


def _span(row: dict[str, Any]) -> dict[str, Any] | None:
    """The row, if it can be shown."""
    whole = isinstance(row.get("lane"), str) and _is_number(row.get("from")) and _is_number(row.get("to"))
    return row if whole else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """The JSON object in a file; an empty one if it is missing, or damaged, of which a note is added."""
    try:
        value = json.loads(path.read_bytes().decode(), parse_constant=_null)
        if isinstance(value, dict):
            return value
        notes.append(f"{path} is damaged: it holds no JSON object")
    except FileNotFoundError:
        pass
    except OSError as error:
        notes.append(f"{path} cannot be read ({error.strerror or error})")
    except (ValueError, RecursionError) as error:
        notes.append(f"{path} is damaged ({error})")
    return {}


def _null(_: str) -> None:
    """NaN and infinities, which are no JSON."""


def _text(path: Path, notes: list[str]) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        notes.append(f"{path} cannot be read ({error.strerror or error})")
        return ""


def _end_of(path: Path, notes: list[str]) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            text = file.read(LOG_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        notes.append(f"{path} cannot be read ({error.strerror or error})")
        return ""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
