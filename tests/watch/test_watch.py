"""The watch over real processes that are stopped, blocked, busy or idle; with short times and without torch."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from monarch.actor import Actor, current_rank

from monarch_rl.errors import DeadlineExceeded, Stalled
from monarch_rl.runtime import device_work, wait_registry
from monarch_rl.runtime.cluster import Cluster, launch_cluster
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint, members
from monarch_rl.runtime.monitor import stacks_of
from monarch_rl.watch import watch
from monarch_rl.watch.watch import Watch, watched
from tests.patience import exit_code, until
from tests.patience import run as run_program
from tests.runtime.hogs import hogs, pin
from tests.runtime.launched import Start, gone

STALL_S = 3.0
"""A fifth of the default. With much less, the polls themselves would keep an idle process busy."""
OPERATION_S = 5.0
"""Time limit of a GPU operation in these tests."""
PATIENCE_S = 300.0
"""Deadline in seconds for expected events, and duration of activities that last until the watch acts."""


def spin(seconds: float) -> None:
    """Compute on this thread."""
    ended = threading.Event()
    threading.Timer(seconds, ended.set).start()
    while not ended.is_set():
        sum(range(1000))


class ScriptedActor(Actor):
    """A trainer rank or a rollout worker controlled by the test."""

    def __init__(self, kind: str, block_limit_s: float = math.inf) -> None:
        wait_registry.register(f"{kind} {current_rank().rank}", block_limit_s=block_limit_s)

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def wait(self, what: str, on: str) -> None:
        await within(600, asyncio.Event().wait(), what, on=on)

    @concurrent_endpoint
    async def block(self, seconds: float) -> None:
        time.sleep(seconds)

    @concurrent_endpoint
    async def spin(self, seconds: float) -> None:
        spin(seconds)

    @concurrent_endpoint
    async def backtrack(self) -> None:
        """Match a regular expression, which takes ages and holds the GIL."""
        re.match("(a+)+$", "a" * 60 + "b")

    @concurrent_endpoint
    async def compute(self, device: str, each_s: float) -> None:
        """Run micro-batches on a thread that spins like one that waits for a GPU."""

        def compute() -> None:
            device_work.FIRST_S = device_work.FLOOR_S = OPERATION_S
            device_work.use_device(device)
            while True:  # until the process ends
                with device_work.operation("a micro-batch", 8192):
                    spin(each_s)
                time.sleep(0.1)  # leaves the machine to other processes

        await asyncio.to_thread(compute)

    @concurrent_endpoint
    async def advance(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            wait_registry.progress("group submitted")
            await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One for all tests: each has its own meshes, so that killed processes do not disturb later tests."""
    with launch_cluster() as launched:
        assert launched is not None
        yield launched


@pytest.fixture(autouse=True)
def _watch_only_processes_of_the_test(request: pytest.FixtureRequest) -> None:
    """Processes on meshes that earlier tests broke may no longer be asked by Monarch."""
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").monitors = []


async def scripted_actors(
    cluster: Cluster, kind: str, block_limit_s: float = math.inf
) -> tuple[list[ScriptedActor], list[int]]:
    """Two processes with one actor each; handles and pids."""
    mesh = cluster.spawn(kind.split()[0], 2)
    actors: ScriptedActor = mesh.spawn("actors", ScriptedActor, kind, block_limit_s)
    pids = await within(PATIENCE_S, actors.pid.call(), "the actors", on="Monarch")
    return members(actors), list(pids.values())


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await within(500, test(), "the test", on="the test")

    asyncio.run(bounded())


async def stalled(cluster: Cluster, folder: Path, work: Callable[[], Awaitable[Any]]) -> tuple[str, float]:
    """Do ``work`` until the watch ends it; its message, and the seconds it took."""
    with pytest.raises(Stalled) as caught:
        async with watched(cluster, folder, STALL_S) as watching:
            await answered(cluster, watching)
            started = time.monotonic()
            await within(PATIENCE_S, work(), "work that cannot end", on="rollout worker 0")
    return str(caught.value), time.monotonic() - started


async def answered(cluster: Cluster, watching: Watch) -> None:
    """Wait until all processes have answered the watch."""

    def all_have() -> bool:
        polled = list(watching._poller._polled.values())
        wanted = sum(len(monitors) for _, monitors in cluster.monitors)
        return len(polled) == wanted and all(each.last_answer is not None for each in polled)

    await until(all_have, "an answer of all processes to the watch")


