"""What a process has its device do, piece by piece, and how long a piece may take: how a GPU that hangs is found.

A thread that waits for a GPU, or for others in NCCL, spins: its process uses a whole core, whether the GPU computes or
hangs. So a process with a device says what it waits for. A piece of work, such as a micro-batch or a step of decoding,
must end within :data:`FACTOR` times the longest so far for each of its tokens, and may always take :data:`FLOOR_S`.
What takes long for reasons of its own has a limit of its own: the first two pieces of a kind, of which one loads
kernels and connects NCCL; one in which kernels are compiled or a CUDA graph is captured; saving.

A piece may have marks, such as one behind each block of a model and so behind its collectives: events on the device,
which cost the host microseconds and make nobody wait. A mark that the device has passed is a sign of life: from then on
what may pass until the next one counts, in the same way. So a long piece that goes on is not taken for one that hangs,
nor does one that hangs half-way have the time of a whole one.
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
"""Of the longest piece so far: pieces of equal tokens differ by their lengths of sequences, and by what else the device
does. Not measured on a GPU yet."""
FLOOR_S = 60.0
"""Seconds that any piece may take: hundreds of times what one takes, less than NCCL's own 300 s."""
FIRST_S = 600.0
"""Seconds for the first two pieces of a kind: the first one loads kernels, so it says nothing about the others."""
COMPILATION = "compilation"
"""Why a piece takes longer in which kernels are compiled."""
COMPILATION_S = 1200.0
"""Seconds for a piece in which kernels are compiled, as for the start of an engine that compiles."""
CAPTURE_S = 600.0
"""Seconds for a piece in which CUDA graphs are captured."""
FEWEST_TOKENS = 256
"""A piece counts as at least this many tokens, because a small one takes as long."""
MOST_MARKS = 4096
"""Marks that are kept until the device has passed them, the newest ones."""


@dataclass(frozen=True, slots=True)
class GpuOperation:
    """A piece of work that a device has not ended."""

    what: str
    """``"a micro-batch of 8192 tokens"``."""
    since: float
    """``time.monotonic()`` of this machine when it began, or of the last sign of life in it."""
    limit_s: float
    """Seconds from then on after which the device counts as hung."""

    @property
    def compiles(self) -> bool:
        """Whether kernels are compiled in it."""
        return self.what.endswith(f", with {COMPILATION}")


class Mark(Protocol):
    """An event of a device: ``torch.Event``."""

    def record(self) -> None:
        """Enqueue it."""

    def query(self) -> bool:
        """Whether the device has passed it. Does not wait; called on another thread."""


class DeviceWork:
    """The work of one process on its device; one piece at a time.

    Args:
        on_change: is told of every change but marks.
        clock: seconds; tests have their own.
        make_mark: makes a mark; None has none.
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
        """By kind, seconds a token; 0 once the first piece, which does not count, has ended."""
        self._piece: GpuOperation | None = None
        self._kind, self._tokens, self._counts = "", 0, False
        self._began = 0.0
        self._thread = 0
        """Which began the piece."""
        self._marks: deque[Mark] = deque(maxlen=MOST_MARKS)
        """Those that the device had not passed."""
        self._longest_gap: dict[str, float] = {}
        """By kind, seconds between two signs of life."""

    @property
    def piece(self) -> GpuOperation | None:
        """What is under way, since the last mark that the device has passed."""
        with self._lock:
            self._look_at_marks()
            return self._piece

    def mark(self) -> None:
        """Put a mark behind what has been enqueued."""
        if self._make_mark is not None:
            mark = self._make_mark()
            mark.record()
            with self._lock:
                self._marks.append(mark)

    def begin(self, kind: str, tokens: int | None = None, limit_s: float | None = None) -> None:
        """A piece begins; the one before is over.

        Args:
            kind: pieces of one kind are compared, such as ``"a micro-batch"``.
            tokens: of the piece; None where its time does not grow with tokens.
            limit_s: replaces what follows from earlier pieces.
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
        """The piece under way is over, if there is one."""
        with self._lock:
            self._close()
            if self._piece is not None:
                self._set(None)

    def cancel(self) -> None:
        """Nothing is under way: what was has failed, and says nothing about the next one."""
        with self._lock:
            self._set(None)

    def extend(self, why: str, limit_s: float) -> None:
        """The piece under way takes longer for a reason of its own, from now on ``limit_s`` seconds."""
        with self._lock:
            if self._piece is None:
                return
            self._counts = False
            what, limit_s = self._piece.what.split(", with ")[0], max(limit_s, self._piece.limit_s)
            self._set(GpuOperation(f"{what}, with {why}", self._clock(), limit_s))

    def is_by_this_thread(self) -> bool:
        """Whether the calling thread began the piece."""
        return threading.get_ident() == self._thread

    def _close(self) -> None:
        if self._piece is None or not self._counts:
            return
        a_token = (self._clock() - self._began) / self._tokens
        if self._kind not in self._longest:
            self._longest[self._kind] = None
            return
        self._longest[self._kind] = max(self._longest[self._kind] or 0.0, a_token)

    def _look_at_marks(self) -> None:
        passed = False
        while self._marks and self._marks[0].query():
            self._marks.popleft()
            passed = True
        if not passed or self._piece is None:
            return
        since, limit_s = self._clock(), self._piece.limit_s
        if self._counts and self._longest.get(self._kind) is not None:
            gap = max(self._longest_gap.get(self._kind, 0.0), since - self._piece.since)
            self._longest_gap[self._kind] = gap
            limit_s = max(FLOOR_S, FACTOR * gap)
        self._piece = replace(self._piece, since=since, limit_s=limit_s)

    def _set(self, piece: GpuOperation | None) -> None:
        self._piece = piece
        if self._on_change is not None:
            self._on_change(piece)


_work: DeviceWork | None = None
"""Of this process; None where its device is a CPU, whose work shows in the CPU's use."""


def use_device(
    kind: str,
    on_change: Callable[[GpuOperation | None], None] | None = None,
    make_mark: Callable[[], Mark] | None = None,
) -> None:
    """This process has work done by a device of this kind, and says so from now on; nothing is said of a CPU."""
    global _work
    _work = None if kind == "cpu" else DeviceWork(on_change, make_mark=make_mark)
    if _work is not None:
        _notice_compilation()


def work() -> DeviceWork | None:
    """This process's work on its device."""
    return _work


def operation_in_progress() -> GpuOperation | None:
    """What this process's device has not ended."""
    return None if _work is None else _work.piece


def mark() -> None:
    """Put a mark behind what this process has enqueued on its device: see :meth:`DeviceWork.mark`."""
    if _work is not None:
        _work.mark()


@contextmanager
def piece(kind: str, tokens: int | None = None, limit_s: float | None = None) -> Iterator[None]:
    """The block is a piece of work of this process's device: see :meth:`DeviceWork.begin`."""
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
    """Have pieces in which kernels are compiled say so.

    Triton, SGLang and flashinfer start compilers as processes, in the thread that needs the kernel; nothing else
    starts any in a piece. What ``torch.compile`` does is told by its callbacks, where it is imported.
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
