"""When checkpoints are saved, and of which version; over simulated actors."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import resource
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_rl.buffer.actor import read_state
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.checkpoint import folders
from monarch_rl.checkpoint.folders import GROUPS, TRAINER, Staged, complete, newest_whole, read_manifest
from monarch_rl.checkpoint.journal import LOST
from monarch_rl.checkpoint.settings import CheckpointSettings
from monarch_rl.pipeline.checkpoints import REPEAT_ERROR_S, Checkpoints, ControllerState
from monarch_rl.pipeline.observer import FrozenMeter, Observer
from monarch_rl.pipeline.rollout_record import RolloutRecord
from monarch_rl.pipeline.run import Run
from monarch_rl.runtime import wait_registry
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.simulate.costs import Costs
from monarch_rl.simulate.handles import LocalMesh
from monarch_rl.simulate.run import Plan, SimulatedTrainer, run_settings, simulated_actors
from monarch_rl.trainer.supervised import SupervisedPlan
from tests.patience import happened, until

PLAN = Plan(groups_per_step=4, group_size=2, trainer_devices=1, replicas=2, buffer=BufferSettings(1))
DISK_S = 300.0
"""Virtual seconds for writing a checkpoint; many steps fit into them."""
SUPERVISED_S = 3.0
"""Virtual seconds of a supervised step."""


class SavingTrainer(SimulatedTrainer):
    """A trainer whose checkpoint is only a version number, on a slow disk."""

    version = copies = 0
    broken = False
    """Whether writing fails, as if one rank had waited in vain for another."""
    plans: Sequence[SupervisedPlan] = ()
    """Plans of the supervised rows that the trainer received."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.new_groups: list[bool] = []
        """For each staged copy, whether it used a new process group."""

    async def update(self, version: int, batch_deadline_s: float) -> dict[str, float]:
        metrics = await super().update(version, batch_deadline_s)
        self.version = version + 1
        return metrics

    async def use_rows(self, plan: SupervisedPlan) -> int:
        self.plans = [*self.plans, plan]
        return len(plan.rows.load())

    async def supervised(self, version: int) -> dict[str, float]:
        await asyncio.sleep(SUPERVISED_S)
        self.version = version + 1
        return {"supervised_loss": 1.0, "tokens": 0.0, "wait_s": 0.0, "step_s": SUPERVISED_S}

    async def stage(self, new_group: bool) -> Staged:
        self.copies += 1
        self.new_groups.append(new_group)
        return Staged(self.version, self.version)

    async def write_checkpoint(self, folder: str) -> list[Any]:
        if self.broken:
            raise OSError("trainer rank 0 did not write together with the others")
        (Path(folder) / TRAINER / "shard").write_bytes(bytes(100_000))
        await asyncio.sleep(DISK_S)
        return []


@asynccontextmanager
async def simulated_run(
    folder: Path, checkpoints: CheckpointSettings, **settings: Any
) -> AsyncIterator[tuple[Run, SavingTrainer]]:
    actors = simulated_actors(PLAN, Costs(), grain=8)
    trainer = SavingTrainer(Costs(), PLAN.trainer_devices, 8, actors.buffer)
    mesh: Any = LocalMesh([trainer])
    run_plan = replace(run_settings(PLAN, 1e9), checkpoint=checkpoints, **settings)
    async with Run.open(run_plan, folder=folder) as run:
        await run.begin(replace(actors, trainer=mesh))
        yield run, trainer


def newest(folder: Path) -> int:
    """Return the version of the newest checkpoint; all its parts must have it."""
    version, path = list(complete(folder / "checkpoints").items())[-1]
    assert read_manifest(path).version == read_state(path / GROUPS)["version"] == version
    return version


