"""Frozen models: plans and refusals before anything is spawned, snapshots, and notifications of lost engines."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from monarch_rl.checkpoint.folders import partial_folder
from monarch_rl.errors import (
    AllActorsLost,
    DeadlineExceeded,
    EngineStopped,
    FolderChanged,
    FrozenRefused,
    GenerationError,
    TooFewDevices,
)
from monarch_rl.generator.connection import ReplicaLost
from monarch_rl.generator.dispatcher import Dispatcher
from monarch_rl.generator.frozen import FrozenEngine, FrozenSettings
from monarch_rl.pipeline.actor_pool import ActorFactory, ActorPool
from monarch_rl.pipeline.frozen import (
    FrozenPlan,
    FrozenPlans,
    FrozenPool,
    check_free_memory,
    check_frozen_devices,
    plan_frozen,
    start_all_frozen,
    with_memory,
)
from monarch_rl.pipeline.memory import VERSIONS, frozen_memory
from monarch_rl.pipeline.observer import FrozenMeter
from monarch_rl.pipeline.policy_snapshots import take_snapshots
from monarch_rl.pipeline.recovery import Recovery, RecoverySettings
from monarch_rl.pipeline.run import Run
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.rollout import frozen
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.runtime.devices import Devices
from monarch_rl.runtime.forking.preloading import ForkServer
from monarch_rl.runtime.persistent_calls import PERSISTENT
from monarch_rl.simulate.clock import run_virtual
from tests.model.chat_helpers import write_model
from tests.patience import until
from tests.recipe.running import random_model
from tools.make_tiny_model import Settings as TinyModel
from tools.make_tiny_model import write_random_model
from tools.memory import MODELS, device_bytes

CPU = Devices("cpu", 1, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("frozen") / "tiny")


def plan(folder: Path, name: str = "judge", policy: Path | None = None, **settings: Any) -> FrozenPlan:
    return plan_frozen(name, str(folder), FrozenSettings(**settings), str(policy or folder), CPU)


def test_a_plan_describes_the_model_for_its_handle(folder: Path) -> None:
    built = plan(folder, replicas=2, tp=2, context_length=100, max_new_tokens=7, chat_options='{"a": 1}')
    assert (built.kind, built.ranks, built.model.limit, built.model.max_new_tokens) == ("frozen judge", 4, 94, 7)
    assert (built.model.chat_options, built.model.foreign, built.model.labels) == ({"a": 1}, "", 0)
    for rollout, expected in (
        (RolloutSettings(temperature=0.7), (0.7, False)),
        (RolloutSettings(temperature=0.0), (1.0, False)),
        (RolloutSettings(top_k=5, keep_sampling_mask=True), (1.0, True)),
    ):
        model = plan_frozen("judge", str(folder), FrozenSettings(), str(folder), CPU, rollout=rollout).model
        assert (model.temperature, model.rollouts_truncated) == expected


def test_a_frozen_copy_of_the_policy_uses_the_policys_chat_settings_by_default(folder: Path, tmp_path: Path) -> None:
    """Otherwise a policy that plays without thinking could have an opponent that thinks."""
    rollout = RolloutSettings(chat_options='{"a": 1}', tool_parser="hermes")

    def chat_settings(model: Path, **settings: Any) -> tuple[Any, str]:
        built = plan_frozen("start", str(model), FrozenSettings(**settings), str(folder), CPU, rollout=rollout).model
        return built.chat_options, built.tool_parser

    other, link = shutil.copytree(folder, tmp_path / "other"), tmp_path / "link"
    link.symlink_to(folder)
    assert chat_settings(folder) == chat_settings(link) == ({"a": 1}, "hermes")
    assert chat_settings(other) == ({}, "")
    assert chat_settings(folder, chat_options="{}", tool_parser="") == ({}, "")
    assert chat_settings(other, chat_options='{"b": 2}', tool_parser="llama3") == ({"b": 2}, "llama3")


def test_every_frozen_model_reads_control_tokens_as_the_rollouts_do(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    for allowed in (False, True):
        rollout = RolloutSettings(allow_control_tokens=allowed)
        for model in (folder, other):
            built = plan_frozen("judge", str(model), FrozenSettings(), str(folder), CPU, rollout=rollout).model
            assert built.allow_control_tokens is allowed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "Judge 1"}, "'Judge 1'"),
        ({"tp": 3}, "judge: .*tp 3 "),
        ({"context_length": 10**6}, "judge: .*context-length"),
        ({"chat_options": "[]"}, "judge: frozen.chat-options"),
        ({"replicas": 0}, "frozen.replicas"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(folder, **settings)


def test_a_missing_or_damaged_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="judge: .*missing"):
        plan(tmp_path / "missing")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ValueError, match="GPT2LMHeadModel .*Qwen3ForSequenceClassification"):
        plan(tmp_path, policy=folder)
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForSequenceClassification"]}))
    with pytest.raises(ValueError, match="safetensors"):
        plan(tmp_path, policy=folder)


def test_a_model_with_another_tokenizer_reports_that_its_ids_differ(folder: Path, tmp_path: Path) -> None:
    other = random_model(tmp_path / "other")
    write_model(other, "qwen3")
    config = json.loads((other / "config.json").read_text())
    assert config["vocab_size"] < 1000, "the files of the model are not read here"
    assert "tokens differ" in plan(folder, policy=other).model.foreign


def test_a_plan_has_the_policys_vocabulary_size_and_not_its_own(folder: Path, tmp_path: Path) -> None:
    """This is the width of the policy's logits: models with one tokenizer are padded to different widths."""
    policy = tmp_path / "policy"
    shutil.copytree(folder, policy)
    config = json.loads((folder / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 1}))
    model = plan(folder, policy=policy).model
    assert (model.policy_ids, model.foreign) == (config["vocab_size"] - 1, "")


