"""The processes that a run has lost: how often each was lost, the first cause, and the file ``losses.jsonl``."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from monarch_rl.observe.disk_thread import DiskThread
from monarch_rl.observe.lines import LineFile
from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.runtime.deadlines import now

logger = logging.getLogger("monarch_rl")


@dataclass(frozen=True, slots=True)
class LostProcess:
    """A process was lost, or its replacement did not start."""

    name: str
    """What the process calls itself."""
    cause: Exception
    when: float
    """Seconds of the event loop's clock."""


class LostProcesses:
    """Counts losses by process and by kind, and writes them to a file.

    Args:
        per_s: seconds for which a loss counts.
        file: for a JSON object per loss and return; None writes none.
    """

    def __init__(self, per_s: float, file: Path | None) -> None:
        self._per_s, self._file = per_s, None if file is None else LineFile(file)
        self._disk: DiskThread | None = None
        self.lost = self.returned = 0
        """Processes that were lost, and how many were replaced."""
        self._recent: dict[str, deque[LostProcess]] = {}
        """By process, its losses that still count."""
        self._first: dict[str, LostProcess] = {}
        """By kind, the first loss of a series in which each came within ``per_s`` of the one before."""
        self._latest: dict[str, LostProcess] = {}
        """By kind, the latest loss."""

    def count(self, kind: str, name: str, cause: Exception) -> None:
        """Count a loss of process ``name``, now."""
        self.recent(name)  # forgets the old ones
        loss = LostProcess(name, cause, now())
        self._recent[name].append(loss)
        latest = self._latest.get(kind)
        if latest is None or latest.when < now() - self._per_s:
            self._first[kind] = loss
        self._latest[kind] = loss

    def recent(self, name: str) -> int:
        """How often process ``name`` was lost in the last ``per_s`` seconds."""
        losses = self._recent.setdefault(name, deque())
        while losses and losses[0].when < now() - self._per_s:
            losses.popleft()
        return len(losses)

    def explain(self, kind: str, name: str, cause: Exception) -> str:
        """Say why no process of a kind is left. ``name``: the last one, which was lost for ``cause``."""
        first, times = self._first[kind], len(self._recent[name])
        text = f"no {kind} is left. The first loss was that of {first.name}: {str(first.cause).strip()}"
        if times > 1:
            text += f"\nThe last one was that of {name}, {times} times: {last_line(cause)}"
        return text

    # -- the log and the file --------------------------------------------------------------------------------------

    def note_lost(self, name: str, cause: Exception) -> None:
        """A process that was there is lost."""
        self.lost += 1
        self._note(name, f"is lost: {last_line(cause)}", cause=str(cause))

    def note_failed_start(self, name: str, cause: Exception) -> None:
        """The replacement of a lost process did not start."""
        self._note(name, f"did not start: {last_line(cause)}", cause=str(cause))

    def note_returned(self, name: str, seconds: float) -> None:
        """A replacement works, ``seconds`` after the loss."""
        self.returned += 1
        self._note(name, f"is back after {seconds:.1f} s", back_after_s=seconds)

    def note_removed(self, name: str, others: list[str]) -> None:
        """A lost process is not replaced."""
        self._note(name, f"is not started again; the run goes on with {', '.join(others)}", removed=True)

    def close(self) -> None:
        """Write what is left, and close the file until the next loss."""
        disk, self._disk = self._disk, None
        if disk is not None:
            disk.close()

    def _note(self, name: str, text: str, **values: object) -> None:
        logger.warning("%s %s", name, text)
        if (file := self._file) is None:
            return
        if self._disk is None:
            self._disk = DiskThread(file.path.name, file.close)
        line = json.dumps({"time": time.time(), "who": name} | values)
        self._disk.begin(lambda: file.append(line), lambda: file.lose(1, "the disk does not go on"))
