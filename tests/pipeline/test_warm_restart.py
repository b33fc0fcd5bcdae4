"""Warm restarts: which losses allow one, and which processes survive; prepared handles, no processes.

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
    """A run with a checkpoint of step 3 that has lost a trainer rank."""

    def __init__(self, output: Path, **checkpoint: Any) -> None:
        self.settings = RunSettings(output=output, checkpoint=CheckpointSettings(**checkpoint))
        self.folder = finished_step(self.settings)
        self.calls: list[str] = []
        self.interrupts = Interrupts()
        self.all_alive = False
        self.cluster: Any = SimpleNamespace(interrupts=self.interrupts, named=str, kill=self._kill)
        self.checkpoints: Any = SimpleNamespace(settled=self._settled, writing=False, limit_s=60.0)
        answers = SimpleNamespace(call=self._alive, call_one=self._alive)
        trainer, buffer = SimpleNamespace(ready=answers), SimpleNamespace(counts=answers)
        self.actors: Any = SimpleNamespace(trainer=trainer, buffer=buffer)
        self.unfinished = self.folder / "unfinished"
        self.unkillable: list[str] = []

    async def _kill(self, mesh: str) -> None:
        self.calls.append(f"kill {mesh}")
        if mesh in self.unkillable:
            raise OSError(f"{mesh} cannot be killed")

    async def _alive(self) -> None:
        if not self.all_alive:
            raise LOST

    async def _settled(self) -> None:
        self.calls.append("settle")
        if self.checkpoints.writing:
            self.unfinished.rename(self.folder / "checkpoints" / "step-000003")

    def find_survivors(self, error: Exception = LOST, previous: Resumed | None = None) -> Survivors | None:
        async def find() -> Survivors | None:
            return await find_survivors(
                error, self.actors, self.checkpoints, self.settings, self.cluster, self.folder, previous
            )

        return asyncio.run(find())

    def note_returned(self, survivors: Survivors) -> None:
        async def note() -> None:
            survivors.note_returned()

        asyncio.run(note())

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


def test_a_run_that_lost_a_trainer_rank_resumes_from_a_checkpoint_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trainer and buffer are killed before the checkpoint is read, because they may still be writing one."""
    stage = Stage(tmp_path)
    survivors = stage.find_survivors()
    assert survivors is not None and survivors.actors is stage.actors and survivors.cause is LOST
    assert stage.calls == ["kill trainer", "kill buffer", "settle"]
    assert (survivors.resumed.version, survivors.resumed.generation) == (3, 1)
    assert re.search("step-000003, .* kept: .*trainer rank 1 has ended", capsys.readouterr().out)
    assert [row["step"] for row in stage.rows("resumes.jsonl")] == [3]
    survivors.losses.close()
    (row,) = stage.rows("failures.jsonl")
    assert row["who"] == "trainer with its buffer" and row["cause"] == str(LOST)
    assert stage.find_survivors(previous=survivors.resumed) is None, (
        "there is no newer checkpoint: the whole run must be restarted"
    )
    finished_step(stage.settings, version=5)
    assert stage.find_survivors(previous=survivors.resumed) is not None


def test_objects_of_a_lost_run_are_released_after_a_warm_restart(tmp_path: Path) -> None:
    """Their error is held until then. Otherwise each warm restart would leak the objects of a run."""
    lost: list[weakref.ref[Stage]] = []

    def end_a_run() -> None:
        run = Stage(tmp_path / "before")
        lost.append(weakref.ref(run))
        raise RuntimeError("a rank is lost")

    def fail() -> None:
        try:
            end_a_run()
        except RuntimeError as error:
            raise ExceptionGroup("several", [error]) from error

    stage = Stage(tmp_path)
    with pytest.raises(ExceptionGroup) as raised:
        fail()
    error = raised.value
    del raised
    survivors = stage.find_survivors(error)
    assert survivors is not None and lost[0]() is not None and error.__traceback__ is not None, (
        "it may still be reported"
    )
    stage.note_returned(survivors)
    gc.collect()
    assert lost[0]() is None


def test_a_warm_restart_waits_for_a_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.checkpoints.writing = True
    (stage.folder / "checkpoints" / "step-000003").rename(stage.unfinished)
    survivors = stage.find_survivors()
    assert survivors is not None and survivors.resumed.version == 3


def test_a_mesh_that_cannot_be_killed_does_not_hide_the_original_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(tmp_path)
    stage.unkillable = ["buffer"]
    assert stage.find_survivors() is None
    assert "buffer cannot be killed" in caplog.text