def test_engines_take_the_devices_after_all_others(folder: Path) -> None:
    plans = [plan(folder, replicas=2), plan(folder, "teacher", tp=2)]
    check_frozen_devices(4, CPU, plans)
    with pytest.raises(TooFewDevices, match="5 for trainer and generators, 4 for .* 2 of frozen judge"):
        check_frozen_devices(5, CPU, plans)


def test_a_run_refuses_two_frozen_models_of_one_name_and_forgets_refused_ones(folder: Path) -> None:
    plans, settings = FrozenPlans(), FrozenSettings()
    plans.add("judge", str(folder), settings, str(folder), 4, CPU)
    for name, replicas, message in (
        ("judge", 1, "already .* named 'judge'"),
        ("Teacher", 1, "lower-case"),
        ("large", 9, "CPU ranks"),
    ):
        with pytest.raises(FrozenRefused, match=message):
            plans.add(name, str(folder), FrozenSettings(replicas=replicas), str(folder), 4, CPU)
    plans.add("teacher", str(folder), settings, str(folder), 4, CPU)
    assert [plan.model.name for plan in plans] == ["judge", "teacher"]
    again = FrozenPlans([FrozenPool(plans[0])])
    assert again.add("judge", str(folder), settings, str(folder), 4, CPU) is plans[0].model, "its engines run already"
    assert again.add("teacher", str(folder), settings, str(folder), 4, CPU) != plans[1].model
    others = FrozenPlans([FrozenPool(plans[0])])
    assert others.add("judge", str(folder), FrozenSettings(replicas=2), str(folder), 4, CPU) != plans[0].model


