"""Reports the current GPU operation of each SGLang scheduler to the generator's process: see ``device_work.py``.

SGLang's schedulers have no monitor. For every batch, each scheduler writes the current operation and its start time to
shared memory, where the generator's monitor can read it at any time. None of this runs on a CPU.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

from monarch_rl.runtime import device_work
from monarch_rl.runtime.device_work import GpuOperation
from monarch_rl.weights.area import Area, attach

VARIABLE = "MONARCH_RL_SCHEDULER_PIECES"
"""Handle of the shared memory, in hexadecimal digits, for the engine's schedulers. Not for users."""
_FORMAT = struct.Struct("<dd112s")
"""Start time, limit and description of an operation; all 0 if there is none."""


class SchedulerOperations:
    """The generator's end. Creates the shared memory, and sets the environment variable for the schedulers.

    Args:
        ranks: number of engine ranks; each has a scheduler.
    """

    def __init__(self, ranks: int) -> None:
        self._area = Area(ranks * _FORMAT.size)
        self._memory = self._area.buffer.numpy().data
        os.environ[VARIABLE] = self._area.handle.hex()

    def reader(self, rank: int) -> Callable[[], GpuOperation | None]:
        """A function that returns the current GPU operation of ``rank``. It keeps the shared memory alive."""
        return partial(self._read, rank)

    def _read(self, rank: int) -> GpuOperation | None:
        since, limit_s, what = _FORMAT.unpack_from(self._memory, rank * _FORMAT.size)
        if not since or _FORMAT.unpack_from(self._memory, rank * _FORMAT.size)[0] != since:
            return None  # the entry is being written, so the scheduler is not hung
        return GpuOperation(what.rstrip(b"\0").decode(errors="replace"), since, limit_s)


def _write(memory: memoryview, rank: int, current: GpuOperation | None) -> None:
    since, limit_s, what = (current.since, current.limit_s, current.what) if current is not None else (0.0, 0.0, "")
    struct.pack_into("<d", memory, rank * _FORMAT.size, 0.0)
    struct.pack_into("<d112s", memory, rank * _FORMAT.size + 8, limit_s, what.encode()[:112])
    struct.pack_into("<d", memory, rank * _FORMAT.size, since)


def install(scheduler_class: Any) -> None:
    """Have SGLang's ``Scheduler`` in this process report its GPU operations, if the engine's process asks for it."""
    handle = os.environ.get(VARIABLE)
    if handle is None:
        return
    memory = attach(bytes.fromhex(handle)).numpy().data
    for name, hook in (("run_batch", run_batch), ("process_batch_result", process_batch_result), ("on_idle", on_idle)):
        setattr(scheduler_class, name, partialmethod(hook, getattr(scheduler_class, name)))
    init = scheduler_class.__init__

    def init_and_report(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        init(scheduler, *args, **kwargs)
        device_work.use_device("accelerator", partial(_write, memory, _rank()))

    scheduler_class.__init__ = init_and_report


def _rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def run_batch(scheduler: Any, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``Scheduler.run_batch``, which launches a batch and, with the overlap scheduler, returns before it
    ends."""
    work = device_work.work()
    if work is not None and work.operation is None:
        _begin(work, batch)
    return original(scheduler, batch, *args, **kwargs)


def process_batch_result(scheduler: Any, original: Callable[..., None], batch: Any, result: Any) -> None:
    """Replaces ``Scheduler.process_batch_result``, which waits for a batch. By then another one may be running."""
    original(scheduler, batch, result)
    work = device_work.work()
    if work is None:
        return
    launched = getattr(scheduler, "result_queue", None)
    if launched:
        _begin(work, launched[0][0])
    else:
        work.end()


def on_idle(scheduler: Any, original: Callable[..., None]) -> None:
    """Replaces ``Scheduler.on_idle``: no operation is running, whatever happened to the last batch."""
    work = device_work.work()
    if work is not None and work.operation is not None:
        work.cancel()
    original(scheduler)


def _begin(work: device_work.DeviceWork, batch: Any) -> None:
    mode = getattr(batch, "forward_mode", None)
    if mode is None:  # placeholder for results that a pause has processed: see scheduler_process.py
        work.end()
    elif mode.is_decode():
        work.begin("a step of decoding", len(batch.reqs))
    else:
        work.begin("a prefill", int(batch.extend_num_tokens or 0))
