"""Detection of hung GPUs: the GPU operations of a process, and how long each may take.

A thread that waits for a GPU, or for other ranks in NCCL, spins: its process uses a whole core whether the GPU computes
or hangs. So a process with a device registers each GPU operation that it waits for, such as a micro-batch or a decoding
step. An operation must end within :data:`FACTOR` times the longest time per token so far of its kind, but may always
take :data:`FLOOR_S`. Operations that are slow for a known reason have limits of their own: the first two of a kind (the
first loads kernels and connects NCCL), those in which kernels are compiled or a CUDA graph is captured, and saving.

An operation may contain marks, such as one after each block of a model and hence after its collectives. A mark is an
event on the device, which costs the host microseconds and blocks nothing. A mark that the device has passed is a sign
of life: from then on, the limit applies to the time until the next mark, and is derived in the same way from earlier
gaps. So a long operation that progresses does not count as hung, and one that hangs halfway is found earlier than after
the time of a whole one.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

FACTOR = 3.0
"""Limit relative to the longest operation so far: operations with equal token counts differ in their sequence lengths,
and in what else the device does. Not measured on a GPU yet."""
FLOOR_S = 60.0
"""Seconds that any operation may take: hundreds of times the usual, but less than NCCL's own 300 s."""
FIRST_S = 600.0
"""Seconds for the first two operations of a kind: the first one loads kernels, so it does not predict the second."""
COMPILATION = "compilation"
"""Reason in messages for an operation in which kernels are compiled."""
COMPILATION_S = 1200.0
"""Seconds for an operation in which kernels are compiled, as for the start of an engine that compiles."""
CAPTURE_S = 600.0
"""Seconds for an operation in which CUDA graphs are captured."""
FEWEST_TOKENS = 256
"""An operation counts as at least this many tokens, because smaller ones take as long."""
MOST_MARKS = 4096
"""Number of marks kept until the device has passed them; the oldest are dropped."""


@dataclass(frozen=True, slots=True)
class GpuOperation:
    """A GPU operation that has not ended."""

    what: str
    """``"a micro-batch of 8192 tokens"``."""
    since: float
    """Start of the operation, or its last sign of life; ``time.monotonic()`` of this machine."""
    limit_s: float
    """Seconds after ``since`` from which the device counts as hung."""

    @property
    def compiles(self) -> bool:
        """Whether kernels are compiled during the operation."""
        return self.what.endswith(f", with {COMPILATION}")


class Mark(Protocol):
    """A device event: ``torch.Event``."""

    def record(self) -> None:
        """Enqueue the event."""

    def query(self) -> bool:
        """Whether the device has passed the event. Does not block; called on another thread."""