def test_unused_engines_are_ended_before_others_take_their_devices(folder: Path) -> None:
    """Engines that would need other devices are ended too; all others keep their processes."""
    calls: list[str] = []

    async def kill(mesh: Any) -> None:
        calls.append(f"end {mesh.name}")

    async def nothing(*_: Any) -> np.ndarray:
        return np.zeros(1)

    engine = SimpleNamespace(setup=SimpleNamespace(call_one=nothing), ready=SimpleNamespace(call_one=nothing))

    def spawn(name: str, *_: Any, first_device: int, **__: Any) -> Any:
        calls.append(f"{name} on {first_device}")
        return SimpleNamespace(name=name, spawn=lambda *_: engine)

    hosts = {"devices": CPU, "num_hosts": 1, "fork_server": ForkServer()}
    cluster: Any = SimpleNamespace(kill=kill, locate=nothing, spawn=spawn, **hosts)
    judge, teacher, other = (plan(folder, name, max_total_tokens=4096) for name in ("judge", "teacher", "other"))

    async def start() -> None:
        before = await start_all_frozen(cluster, [judge, teacher], 4, 0)
        after = await start_all_frozen(cluster, [judge, other], 4, 0, before)
        assert after[0] is before[0] and after[1] not in before
        await start_all_frozen(cluster, [other], 4, 0, after)

    asyncio.run(start())
    assert calls[:2] == ["frozen_judge0 on 4", "frozen_teacher0 on 5"]
    assert calls[2:4] == ["end frozen_teacher0", "frozen_other0 on 5"]
    assert sorted(calls[4:6]) == ["end frozen_judge0", "end frozen_other0"] and calls[6:] == ["frozen_other0 on 4"]


def test_weights_for_a_model_that_the_run_does_not_have_are_refused(folder: Path) -> None:
    known, other = plan(folder), plan(folder, "teacher")

    async def test() -> None:
        async with Run.open(RunSettings(model=str(folder))) as run:
            run._begun = SimpleNamespace(actors=SimpleNamespace(frozen=[FrozenPool(known)]))  # type: ignore[assignment]
            with pytest.raises(ValueError, match="'teacher' .*judge.*run.frozen"):
                await run.load_frozen(other.model, folder)

    asyncio.run(test())


def test_the_memory_plan_of_a_gpu_counts_log_probs_and_no_versions() -> None:
    gpu = Devices("cuda", 1, 8, device_bytes(80))
    small, large = MODELS["Qwen3-0.6B"], MODELS["Qwen3-32B"]
    needed = frozen_memory(small, FrozenSettings().engine, gpu.memory)
    assert VERSIONS not in needed and needed["log-probs of prompts"] > 2**30
    automatic = with_memory(small, FrozenSettings(), gpu).memory_fraction
    assert 0.5 < automatic < 0.95
    assert with_memory(small, FrozenSettings(memory_fraction=0.3), gpu).memory_fraction == 0.3
    gpu = Devices("cuda", 1, 8, device_bytes(40))
    with pytest.raises(ValueError, match=r"frozen\.tp"):
        with_memory(large, FrozenSettings(context_length=4096), gpu)
    assert with_memory(large, FrozenSettings(context_length=4096, tp=4), gpu).memory_fraction > 0


def test_a_machine_without_gpus_needs_room_for_all_engines(folder: Path) -> None:
    plans = [plan(folder, max_total_tokens=4096), plan(folder, "teacher", replicas=2, max_total_tokens=4096)]
    check_free_memory(plans, generator_bytes=0, free_bytes=1 << 30)
    with pytest.raises(RuntimeError, match="generators 1.0, frozen teacher"):
        check_free_memory(plans, generator_bytes=1 << 30, free_bytes=1 << 30)


# ---- lost engines -------------------------------------------------------------------------------------------


def sums(folder: str) -> np.ndarray:
    """Checksums of the weight files that a folder has now."""
    return np.array([zlib.crc32(path.read_bytes()) for path in sorted(Path(folder).glob("*.safetensors"))])


class Engine:
    """A handle of a frozen engine; ``fail`` ends it."""

    def __init__(self, answers: Any = None) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.requests = 0
        self._answers = answers
        self.pid = id(self)
        self.loaded: list[str] = []
        self.loads = 0
        for name in ("block_until_lost", "logprobs", "stats", "load", "setup"):
            setattr(self, name, SimpleNamespace(call_one=getattr(self, f"_{name}")))

    async def _block_until_lost(self) -> None:
        await asyncio.shield(self.end)

    async def _logprobs(self) -> Any:
        self.requests += 1
        if isinstance(self._answers, Exception):
            raise self._answers
        return self._answers

    async def _setup(self, name: str, folder: str, settings: Any, index: int, memory: Any) -> np.ndarray:
        return sums(folder)

    async def _load(self, folder: str) -> np.ndarray:
        self.loaded.append(folder)
        found = sums(folder)
        self.loads += 1
        await asyncio.sleep(0.01)
        self.loads -= 1
        assert not self.loads, "an engine loads only one folder at a time"
        if isinstance(self._answers, Exception):
            raise self._answers
        return found

    async def _stats(self) -> dict[str, Any]:
        counts = {"requests": self.requests, "read_tokens": 10 * self.requests, "drawn_tokens": self.requests}
        return counts | {"busy_seconds": 0.5, "devices": 2, "pid": self.pid, "child_pids": []}


