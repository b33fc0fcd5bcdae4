"""The watch over synthetic pictures: errors in the watch itself, and what it forgets. Only small processes are
started."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.errors import Stalled
from monarch_rl.runtime import device_work, monitor, wait_registry
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.device_work import COMPILATION_S, GpuOperation
from monarch_rl.runtime.wait_registry import CONTROLLER, Progress
from monarch_rl.watch import process_poller, watch
from monarch_rl.watch.process_poller import LoopLag, ProcessPoller, _PolledProcess
from monarch_rl.watch.stall import Process, RunPicture
from monarch_rl.watch.watch import FAILED_POLLS, watched
from tests.patience import TICK_S, Patience, until

STALL_S = 2.0
PATIENCE_S = 120.0
"""Deadline in seconds for expected events."""
TakePicture = Callable[[int], Awaitable[RunPicture]]
"""Its argument is the number of earlier pictures."""


def cluster(*monitors: tuple[str, list[Any]]) -> Cluster:
    return cast(Cluster, SimpleNamespace(monitors=list(monitors)))


def idle(culprit_silent_s: float = 0.0) -> RunPicture:
    """A run that does nothing, with the actual waits of this process. A generator has been silent."""
    own = monitor.own_report()
    processes = [Process(CONTROLLER, own.pid, own.machine, own), Process("generator 0", silent_s=culprit_silent_s)]
    return RunPicture({process.name: process for process in processes}, STALL_S)


@pytest.fixture
def watch_sees(monkeypatch: pytest.MonkeyPatch) -> Callable[[TakePicture], list[float]]:
    """Replaces the pictures of watches; returns the times of the polls, updated as they happen."""

    def see(take: TakePicture) -> list[float]:
        polls = list[float]()

        async def picture(_: ProcessPoller) -> RunPicture:
            polls.append(time.monotonic())
            return await take(len(polls) - 1)

        monkeypatch.setattr(ProcessPoller, "picture", picture)
        return polls

    return see


async def stalled(folder: Path) -> None:
    with pytest.raises(Stalled):
        async with watched(cluster(), folder, STALL_S):
            await within(PATIENCE_S, asyncio.Event().wait(), "an event that never happens", on="generator 0")


def test_a_stalled_disk_loses_the_report_but_the_run_still_ends(
    watch_sees: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The watch continues, and logs the content of the report."""
    disk, writing = threading.Event(), list[Path]()

    async def take(_: int) -> RunPicture:
        return idle(culprit_silent_s=PATIENCE_S)

    def stalls(path: Path, *_: Any, **__: Any) -> None:
        writing.append(path)
        disk.wait(PATIENCE_S)

    watch_sees(take)
    monkeypatch.setattr(Path, "write_text", stalls)
    monkeypatch.setattr(watch, "ASK_DEADLINE_S", 0.5)
    with caplog.at_level(logging.ERROR):
        asyncio.run(stalled(tmp_path))
    disk.set()
    assert writing and str(writing[0]) in caplog.text


def test_a_slow_picture_does_not_hide_a_stall(watch_sees: Any, tmp_path: Path) -> None:
    async def take(_: int) -> RunPicture:
        await asyncio.sleep(0.75 * STALL_S)
        return idle()

    watch_sees(take)
    asyncio.run(stalled(tmp_path))
    assert list(tmp_path.glob("stall-*.txt"))


def test_a_stop_during_a_picture_makes_no_culprit(watch_sees: Any, tmp_path: Path) -> None:
    """It blocks the loop of the watch, as a stop of the process does; silent processes were stopped, too."""

    async def take(number: int) -> RunPicture:
        if number < 2:
            time.sleep(STALL_S)
            return idle(10 * STALL_S)
        advances = idle()
        own = monitor.own_report()
        progress = {"step trained": Progress(number, time.monotonic())}
        advances.processes[CONTROLLER].report = dataclasses.replace(own, progress=progress)
        return advances

    polls = watch_sees(take)

    async def test() -> None:
        async with watched(cluster(), tmp_path, STALL_S):
            await until(lambda: len(polls) >= 4, "polls of the watch")

    asyncio.run(test())
    assert not list(tmp_path.iterdir())


