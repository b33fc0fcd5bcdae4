"""Metrics files of a run: one JSON object per step, and the same for TensorBoard."""

from __future__ import annotations

import functools
import json
import logging
import math
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from monarch_rl.observe.disk_thread import DiskThread
from monarch_rl.observe.lines import LineFile
from monarch_rl.observe.registry import check_names

logger = logging.getLogger("monarch_rl")


FILE = "metrics.jsonl"


class Metrics:
    """Writes ``metrics.jsonl`` and TensorBoard event files into a folder.

    A line of the file is ``{"step": int, "seconds": float, name: number or null, ...}``. ``seconds`` counts from the
    start of the run; null stands for nan and infinities. Lines that cannot be written to disk are left out
    (``LineFile``). All writing is on its own thread, so callers do not wait for the disk.

    Args:
        folder: folder of the files; created if it does not exist.
        step: step of the last line, in a resumed run; TensorBoard discards later ones.
        seconds: duration of the run so far.
    """

    def __init__(self, folder: str | Path, step: int = 0, seconds: float = 0.0) -> None:
        self.path = Path(folder) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.lines = LineFile(self.path)
        self._step = step
        self._start = time.monotonic() - seconds
        self._board: SummaryWriter | None = self._open_board()
        self._disk = DiskThread("metrics", self._close)

    @property
    def seconds(self) -> float:
        """Duration of the run so far."""
        return time.monotonic() - self._start

    def _open_board(self) -> SummaryWriter | None:
        try:
            return SummaryWriter(
                str(self.path.with_name("tensorboard")), purge_step=self._step + 1 if self._step else None
            )
        except OSError as error:
            logger.error("TensorBoard's file cannot be written (%s): the run continues without it", error)
            return None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one step's values. TensorBoard groups names by the part before the slash (``lag/mean``).

        Raises:
            ValueError: a name is not in the registry (``observe/registry.py``); nothing was written.
        """
        check_names(list(values))
        numbers = {name: float(value) for name, value in values.items()}
        line: dict[str, float | None] = {"step": step, "seconds": round(self.seconds, 3)}
        line.update({name: value if math.isfinite(value) else None for name, value in numbers.items()})
        write = functools.partial(self._write, step, json.dumps(line), numbers)
        self._disk.begin(write, lambda: self.lines.lose(1, "the disk is slower than the run"))

    def _write(self, step: int, line: str, numbers: Mapping[str, float]) -> None:
        """Runs on the disk thread."""
        written = self.lines.append(line)
        self._step = step
        if self._board is None and written:
            self._board = self._open_board()
        try:
            if self._board is not None:
                # One event for all values: TensorBoard computes its checksums in Python, byte by byte.
                summary = Summary(value=[Summary.Value(tag=name, simple_value=x) for name, x in numbers.items()])
                self._board._get_file_writer().add_summary(summary, step)
        except OSError as error:  # raised by TensorBoard's own writer thread, at a later call
            logger.error("TensorBoard's file cannot be written (%s): the run continues without it", error)
            self._drop_board()

    def position(self) -> Future[int]:
        """A future of the size of the lines so far, in bytes. When it is done, these lines and TensorBoard's data are
        on disk. It may raise OSError."""
        return self._disk.ask(self._position)

    def _position(self) -> int:
        if self._board is not None:
            try:
                self._board.flush()
            except OSError:
                self._drop_board()
        return self.lines.position()

    def _drop_board(self) -> None:
        board, self._board = self._board, None
        with suppress(OSError):
            assert board is not None
            board.close()

    def close(self) -> None:
        """Write all queued lines, and close the files."""
        self._disk.close()

    def _close(self) -> None:
        self.lines.close()
        if self._board is not None:
            self._drop_board()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
