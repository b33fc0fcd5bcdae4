"""Streams of accelerators. Only this module creates them and waits for work on them.

Training computes on the default stream of its device. Moving, compressing and summing weights use side streams, one
per thread (:class:`SideThread`). No stream ever waits for another: if one needs the result of another, a thread first
waits for its own stream and then lets the other thread begin: checksums and transfers begin after the snapshot, and
``delta`` and the transfer take turns. ``tools/lint_streams.py`` finds code that does not use this module.

==================================  ====================  ============================================================
thread                              stream                waits for
==================================  ====================  ============================================================
trainer rank, ``compute``: steps,   the default one       after a snapshot, its own stream; in a step, the ``compute``
snapshots                                                 threads of the other ranks
trainer rank, ``weights``:          its own; NCCL runs    its own stream, and the replicas' ``weights`` threads
broadcasts, marks                   on it
trainer rank, ``verify``:           its own               its own stream
checksums
trainer rank and replica,           its own               its own stream
``delta``
replica, ``weights``                its own; NCCL runs    its own stream, and one trainer rank's ``weights`` thread at
                                    on it                 a time
engine                              SGLang's              before a commit copies, the whole device: nothing else of
                                                          that process is on it
==================================  ====================  ============================================================

Why no cycle of waits is possible:

1. Threads that train wait for threads that train, and threads that transfer for threads that transfer. Nothing connects
   the two groups except the snapshot, which comes before its transfer, and its memory, which is overwritten only when
   every replica serves the version (a host waits for that, no stream).
2. Among the threads that train, the order of FSDP's collectives is the same on all ranks.
3. A replica receives from the trainer ranks in their order. Take the lowest rank whose part is not finished: every
   replica is done with the ranks before it, so each one is at this rank, or gets there, and waits for nobody else. The
   rank's ``weights`` thread waits for nobody but them. So its part finishes, and then the next one's.
4. Kernels of different streams may still queue behind each other in hardware. A broadcast that waits for a member is a
   kernel that spins, so no broadcast is enqueued before its members have met on the host, through the rank's store
   (``BroadcastGroup.meet``). By 3 only one rank at a time has broadcasts on its device, and all of their members are
   there. They can only be behind a kernel of training, which waits for devices on which no broadcast is.

On a CPU, work is done when a call returns, so this module does nothing there.
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
"""Seconds between two checks whether a stream is done; a transfer takes milliseconds at least."""


def device_module(device: torch.device) -> Any:
    """torch's module for a device's streams and events, such as ``torch.cuda``; None for a CPU, which has no
    streams."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def finish_current(device: torch.device) -> None:
    """Wait for the work that the calling thread has enqueued on its current stream, and nothing else on the device."""
    module = device_module(device)
    if module is not None:
        module.current_stream(device).synchronize()  # streams: only the calling thread's


def finish_device(device: torch.device) -> None:
    """Wait for all work that this process has enqueued on a device. Not for a process that trains."""
    module = device_module(device)
    if module is not None:
        module.synchronize(device)  # streams: all, in a process that only decodes


_free: dict[tuple[Any, torch.device], list[Any]] = defaultdict(list)
"""Streams that were given back, by module and device. They are reused, because torch creates at most 32 distinct
streams and then gives the same one to two threads."""
_freeing = threading.Lock()


class SideStream:
    """A stream other than the default one, for exclusive use until :meth:`give_back`."""

    def __init__(self, device: torch.device) -> None:
        self._module, self._device = device_module(device), device
        self._stream: Any = None if self._module is None else self._take()

    def _take(self) -> Any:
        with _freeing:
            free = _free[self._module, self._device]
            for index, stream in enumerate(free):
                if stream.query():  # False, for example, for a stream with a broadcast that could not be aborted
                    return free.pop(index)
        return self._module.Stream(self._device)

    def give_back(self) -> None:
        """Give the stream to others once all work enqueued on it is done. Do not use it after this call."""
        if self._module is not None:
            with _freeing:
                _free[self._module, self._device].append(self._stream)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Enqueue the block's work on this stream. When the block ends the work is done, unless the block raises."""
        if self._module is None:
            yield
            return
        with self._module.stream(self._stream):
            yield
            self._stream.synchronize()

    def wait(self, until: float, stop: threading.Event) -> bool:
        """Wait for the enqueued work, until ``until`` (``time.monotonic()``) or until ``stop`` is set.

        Returns whether the work is done. Unlike ``synchronize`` this returns even if the work never ends.
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
    """Enqueue the block's work on a stream other than the default one. When the block ends the work is done, unless the
    block raises."""
    stream = SideStream(device)
    try:
        with stream.use():
            yield
    finally:
        stream.give_back()


class SideThread:
    """A thread with its own stream, which runs one call at a time.

    Args:
        name: name of the thread.
        device: device of the stream.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.stream = SideStream(device)
        self._executor = ThreadPoolExecutor(1, name)
        self._closed = False

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run ``call`` on the thread, with its stream as the current one; returns when all work that it enqueued is
        done."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._run, call, arguments)

    def _run(self, call: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        with self.stream.use():
            return call(*arguments)

    def close(self) -> None:
        """Accept no more calls, without waiting for the current one. May be called more than once."""
        if not self._closed:
            self._closed = True
            self._executor.submit(self.stream.give_back)  # after the current call, which uses the stream
            self._executor.shutdown(wait=False)
