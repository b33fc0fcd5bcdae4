"""A process without a core is distinguished from one that waits, and deadlines are extended for it."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.errors import DeadlineExceeded
from monarch_rl.runtime import deadlines, starvation, wait_registry
from monarch_rl.runtime.deadlines import STRETCH, DeadlineClock, within
from monarch_rl.runtime.starvation import CoreTime, Look, look, run_processes
from tests.patience import exit_code, wait_until
from tests.runtime.hogs import hogs, pin

CORE = min(os.sched_getaffinity(0))
COMPUTE = (
    "import time; print(flush=True); {}\nbegun = time.process_time()\nwhile time.process_time() < begun + {}: pass"
)
"""Print a line once Python has started, execute a statement, and then compute for some CPU-seconds."""
SENT = "input()"
"""A statement that waits for a line."""


@contextmanager
def program(text: str, *, core: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A Python program in a session of its own, like hogs, so that it shares a core with them evenly."""
    pipe, command = subprocess.PIPE, [sys.executable, "-c", text]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if core is not None:
            pin(process.pid, core)
        try:
            yield process
        finally:
            process.kill()


def test_a_process_without_a_core_is_distinguished_from_one_that_waits() -> None:
    waits, computes = "import time; print(flush=True); time.sleep(600)", COMPUTE.format("", 600)
    with program(waits, core=CORE) as waiting, program(computes, core=CORE) as starved, hogs(6, CORE):
        wait_until_asleep(waiting.pid)
        before = look([waiting.pid, starved.pid])
        wait_until(lambda: wanted(starved.pid, before)[1] >= 1.0, "a process to want its core for a second")
        pid, _ = look([waiting.pid, starved.pid]).most_starved(before)
        queued_s, wanted_s = wanted(starved.pid, before)
        assert pid == starved.pid and queued_s > 0.6 * wanted_s, "it shares its core with six others"
        assert wanted(waiting.pid, before)[1] < 0.1 * queued_s


def wanted(pid: int, before: Look) -> tuple[float, float]:
    """Seconds for which the process had no core, and for which it wanted one: not wall-clock time."""
    now = starvation.core_time(pid)
    queued_s = now.queued_s - before.processes[pid].queued_s
    return queued_s, queued_s + now.ran_s - before.processes[pid].ran_s


def wait_until_asleep(pid: int) -> None:
    """After printing its line, it may have to wait for a core before it sleeps."""
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_SLEEPING, "a process to sleep")


def test_an_ended_process_has_no_core_time() -> None:
    with program("print(flush=True)") as ended:
        exit_code(ended)
        assert starvation.core_time(ended.pid) == CoreTime(0.0, 0.0)


def test_a_system_without_schedstat_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starvation.warn_if_not_counted()
    assert not caplog.text
    monkeypatch.setattr("os.path.exists", lambda path: path != "/proc/self/schedstat")
    starvation.warn_if_not_counted()
    assert caplog.text.count("schedstat") == 1


def test_the_processes_of_a_run_are_descendants_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    below = "import subprocess, sys\nwith subprocess.Popen(['sleep', '600']) as p: print(flush=True); p.wait()"
    with program(below) as host, program(COMPUTE.format("", 600)) as stranger:
        assert {os.getpid(), host.pid, stranger.pid} <= set(run_processes())
        monkeypatch.setenv(starvation.HOST_PID_VARIABLE, str(host.pid))
        found = run_processes()
        assert stranger.pid not in found and {os.getpid(), host.pid} < set(found), "including its sleep process"


@given(st.floats(0, 3), st.floats(0, 3), st.floats(0.01, 3))
def test_the_queued_share_is_the_time_that_an_idle_machine_would_have_saved(
    ran: float, queued: float, seconds: float
) -> None:
    before = CoreTime(5.0, 7.0)
    share = CoreTime(5.0 + ran, 7.0 + queued).queued_share(before, seconds)
    assert 0.0 <= share <= 1.0
    if ran + queued >= seconds:
        assert share == pytest.approx(queued / (ran + queued))
    assert CoreTime(0.0, 0.0).queued_share(before, seconds) == 0.0, "its threads have ended"