@pytest.mark.parametrize("under_way_s", [0.0, 1.0, 100.0])
def test_a_batch_that_comes_while_the_run_ends_costs_no_checkpoint(tmp_path: Path, under_way_s: float) -> None:
    """The disk is still writing another checkpoint, and the update in flight has its batch or still waits for it."""

    async def ends() -> None:
        async with simulated_run(tmp_path, CheckpointSettings(every_steps=1, grace_s=1e6)) as (run, trainer):
            async for step in run.steps(100):
                await run.step()
                if step == 2:
                    updating = asyncio.ensure_future(run.update())
                    await asyncio.sleep(under_way_s)
                    updating.cancel()
                    copies = trainer.copies
                    try:
                        raise KeyError("a mistake")
                    finally:
                        captured.extend([run, trainer, copies])

    captured: list[Any] = []
    with pytest.raises(KeyError, match="a mistake"):
        run_virtual(ends())
    run, trainer, copies = captured
    assert newest(tmp_path) == run.version == trainer.version >= 2
    assert trainer.copies == copies + 1, "the model is copied once"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == run.version


def test_a_signal_while_the_last_checkpoint_is_written_leaves_it_whole(tmp_path: Path) -> None:
    async def ends() -> None:
        async with simulated_run(tmp_path, CheckpointSettings(every_minutes=1e6, grace_s=1e6)) as (run, trainer):
            trainers.append(trainer)
            async for step in run.steps(3):
                await run.step()
                if step == 3:
                    task = asyncio.current_task()
                    assert task is not None
                    asyncio.get_running_loop().call_later(DISK_S / 2, task.cancel)

    trainers: list[SavingTrainer] = []
    with pytest.raises(asyncio.CancelledError):
        run_virtual(ends())
    assert newest(tmp_path) == 3 and trainers[0].copies == 1
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.parametrize(("minutes", "saved"), [(1e6, [2]), (0.0, [])])
def test_a_loop_that_is_left_early_ends_with_a_checkpoint(tmp_path: Path, minutes: float, saved: list[int]) -> None:
    """Unless no checkpoints are due between steps: code after the loop may still fail."""

    async def left() -> None:
        async with simulated_run(tmp_path, CheckpointSettings(every_minutes=minutes)) as (run, _):
            async for step in run.steps(100):
                await run.step()
                if step == 2:
                    break

    run_virtual(left())
    assert list(complete(tmp_path / "checkpoints")) == saved


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder))
    yield folder
    while subprocess.run(["umount", "--lazy", str(folder)], capture_output=True).returncode == 0:
        pass


