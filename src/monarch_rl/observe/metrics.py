"""The numbers of a run on disk: one JSON object a step, and the same for TensorBoard."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter

from monarch_rl.observe.registry import check_names


class Metrics:
    """Writes ``metrics.jsonl`` and TensorBoard event files into a folder.

    A line of the file is ``{"step": int, "seconds": float, name: number or null, ...}``. ``seconds`` counts from the
    start of this process's run; null stands for nan and infinities. A resumed run appends.

    Args:
        folder: made if it does not exist.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = self.path.open("a", buffering=1)  # a line can be read as soon as it is written
        self._board = SummaryWriter(str(Path(folder) / "tensorboard"))
        self._start = time.monotonic()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one step's values. TensorBoard groups names by what comes before the slash (``lag/mean``).

        Raises:
            ValueError: a name is not in the registry (``observe/registry.py``); nothing was written.
        """
        check_names(list(values))
        numbers = {name: float(value) for name, value in values.items()}
        line: dict[str, float | None] = {"step": step, "seconds": round(time.monotonic() - self._start, 3)}
        line.update({name: value if math.isfinite(value) else None for name, value in numbers.items()})
        self._lines.write(json.dumps(line) + "\n")
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._lines.close()
        self._board.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