def test_stacks_are_read_without_an_activated_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "test_stacks_are_read_without" in stacks_of(os.getpid())


def test_stacks_that_py_spy_cannot_read_have_its_error() -> None:
    with subprocess.Popen(["true"]) as ended:
        exit_code(ended)
    assert re.match(rf"py-spy .*{ended.pid}: \S", stacks_of(ended.pid))


@pytest.mark.parametrize("machine", [pytest.param("this machine", marks=pytest.mark.core), "another machine"])
def test_a_stopped_process_is_named_and_killed(
    cluster: Cluster, tmp_path: Path, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the controller cannot inspect it: then another process on its machine does, and kills it."""
    if machine == "another machine":
        for module in ("runtime.machine", "runtime.cluster", "watch.process_poller"):
            monkeypatch.setattr(f"monarch_rl.{module}.own_id", lambda: "the controller's")
        monkeypatch.delattr("monarch_rl.runtime.monitor.stacks_of")
        monkeypatch.delattr("monarch_rl.runtime.monitor.kill")

    async def test() -> None:
        ranks, _ = await scripted_actors(cluster, "trainer rank")
        workers, pids = await scripted_actors(cluster, "rollout worker")

        async def work() -> None:
            waiting = asyncio.ensure_future(ranks[0].wait.call_one("the batch of step 1", "rollout worker 1"))
            others = asyncio.ensure_future(workers[0].advance.call_one(PATIENCE_S))  # other processes advance
            os.kill(pids[1], signal.SIGSTOP)
            await asyncio.gather(waiting, others)

        message, _ = await stalled(cluster, tmp_path, work)
        chain = rf"trainer rank 0 .*the batch of step 1; rollout worker 1 .*process {pids[1]} is stopped"
        assert re.match(chain, message), message
        await until(lambda: gone(pids[1]), "its end")
        (report,) = tmp_path.glob("stall-*.txt")
        text = report.read_text()
        assert text.startswith(message) and "--- trainer rank 0\nthread " in text
        assert f"--- rollout worker 1\nProcess {pids[1]}" in text and "EpollSelector.select" in text
        assert re.search(r"^rollout worker 0 .*waits for no process", text, re.MULTILINE)

    run(test)


def test_a_lost_process_with_remaining_waiters_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """Monarch has notified the watch of the loss, but not the waiter; all other processes continue."""

    async def test() -> None:
        ranks, _ = await scripted_actors(cluster, "trainer rank")
        workers, pids = await scripted_actors(cluster, "rollout worker")

        async def work() -> None:
            waiting = asyncio.ensure_future(ranks[0].wait.call_one("the batch of step 1", "rollout workers"))
            others = asyncio.ensure_future(workers[0].advance.call_one(PATIENCE_S))
            os.kill(pids[1], signal.SIGKILL)
            await asyncio.gather(waiting, others)

        message, _ = await stalled(cluster, tmp_path, work)
        assert re.match(r"trainer rank 0 .*the batch of step 1; rollout worker 1 ", message), message

    run(test)


@pytest.mark.parametrize("first", ["the run", "the watch"])
def test_the_first_cause_of_the_end_is_raised(cluster: Cluster, tmp_path: Path, first: str) -> None:
    """The watch has found a culprit, and asks whether it can be replaced, while the run fails because of it."""

    async def test() -> None:
        _, pids = await scripted_actors(cluster, "generator")
        asked, failed = asyncio.Event(), asyncio.Event()

        async def recover(culprit: str, state: str, group: int | None) -> bool:
            asked.set()
            await within(PATIENCE_S, failed.wait(), "the run to fail", on="the test")
            await asyncio.sleep(0.5)  # its end has begun
            return False

        async def fail() -> None:
            async with watched(cluster, tmp_path, STALL_S, recover) as watching:
                await answered(cluster, watching)
                os.kill(pids[0], signal.SIGSTOP)
                await within(PATIENCE_S, asked.wait(), "the watch to find it", on="the watch")
                while first == "the watch" and watching.stalled is None:
                    time.sleep(0.01)  # until its deadline passes; its cancellation comes at the next await
                failed.set()
                raise OSError("a rank does not answer")

        with pytest.raises(OSError if first == "the run" else Stalled) as raised:
            await asyncio.create_task(fail())
        assert first == "the run" or isinstance(raised.value.__cause__, OSError)

    run(test)


@pytest.mark.core
def test_a_culprit_that_is_replaced_does_not_end_the_run(cluster: Cluster, tmp_path: Path) -> None:
    async def test() -> None:
        _, pids = await scripted_actors(cluster, "generator")
        asked: list[str] = []
        replaced = asyncio.Event()

        async def recover(culprit: str, state: str, group: int | None) -> bool:
            asked.append(f"{culprit} {state}")
            asyncio.get_running_loop().call_later(2 * STALL_S, replaced.set)
            return True

        async with watched(cluster, tmp_path, STALL_S, recover) as watching:
            await answered(cluster, watching)
            os.kill(pids[0], signal.SIGSTOP)
            await within(PATIENCE_S, replaced.wait(), "a replacement", on="the test")
        (cause,) = asked
        assert re.fullmatch(rf"generator 0 stopped answering \d+ s ago; its process {pids[0]} is stopped", cause)
        await until(lambda: gone(pids[0]), "its end")

    run(test)


@pytest.mark.parametrize("machine", ["this machine", "another machine"])
def test_a_replaced_process_is_ended_even_if_it_does_not_answer(
    cluster: Cluster, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must release its device for the process that replaces it."""
    if machine == "another machine":
        for module in ("runtime.machine", "runtime.cluster", "watch.process_poller"):
            monkeypatch.setattr(f"monarch_rl.{module}.own_id", lambda: "the controller's")
        monkeypatch.delattr("monarch_rl.runtime.monitor.kill")

    async def test() -> None:
        await scripted_actors(cluster, "trainer rank")
        mesh = cluster.spawn("generator", 1)
        pid = await within(
            PATIENCE_S, mesh.spawn("actor", ScriptedActor, "generator").pid.call_one(), "it", on="Monarch"
        )
        await cluster.locate(mesh)
        os.kill(pid, signal.SIGSTOP)
        before = len(cluster.monitors)
        await cluster.kill(mesh)
        assert len(cluster.monitors) == before - 1, "a new watch does not look for it"
        await until(lambda: gone(pid), "its end")

    run(test)


COMPUTING_S = 9.0
"""Seconds for which a process computes in one call."""
CROWDED_STALL_S = COMPUTING_S / 3
"""Longer than in other tests: in each window of this length, the machine must give the process 5 % of a core."""
ATTEMPTS = 6
"""A process without a core looks idle: then the test starts again."""


@contextmanager
def queued(pids: Sequence[int]) -> Iterator[Callable[[], float]]:
    """Observe processes while the block runs.

    Yields:
        Returns the seconds for which threads of one of them were ready to run and had no core, at most.
    """
    before = {pid: queued_s(pid) for pid in pids}
    longest, ended = 0.0, threading.Event()

    def observe() -> None:
        nonlocal longest
        while not ended.wait(0.1):
            longest = max(longest, *(queued_s(pid) - before[pid] for pid in pids))

    observer = threading.Thread(target=observe, daemon=True)
    observer.start()
    try:
        yield lambda: longest
    finally:
        ended.set()
        observer.join()


def queued_s(pid: int) -> float:
    """Sum of the second number of Linux's ``schedstat`` over all threads; 0 for a process that has ended."""
    waited = 0
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            waited += int((thread / "schedstat").read_text().split()[1])
    return waited / 1e9


def computes_unhindered(cluster: Cluster, folder: Path) -> bool:
    """Whether the watch leaves a computing rank alone; if not, the machine must have given it no core."""
    folder.mkdir()
    left_alone = True

    async def test() -> None:
        nonlocal left_alone
        ranks, pids = await scripted_actors(cluster, "trainer rank")
        with queued(pids) as longest_s:
            try:
                async with watched(cluster, folder, CROWDED_STALL_S) as watch:
                    await within(PATIENCE_S, ranks[0].spin.call_one(COMPUTING_S), "ranks", on="trainer ranks")
                    lag = dict[str, float]()

                    def shows() -> bool:
                        lag.update(watch.loop_lag())
                        return lag.get("loop_lag/trainer_max_ms", 0) >= 0.8 * COMPUTING_S * 1e3

                    await until(shows, lambda: f"the lag, but {lag}")
            except Stalled as stalled:
                assert longest_s() > CROWDED_STALL_S / 2, f"the machine had cores, but {stalled}"
                left_alone = False
            else:
                assert not list(folder.glob("stall-*")), "a report was written"

    run(test)
    return left_alone


def test_a_computing_process_is_left_alone_and_shows_in_the_loop_lag(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = (computes_unhindered(cluster, tmp_path / str(attempt)) for attempt in range(ATTEMPTS))
    assert any(attempts), f"a process that computes was ended {ATTEMPTS} times"
    assert re.search(r"event loop of trainer rank 0 .*late", caplog.text)


HOGS = 40
"""Competing processes on the core of a computing one: it gets 2 % of the core, less than an idle process may use."""


@pytest.mark.core
def test_a_computing_process_without_a_core_is_left_alone_and_the_machine_is_named(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        ranks, pids = await scripted_actors(cluster, "trainer rank")
        core = min(os.sched_getaffinity(0))
        pin(pids[0], core)
        async with watched(cluster, tmp_path, STALL_S):
            with hogs(HOGS, core):
                await within(PATIENCE_S, ranks[0].spin.call_one(3 * STALL_S), "step 1", on="trainer ranks")
        assert not list(tmp_path.glob("stall-*")), "a report was written"

    run(test)
    assert re.search(r"too little CPU: .*\d+ %", caplog.text)


def test_an_exceeded_deadline_leaves_a_report(cluster: Cluster, tmp_path: Path) -> None:
    """A process that computes forever is not a culprit for the watch; the deadline ends it, and the report names it."""

    async def test() -> None:
        ranks, pids = await scripted_actors(cluster, "trainer rank")
        with pytest.raises(DeadlineExceeded, match="step 1"):
            async with watched(cluster, tmp_path, STALL_S) as watching:
                await answered(cluster, watching)
                # Longer than a crowded machine may stretch the deadline.
                await within(2 * STALL_S, ranks[0].spin.call_one(30 * STALL_S), "step 1", on="trainer ranks")
        os.kill(pids[0], signal.SIGKILL)
        (report,) = tmp_path.glob("stall-*.txt")
        assert re.search(r"trainer rank 0 .*uses \d+% of a core", report.read_text())

    run(test)


@pytest.mark.core
def test_a_blocked_loop_is_named_with_the_line_that_blocks_it(cluster: Cluster, tmp_path: Path) -> None:
    async def test() -> None:
        workers, pids = await scripted_actors(cluster, "rollout worker")

        async def work() -> None:
            wait_registry.progress("version published")  # otherwise the run would end as stuck
            await workers[0].block.call_one(600)

        message, _ = await stalled(cluster, tmp_path, work)
        blocked = rf"rollout worker 0 .*blocked .*{re.escape(__file__)}:\d+; .*process {pids[0]} "
        assert re.match(rf"controller .*work that cannot end; {blocked}", message), message
        (report,) = tmp_path.glob("stall-*.txt")
        assert re.search(
            r"the loop of rollout worker 0\n(.*\n)*.*in block\n\s+time\.sleep\(seconds\)", report.read_text()
        )

    run(test)


def test_a_call_that_holds_the_gil_for_too_long_is_a_culprit_although_it_uses_the_cpu(
    cluster: Cluster, tmp_path: Path
) -> None:
    async def test() -> None:
        workers, pids = await scripted_actors(cluster, "rollout worker", block_limit_s=1.5 * STALL_S)

        async def work() -> None:
            wait_registry.progress("version published")  # otherwise the run would end as stuck
            await workers[0].backtrack.call_one()

        message, _ = await stalled(cluster, tmp_path, work)
        silent = rf"rollout worker 0 stopped answering \d+ s ago; its process {pids[0]} is \w+ and uses \d+%"
        assert re.match(rf"controller .*work that cannot end; {silent}", message), message
        (report,) = tmp_path.glob("stall-*.txt")
        assert "in backtrack" in report.read_text() or "backtrack (" in report.read_text(), "no stack of py-spy"

    run(test)


@pytest.mark.core
def test_a_stall_without_a_culprit_reports_its_chain_of_waits(cluster: Cluster, tmp_path: Path) -> None:
    async def test() -> None:
        ranks, _ = await scripted_actors(cluster, "trainer rank")
        workers, _ = await scripted_actors(cluster, "rollout worker")

        async def work() -> None:
            waiting = ranks[0].wait.call_one("the batch of step 1", "rollout worker 0")
            await asyncio.gather(waiting, workers[0].advance.call_one(4 * STALL_S))

        message, seconds = await stalled(cluster, tmp_path, work)
        # A poll may date the last advance an interval earlier, and that was up to 0.1 s before the end of the four.
        # clock: at least
        assert seconds >= (6 - 1 / watch.POLLS) * STALL_S - 0.2, "the run was ended while it advanced"
        assert "; rollout worker 0 waits for no process" in message

    run(test)


@pytest.mark.heavy
def test_a_recipe_that_waits_in_its_own_code_does_not_end_the_run(tmp_path: Path) -> None:
    script = tmp_path / "controller.py"
    script.write_text(
        f"""
import asyncio, logging, pathlib
from monarch_rl.watch import watch
from monarch_rl.runtime.cluster import launch_cluster

warned = asyncio.Event()

class Handler(logging.Handler):
    def emit(self, record):
        if "the recipe's own code" in record.getMessage():
            loop.call_soon_threadsafe(warned.set)

async def main(cluster):
    global loop
    loop = asyncio.get_running_loop()
    logging.basicConfig(handlers=[logging.StreamHandler(), Handler()])
    async with watch.watched(cluster, pathlib.Path({str(tmp_path)!r}), 1.0):
        await warned.wait()
        await asyncio.sleep({2 * watch.STUCK_FACTOR})

with launch_cluster() as cluster:
    asyncio.run(main(cluster))
"""
    )
    done = run_program([sys.executable, script], seconds=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the recipe's own code") == 1 and not list(tmp_path.glob("stall-*.txt")), done.stderr


@pytest.mark.heavy
def test_a_blocked_controller_is_ended_at_once(tmp_path: Path) -> None:
    script = tmp_path / "controller.py"
    script.write_text(
        f"""
import asyncio, pathlib, time
from monarch_rl.watch import watch
from monarch_rl.runtime.cluster import launch_cluster

watch.END_S = 1.0

async def spare(culprit):
    return True

async def main(cluster):
    async with watch.watched(cluster, pathlib.Path({str(tmp_path)!r}), 1.0, spare):
        await asyncio.sleep(0.5)
        time.sleep(600)

with launch_cluster() as cluster:
    asyncio.run(main(cluster))
"""
    )
    done = run_program([sys.executable, script], seconds=PATIENCE_S)
    assert done.returncode == 1, done.stderr
    assert re.search(r"at once.* controller .*blocked", done.stderr), done.stderr
    assert "time.sleep(600)" in done.stderr


def test_timers_restart_after_a_stop_of_the_controller(start: Start, tmp_path: Path) -> None:
    """It is stopped for longer than a run may stall, and then continues for a while."""
    begun = tmp_path / "begun"
    script = tmp_path / "controller.py"
    script.write_text(
        f"""
import asyncio, pathlib
from monarch_rl.watch import watch
from monarch_rl.runtime.cluster import launch_cluster

async def main(cluster):
    async with watch.watched(cluster, pathlib.Path({str(tmp_path)!r}), {STALL_S}):
        await asyncio.sleep({STALL_S / 3})
        pathlib.Path({str(begun)!r}).write_text("now")
        await asyncio.sleep({4 * STALL_S})

with launch_cluster() as cluster:
    asyncio.run(main(cluster))
"""
    )
    run = start([sys.executable, str(script)])
    run.wait_for(begun)
    run.process.send_signal(signal.SIGSTOP)
    time.sleep(3.5 * STALL_S)
    run.process.send_signal(signal.SIGCONT)
    assert run.wait() == 0, run.output()
    assert not list(tmp_path.glob("stall-*")), "a report was written"


@pytest.mark.core
def test_a_spinning_process_is_named_only_if_its_device_hangs(cluster: Cluster, tmp_path: Path) -> None:
    """The device of one rank never finishes a micro-batch, the other device finishes many. Both ranks use the CPU."""

    async def test() -> None:
        ranks, pids = await scripted_actors(cluster, "trainer rank")

        async def work() -> None:
            computing = asyncio.gather(
                ranks[0].compute.call_one("cuda", 0.05),
                ranks[1].compute.call_one("cuda", 10 * PATIENCE_S),
            )
            await within(PATIENCE_S, computing, "trainer ranks to make step 1", on="trainer ranks")

        message, _ = await stalled(cluster, tmp_path, work)
        os.kill(pids[0], signal.SIGKILL)
        hangs = rf"trainer rank 1 .*device .*a micro-batch of 8192 tokens, .* 5 s; .*process {pids[1]} "
        assert re.match(rf"controller .*step 1; {hangs}", message), message
        (report,) = tmp_path.glob("stall-*.txt")
        text = report.read_text()
        assert "in spin" in text, "the stacks show where it waits"
        assert len(re.findall("its device", text)) == 2, "in the message and in the list: only for rank 1"

    run(test)