def mount(*arguments: str) -> None:
    try:
        subprocess.run(["mount", *arguments], check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this test must be allowed to mount a file system: {getattr(error, 'stderr', error)}")


def fill(disk: Path) -> None:
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def empty(disk: Path) -> None:
    (disk / "filler").unlink()


def refuse_bytes(disk: Path) -> None:
    """Let no file of this process grow; unlike mounts, this needs no privileges."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def accept_bytes(disk: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def make_read_only(disk: Path) -> None:
    folder = str(disk / "checkpoints")
    mount("--bind", folder, folder)
    mount("-o", "remount,bind,ro", folder)


def make_writable(disk: Path) -> None:
    subprocess.run(["umount", str(disk / "checkpoints")], check=True, timeout=60)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread ends
@pytest.mark.parametrize(
    ("refuse", "accept"), [(refuse_bytes, accept_bytes), (fill, empty), (make_read_only, make_writable)]
)
@pytest.mark.usefixtures("capsys")  # pytest's own files could not grow
def test_a_full_or_read_only_disk_costs_lines_and_checkpoints_but_no_step(
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
    refuse: Callable[[Path], None],
    accept: Callable[[Path], None],
) -> None:
    """It is reported once and counted. The last good checkpoint stays; the next one is saved once the disk works."""
    disk: Path = request.getfixturevalue("tmp_path" if refuse is refuse_bytes else "small_disk")
    failed, saved = [], set[int]()

    async def trains() -> None:
        async with simulated_run(disk, CheckpointSettings(every_steps=2, every_minutes=0)) as (run, _):
            async for step in run.steps(14):
                metrics = await run.step()
                failed.append(metrics["checkpoint/failed"])
                await run._checkpoints.settled()
                if step == 5:
                    await asyncio.to_thread(refuse, disk)
                if step == 11:
                    saved.update(complete(disk / "checkpoints"))
                    await asyncio.to_thread(accept, disk)
        assert run.version == 14

    with caplog.at_level(logging.WARNING):
        try:
            run_virtual(trains())
        finally:
            accept_bytes(disk)
    assert failed[:6] == [0] * 6 and 2 <= failed[-1] <= 3 and saved == {2, 4}
    assert newest(disk) == 14
    messages = [record.getMessage() for record in caplog.records]
    assert sum("of step 6: " in text and "of step 4" in text for text in messages) == 1
    assert sum("no checkpoint of step" in text for text in messages) == 1
    rows = [json.loads(line) for line in (disk / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 14 - rows[-1]["checkpoint/lost_lines"] and (rows[0]["step"], rows[-1]["step"]) == (1, 14)
    assert (len(rows) < 14) == (refuse is not make_read_only)


def test_trainer_ranks_use_a_new_process_group_after_a_failed_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure of the controller itself needs no new group. Repeated failures are reported once an hour."""

    async def trains() -> None:
        async with simulated_run(tmp_path, CheckpointSettings(every_steps=1, every_minutes=0)) as (run, trainer):
            async for step in run.steps(7):
                trainer.broken = step in (3, 4, 5)  # while the checkpoint of the step before is written
                if step == 6:  # the controller cannot make the folder of the next one
                    (tmp_path / "checkpoints" / ".step-000006.partial").write_text("")
                await run.step()
                await run._checkpoints.settled()
                if step == 4:
                    await asyncio.sleep(REPEAT_ERROR_S)
            trainers.append(trainer)

    trainers: list[SavingTrainer] = []
    with caplog.at_level(logging.ERROR):
        run_virtual(trains())
    assert trainers[0].new_groups == [False, False, True, True, True, False, False]
    assert list(complete(tmp_path / "checkpoints")) == [5, 7], "the two newest stay"
    reported = [re.findall(r"no checkpoint of step (\d+): ", record.getMessage()) for record in caplog.records]
    assert reported == [["2"], ["4"], ["6"]]


@pytest.mark.parametrize("part", [RolloutRecord.token_lines, Observer.step, FrozenMeter.metrics])
def test_a_step_whose_log_is_interrupted_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: Callable[..., Any]
) -> None:
    """A signal interrupts it, whichever actor's answer it waits for."""
    owners = {RolloutRecord.token_lines: RolloutRecord, Observer.step: Observer, FrozenMeter.metrics: FrozenMeter}
    owner: Any = owners[part]
    cancelled: list[Run] = []

    async def interrupted(self: Any, *arguments: Any) -> Any:
        if runs and runs[0].version == 3 and not cancelled:
            cancelled.append(runs[0])
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_later(0.5, task.cancel)
            await asyncio.sleep(1)
        return await part(self, *arguments)

    runs: list[Run] = []
    monkeypatch.setattr(owner, part.__name__, interrupted)

    async def ends() -> None:
        async with simulated_run(tmp_path, CheckpointSettings(every_minutes=1e6, grace_s=1e6)) as (run, _):
            runs.append(run)
            async for _ in run.steps(100):
                await run.step()

    with pytest.raises(asyncio.CancelledError):
        run_virtual(ends())
    assert cancelled and newest(tmp_path) == 3
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_losses_of_all_ranks_journals_are_a_metric(tmp_path: Path) -> None:
    async def lost() -> dict[str, float]:
        async with simulated_run(tmp_path, CheckpointSettings(every_minutes=0)) as (run, _):
            async for _ in run.steps(1):
                metrics = await run.update()
                values = await run.log([metrics[0] | {LOST: 1.0}, metrics[0] | {LOST: 2.0}])
        return values

    assert run_virtual(lost())["journal/lost"] == 3.0
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["journal/lost"] == 3.0