class Worker:
    """A handle of a rollout worker that records its notifications about frozen engines."""

    def __init__(self) -> None:
        self.notifications: list[tuple[Any, ...]] = []
        self.deaf = False
        never = asyncio.get_running_loop().create_future()
        self.block_until_lost = SimpleNamespace(call_one=lambda: asyncio.shield(never))
        self.update_frozen = SimpleNamespace(call_one=self._update)
        self.replace_frozen = SimpleNamespace(call_one=self._replace)

    async def _update(self, key: str, lost: list[int]) -> None:
        self.notifications.append(("lost", lost))

    async def _replace(self, key: str, index: int, handle: Any) -> None:
        if self.deaf:
            raise DeadlineExceeded("waited 60 s")
        self.notifications.append(("new", index, handle))


class Stage:
    """Two engines of a frozen model called ``generator``, a generator and two workers."""

    def __init__(self, folder: Path, plan: FrozenPlan, restarts: int = 3) -> None:
        self.started: list[Engine] = []
        self.broken = False
        cluster: Any = SimpleNamespace(kill=self._nothing, locate=self._nothing)
        self.pool = FrozenPool(plan, ActorFactory[FrozenEngine](cluster, self._spawn, self._set_up))
        self.engines = [Engine(), Engine()]
        self.pool.handles = dict(enumerate(self.engines))  # type: ignore[arg-type]
        self.pool.latest = dict(self.pool.handles)
        self.notifications: list[tuple[Any, ...]] = []
        replicas: Any = SimpleNamespace(
            update_replicas=lambda paused, lost: self.notifications.append(("lost", lost)),
            replace=lambda index, handle: self.notifications.append(("new", index, handle)),
        )
        frozen._connected[plan.model.key] = frozen.Connected(None, None, replicas)  # type: ignore[arg-type]
        self.workers = [Worker(), Worker()]
        workers: ActorPool[Any] = ActorPool("rollout worker", "rollout", dict(enumerate(self.workers)))
        generators: ActorPool[Any] = ActorPool("generator", "generator", {0: Engine()})
        publisher: Any = SimpleNamespace(replicas=SimpleNamespace(on_lost=None, lost={}))
        settings = RecoverySettings(restarts=restarts)
        self.recovery = Recovery(generators, workers, publisher, SimpleNamespace(), settings, folder, [self.pool])  # type: ignore[arg-type]
        self.file = folder / "failures.jsonl"

    async def _nothing(self, mesh: Any) -> None: ...

    def _spawn(self, index: int) -> tuple[Any, Any]:
        self.started.append(Engine())
        return f"mesh {index}", self.started[-1]

    async def _set_up(self, index: int, engine: Any) -> None:
        await asyncio.sleep(0.01)
        if self.broken:
            raise RuntimeError("no device")
        await self.pool.set_up(index, engine, on_gpu=False)


def on_stage(tmp_path: Path, folder: Path, test: Callable[[Stage], Awaitable[None]], restarts: int = 3) -> None:
    """Run ``test`` in virtual time."""

    async def go() -> None:
        await test(Stage(tmp_path, plan(folder, "generator"), restarts))

    run_virtual(go())
    frozen._connected.clear()


