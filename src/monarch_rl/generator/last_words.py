"""What a scheduler failed with, told to its engine's process: else it would stand in the scheduler's output alone.

The engine and its schedulers share an anonymous file, which outlives each of them. The first to fail is the cause:
other ranks of the engine then fail because it is gone. Imports nothing heavy.
"""

from __future__ import annotations

import os
import traceback
import weakref
from multiprocessing.reduction import DupFd
from typing import Any

MOST = 1600
"""Characters that are passed on; of a longer text the beginning and, twice as much, the end."""
_END = "\0"
_file: int | None = None
"""In a scheduler: the descriptor to write to."""


class LastWords:
    """The engine's end: make one before its schedulers are started."""

    def __init__(self) -> None:
        self._file = os.memfd_create("monarch_rl-last-words", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def first(self) -> str:
        """What the first scheduler that failed had to say; empty if none has said anything."""
        text = os.pread(self._file, 4 * MOST + len(_END), 0).decode(errors="replace")
        return text.partition(_END)[0]

    def for_scheduler(self) -> Any:
        """What a process that is just being started needs for :func:`use`."""
        return DupFd(self._file)


def use(file: Any) -> None:
    """In a scheduler: have :func:`say` write to what :meth:`LastWords.for_scheduler` gave."""
    global _file
    _file = file.detach()


def say(error: BaseException) -> None:
    """In a scheduler: this is what it ends with."""
    if _file is None:
        return
    from monarch_rl.generator.flag_names import recipe_flags

    text = recipe_flags("".join(traceback.format_exception_only(error)).strip()).replace(_END, " ")
    if len(text) > MOST:
        text = f"{text[: MOST // 3]} [...] {text[-2 * MOST // 3 :]}"
    # All of them have one position in it, so none writes over another's words.
    os.write(_file, f"{text}{_END}".encode(errors="replace"))