class DeviceWork:
    """The GPU operations of one process, one at a time.

    Args:
        on_change: called with the current operation at every change, except when marks are passed.
        clock: returns seconds; replaced in tests.
        make_mark: creates a mark; None disables marks.
    """

    def __init__(
        self,
        on_change: Callable[[GpuOperation | None], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        make_mark: Callable[[], Mark] | None = None,
    ) -> None:
        self._on_change, self._clock, self._make_mark = on_change, clock, make_mark
        self._lock = threading.Lock()
        self._longest: dict[str, float | None] = {}
        """By kind, longest seconds per token; None after the first operation of the kind, which does not count."""
        self._operation: GpuOperation | None = None
        self._kind, self._tokens, self._counts = "", 0, False
        self._began = 0.0
        self._thread = 0
        """Thread that began the operation."""
        self._marks: deque[Mark] = deque(maxlen=MOST_MARKS)
        """Marks that the device had not passed at the last check."""
        self._longest_gap: dict[str, float] = {}
        """By kind, longest seconds between two signs of life."""

    @property
    def operation(self) -> GpuOperation | None:
        """The current operation, counted from the last mark that the device has passed."""
        with self._lock:
            self._check_marks()
            return self._operation

    def mark(self) -> None:
        """Enqueue a mark after everything enqueued so far."""
        if self._make_mark is not None:
            mark = self._make_mark()
            mark.record()
            with self._lock:
                self._marks.append(mark)

    def begin(self, kind: str, tokens: int | None = None, limit_s: float | None = None) -> None:
        """Begin an operation; ends the current one.

        Args:
            kind: such as ``"a micro-batch"``; an operation is compared with earlier ones of its kind.
            tokens: number of tokens in the operation; None if its time does not grow with tokens.
            limit_s: limit in seconds, instead of the one derived from earlier operations.
        """
        with self._lock:
            self._close()
            self._kind, self._tokens = kind, max(tokens or 0, FEWEST_TOKENS)
            self._counts, self._thread = limit_s is None, threading.get_ident()
            if limit_s is None:
                known = self._longest.get(kind)
                limit_s = FIRST_S if known is None else max(FLOOR_S, FACTOR * known * self._tokens)
            what = kind if tokens is None else f"{kind} of {tokens} tokens"
            self._began = self._clock()
            self._set(GpuOperation(what, self._began, limit_s))

    def end(self) -> None:
        """End the current operation, if there is one."""
        with self._lock:
            self._close()
            if self._operation is not None:
                self._set(None)

    def cancel(self) -> None:
        """End the current operation as failed: its duration does not count for later limits."""
        with self._lock:
            self._set(None)

    def extend(self, why: str, limit_s: float) -> None:
        """Give the current operation ``limit_s`` seconds from now on, because of ``why``."""
        with self._lock:
            if self._operation is None:
                return
            self._counts = False
            what, limit_s = self._operation.what.split(", with ")[0], max(limit_s, self._operation.limit_s)
            self._set(GpuOperation(f"{what}, with {why}", self._clock(), limit_s))

    def is_by_this_thread(self) -> bool:
        """Whether the calling thread began the last operation."""
        return threading.get_ident() == self._thread

    def _close(self) -> None:
        if self._operation is None or not self._counts:
            return
        per_token = (self._clock() - self._began) / self._tokens
        if self._kind not in self._longest:
            self._longest[self._kind] = None
            return
        self._longest[self._kind] = max(self._longest[self._kind] or 0.0, per_token)

    def _check_marks(self) -> None:
        passed = False
        while self._marks and self._marks[0].query():
            self._marks.popleft()
            passed = True
        if not passed or self._operation is None:
            return
        since, limit_s = self._clock(), self._operation.limit_s
        if self._counts and self._longest.get(self._kind) is not None:
            gap = max(self._longest_gap.get(self._kind, 0.0), since - self._operation.since)
            self._longest_gap[self._kind] = gap
            limit_s = max(FLOOR_S, FACTOR * gap)
        self._operation = replace(self._operation, since=since, limit_s=limit_s)

    def _set(self, operation: GpuOperation | None) -> None:
        self._operation = operation
        if self._on_change is not None:
            self._on_change(operation)


_work: DeviceWork | None = None
"""The GPU operations of this process; None if its device is a CPU, whose work shows in its CPU time."""


def use_device(
    kind: str,
    on_change: Callable[[GpuOperation | None], None] | None = None,
    make_mark: Callable[[], Mark] | None = None,
) -> None:
    """Register this process's GPU operations from now on; for ``kind`` ``"cpu"``, nothing is registered."""
    global _work
    _work = None if kind == "cpu" else DeviceWork(on_change, make_mark=make_mark)
    if _work is not None:
        _notice_compilation()


def work() -> DeviceWork | None:
    """This process's GPU operations; None if they are not registered."""
    return _work


def operation_in_progress() -> GpuOperation | None:
    """This process's current GPU operation, if any."""
    return None if _work is None else _work.operation


def mark() -> None:
    """Enqueue a mark on this process's device: see :meth:`DeviceWork.mark`."""
    if _work is not None:
        _work.mark()


@contextmanager
def operation(kind: str, tokens: int | None = None, limit_s: float | None = None) -> Iterator[None]:
    """Register the block as a GPU operation of this process: see :meth:`DeviceWork.begin`."""
    if _work is None:
        yield
        return
    _work.begin(kind, tokens, limit_s)
    try:
        yield
    except BaseException:
        _work.cancel()
        raise
    _work.end()


def _notice_compilation() -> None:
    """Extend the limit of operations in which kernels are compiled.

    Triton, SGLang and flashinfer run compilers as processes, started by the thread that needs the kernel; nothing else
    starts processes during an operation. ``torch.compile`` reports compilations by callbacks, if it is imported.
    """
    if not getattr(subprocess.Popen, "_noticed", False):
        original = subprocess.Popen.__init__

        def start(self: Any, *args: Any, **kwargs: Any) -> None:
            if _work is not None and _work.is_by_this_thread():
                _work.extend(COMPILATION, COMPILATION_S)
            original(self, *args, **kwargs)

        subprocess.Popen.__init__ = start  # type: ignore[method-assign]
        subprocess.Popen._noticed = True  # type: ignore[attr-defined]
    callback: Any = sys.modules.get("torch._dynamo.callback")
    if callback is not None and _on_compile_start not in callback.callback_handler.start_callbacks:
        callback.on_compile_start(_on_compile_start)


def _on_compile_start(arguments: Any) -> None:
    if _work is None:
        return
    if arguments.callback_trigger.name == "CUDAGRAPH_RECORDING":
        _work.extend("CUDA graph capture", CAPTURE_S)
    else:
        _work.extend(COMPILATION, COMPILATION_S)
