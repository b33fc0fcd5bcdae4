"""Which losses a run survives with the processes that it has, and which of these stay: prepared handles, no processes.

Real processes are killed and stopped in tests/recipe/test_resume.py.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_rl.checkpoint.settings import CheckpointSettings
from monarch_rl.errors import AllActorsLost
from monarch_rl.pipeline.actor_pool import ActorFactory, ActorPool
from monarch_rl.pipeline.recovery import Recovery, RecoverySettings
from monarch_rl.pipeline.resume import Resumed, open_run
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.pipeline.start import Actors, _reusable_workers
from monarch_rl.pipeline.warm_restart import Survivors, find_survivors
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.signals import Interrupts
from tests.pipeline.test_resume import finished_step

LOST = RuntimeError("the process of trainer rank 1 has ended")


class Stage:
    """A run with a checkpoint of step 3, which has lost a trainer rank."""

    def __init__(self, output: Path, **checkpoint: Any) -> None:
        self.settings = RunSettings(output=output, checkpoint=CheckpointSettings(**checkpoint))
        self.folder = finished_step(self.settings)
        self.did: list[str] = []
        self.interrupts = Interrupts()
        self.lives = False
        self.cluster: Any = SimpleNamespace(interrupts=self.interrupts, named=str, kill=self._kill)
        self.checkpoints: Any = SimpleNamespace(settled=self._settled, writing=False, limit_s=60.0)
        answers = SimpleNamespace(call=self._alive, call_one=self._alive)
        trainer, buffer = SimpleNamespace(ready=answers), SimpleNamespace(counts=answers)
        self.actors: Any = SimpleNamespace(trainer=trainer, buffer=buffer)
        self.elsewhere = self.folder / "elsewhere"
        self.refuses: list[str] = []

    async def _kill(self, mesh: str) -> None:
        self.did.append(f"kill {mesh}")
        if mesh in self.refuses:
            raise OSError(f"{mesh} cannot be killed")

    async def _alive(self) -> None:
        if not self.lives:
            raise LOST

    async def _settled(self) -> None:
        self.did.append("settle")
        if self.checkpoints.writing:
            self.elsewhere.rename(self.folder / "checkpoints" / "step-000003")

    def keep(self, error: Exception = LOST, before: Resumed | None = None) -> Survivors | None:
        async def kept() -> Survivors | None:
            return await find_survivors(
                error, self.actors, self.checkpoints, self.settings, self.cluster, self.folder, before
            )

        return asyncio.run(kept())

    def go_on(self, kept: Survivors) -> None:
        async def returned() -> None:
            kept.note_returned()

        asyncio.run(returned())

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


def test_a_run_without_a_trainer_rank_goes_on_from_its_checkpoint_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that trains and buffers is killed before the checkpoint is read: it may still be writing one."""
    stage = Stage(tmp_path)
    kept = stage.keep()
    assert kept is not None and kept.actors is stage.actors and kept.cause is LOST
    assert stage.did == ["kill trainer", "kill buffer", "settle"]
    assert (kept.resumed.version, kept.resumed.generation) == (3, 1)
    assert re.search("step-000003, .* kept: .*trainer rank 1 has ended", capsys.readouterr().out)
    assert [row["step"] for row in stage.rows("resumes.jsonl")] == [3]
    kept.losses.close()
    (row,) = stage.rows("failures.jsonl")
    assert row["who"] == "trainer with its buffer" and row["cause"] == str(LOST)
    assert stage.keep(before=kept.resumed) is None, "there is no newer checkpoint: all of it is started again"
    finished_step(stage.settings, version=5)
    assert stage.keep(before=kept.resumed) is not None


def test_what_a_lost_run_had_is_released_once_another_goes_on(tmp_path: Path) -> None:
    """Although its error is kept until then: else a run that often goes on would have all runs before."""
    had: list[weakref.ref[Stage]] = []

    def end_a_run() -> None:
        run = Stage(tmp_path / "before")
        had.append(weakref.ref(run))
        raise RuntimeError("a rank is lost")

    def fail() -> None:
        try:
            end_a_run()
        except RuntimeError as error:
            raise ExceptionGroup("several", [error]) from error

    stage = Stage(tmp_path)
    with pytest.raises(ExceptionGroup) as told:
        fail()
    error = told.value
    del told
    kept = stage.keep(error)
    assert kept is not None and had[0]() is not None and error.__traceback__ is not None, "it may still have to be told"
    stage.go_on(kept)
    gc.collect()
    assert had[0]() is None