def test_an_unwritable_report_does_not_keep_the_run_from_ending(
    watch_sees: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def take(_: int) -> RunPicture:
        return idle()

    watch_sees(take)
    asyncio.run(stalled(tmp_path / "deleted"))
    assert str(tmp_path / "deleted") in caplog.text and "generator 0" in caplog.text


def test_an_error_of_one_poll_does_not_end_the_watch(
    watch_sees: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def take(number: int) -> RunPicture:
        if number % FAILED_POLLS < FAILED_POLLS - 1:
            raise psutil.AccessDenied(1)
        return idle()

    watch_sees(take)
    asyncio.run(stalled(tmp_path))
    assert "AccessDenied" in caplog.text


def test_a_watch_whose_polls_all_fail_gives_up_with_an_error(
    watch_sees: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def take(_: int) -> RunPicture:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "made up")

    polls = watch_sees(take)

    async def test() -> None:
        async with watched(cluster(), tmp_path, STALL_S) as watch:
            await until(lambda: not watch._thread.is_alive(), "the end of the watch")

    asyncio.run(test())
    assert len(polls) == FAILED_POLLS
    (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert error.exc_info is not None and isinstance(error.exc_info[1], UnicodeDecodeError)


def test_a_process_that_may_not_be_inspected_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: psutil.Process) -> str:
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil.Process, "status", refuse)
    assert monitor.state_of(1) == monitor.ProcessState("unknown", 0.0)


class FakeMonitor:
    """The monitor of a real process that does nothing."""

    def __init__(self, name: str) -> None:
        self._program = subprocess.Popen(["sleep", "600"])
        self.pid = self._program.pid
        self._report = dataclasses.replace(monitor.own_report(), name=name, pid=self.pid)
        self.report = SimpleNamespace(call_one=self._answer)

    async def _answer(self) -> monitor.ProcessReport:
        if self._program.poll() is not None:
            raise RuntimeError("it has ended")
        return self._report

    def end(self) -> None:
        self._program.kill()
        self._program.wait()


def shows(pid: int, picture: RunPicture) -> bool:
    return pid in {process.pid for process in picture.processes.values()}


def test_ended_and_replaced_processes_are_forgotten() -> None:
    async def test() -> None:
        lives = FakeMonitor("buffer")
        seen = cluster(("buffer", [lives]))
        poller = ProcessPoller(seen, STALL_S, 0.01, LoopLag())

        async def picture_of(shown: Callable[[RunPicture], bool]) -> None:
            patience = Patience("the expected picture")
            while not shown(await poller.picture()):
                patience.tick()
                await asyncio.sleep(TICK_S)

        for _ in range(4):
            replaced = FakeMonitor("generator 0")
            seen.monitors = [("buffer", [cast(Any, lives)]), ("generator", [cast(Any, replaced)])]
            poller.add_new()
            pid = replaced.pid
            await picture_of(partial(shows, pid))
            replaced.end()
            seen.monitors = seen.monitors[:1]
        await picture_of(lambda picture: picture.processes.keys() == {CONTROLLER, "buffer"})
        await picture_of(lambda picture: len(poller._polled) == 1)
        assert len(poller._cpu_history) <= 2 and not poller._not_running_since, "the controller's and the buffer's"
        poller.close()
        lives.end()

    asyncio.run(test())


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 1), st.booleans()), min_size=1, max_size=30), st.floats(0, 50)
)
def test_time_without_a_core_and_unwatched_time_do_not_count_against_a_device(
    looks: list[tuple[float, float, bool]], watched_after_s: float
) -> None:
    """``looks``: seconds since the previous one, their share without a core, whether a new GPU operation began."""
    poller = ProcessPoller(cluster(), 15.0, 3.0, LoopLag())
    start = poller._watched_since = watched_after_s
    now, queued_s, ran_s, since, without_core_s = 0.0, 1000.0, 10.0, 0.0, 0.0
    for number, (seconds, share, begins) in enumerate(looks):
        now, queued_s, ran_s = now + seconds, queued_s + share * seconds, ran_s + (1 - share) * seconds
        without_core_s += share * seconds
        if begins or number == 0:
            since, without_core_s = now, 0.0
        process = Process("trainer rank 0", 100, "m", state=monitor.ProcessState("running", ran_s, queued_s))
        process.operation, process.operation_s = GpuOperation("a micro-batch", since, 60.0), now - since
        poller._leave_out_queued(process, now)
        assert process.operation_s == pytest.approx(max(0.0, min(now - since, now - start) - without_core_s), abs=1e-6)
    process.operation = None
    poller._leave_out_queued(process, now)
    assert not poller._operations


def test_many_threads_without_a_core_do_not_hide_a_device_that_hangs() -> None:
    """On a crowded machine the threads of a process wait in parallel, in total longer than the elapsed time."""
    poller = ProcessPoller(cluster(), 15.0, 3.0, LoopLag())
    poller._watched_since = 0.0
    for now in (0.0, 100.0):
        process = Process("trainer rank 0", 100, "m", state=monitor.ProcessState("running", 0.5 * now, 4.5 * now))
        process.operation, process.operation_s = GpuOperation("a micro-batch", 0.0, 60.0), now
        poller._leave_out_queued(process, now)
    assert process.operation_s == pytest.approx(10)