class Machine:
    """A simulated machine, with its time and the event loop of a waiting process."""

    def __init__(self, share: float) -> None:
        self.now = time.monotonic()
        self.paused_s = 0.0
        self._began, self._share = self.now, share

    def time(self) -> float:
        return self.now

    def look(self) -> Look:
        passed_s = self.now - self._began
        return Look(self.now, {1: CoreTime((1 - self._share) * passed_s, self._share * passed_s)})

    def waits(self, seconds: float, pause_s: float = 0.0, ended: float = 1.0) -> float:
        """The seconds until a deadline has passed; this process pauses in its first half. At a share ``ended`` of that
        half one wait ends, and another one continues with its clock."""
        began, windows = self.now, 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(deadlines.asyncio, "get_running_loop", lambda: self)
            patch.setattr(deadlines.time, "monotonic", self.time)
            patch.setattr(starvation, "look", self.look)
            patch.setattr(wait_registry, "paused_s", lambda: self.paused_s)
            clock = DeadlineClock(seconds, "nothing")
            while (window_s := clock.next_window_s()) is not None:
                assert window_s > 0 and windows < 200, "it polls continuously"
                windows += 1
                self.now += window_s * (ended if windows == 1 else 1.0)
                if windows == 1:
                    self.now, self.paused_s = self.now + pause_s, self.paused_s + pause_s
        return self.now - began


@given(st.floats(0, 1), st.floats(1.0, 3600.0), st.floats(0, 1))
def test_a_deadline_is_extended_by_the_slowdown_of_the_machine(share: float, seconds: float, ended: float) -> None:
    waited_s = Machine(share).waits(seconds, ended=ended)
    slower = 1 / (1 - share) if share < 1 else math.inf
    not_worth_it_s = max(0.05 * seconds, 0.4)
    # clock: of the simulated machine
    assert waited_s >= min(STRETCH * seconds, (seconds - not_worth_it_s) * slower) * (1 - 1e-6)
    # clock: of the simulated machine
    assert waited_s <= min((STRETCH + 1) * seconds, seconds * slower) * (1 + 1e-6)


@given(st.floats(2.0, 600.0), st.floats(1.0, 10_000.0))
def test_a_pause_of_the_waiter_does_not_count(pause_s: float, seconds: float) -> None:
    assert Machine(0.0).waits(seconds, pause_s) == pytest.approx(seconds + pause_s)


@pytest.mark.parametrize("seconds", [0.01, 0.9])
def test_a_short_deadline_is_not_extended(seconds: float) -> None:
    assert Machine(0.9).waits(seconds) == pytest.approx(seconds)
    assert Machine(0.9).waits(seconds, ended=0.3) == pytest.approx(seconds)


def test_a_process_that_shares_its_core_gets_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs 0.8 CPU-seconds within 2 s; three others want the core, too, so it takes at least 3.2 s."""
    monkeypatch.setattr(deadlines, "STRETCH", 1000.0)  # other processes may want the core, too

    async def wait_for(process: subprocess.Popen[str]) -> float:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        before = time.monotonic()
        await within(2.0, asyncio.to_thread(process.wait), "a process that computes")
        return time.monotonic() - before

    with program(COMPUTE.format(SENT, 0.8), core=CORE) as process, hogs(3, CORE):
        assert asyncio.run(wait_for(process)) > 2.0  # clock: at least


def test_a_process_that_waits_gets_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine and other processes of the run are: only this process is inspected, and it waits."""
    monkeypatch.setattr(starvation, "run_processes", lambda: [os.getpid()])

    async def wait() -> tuple[float, float]:
        """Seconds that the clock excluded besides pauses, and for which this process was ready without a core."""
        clock, queued_before_s = DeadlineClock(2.0, "nothing"), starvation.core_time(os.getpid()).queued_s
        with pytest.raises(DeadlineExceeded):
            await within(clock, asyncio.Event().wait(), "nothing")
        return clock._lost_s - clock._paused_s, starvation.core_time(os.getpid()).queued_s - queued_before_s

    with hogs(2 * (os.cpu_count() or 1)):
        left_out_s, queued_s = asyncio.run(wait())
    # The share after the first look also counts for the time before it, which is at most four times as long.
    assert left_out_s <= 5 * queued_s + 0.01