@pytest.mark.parametrize("reason", ["all alive", "an error", "interrupted", "a lost host", "disabled", "no checkpoint"])
def test_some_endings_allow_no_warm_restart(tmp_path: Path, reason: str) -> None:
    stage = Stage(tmp_path, restarts=0) if reason == "disabled" else Stage(tmp_path)
    stage.all_alive = reason == "all alive"
    if reason == "interrupted":
        stage.interrupts.received = 15
    elif reason == "a lost host":
        stage.interrupts.reason = RuntimeError("the host is lost")
    elif reason == "no checkpoint":
        (stage.folder / "checkpoints" / "step-000003").rename(stage.unfinished)
    assert stage.find_survivors(KeyError("a mistake") if reason == "an error" else LOST) is None
    assert not stage.calls and not (stage.folder / "failures.jsonl").exists()


def test_a_broken_checkpoint_prevents_a_warm_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(tmp_path)
    (open_run(stage.folder, stage.settings).checkpoint / "buffer.groups").write_bytes(b"")
    assert stage.find_survivors() is None
    assert "warm restart failed" in caplog.text


def test_a_broken_newer_checkpoint_allows_no_second_resume_from_the_same_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(tmp_path)
    survivors = stage.find_survivors()
    assert survivors is not None
    finished_step(stage.settings, version=5)
    (stage.folder / "checkpoints" / "step-000005" / "buffer.groups").write_bytes(b"")
    assert stage.find_survivors(previous=survivors.resumed) is None
    assert "step-000003, from which the run has already resumed" in caplog.text


class Pool:
    """A started pool of three processes, of which process 1 does not answer and process 2 is missing."""

    def __init__(self) -> None:
        self.killed: list[str] = []
        self.refused: set[int] = set()
        """Indices at which no process starts."""
        cluster: Any = SimpleNamespace(kill=self._kill, locate=self._nothing)
        started = itertools.count()

        def spawn(index: int) -> Any:
            return f"mesh of {index}", f"process {next(started)}"

        factory = ActorFactory[str](cluster, spawn, self._set_up)
        self.pool = ActorPool[str]("generator", "generator", factory=factory)

    async def restarted(self, refused: set[int]) -> ActorPool[str]:
        """Start the whole pool again and return it."""
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


def test_actors_that_can_join_survive_and_the_rest_are_replaced() -> None:
    harness = Pool()
    pool = asyncio.run(harness.restarted(set()))
    assert list(pool.handles) == [0, 1, 2] and pool.handles == pool.latest and not pool.lost
    assert pool.handles[0] == "process 0" and {pool.handles[1], pool.handles[2]} == {"process 3", "process 4"}
    assert sorted(harness.killed) == ["mesh of 1", "mesh of 2"]


def test_an_actor_that_does_not_restart_is_left_out_while_another_one_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For example, its machine is gone. At the start of a run, all actors have to start."""
    harness = Pool()
    pool = asyncio.run(harness.restarted({1, 2}))
    assert pool.handles == {0: "process 0"} and pool.lost == [1, 2]
    assert sorted(harness.killed) == ["mesh of 1"] * 2 + ["mesh of 2"] * 2, "nothing is left of failed starts"
    assert re.search("generator 2 .*: no machine for 2", caplog.text)
    with pytest.raises(AllActorsLost, match="generator"):
        asyncio.run(lose_last_actor(pool))
    with pytest.raises(RuntimeError, match="no machine for 0"):
        asyncio.run(Pool().restarted({0, 1, 2}))
    fresh = Pool()
    fresh.refused = {2}
    with pytest.raises(RuntimeError, match="no machine for 2"):
        asyncio.run(fresh.pool.start_all(3))


async def lose_last_actor(pool: Any) -> None:
    none: ActorPool[Any] = ActorPool("rollout worker", "rollout")
    publisher: Any = SimpleNamespace(replicas=SimpleNamespace(on_lost=None, lost={}))
    recovery = Recovery(pool, none, publisher, publisher, RecoverySettings())
    recovery._may_restart(pool, 0, LOST)
    recovery._remove(pool, 0, LOST)


def test_workers_survive_only_if_their_inputs_are_unchanged() -> None:
    """A recipe that is called again may pass another task or other stages."""

    def survive(rows: list[str], *stages: str) -> tuple[bool, list[str]]:
        async def restart() -> tuple[bool, list[str]]:
            harness = Pool()
            inputs: Any = ByValue(["a row"]), ByValue(("a stage",))
            now: Any = ByValue(rows), ByValue(stages)
            await harness.pool.start_all(2)
            pool: Any = harness.pool
            workers = await _reusable_workers(Actors(pool, pool, pool, pool, worker_inputs=inputs), now)
            return workers is pool, sorted(harness.killed)

        return asyncio.run(restart())

    assert survive(["a row"], "a stage") == (True, [])
    assert survive(["another"], "a stage") == (False, ["mesh of 0", "mesh of 1"])
    assert survive(["a row"]) == (False, ["mesh of 0", "mesh of 1"])
