"""The metrics file of a run: one JSON object per step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

from monarch_rl.observe.disk_thread import DiskThread
from monarch_rl.observe.lines import LineFile
from monarch_rl.observe.registry import check_names

FILE = "metrics.jsonl"


class Metrics:
    """Writes ``metrics.jsonl`` into a folder.

    A line of the file is ``{"step": int, "seconds": float, name: number or null, ...}``. ``seconds`` counts from the
    start of the run; null stands for nan and infinities. Lines that cannot be written to disk are left out
    (``LineFile``). All writing is on its own thread, so callers do not wait for the disk.

    Args:
        folder: folder of the file; created if it does not exist.
        seconds: duration of the run so far.
    """

    def __init__(self, folder: str | Path, seconds: float = 0.0) -> None:
        self.path = Path(folder) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.lines = LineFile(self.path)
        self._start = time.monotonic() - seconds
        self._disk = DiskThread("metrics", self.lines.close)

    @property
    def seconds(self) -> float:
        """Duration of the run so far."""
        return time.monotonic() - self._start

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one step's values.

        Raises:
            ValueError: a name is not in the registry (``observe/registry.py``); nothing was written.
        """
        check_names(list(values))
        numbers = {name: float(value) for name, value in values.items()}
        line: dict[str, float | None] = {"step": step, "seconds": round(self.seconds, 3)}
        line.update({name: value if math.isfinite(value) else None for name, value in numbers.items()})
        text = json.dumps(line)
        self._disk.begin(lambda: self.lines.append(text), lambda: self.lines.lose(1, "the disk is slower than the run"))

    def position(self) -> Future[int]:
        """A future of the size of the lines so far, in bytes. When it is done, these lines are on disk. It may raise
        OSError."""
        return self._disk.ask(self.lines.position)

    def close(self) -> None:
        """Write all queued lines, and close the file."""
        self._disk.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