class Savers:
    """A trainer and a buffer at version 1 that write immediately."""

    checkpoint_bytes = 0

    def __init__(self) -> None:
        self.trainer: Any = SimpleNamespace(stage=self._call({0: Staged(1, 1)}), write_checkpoint=self._call({0: []}))
        self.buffer: Any = SimpleNamespace(stage=self._call(1), write_checkpoint=SimpleNamespace(call_one=self._write))

    def _call(self, answer: Any) -> Any:
        async def call(*_: Any) -> Any:
            return answer

        return SimpleNamespace(call=call, call_one=call)

    async def _write(self, path: str) -> list[tuple[str, int]]:
        Path(path).write_bytes(b"groups")
        return [("the header", 6)]


async def one_checkpoint(run: Path, metric: str = "") -> Checkpoints:
    checkpoints = Checkpoints(run, Savers(), CheckpointSettings(), {}, lambda _: None, metric=lambda: metric)
    await checkpoints.begin(1, ControllerState)
    return checkpoints


class StalledDisk:
    """A disk on which no checkpoint is renamed to its final name before :meth:`resume`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._resumed, self._commit = threading.Event(), folders.commit
        monkeypatch.setattr(folders, "commit", self._stalled)

    def _stalled(self, *arguments: Any) -> Path:
        happened(self._resumed, "the disk to resume")
        return self._commit(*arguments)

    async def until_waiting(self) -> None:
        def waits() -> bool:
            return any("flushed" in wait.what and wait.on == "the disk" for wait in wait_registry.waits())

        await until(waits, "a wait for the disk to flush")

    def resume(self) -> None:
        self._resumed.set()


def test_the_wait_for_a_stalled_disk_at_the_end_of_a_checkpoint_names_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the watch would blame the controller of a finished run, because it seems to wait for nobody."""
    disk = StalledDisk(monkeypatch)

    async def ends() -> Checkpoints:
        checkpoints = await one_checkpoint(tmp_path)
        await disk.until_waiting()
        disk.resume()
        await checkpoints.settled()
        return checkpoints

    assert asyncio.run(ends()).saved == 1


def test_a_disk_that_stalls_forever_costs_the_checkpoint_but_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = threading.Event()
    monkeypatch.setattr(folders, "commit", lambda *_: disk.wait(600))
    monkeypatch.setattr(Checkpoints, "limit_s", 0.2)

    async def ends() -> Checkpoints:
        checkpoints = await one_checkpoint(tmp_path)
        await checkpoints.settled()
        return checkpoints

    checkpoints = asyncio.run(ends())
    disk.set()
    assert checkpoints.saved is None and checkpoints.failed == 1
    assert "the checkpoint of step 1 to be flushed" in caplog.text


def test_a_checkpoint_counts_once_its_folder_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors with the link to it and with older checkpoints do not matter."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    async def ends() -> Checkpoints:
        monkeypatch.setattr(folders, "point", full)
        checkpoints = await one_checkpoint(tmp_path)
        await checkpoints.settled()
        return checkpoints

    checkpoints = asyncio.run(ends())
    assert checkpoints.saved == 1 and not checkpoints.failed and newest_whole(tmp_path / "checkpoints")[1].version == 1
    assert "No space left on device" in caplog.text


def test_the_last_step_has_one_checkpoint(tmp_path: Path) -> None:
    async def whole() -> int:
        async with simulated_run(tmp_path, CheckpointSettings(every_minutes=1e6)) as (run, trainer):
            async for _ in run.steps(3):
                await run.step()
        return trainer.copies

    assert run_virtual(whole()) == 1 and list(complete(tmp_path / "checkpoints")) == [3]
