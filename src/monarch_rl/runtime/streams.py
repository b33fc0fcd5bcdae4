"""Streams of accelerators: the only place that makes them, and that waits for work on them.

Training computes on the default stream of its device. What moves, compresses or sums weights does so on streams of
its own, one for each thread (:class:`SideThread`). No stream ever waits for another one: where one needs what another
has computed, a thread first waits for its own stream and then lets the other thread begin. docs/weights.md, "Streams",
says why no circle of waits is possible then; ``tools/lint_streams.py`` finds what does not use this module.

On a CPU work is done when a call returns, and all of this does nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_SHORTEST_POLL_S, _LONGEST_POLL_S = 2e-5, 1e-3
"""Between two questions whether a stream is done; a transfer takes milliseconds at least."""


def device_module(device: torch.device) -> Any:
    """torch's module for a device's streams and events, such as ``torch.cuda``; None on a CPU, which has none."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def finish_current(device: torch.device) -> None:
    """Wait for what the calling thread has enqueued on its current stream, and for nothing else on the device."""
    module = device_module(device)
    if module is not None:
        module.current_stream(device).synchronize()  # streams: of the thread that calls


def finish_device(device: torch.device) -> None:
    """Wait for all that this process has enqueued on a device. Not for a process that trains."""
    module = device_module(device)
    if module is not None:
        module.synchronize(device)  # streams: of a process that only decodes


_free: dict[tuple[Any, torch.device], list[Any]] = defaultdict(list)
"""By a device and its module: streams that were given back. torch makes no more than 32 that differ, and then gives the
same one to two threads, so these are used again."""
_freeing = threading.Lock()


class SideStream:
    """A stream beside the default one. It is nobody else's until :meth:`give_back`."""

    def __init__(self, device: torch.device) -> None:
        self._module, self._device = device_module(device), device
        self._stream: Any = None if self._module is None else self._take()

    def _take(self) -> Any:
        with _freeing:
            free = _free[self._module, self._device]
            for index, stream in enumerate(free):
                if stream.query():  # one may still have a broadcast on it that nobody could abort
                    return free.pop(index)
        return self._module.Stream(self._device)

    def give_back(self) -> None:
        """Let others have it once all that is enqueued on it is done. Not to be used after that."""
        if self._module is not None:
            with _freeing:
                _free[self._module, self._device].append(self._stream)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Enqueue what the block does on this stream. When the block ends, all of it is done; not if it raises."""
        if self._module is None:
            yield
            return
        with self._module.stream(self._stream):
            yield
            self._stream.synchronize()

    def wait(self, until: float, stop: threading.Event) -> bool:
        """Wait for what is enqueued, but not beyond ``until`` (``time.monotonic()``) nor once ``stop`` is set.

        Returns whether it is done. Unlike ``synchronize`` this ends if the work does not.
        """
        if self._module is None:
            return True
        done = self._module.Event()
        done.record(self._stream)
        pause = _SHORTEST_POLL_S
        while not done.query():
            if stop.is_set() or time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
        return True


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[None]:
    """Enqueue what the block does on a stream beside the default one; when the block ends, all of it is done."""
    stream = SideStream(device)
    try:
        with stream.use():
            yield
    finally:
        stream.give_back()


class SideThread:
    """A thread with a stream of its own; it does one call after the other.

    Args:
        name: of the thread.
        device: of the stream.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.stream = SideStream(device)
        self._executor = ThreadPoolExecutor(1, name)
        self._closed = False

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call on the thread, under its stream; returns when all that the call has enqueued is done."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._run, call, arguments)

    def _run(self, call: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        with self.stream.use():
            return call(*arguments)

    def close(self) -> None:
        """Take no more calls. The one under way goes on, and nobody waits for it. May be called again."""
        if not self._closed:
            self._closed = True
            self._executor.submit(self.stream.give_back)  # after the call under way, which uses it
            self._executor.shutdown(wait=False)