def test_a_checkpoint_that_is_being_written_counts(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.checkpoints.writing = True
    (stage.folder / "checkpoints" / "step-000003").rename(stage.elsewhere)
    kept = stage.keep()
    assert kept is not None and kept.resumed.version == 3


def test_what_cannot_be_killed_does_not_hide_what_ended_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(tmp_path)
    stage.refuses = ["buffer"]
    assert stage.keep() is None
    assert "buffer cannot be killed" in caplog.text


@pytest.mark.parametrize(
    "reason", ["all live", "a mistake", "interrupted", "a lost host", "not wanted", "no checkpoint"]
)
def test_what_a_run_does_not_go_on_after_in_place(tmp_path: Path, reason: str) -> None:
    stage = Stage(tmp_path, restarts=0) if reason == "not wanted" else Stage(tmp_path)
    stage.lives = reason == "all live"
    if reason == "interrupted":
        stage.interrupts.received = 15
    elif reason == "a lost host":
        stage.interrupts.reason = RuntimeError("the host is lost")
    elif reason == "no checkpoint":
        (stage.folder / "checkpoints" / "step-000003").rename(stage.elsewhere)
    assert stage.keep(KeyError("a mistake") if reason == "a mistake" else LOST) is None
    assert not stage.did and not (stage.folder / "failures.jsonl").exists()


def test_a_broken_checkpoint_leaves_the_run_to_who_started_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(tmp_path)
    (open_run(stage.folder, stage.settings).checkpoint / "buffer.groups").write_bytes(b"")
    assert stage.keep() is None
    assert "warm restart failed" in caplog.text


def test_a_newer_checkpoint_that_is_broken_is_no_way_to_go_on_from_the_same_one_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(tmp_path)
    kept = stage.keep()
    assert kept is not None
    finished_step(stage.settings, version=5)
    (stage.folder / "checkpoints" / "step-000005" / "buffer.groups").write_bytes(b"")
    assert stage.keep(before=kept.resumed) is None
    assert "step-000003, from which the run has already resumed" in caplog.text


class Pool:
    """A pool of three processes that were started, and lost: process 1 does not answer, process 2 is not there."""

    def __init__(self) -> None:
        self.killed: list[str] = []
        self.refused: set[int] = set()
        """The indices at which no process starts."""
        cluster: Any = SimpleNamespace(kill=self._kill, locate=self._nothing)
        started = itertools.count()

        def spawn(index: int) -> Any:
            return f"mesh of {index}", f"process {next(started)}"

        factory = ActorFactory[str](cluster, spawn, self._set_up)
        self.pool = ActorPool[str]("generator", "generator", factory=factory)

    async def started(self, refused: set[int]) -> ActorPool[str]:
        """All of it, started once more."""
        await self.pool.start_all(3)
        self.pool.handles.pop(2)
        self.refused = refused
        await self.pool.start_all(3, self._join)
        return self.pool

    async def _join(self, index: int, _: str) -> None:
        if index == 1 or index in self.refused:
            raise RuntimeError("it does not answer")

    async def _set_up(self, index: int, _: str) -> None:
        if index in self.refused:
            raise RuntimeError(f"no machine for {index}")

    async def _kill(self, mesh: str) -> None:
        self.killed.append(mesh)

    async def _nothing(self, *_: Any) -> None:
        return


def test_those_of_a_pool_that_can_join_stay_and_others_are_started_in_the_place_of_the_rest() -> None:
    given = Pool()
    pool = asyncio.run(given.started(set()))
    assert list(pool.handles) == [0, 1, 2] and pool.handles == pool.latest and not pool.lost
    assert pool.handles[0] == "process 0" and {pool.handles[1], pool.handles[2]} == {"process 3", "process 4"}
    assert sorted(given.killed) == ["mesh of 1", "mesh of 2"]


def test_one_that_does_not_start_again_is_left_out_as_long_as_another_one_is_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As on a machine that is no more. At the start of a run all have to come up."""
    given = Pool()
    pool = asyncio.run(given.started({1, 2}))
    assert pool.handles == {0: "process 0"} and pool.lost == [1, 2]
    assert sorted(given.killed) == ["mesh of 1"] * 2 + ["mesh of 2"] * 2, "nothing is left of what did not start"
    assert re.search("generator 2 .*: no machine for 2", caplog.text)
    with pytest.raises(AllActorsLost, match="generator"):
        asyncio.run(loses_its_last(pool))
    with pytest.raises(RuntimeError, match="no machine for 0"):
        asyncio.run(Pool().started({0, 1, 2}))
    fresh = Pool()
    fresh.refused = {2}
    with pytest.raises(RuntimeError, match="no machine for 2"):
        asyncio.run(fresh.pool.start_all(3))


async def loses_its_last(pool: Any) -> None:
    none: ActorPool[Any] = ActorPool("rollout worker", "rollout")
    publisher: Any = SimpleNamespace(replicas=SimpleNamespace(on_lost=None, lost={}))
    recovery = Recovery(pool, none, publisher, publisher, RecoverySettings())
    recovery._may_restart(pool, 0, LOST)
    recovery._remove(pool, 0, LOST)


def test_workers_stay_only_for_what_they_were_given() -> None:
    """A recipe that is called again may hand over another task, or other stages."""

    def kept(rows: list[str], *stages: str) -> tuple[bool, list[str]]:
        async def keep() -> tuple[bool, list[str]]:
            given = Pool()
            inputs: Any = ByValue(["a row"]), ByValue(("a stage",))
            now: Any = ByValue(rows), ByValue(stages)
            await given.pool.start_all(2)
            there: Any = given.pool
            workers = await _reusable_workers(Actors(there, there, there, there, worker_inputs=inputs), now)
            return workers is there, sorted(given.killed)

        return asyncio.run(keep())

    assert kept(["a row"], "a stage") == (True, [])
    assert kept(["another"], "a stage") == (False, ["mesh of 0", "mesh of 1"])
    assert kept(["a row"]) == (False, ["mesh of 0", "mesh of 1"])