@pytest.mark.parametrize(
    "culprit", ["", "frozen generator 1", "the engine of frozen generator 1", "frozen_generator1 0"]
)
def test_all_clients_are_notified_of_a_lost_engine_and_its_replacement(
    tmp_path: Path, folder: Path, culprit: str
) -> None:
    """Clients are workers and the controller. A frozen model may have the name of another kind of process."""

    async def test(stage: Stage) -> None:
        async with stage.recovery.supervising():
            await asyncio.sleep(0)
            if culprit:
                assert await stage.recovery.recover(culprit, "is stopped")
            else:
                stage.engines[1].end.set_exception(RuntimeError("Killed(sig=9)"))
            await until(lambda: stage.recovery.metrics()["recovery/returned"], "a return")
        (new,) = stage.started
        for notifications in (stage.notifications, *(worker.notifications for worker in stage.workers)):
            assert notifications == [("lost", [1]), ("new", 1, new), ("lost", [])]
        handles: dict[int, Any] = dict(stage.pool.handles)
        assert handles == {0: stage.engines[0], 1: new}
        assert [json.loads(line)["who"] for line in stage.file.read_text().splitlines()] == ["frozen generator 1"] * 2

    on_stage(tmp_path, folder, test)


def test_a_run_without_engines_of_a_frozen_model_ends(tmp_path: Path, folder: Path) -> None:
    async def test(stage: Stage) -> None:
        stage.broken = True
        with pytest.raises(AllActorsLost, match="frozen generator [01]: .*Killed"):
            async with stage.recovery.supervising():
                for engine in stage.engines:
                    engine.end.set_exception(RuntimeError("Killed(sig=9)"))
                await asyncio.sleep(30)
        assert len(stage.started) == 2, "each engine is restarted once"

    on_stage(tmp_path, folder, test, restarts=1)


def test_a_worker_that_does_not_accept_a_new_engine_is_lost(tmp_path: Path, folder: Path) -> None:
    async def test(stage: Stage) -> None:
        stage.workers[1].deaf = True
        with pytest.raises(BaseException, match="requeue"):  # the stage has no buffer that requeues its groups
            async with stage.recovery.supervising():
                stage.engines[0].end.set_exception(RuntimeError("Killed(sig=9)"))
                await asyncio.sleep(30)
        assert "rollout worker 1" in stage.file.read_text()

    on_stage(tmp_path, folder, test)


def test_all_engines_load_another_folder_including_one_that_is_starting(tmp_path: Path, folder: Path) -> None:
    later = random_model(tmp_path / "later")
    other = tmp_path / "other"
    write_random_model(other, TinyModel(hidden_size=32, layers=2))

    async def test(stage: Stage) -> None:
        with pytest.raises(ValueError, match="frozen generator: .*/other "):
            await stage.pool.load(other)
        assert stage.pool.folder == folder and not stage.engines[0].loaded
        stage.engines[1]._answers = ActorError(EngineStopped("exit code -9"), "load failed")  # it will be replaced
        starting = asyncio.ensure_future(stage.pool.start(1))
        await asyncio.sleep(0)
        await stage.pool.load(later)
        assert stage.engines[0].loaded == [str(later)]
        await starting
        assert stage.started[0].loaded == [str(later)] and stage.pool.folder == later

    on_stage(tmp_path, folder, test)


def test_an_engine_that_starts_from_a_modified_folder_does_not_serve(tmp_path: Path, folder: Path) -> None:
    """Otherwise it would serve other weights than the other engines. Loading the folder again resolves this."""
    saved = tmp_path / "saved"
    shutil.copytree(folder, saved)

    async def test(stage: Stage) -> None:
        await stage.pool.load(saved)
        await stage.pool.start(1)
        (file,) = saved.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        with pytest.raises(FolderChanged, match="frozen generator 1 .*/saved "):
            await stage.pool.start(1)
        await stage.pool.load(saved)
        await stage.pool.start(1)

    on_stage(tmp_path, folder, test)


def test_an_engine_that_starts_during_loads_ends_with_the_newest_folder(tmp_path: Path, folder: Path) -> None:
    """At any interleaving, also if the folder keeps its name, and never with two loads at once."""
    later = random_model(tmp_path / "later")

    async def test(stage: Stage) -> None:
        for turns in range(8):
            starting = asyncio.ensure_future(stage.pool.start(1))
            await asyncio.sleep(0.004 * turns)
            await asyncio.gather(stage.pool.load(later), stage.pool.load(folder))
            newest = stage.pool.folder
            engine: Any = await starting
            assert engine.loaded or turns, "it started before both loads"
            assert not engine.loaded or engine.loaded[-1] == str(newest) == stage.engines[0].loaded[-1]

    on_stage(tmp_path, folder, test)


