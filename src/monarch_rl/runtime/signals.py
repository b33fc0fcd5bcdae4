"""Ctrl-C and SIGTERM end a run cleanly. A second signal, or a timeout, ends it at once."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

logger = logging.getLogger("monarch_rl")

CLEAN_EXIT_S = 20.0
"""Seconds from the first signal to the end of the process, even if something still runs."""


@contextmanager
def interrupts(*, raise_in_main: bool = True) -> Iterator[None]:
    """Within the block the first SIGINT or SIGTERM raises KeyboardInterrupt in the main thread; the second one exits.

    A KeyboardInterrupt that leaves the block becomes SystemExit with the shell's code, 128 + the signal's number.

    Under a running event loop the interrupt is raised between two callbacks, never inside one, so that ``asyncio.run``
    cancels its tasks and their ``finally`` blocks run. With ``raise_in_main=False`` the first signal only starts the
    timeout (:data:`CLEAN_EXIT_S`). In a thread other than the main one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: int | None = None
    watchdog: threading.Timer | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received, watchdog
        name = signal.Signals(number).name
        if received is not None:
            logger.error("%s again: ending at once", name)
            os._exit(128 + number)
        received = number
        logger.warning("%s: stopping (once more ends at once)", name)
        watchdog = threading.Timer(CLEAN_EXIT_S, _exit_at_once, (number,))
        watchdog.daemon = True
        watchdog.start()
        if not raise_in_main:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise KeyboardInterrupt from None
        loop.call_soon_threadsafe(_interrupt)

    previous: dict[int, Any] = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        if received is None:
            raise
        raise SystemExit(128 + received) from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if watchdog is not None:
            watchdog.cancel()


def _interrupt() -> None:
    raise KeyboardInterrupt


def _exit_at_once(number: int) -> None:
    name = signal.Signals(number).name
    logger.error("not stopped %g s after %s: ending at once; the stacks follow", CLEAN_EXIT_S, name)
    faulthandler.dump_traceback(sys.stderr)
    os._exit(128 + number)