class FakePoller(ProcessPoller):
    """Polls computing processes on simulated machines, at times that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(process_poller, "time", SimpleNamespace(monotonic=lambda: self.now))
        super().__init__(cluster(), 15.0, 3.0, LoopLag())

    async def _states(self, machine: str, processes: list[Process]) -> dict[int, monitor.ProcessState]:
        return {process.pid: monitor.ProcessState("running", self.now) for process in processes if process.pid}

    def hang(self, now: float, **operations: tuple[str, GpuOperation]) -> set[str]:
        """Names of the processes whose device hangs, given their machines and GPU operations."""
        self.now, picture = now, RunPicture()
        for pid, (name, (machine, operation)) in enumerate(operations.items(), 1):
            made = Process(name.replace("_", " "), pid, machine, operation=operation, operation_s=now - operation.since)
            picture.processes[made.name] = made
        asyncio.run(self._inspect(picture))
        return {process.name for process in picture.culprits()}


STEP = GpuOperation("an optimiser step of 8192 tokens", 0.0, 60.0)
COMPILES = GpuOperation("a micro-batch of 8192 tokens, with compilation", 0.0, COMPILATION_S)


def test_a_rank_that_waits_for_a_compiling_rank_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a collective, until the compilation of the other rank takes too long. An engine does not wait for ranks."""
    poller = FakePoller(monkeypatch)
    for now in range(0, 1200, 3):
        engine = {"the engine of generator 0": ("m", STEP)} if now < 60 else {}
        assert not poller.hang(now, trainer_rank_0=("m", STEP), trainer_rank_1=("n", COMPILES), **engine)
    assert poller.hang(1200, trainer_rank_0=("m", STEP), trainer_rank_1=("n", COMPILES)) == {"trainer rank 1"}

    poller = FakePoller(monkeypatch)
    for now in range(0, 900, 3):
        poller.hang(now, trainer_rank_0=("m", STEP), trainer_rank_1=("n", COMPILES))
    then = GpuOperation("a micro-batch of 8192 tokens", 900.0, 600.0)
    ends = [
        now for now in range(900, 1000, 3) if poller.hang(now, trainer_rank_0=("m", STEP), trainer_rank_1=("n", then))
    ]
    assert 957 <= ends[0] <= 963, "its remaining 60 s begin when the other rank has compiled"


def test_an_engine_that_waits_for_a_compiling_engine_on_its_machine_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For the lock of the kernel files. Two engines that hang while they compile do not excuse each other."""
    poller, prefill = FakePoller(monkeypatch), GpuOperation("a prefill of 100 tokens", 0.0, 60.0)
    elsewhere = set()
    for now in range(0, 1200, 3):
        elsewhere |= poller.hang(
            now,
            the_engine_of_generator_0=("m", COMPILES),
            the_engine_of_generator_1=("m", prefill),
            the_engine_of_generator_2=("n", prefill),
            trainer_rank_0=("m", STEP),
        )
    assert elsewhere == {"the engine of generator 2", "trainer rank 0"}

    poller = FakePoller(monkeypatch)
    both = {f"the_engine_of_generator_{i}": ("m", COMPILES) for i in range(2)}
    for now in range(0, 3000, 3):
        poller.hang(now, **both)
    assert len(poller.hang(3000, **both)) == 2


def test_a_report_has_the_pending_operations_of_a_process_and_its_helpers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the process itself to the picture. Operations in progress at its last answer may have ended since, also
    those of its helpers."""

    async def test() -> None:
        own, now = monitor.own_report(), time.monotonic()
        monkeypatch.setattr(process_poller, "time", SimpleNamespace(monotonic=lambda: now))
        report = dataclasses.replace(
            own,
            name="generator 0",
            now=now,
            helpers={1: "the engine of generator 0"},
            operation=GpuOperation("a micro-batch", now - 100, 60.0),
            helpers_operations={1: GpuOperation("a step of decoding", now - 50, 60.0)},
        )
        poller = ProcessPoller(cluster(("generator0", [object()])), STALL_S, 0.0, LoopLag())
        poller._watched_since = now - 1000
        handle: Any = object()
        polled = _PolledProcess(handle, Process("generator 0", os.getppid(), own.machine, report), now - 30)
        poller._polled[id(handle)] = polled
        seen = (await poller.picture()).processes
        assert seen["generator 0"].operation == report.operation and seen["generator 0"].operation_s == pytest.approx(
            100
        )
        assert seen["generator 0"].device_hangs
        engine = seen["the engine of generator 0"]
        assert engine.operation == report.helpers_operations[1] and engine.operation_s == pytest.approx(50)
        assert not engine.device_hangs
        poller.reset_silence(lost_s=100.0)
        seen = (await poller.picture()).processes
        assert not seen["generator 0"].device_hangs, "the watch itself did not run meanwhile"
        assert seen["generator 0"].operation_s == pytest.approx(0)

    asyncio.run(test())


def test_a_process_reports_its_pending_gpu_operation() -> None:
    device_work.use_device("cuda")
    try:
        with device_work.operation("a micro-batch", 10):
            wait_registry.helper(1, "the engine of generator 0", device_work.operation_in_progress)
            report = monitor.own_report()
            assert report.operation is not None and report.operation.what == "a micro-batch of 10 tokens"
            assert report.helpers_operations == {1: report.operation}
        assert monitor.own_report().operation is None and monitor.own_report().helpers_operations == {}
    finally:
        wait_registry.no_helper(1)
        device_work.use_device("cpu")
    assert wait_registry.helpers_operations() == {}