def test_a_frozen_model_loads_the_policys_weights_every_few_versions(tmp_path: Path, folder: Path) -> None:
    """A resumed run takes a snapshot immediately. Folders that no engine serves any more are removed."""

    async def saved(target: str, end_tokens: Sequence[int]) -> None:
        shutil.copytree(folder, target, dirs_exist_ok=True)

    async def test(stage: Stage) -> None:
        stage.pool.plan = replace(stage.pool.plan, snapshot_every=2)
        trainer = SimpleNamespace(save=SimpleNamespace(call=saved))
        actors: Any = SimpleNamespace(frozen=(stage.pool,), trainer=trainer, model_bytes=0)
        for version in range(8):
            await take_snapshots(actors, version, tmp_path)
            assert stage.pool.version == (version - version % 2 or None)
        await take_snapshots(actors, 7, tmp_path, resumed=True)
        written = [tmp_path / "snapshots" / f"version-{version:08d}" for version in (2, 4, 6, 7)]
        assert stage.engines[0].loaded == [str(path) for path in written] and stage.pool.version == 7
        assert [path.exists() for path in written] == [False, False, True, True]
        for version, served in ((10, 10), (10, 10), (11, 10), (13, 13), (15, 15), (16, 16)):  # some are not published
            await take_snapshots(actors, version, tmp_path)
            assert stage.pool.version == served
        stage.pool.plan = replace(stage.pool.plan, snapshot_every=0)
        await take_snapshots(actors, 18, None)
        stage.pool.plan = replace(stage.pool.plan, snapshot_every=2)
        with pytest.raises(RuntimeError, match="snapshot"):
            await take_snapshots(actors, 18, None)

    on_stage(tmp_path, folder, test)
    other = tmp_path / "other"
    write_random_model(other, TinyModel(hidden_size=32, layers=2))
    with pytest.raises(ValueError, match="model me: .* tensors"):
        plan_frozen("me", str(other), FrozenSettings(), str(folder), CPU, snapshot_every=2)


