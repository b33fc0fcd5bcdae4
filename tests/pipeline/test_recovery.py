"""Which actors are restarted and how often, and how a run ends that cannot continue: prepared handles, no processes.

Real processes are killed, stopped and made to fail in tests/recipe/test_chaos.py.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_rl.errors import AllActorsLost, DeadlineExceeded
from monarch_rl.pipeline.actor_pool import ActorFactory, ActorPool
from monarch_rl.pipeline.recovery import LostProcesses, Recovery, RecoverySettings
from monarch_rl.simulate.clock import run_virtual
from tests.patience import until

STATE = "has blocked its event loop for 16 s at mistakes.py:62"


class Worker:
    """A handle of a rollout worker or a generator; ``fail`` ends it."""

    def __init__(self) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.replaced: list[tuple[int, Any]] = []
        self.runs = 0
        self.refuses_replacements = False
        for name in ("block_until_lost", "run", "replace"):
            setattr(self, name, SimpleNamespace(call_one=getattr(self, f"_{name}")))

    async def _block_until_lost(self) -> None:
        await asyncio.shield(self.end)

    async def _run(self) -> None:
        self.runs += 1
        await asyncio.shield(self.work)

    async def _replace(self, index: int, handle: Any) -> None:
        if self.refuses_replacements:
            raise DeadlineExceeded("waited 60 s")
        self.replaced.append((index, handle))

    def fail(self, why: str) -> None:
        self.end.set_exception(RuntimeError(why))


class Stage:
    """Two generators and two workers, and a publisher and a buffer that record their calls."""

    def __init__(self, folder: Path, replaceable: bool = True, **settings: Any) -> None:
        self.started: dict[str, list[Worker]] = {"generator": [], "rollout worker": []}
        self.stopped: list[Any] = []
        self.events: list[tuple[Any, ...]] = []
        self.broken: dict[str, str] = {}
        """Maps a kind of actor to the error with which its replacements fail to start."""
        cluster: Any = SimpleNamespace(kill=self._stop, locate=self._locate)

        def pool(kind: str) -> ActorPool[Any]:
            factory = ActorFactory[Any](cluster, lambda index: self._spawn(kind, index), lambda *_: self._set_up(kind))
            workers = {index: Worker() for index in range(2)}
            return ActorPool(kind, kind.split()[0], workers, factory if replaceable else None)

        self.generators, self.workers = pool("generator"), pool("rollout worker")
        replicas = SimpleNamespace(on_lost=None, lost={}, notify_workers=self._notify_workers)
        publisher: Any = SimpleNamespace(replicas=replicas, add=self._add, remove_replica=self._recording("remove"))
        self.publisher_refuses = False
        self.hold: asyncio.Event | None = None
        """If set, ``notify_workers`` waits for it."""
        self.publisher = publisher
        buffer: Any = SimpleNamespace(
            requeue=SimpleNamespace(call_one=self._recording("requeue", [4, 5])),
            close=SimpleNamespace(call_one=self._recording("close")),
            counts=SimpleNamespace(call_one=self._counts),
        )
        self.buffer_lost = False
        self.file = folder / "failures.jsonl"
        self.recovery = Recovery(self.generators, self.workers, publisher, buffer, RecoverySettings(**settings), folder)

    async def _counts(self) -> None:
        if self.buffer_lost:
            raise RuntimeError("the buffer has ended")

    async def _stop(self, mesh: Any) -> None:
        self.stopped.append(mesh)

    async def _locate(self, mesh: Any) -> None:
        """These tests do not need the location of processes."""

    def _spawn(self, kind: str, index: int) -> tuple[Any, Worker]:
        worker = Worker()
        self.started[kind].append(worker)
        return f"mesh of {kind} {index}", worker

    async def _set_up(self, kind: str) -> None:
        if kind in self.broken:
            raise ValueError(self.broken[kind])

    async def _add(self, index: int, generator: Any) -> None:
        self.events.append(("add", index, generator))
        if self.publisher_refuses:
            raise RuntimeError("no version in 3 attempts")
        self.publisher.replicas.lost.pop(index, None)

    async def _notify_workers(self) -> None:
        if self.hold is not None:
            self.events.append(("dispatch waits",))
            await self.hold.wait()
        self.events.append(("dispatch",))

    def _recording(self, event: str, answer: Any = None) -> Callable[..., Awaitable[Any]]:
        async def record(*values: Any) -> Any:
            self.events.append((event, *values))
            return answer

        return record

    def losses(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def has_removed(self) -> bool:
        return any("removed" in row for row in self.losses())

    def returns(self) -> float:
        return self.recovery.metrics()["recovery/returned"]


def run_on_stage(folder: Path, test: Callable[[Stage], Awaitable[None]], **settings: Any) -> None:
    """Run ``test`` in virtual time."""

    async def go() -> None:
        await test(Stage(folder, **settings))

    run_virtual(go())


def test_a_lost_generator_is_replaced_and_added(tmp_path: Path) -> None:
    async def test(stage: Stage) -> None:
        async with stage.recovery.supervising():
            stage.generators.handles[1].fail("process ended\nKilled(sig=9)")
            await until(stage.returns, "a return")
        (new,) = stage.started["generator"]
        assert stage.events == [("remove", 1, "Killed(sig=9)"), ("add", 1, new)]
        assert stage.generators.handles[1] is new
        assert [worker.replaced for worker in stage.workers.handles.values()] == [[(1, new)]] * 2
        lost, back = stage.losses()
        assert lost["who"] == back["who"] == "generator 1" and "Killed(sig=9)" in lost["cause"]
        assert back["back_after_s"] >= 0
        assert stage.recovery.metrics() == {"recovery/lost": 1.0, "recovery/returned": 1.0}

    run_on_stage(tmp_path, test)


@pytest.mark.parametrize("cause", ["its process", "its work", "the watch"])
def test_the_groups_of_a_lost_worker_are_requeued_and_a_new_worker_runs(tmp_path: Path, cause: str) -> None:
    async def test(stage: Stage) -> None:
        async with stage.recovery.supervising(), stage.recovery.rolling_out():
            lost = stage.workers.handles[0]
            await asyncio.sleep(0)
            if cause == "its process":
                lost.fail("Killed(sig=9)")
            elif cause == "its work":
                lost.work.set_exception(RuntimeError("no such item"))
            else:
                assert await stage.recovery.recover("rollout worker 0", STATE, 4)
            await until(stage.returns, "a return")
            (new,) = stage.started["rollout worker"]
            (_, name, dropped), dispatched = stage.events
            assert name == "rollout worker 0" and dispatched == ("dispatch",)
            if cause == "the watch":
                group, failure = dropped
                assert group == 4 and STATE in failure.report
            else:
                assert dropped is None
            await until(lambda: new.runs, "its run")  # the task that calls run starts after the return is recorded
            stage.workers.handles[1].work.set_result(None)
            new.work.set_result(None)  # has an effect only because run was called
        assert new.runs == 1
        assert stage.events[-1] == ("close",)
        assert (stage.losses()[0]["cause"] == f"rollout worker 0 {STATE}") == (cause == "the watch")

    run_on_stage(tmp_path, test)


def test_a_replica_that_the_publisher_removes_is_replaced(tmp_path: Path) -> None:
    async def test(stage: Stage) -> None:
        async with stage.recovery.supervising():
            await asyncio.sleep(0)
            stage.publisher.replicas.on_lost("generator 0", RuntimeError("no version in 3 attempts"))
            await until(stage.returns, "a return")
        assert stage.losses()[0]["cause"] == "no version in 3 attempts"
        assert stage.publisher.replicas.on_lost is None

    run_on_stage(tmp_path, test)


def test_a_replacement_that_does_not_start_is_retried_up_to_the_limit(tmp_path: Path) -> None:
    async def test(stage: Stage) -> None:
        stage.broken["generator"] = "out of memory"
        async with stage.recovery.supervising():
            stage.generators.handles[0].fail("Killed(sig=9)")
            await until(stage.has_removed, "a removal")
            assert len(stage.started["generator"]) == 2 and list(stage.generators.handles) == [1]
            assert await stage.recovery.recover("generator 1", STATE), "a replacement may be started"

    run_on_stage(tmp_path, test, restarts=2)


def test_a_crash_loop_ends_with_its_first_cause(tmp_path: Path) -> None:
    async def test(stage: Stage) -> None:
        stage.broken["rollout worker"] = "a consequence"
        with pytest.raises(AllActorsLost) as ended:
            async with stage.recovery.supervising():
                stage.workers.handles[1].fail("the disk is full")
                await until(stage.has_removed, "a removal")
                stage.workers.handles[0].fail("Killed(sig=9)")
                await asyncio.sleep(30)
        assert re.search(
            r"rollout worker 1: the disk is full(?s:.*) rollout worker 0, 3 times: a conseq", str(ended.value)
        )

    run_on_stage(tmp_path, test, restarts=2)


def test_the_first_cause_belongs_to_the_current_series_of_losses(tmp_path: Path) -> None:
    """Each loss comes within ``per_s`` of the previous one, although the whole series takes longer."""

    async def test(stage: Stage) -> None:
        with pytest.raises(AllActorsLost) as ended:
            async with stage.recovery.supervising():
                stage.workers.handles[1].fail("unrelated")
                await asyncio.sleep(150)
                for index, why in ((1, "the disk is full"), (0, "one consequence"), (1, "another"), (0, "and another")):
                    stage.workers.handles[index].fail(why)
                    await asyncio.sleep(60)
                stage.broken["rollout worker"] = "no device"
                for index in (1, 0):
                    stage.workers.handles[index].fail("the last of them")
                    await asyncio.sleep(30)
        assert stage.returns() == 5
        assert "rollout worker 1: the disk is full" in str(ended.value) and "unrelated" not in str(ended.value)

    run_on_stage(tmp_path, test, restarts=1, per_s=100)


def test_a_removed_process_is_ended(tmp_path: Path) -> None:
    async def test(stage: Stage) -> None:
        async with stage.recovery.supervising():
            stage.publisher_refuses = True
            stage.generators.handles[0].fail("Killed(sig=9)")
            await until(stage.has_removed, "a removal")
            assert stage.stopped == ["mesh of generator 0"] * 2
            assert list(stage.generators.handles) == [1]

    run_on_stage(tmp_path, test, restarts=2)


def test_a_worker_that_starts_as_rollouts_begin_is_run_once(tmp_path: Path) -> None:
    async def test(stage: Stage) -> None:
        async with stage.recovery.supervising():
            stage.hold = asyncio.Event()
            stage.workers.handles[0].fail("Killed(sig=9)")
            await until(lambda: ("dispatch waits",) in stage.events, "the dispatch")
            async with stage.recovery.rolling_out():
                stage.hold.set()
                await until(stage.returns, "a return")
                await asyncio.sleep(0.01)
                assert [worker.runs for worker in stage.workers.handles.values()] == [1, 1]
                for worker in stage.workers.handles.values():
                    worker.work.set_result(None)

    run_on_stage(tmp_path, test)


def test_a_worker_that_does_not_accept_a_new_generator_is_replaced_too(tmp_path: Path) -> None:
    async def test(stage: Stage) -> None:
        async with stage.recovery.supervising():
            stage.workers.handles[1].refuses_replacements = True
            stage.generators.handles[0].fail("Killed(sig=9)")
            await until(lambda: stage.returns() == 2, "two returns")
        assert {row["who"] for row in stage.losses()} == {"generator 0", "rollout worker 1"}

    run_on_stage(tmp_path, test)


def test_a_process_without_a_registered_name_is_identified_by_its_mesh(tmp_path: Path) -> None:
    async def test(stage: Stage) -> None:
        async with stage.recovery.supervising():
            await asyncio.sleep(0)
            assert await stage.recovery.recover("generator1 0", STATE)
            assert not await stage.recovery.recover("trainer 0", STATE)
            await until(stage.returns, "a return")
        assert stage.losses()[0]["who"] == "generator 1"

    run_on_stage(tmp_path, test)


def test_a_replica_lost_before_the_supervision_is_replaced(tmp_path: Path) -> None:
    """For example, a replica that did not load the first version."""

    async def test(stage: Stage) -> None:
        stage.publisher.replicas.lost[1] = "no version in 3 attempts"
        async with stage.recovery.supervising():
            await until(stage.returns, "a return")
        assert stage.losses()[0]["cause"] == "no version in 3 attempts"

    run_on_stage(tmp_path, test)


def test_a_stalled_disk_does_not_delay_the_report_of_a_loss(tmp_path: Path) -> None:
    """A full pipe blocks its writer. This must not be the controller, which would look as if it hung."""
    os.mkfifo(tmp_path / "failures.jsonl")
    pipe = os.open(tmp_path / "failures.jsonl", os.O_RDWR | os.O_NONBLOCK)
    filled, read = 0, b""
    with suppress(BlockingIOError):
        while True:
            filled += os.write(pipe, b"\n" * 4096)
    losses = LostProcesses(60.0, tmp_path / "failures.jsonl")
    losses.note_lost("generator 0", RuntimeError("Killed(sig=9)"))
    losses.note_returned("generator 0", 1.5)
    while len(read) < filled:
        read += os.read(pipe, filled - len(read))
    losses.close()
    rows = [json.loads(line) for line in os.read(pipe, 1 << 16).splitlines() if line]
    os.close(pipe)
    assert [row["who"] for row in rows] == ["generator 0"] * 2 and rows[1]["back_after_s"] == 1.5


def test_losses_long_ago_do_not_count(tmp_path: Path) -> None:
    async def test(stage: Stage) -> None:
        async with stage.recovery.supervising():
            for times in range(1, 5):
                stage.generators.handles[0].fail("Killed(sig=9)")
                await until(functools.partial(lambda so_far: stage.returns() == so_far, times), "a return")
                await asyncio.sleep(200)
        assert len(stage.started["generator"]) == 4

    run_on_stage(tmp_path, test, restarts=1, per_s=100)


def test_without_restarts_a_run_continues_until_the_last_replica_is_lost(tmp_path: Path) -> None:
    async def test(stage: Stage) -> None:
        async with stage.recovery.supervising():
            await asyncio.sleep(0)
            assert await stage.recovery.recover("the engine of generator 1", STATE)
            await until(lambda: list(stage.generators.handles) == [0], "a removal")
            assert not await stage.recovery.recover("generator 0", STATE)
            assert not await stage.recovery.recover("trainer rank 0", STATE)

    run_on_stage(tmp_path, test, restarts=0)


def test_a_worker_that_missed_a_deadline_on_another_process_ends_the_run(tmp_path: Path) -> None:
    async def test(stage: Stage) -> None:
        with pytest.raises(DeadlineExceeded, match="a free slot"):
            async with stage.recovery.supervising(), stage.recovery.rolling_out():
                stage.workers.handles[0].work.set_exception(DeadlineExceeded("waited 5 s for a free slot"))
                await asyncio.sleep(30)
        assert not stage.started["rollout worker"]

    run_on_stage(tmp_path, test)


def test_workers_that_fail_because_the_buffer_is_lost_are_not_restarted(tmp_path: Path) -> None:
    async def test(stage: Stage) -> None:
        stage.buffer_lost = True
        with pytest.raises(RuntimeError, match="no answer to admit_many"):
            async with stage.recovery.supervising(), stage.recovery.rolling_out():
                for worker in stage.workers.handles.values():
                    worker.work.set_exception(RuntimeError("no answer to admit_many"))
                await asyncio.sleep(30)
        assert not stage.stopped and not stage.losses() and len(stage.workers.handles) == 2

    run_on_stage(tmp_path, test)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"recovery\.restarts"):
        RecoverySettings(restarts=-1)
    with pytest.raises(ValueError, match=r"RecoverySettings\.per_s "):
        RecoverySettings(per_s=0)
