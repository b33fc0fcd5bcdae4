"""Ctrl-C, SIGTERM and SIGUSR1 end a run cleanly, and so can another thread. SIGHUP, of a terminal that is closed, does
not: the run continues without it.

A second signal, or a timeout, ends the run at once.

systemd and batch systems signal all processes of a job, and the supervisor also forwards the signal. So the same signal
arriving twice in a short time counts once.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

logger = logging.getLogger("monarch_rl")

CLEAN_EXIT_S = 20.0
"""Seconds from the first signal after which the process is ended, even if something still runs."""
SAME_S = 2.0
"""Seconds after the first signal within which the same signal is ignored."""
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Batch systems send SIGUSR1 some time before they end a job."""


class Interrupts:
    """State of the signal handling within a block of :func:`interrupts`."""

    def __init__(self) -> None:
        self.received: int | None = None
        """The first signal."""
        self.received_at = 0.0
        """Time of the first signal, ``time.monotonic()``."""
        self.reason: Exception | None = None
        """Why another thread ends the block."""
        self.armed = False
        """Whether signals are handled: the block runs in the main thread, and has not ended."""
        self.grace_s = 0.0
        """Seconds for saving, in addition to :data:`CLEAN_EXIT_S`."""
        self.take_over: Callable[[], object] | None = None
        """Called on the running event loop instead of raising KeyboardInterrupt; must end what runs there."""

    def end(self, reason: Exception) -> None:
        """End the block from another thread, as a signal would, but make it raise ``reason``."""
        if self.armed and self.received is None and self.reason is None:  # else the block is already ending
            self.reason = reason
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


@contextmanager
def interrupts(*, raise_in_main: bool = True) -> Iterator[Interrupts]:
    """Within the block, the first signal of :data:`HANDLED` raises KeyboardInterrupt in the main thread; the second one
    exits at once, unless it is the same signal within :data:`SAME_S`. SIGHUP is only logged (:func:`note_hangups`).

    A KeyboardInterrupt that leaves the block becomes SystemExit with the shell's code, 128 + the signal's number.

    Under a running event loop the interrupt is raised between two callbacks, never inside one, so that ``asyncio.run``
    cancels its tasks and their ``finally`` blocks run. With ``raise_in_main=False`` the first signal only starts the
    timeout (:data:`CLEAN_EXIT_S`). In a thread other than the main one this function does nothing.
    """
    state = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield state
        return
    watchdog: threading.Timer | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal watchdog
        name = signal.Signals(number).name
        if state.received == number and time.monotonic() - state.received_at < SAME_S:
            return
        if state.received is not None:
            logger.error("%s again: ending at once", name)
            os._exit(128 + number)
        state.received, state.received_at = number, time.monotonic()
        if state.reason is None:
            logger.warning("%s: stopping (send it again after %g s to end at once)", name, SAME_S)
        watchdog = _watchdog(number, state)
        if not raise_in_main:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise KeyboardInterrupt from None
        loop.call_soon_threadsafe(state.take_over or _interrupt)

    previous: dict[int, Any] = {number: signal.signal(number, handle) for number in HANDLED}
    note_hangups()
    state.armed = True
    try:
        yield state
    except KeyboardInterrupt:
        if state.reason is not None:
            raise state.reason from None
        if state.received is None:
            raise
        raise SystemExit(128 + state.received) from None
    finally:
        state.armed = False
        for number, handler in previous.items():
            signal.signal(number, handler)
        if watchdog is not None:
            watchdog.cancel()


def _watchdog(number: int, state: Interrupts) -> threading.Timer:
    """Start a timer that ends the process if it has not ended by then."""
    limit_s = CLEAN_EXIT_S + state.grace_s
    timer = threading.Timer(limit_s, _exit_at_once, (number, state.reason, limit_s))
    timer.daemon = True
    timer.start()
    return timer


def note_hangups() -> None:
    """From now on SIGHUP is only logged, unless this process ignores it already, as under nohup and the supervisor."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _note_hangup)


def _note_hangup(number: int, frame: FrameType | None) -> None:
    logger.warning("SIGHUP (the terminal was closed): the run continues; kill %d ends it", os.getpid())


def _interrupt() -> None:
    raise KeyboardInterrupt


def _exit_at_once(number: int, reason: Exception | None, limit_s: float) -> None:
    what = signal.Signals(number).name if reason is None else str(reason)
    logger.error("not stopped %g s after %s: ending at once; the stacks follow", limit_s, what)
    faulthandler.dump_traceback(sys.stderr)
    os._exit(128 + number if reason is None else 1)