def test_a_snapshot_that_cannot_be_written_leaves_the_previous_one_in_use(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure is reported once and counted, and the partial snapshot is removed. A lost rank is raised: it is no
    failure of the disk."""
    problems: dict[int, Exception] = {
        4: ActorError(OSError(errno.ENOSPC, "No space left on device"), "save failed"),
        6: ActorError(RuntimeError("trainer rank 1 could not write the weights: OSError"), "save failed"),
        8: DeadlineExceeded("waited 600 s for the disk"),
        12: SupervisionError("trainer rank 1 is gone"),
    }

    async def saved(target: str, end_tokens: Sequence[int]) -> None:
        path = Path(target)
        partial = partial_folder(path)
        shutil.copytree(folder, partial)
        if problem := problems.get(int(path.name.removeprefix("version-"))):
            raise problem
        partial.rename(path)

    async def test(stage: Stage) -> None:
        pool = stage.pool
        pool.plan = replace(pool.plan, snapshot_every=2)
        trainer = SimpleNamespace(save=SimpleNamespace(call=saved))
        actors: Any = SimpleNamespace(frozen=(pool,), trainer=trainer, model_bytes=0)
        for version in range(11):
            await take_snapshots(actors, version, tmp_path)
            assert pool.version == {0: None, 4: 2, 6: 2, 8: 2}.get(version - version % 2, version - version % 2)
        assert pool.refused_snapshots == 3
        assert sorted(path.name for path in (tmp_path / "snapshots").iterdir()) == [
            "version-00000002",
            "version-00000010",
        ]
        (tmp_path / "snapshots" / "version-00000000").symlink_to(folder)  # rmtree takes no link
        with pytest.raises(SupervisionError):
            await take_snapshots(actors, 12, tmp_path)
        problems.clear()
        await take_snapshots(actors, 14, tmp_path)
        assert pool.version == 14

    on_stage(tmp_path, folder, test)
    refused, undeletable = [record.getMessage() for record in caplog.records]
    assert all(part in refused for part in ("version 4 ", "version 2", "No space left")) and "snapshots" in undeletable


def test_an_engine_that_cannot_read_a_folder_is_lost(tmp_path: Path) -> None:
    """Otherwise it would keep serving the old weights although everybody expects the new ones."""

    async def test() -> None:
        engine: Any = FrozenEngine()
        load: Any = getattr(vars(FrozenEngine)["load"]._method, PERSISTENT)
        with pytest.raises((OSError, ValueError)) as raised:
            await load(engine, str(tmp_path / "missing"))
        assert engine._failed.done() and engine._failed.result() is raised.value

    asyncio.run(test())


def test_metrics_add_up_over_restarted_engines(folder: Path) -> None:
    async def test() -> None:
        pool = FrozenPool(plan(folder))
        first, second = Engine(1), Engine(1)
        meter = FrozenMeter([pool])
        for engine, requests in ((first, 3), (second, 4)):
            pool.handles = {0: engine}  # type: ignore[dict-item]
            engine.requests = requests
            values = await meter.metrics()
        assert values == {
            "frozen/judge/requests": 7,
            "frozen/judge/read_tokens": 70,
            "frozen/judge/drawn_tokens": 7,
            "frozen/judge/device_s": 2.0,
        }
        pool.handles[1] = other = Engine(1)  # type: ignore[assignment]
        other.requests, other.pid = 5, second.pid
        assert (await meter.metrics())["frozen/judge/requests"] == 12, "two machines may use the same pid"

    asyncio.run(test())


# ---- requests to endpoints ----------------------------------------------------------------------------------


def ask(dispatcher: Dispatcher, group: int = 0) -> Awaitable[Any]:
    return dispatcher.call(group, "return log-probs", lambda handle: handle.logprobs.call_one())


def test_a_call_survives_a_bounded_number_of_lost_engines() -> None:
    async def test() -> None:
        lost = ActorError(EngineStopped("exit code -9"), "logprobs failed")
        engines: list[Any] = [Engine(lost), Engine(lost), Engine(np.ones(2))]
        answer = await ask(Dispatcher(engines, 600, "frozen judge", max_losses=2))
        assert answer.tolist() == [1, 1] and [engine.requests for engine in engines] == [1, 1, 1]
        with pytest.raises(ReplicaLost, match="exit code -9"):
            await ask(Dispatcher(engines[:2], 600, "frozen judge", max_losses=1))

    asyncio.run(test())


def test_a_refused_request_raises_at_the_caller_and_costs_no_engine() -> None:
    async def test() -> None:
        refusing: Any = Engine(ActorError(GenerationError("too long"), "logprobs failed"))
        dispatcher = Dispatcher([refusing], 600, "frozen judge", max_losses=2)
        for requests in (1, 2):
            with pytest.raises(GenerationError, match="too long"):
                await ask(dispatcher)
            assert refusing.requests == requests and not dispatcher._lost

    asyncio.run(test())


def test_a_call_waits_for_a_replacement_engine_and_its_deadline_names_the_lost_one() -> None:
    async def test() -> None:
        lost: Any = Engine(ActorError(EngineStopped("exit code -9"), "logprobs failed"))
        fresh: Any = Engine(np.ones(1))
        dispatcher = Dispatcher([lost], 600, "frozen judge", "frozen.request-deadline-s", max_losses=2)
        request = asyncio.ensure_future(ask(dispatcher))  # type: ignore[arg-type]
        while not dispatcher._lost:
            await asyncio.sleep(0)
        dispatcher.replace(0, fresh)
        dispatcher.update_replicas([], [])
        assert (await request).tolist() == [1]
        late = Dispatcher([lost], 0.05, "frozen judge", "frozen.request-deadline-s", max_losses=2)
        with pytest.raises(DeadlineExceeded, match="frozen judge 0 was lost"):
            await ask(late)

    asyncio.run(test())
