"""Reads a run's folder into memory. Whatever the run left is read: a folder of a run that was killed, is still running,
or was written by an earlier version. Damaged lines are left out and counted."""

from __future__ import annotations

import json
import re
import socket
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    written, and the step that trained it under ``step``, if that is known."""
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
    if not is_run(folder):
        raise SettingsError(f"{folder} holds no run (no run.json, settings.json or metrics.jsonl): give a run's folder")
    record = RunRecord(folder, folder.resolve().name)
    notes = record.notes
    record.state = state_of(folder, notes)
    if isinstance(name := record.state.get("name"), str) and name:
        record.name = name
    written = record.state.get("format", 0)
    if not isinstance(written, int) or written > FORMAT:
        notes.append(
            f"{folder / 'run.json'} has format {written!r}, and this version reads up to {FORMAT}: update monarch_rl "
            "if something is missing here"
        )
    record.settings = read_object(folder / "settings.json", notes)
    record.settings.pop("crc32", None)
    record.metrics = _metrics(folder / "metrics.jsonl", notes)
    record.episodes = _episodes(folder, notes, episode_bytes)
    record.spans = [row for row in _newest(folder / "timeline", "spans", SPAN_BYTES, notes) if _is_span(row)]
    record.failures = list(_rows(folder / "failures.jsonl", notes))
    record.resumes = list(_rows(folder / "resumes.jsonl", notes))
    record.recipe = _text(folder / "recipe.py", notes)[:RECIPE_BYTES]
    record.log = _end_of(folder / "console.log", notes)
    return record


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


def _metrics(path: Path, notes: list[str]) -> Metrics:
    metrics = Metrics()
    columns = metrics.columns
    earlier = latest = 0.0  # seconds before the newest resume, and in all
    for row in _rows(path, notes):
        step, seconds = row.pop("step", None), row.pop("seconds", None)
        if not isinstance(step, int):
            continue
        if _is_number(seconds):
            if earlier + seconds < latest:
                earlier = latest
            latest = earlier + seconds
        index = len(metrics.steps)
        metrics.steps.append(step)
        metrics.seconds.append(latest)
        for name, value in row.items():
            if value is None or _is_number(value):
                column = columns.get(name) or columns.setdefault(name, Column())
                column.rows.append(index)
                column.values.append(float("nan") if value is None else value)
    return metrics


def _episodes(folder: Path, notes: list[str], limit: int) -> list[dict[str, Any]]:
    rollouts = folder / "rollouts"
    episodes = [row for row in map(_episode, _newest(rollouts, "episodes", limit, notes)) if row is not None]
    trained = {_key(row): row for row in _newest(rollouts, "tokens", limit, notes)}
    for episode in episodes:
        if episode["kind"] == "train" and (arrays := trained.get(_key(episode))) is not None:
            episode["trained"] = arrays
            episode["step"] = arrays.get("step")
            episode["advantage"] = arrays.get("advantage")
    if not episodes and (folder / "rollouts.jsonl").exists():
        rows = map(_old_episode, _rows(folder / "rollouts.jsonl", notes, limit))
        episodes = [row for row in rows if row is not None]
    return episodes


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


def _is_span(row: dict[str, Any]) -> bool:
    return isinstance(row.get("lane"), str) and _is_number(row.get("from")) and _is_number(row.get("to"))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _newest(folder: Path, stem: str, limit: int, notes: list[str]) -> list[dict[str, Any]]:
    """Rows of the newest pieces of a log, oldest first; at most ``limit`` bytes, but at least the newest piece."""
    pieces, chosen, nbytes = pieces_of(folder, stem) if folder.is_dir() else [], list[Path](), 0
    for piece in reversed(pieces):
        with suppress(FileNotFoundError):  # a running run may just have deleted it
            nbytes += piece.stat().st_size
        if chosen and nbytes > limit:
            notes.append(f"{folder}: the {len(pieces) - len(chosen)} oldest files {stem}-*.jsonl are left out (size)")
            break
        chosen.insert(0, piece)
    return [row for piece in chosen for row in _rows(piece, notes, limit)]


def _rows(path: Path, notes: list[str], limit: int | None = None) -> Iterator[dict[str, Any]]:
    """The JSON objects in the lines of a file; of a file larger than ``limit`` bytes, those at its end. An incomplete
    last line is left out silently: the run is writing it, or was killed while it did."""
    damaged = 0
    try:
        with path.open("rb") as file:
            if limit is not None and (size := path.stat().st_size) > limit:
                file.seek(size - limit)
                file.readline()
                notes.append(f"{path}: only the newest {limit >> 20} MiB are read")
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    row = json.loads(line.decode(), parse_constant=_null)
                    damaged += not isinstance(row, dict)
                    if isinstance(row, dict):
                        yield row
                except (ValueError, RecursionError):
                    damaged += 1
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{path} cannot be read ({error.strerror or error})")
    if damaged:
        notes.append(f"{path}: {damaged} damaged line{'s' * (damaged > 1)} left out")


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
