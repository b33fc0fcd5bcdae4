"""What scoring processes print, up to a bound, and the stacks that they leave when they are ended."""

from __future__ import annotations

import faulthandler
import math
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from monarch_rl.runtime import presence

SHOWN_BYTES = 2**16
"""Bytes that the scoring processes of a worker may print in :data:`WINDOW_S` seconds."""
WINDOW_S = 60.0
TAIL_BYTES = 4096
"""Newest bytes that are kept for the message of processes that do not start."""
DRAIN_S = 1.0
"""Seconds in which what was printed by processes that have ended is read, at most."""


class ScorerOutput:
    """The output of the scoring processes of one worker, which it prints on stderr, up to a bound.

    A score that prints for each answer would otherwise bury what the run says, and may run programs that print, too.
    So it is a pipe that takes the place of the processes' standard output and error.
    """

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        stacks = os.memfd_create("monarch_rl-stacks")
        self.ends = Connection(writer, readable=False), Connection(stacks)
        """What a scoring process takes (:func:`print_into`); can be pickled while one is started."""
        self._owner = presence.current_name()
        self._tail = b""
        self._left, self._window_ends = 0, -math.inf
        self._left_out = 0
        """Bytes of this window."""
        self._thread = threading.Thread(target=self._forward, name="scorer-output", daemon=True)
        self._thread.start()

    def take_stack(self) -> str:
        """What the processes wrote since the last call when they were killed or crashed: their stacks. May be empty.

        Of several that end at the same time, all stacks may be in one call's answer, and none in the next one's: pebble
        does not say which process computed a score that took too long.
        """
        stacks = self.ends[1].fileno()
        text = os.pread(stacks, 2**20, 0).decode(errors="replace")
        # All processes write at one offset, which belongs to the file that they share.
        os.ftruncate(stacks, 0)
        os.lseek(stacks, 0, os.SEEK_SET)
        return text

    def tail(self) -> str:
        """The end of what was printed. May wait for a moment: call it off the event loop."""
        poll, deadline = select.poll(), time.monotonic() + DRAIN_S
        poll.register(self._reader, select.POLLIN)
        while poll.poll(0) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._tail.decode(errors="replace").strip()

    def close(self) -> None:
        """End it once the processes have ended. May wait for a moment: call it off the event loop."""
        for end in self.ends:
            end.close()
        self._thread.join(DRAIN_S)  # a program that a score has started may still hold the pipe

    def _forward(self) -> None:
        """On a thread of its own: read all, so that no process waits, and print what may be printed."""
        while data := os.read(self._reader, 2**16):
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            moment = time.monotonic()
            if moment >= self._window_ends:
                self._say_left_out()
                self._left, self._window_ends = SHOWN_BYTES, moment + WINDOW_S
            shown = data[: self._left]
            if shown:
                _print(shown)
            if len(data) > self._left and not self._left_out:
                limit = f"more than {SHOWN_BYTES // 1024} KiB within {WINDOW_S:g} s"
                self._say(f"the scoring processes of {self._owner} have printed {limit}: the rest is left out")
            self._left_out += len(data) - len(shown)
            self._left -= len(shown)
        self._say_left_out()
        os.close(self._reader)

    def _say_left_out(self) -> None:
        if self._left_out:
            self._say(f"{self._left_out:,} bytes that the scoring processes of {self._owner} printed were left out")
            self._left_out = 0

    def _say(self, sentence: str) -> None:
        _print(f"\n[{sentence}]\n".encode())


def _print(data: bytes) -> None:
    with suppress(OSError):  # nobody reads what this process prints any more
        os.write(2, data)


def print_into(ends: tuple[Connection, Connection]) -> None:
    """In a scoring process: print into the pipe from here on, and leave the stack when it crashes or is ended.

    Call it once the handler of SIGTERM is set: that one runs after the stack is written, also where it must wait for a
    call in C to return.
    """
    writer, stacks = ends
    for standard in (1, 2):
        os.dup2(writer.fileno(), standard)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=stacks.fileno())
    faulthandler.register(signal.SIGTERM, file=stacks.fileno(), chain=True)
