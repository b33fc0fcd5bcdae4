"""The frozen models of a run: the recipe's requests, their checks, and a pool of engine replicas for each model."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, ProcMesh

from monarch_rl.errors import FolderChanged, FrozenRefused, SettingsError
from monarch_rl.generator.dispatcher import Dispatcher
from monarch_rl.generator.frozen import FrozenEngine, FrozenSettings
from monarch_rl.generator.scheduler_process import ENGINE_PRELOAD
from monarch_rl.generator.settings import check_context, check_served, engine_limits
from monarch_rl.model.config import ModelConfig, read_frozen
from monarch_rl.model.folder import resolve_frozen, resolve_model
from monarch_rl.model.lora import FULL_TRAINING
from monarch_rl.model.tensors import check_folder, expected_tensors
from monarch_rl.model.tokens import tokenizer_difference
from monarch_rl.pipeline.actor_pool import ActorFactory, ActorPool, ping
from monarch_rl.pipeline.memory import cpu_memory, describe, frozen_fraction
from monarch_rl.rollout.frozen import FrozenModel, FrozenReplicas, replicas_of
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, disk_limit_s, within
from monarch_rl.runtime.devices import Devices
from monarch_rl.runtime.machine_memory import free_memory

NAME = re.compile(r"[a-z][a-z_]*")


@dataclass(frozen=True)
class FrozenPlan:
    """A frozen model to be started."""

    model: FrozenModel
    settings: FrozenSettings
    snapshot_every: int = 0
    """Versions after which its engines load the policy's weights; 0 is never."""

    @property
    def ranks(self) -> int:
        """Engine ranks of all its replicas; on GPUs, its number of devices."""
        return self.settings.replicas * self.settings.tp

    @property
    def kind(self) -> str:
        """Name of a replica in messages, without its index."""
        return f"frozen {self.model.name}"

    def cpu_memory(self) -> dict[str, int]:
        """Bytes of a replica by purpose, on a machine without GPUs. Reads the model's ``config.json``."""
        return cpu_memory(read_frozen(Path(self.model.model)), self.settings.engine, FULL_TRAINING)

    def same_as(self, other: FrozenPlan) -> bool:
        """Whether engines of this plan can serve another one: the plans are equal except for the model's key."""
        return replace(self, model=replace(self.model, key=other.model.key)) == other


def plan_frozen(
    name: str,
    model: str,
    settings: FrozenSettings,
    policy: str,
    offered: Devices,
    snapshot_every: int = 0,
    rollout: RolloutSettings | None = None,
) -> FrozenPlan:
    """Check a frozen model.

    Args:
        policy: Hugging Face folder or Hub name of the model to train.
        offered: the devices of the launch.
        snapshot_every: see :class:`FrozenPlan`.
        rollout: the policy's sampling and chat settings; None uses the defaults.

    Raises:
        ValueError: names the problem, and says what to do.
    """
    on_gpu, sampling = offered.kind == "cuda", rollout or RolloutSettings()
    if not NAME.fullmatch(name):
        raise SettingsError(
            f"frozen model name {name!r} is invalid: use lower-case letters and _, starting with a letter"
        )
    try:
        config = resolve_frozen(model)
        folder = config.folder
        check_folder(config)
        check_served(config, settings.engine, on_gpu)
        check_context(config, settings.engine)
        settings = with_memory(config, settings, offered)
        trained = resolve_model(policy)
        foreign = tokenizer_difference(trained.folder, folder)
        # An earlier version of the policy is prompted as the policy is; another model has its own chat template.
        options, parser = settings.chat(sampling if folder.samefile(trained.folder) else RolloutSettings())
        if snapshot_every and expected_tensors(config) != expected_tensors(trained):
            raise SettingsError(
                f"{folder} has other tensors than the policy {trained.folder}, whose weights it is to load every "
                f"{snapshot_every} versions: give the policy's own folder"
            )
    except ValueError as error:
        raise SettingsError(f"frozen model {name}: {error}") from error
    limit = min(engine_limits(config, settings.engine, on_gpu).values())
    key = f"{name}-{uuid.uuid4().hex}"
    requests = settings.max_new_tokens, options, settings.request_deadline_s
    comparison = config.reward_labels, sampling.temperature or 1.0, sampling.truncated
    chat = parser, sampling.allow_control_tokens
    handle = FrozenModel(name, str(folder), key, limit, *requests, foreign, *comparison, *chat, trained.vocab_size)
    return FrozenPlan(handle, settings, snapshot_every)


def with_memory(config: ModelConfig, settings: FrozenSettings, offered: Devices) -> FrozenSettings:
    """The settings with ``memory_fraction`` resolved: the share of a GPU for weights and KV cache that leaves enough
    for everything else.

    Raises:
        ValueError: an engine does not fit its GPUs; lists the memory needed by purpose.
    """
    if not offered.memory:
        return settings
    automatic = frozen_fraction(config, settings.engine, offered.memory)
    return replace(settings, memory_fraction=settings.memory_fraction or automatic)


def check_free_memory(plans: Sequence[FrozenPlan], generator_bytes: int, free_bytes: int) -> None:
    """Refuse to start engines for which a machine without GPUs has too little free memory.

    Args:
        generator_bytes: memory that the generators are about to use.
        free_bytes: the machine's free memory.

    Raises:
        RuntimeError: lists the memory needed by each model.
    """
    needed = {plan.kind: plan.settings.replicas * sum(plan.cpu_memory().values()) for plan in plans}
    if generator_bytes + sum(needed.values()) > free_bytes:
        raise RuntimeError(
            f"the engines need {describe(needed | {'generators': generator_bytes})} GiB of memory, but only "
            f"{free_bytes / 2**30:.1f} GiB of this machine are free: use smaller KV caches "
            "(frozen.max-total-tokens), or fewer replicas"
        )


def check_frozen_devices(first_device: int, offered: Devices, plans: Sequence[FrozenPlan]) -> None:
    """Refuse engines that need more devices than there are from ``first_device`` on. Raises TooFewDevices."""
    engines = ", ".join(f"{plan.settings.replicas} of {plan.kind}" for plan in plans)
    ranks = sum(plan.ranks for plan in plans)
    what = f"{first_device} for trainer and generators, {ranks} for frozen models: {engines}"
    offered.check(first_device + ranks, what)


class FrozenPlans(list[FrozenPlan]):
    """The frozen models of a run that has not started.

    Args:
        survivors: pools that survive a warm restart; a model with the same plan keeps its key.
    """

    def __init__(self, survivors: Sequence[FrozenPool] = ()) -> None:
        super().__init__()
        self._survivors = survivors

    def add(
        self,
        name: str,
        model: str,
        settings: FrozenSettings,
        policy: str,
        first_device: int,
        offered: Devices,
        snapshot_every: int = 0,
        rollout: RolloutSettings | None = None,
    ) -> FrozenModel:
        """Check and add a model; see :func:`plan_frozen`. Raises FrozenRefused."""
        if any(plan.model.name == name for plan in self):
            raise FrozenRefused(f"there is already a frozen model named {name!r}: give each model a name of its own")
        try:
            plan = plan_frozen(name, model, settings, policy, offered, snapshot_every, rollout)
            check_frozen_devices(first_device, offered, [*self, plan])
        except ValueError as error:
            raise FrozenRefused(str(error)) from error
        plan = next((pool.plan for pool in self._survivors if pool.plan.same_as(plan)), plan)
        self.append(plan)
        return plan.model


class FrozenPool(ActorPool[FrozenEngine]):
    """The engines of one frozen model, on consecutive devices from ``first_device`` on."""

    def __init__(
        self, plan: FrozenPlan, factory: ActorFactory[FrozenEngine] | None = None, first_device: int = 0
    ) -> None:
        super().__init__(plan.kind, f"frozen_{plan.model.name}", factory=factory)
        self.plan, self.first_device = plan, first_device
        self.model = plan.model
        self.folder = Path(plan.model.model)
        """Folder of the weights that the engines serve."""
        self.version: int | None = None
        """The policy version of these weights, if they are a snapshot of the policy."""
        self.published_version = 0
        """The policy version last published, from which :meth:`is_due` counts."""
        self.refused_snapshots = 0
        """Number of policy snapshots that could not be written."""
        self.refused = False
        """Whether the newest due snapshot could not be written."""
        self._loads = 0
        """Number of :meth:`load` calls."""
        self._loading = asyncio.Lock()
        self._checksums: np.ndarray | None = None
        """Checksums of the folder's weights as the first engine read them since the last load, int64[tensors]; None
        before."""

    def is_due(self, version: int) -> bool:
        """Whether the engines are to load ``version`` of the policy."""
        # Not every version is published, so multiples of snapshot_every may be skipped.
        return version // self.plan.snapshot_every > self.published_version // self.plan.snapshot_every

    async def set_up(self, index: int, engine: FrozenEngine, on_gpu: bool) -> None:
        """Have a new engine load and verify the folder. Raises errors of the set-up, and FolderChanged."""
        name, folder, loads, settings = self.name(index), self.folder, self._loads, self.plan.settings.engine
        memory = None if on_gpu else self.plan.cpu_memory()
        start = engine.setup.call_one(name, str(folder), settings, index, memory)
        # On top of the start, its files are read a second time, to verify them.
        limit_s = settings.start_limit_s(on_gpu) + disk_limit_s(_file_bytes(folder)) + CALL_DEADLINE_S
        checksums = await within(limit_s, start, f"{name} to start", on=name)
        if loads == self._loads:  # otherwise start() has it load the newest folder
            self._check_same(checksums, name)

    async def start(self, index: int) -> FrozenEngine:
        """As :meth:`ActorPool.start`; if another folder was loaded meanwhile, the new engine loads it, too."""
        loads = self._loads
        engine = await super().start(index)
        if self._loads != loads:
            async with self._loading:  # waits: the loads that it waits for have deadlines
                await self._load(engine, self.name(index))
        return engine

    async def join(self, index: int, engine: FrozenEngine) -> None:
        """Raise if an engine that survived a warm restart does not answer."""
        await ping(self.name(index), engine)

    async def load(self, folder: Path, version: int | None = None) -> None:
        """Have all engines serve the weights of another folder of the same shapes.

        Args:
            version: the policy version of these weights, if they are a snapshot of the policy.

        Raises:
            ValueError: its tensors have other names or shapes; the engines keep their weights.
            FolderChanged: the folder was modified meanwhile, and engines have read different weights.
        """
        config = read_frozen(folder)
        if expected_tensors(config) != expected_tensors(read_frozen(self.folder)):
            raise SettingsError(
                f"{self.kind}: the tensors of {folder} have other names or shapes than in {self.folder}"
            )
        check_folder(config)
        async with self._loading:  # waits: the loads that it waits for have deadlines
            self.folder, self.version, self._checksums = folder, version, None
            self._loads += 1
            loading = [self._load(engine, self.name(index)) for index, engine in self.handles.items()]
            for error in await asyncio.gather(*loading, return_exceptions=True):  # waits: each has a deadline
                # A lost engine is no error here: its replacement loads the folder.
                if isinstance(error, BaseException) and not isinstance(error, SupervisionError | ActorError):
                    raise error

    async def _load(self, engine: FrozenEngine, name: str) -> None:
        loading = engine.load.call_one(str(self.folder))
        limit_s = disk_limit_s(_file_bytes(self.folder)) + self.plan.settings.engine.drain_deadline_s
        checksums = await within(limit_s, loading, f"{name} to load {self.folder}", on=name)
        self._check_same(checksums, name)

    def _check_same(self, checksums: np.ndarray, name: str) -> None:
        """Check that all engines have read the same weights, as each reads the folder at another time. Raises
        FolderChanged."""
        if self._checksums is None:
            self._checksums = checksums
        elif not np.array_equal(self._checksums, checksums):
            raise FolderChanged(
                f"{name} read other weights from {self.folder} than the engines before it, so it does not serve: do "
                "not modify a folder while it is served, or load it again afterwards"
            )

    def dispatcher(self) -> FrozenReplicas:
        """A dispatcher of requests to the current replicas."""
        replicas = [self.latest[index] for index in sorted(self.latest)]
        s = self.plan.settings
        flag = FrozenSettings.flag("request_deadline_s")
        return Dispatcher(replicas, s.request_deadline_s, self.kind, flag, s.request_losses)

    async def note_lost_engine(self, workers: ActorPool[RolloutWorker]) -> None:
        """Notify this process and all workers which replicas are lost."""
        key, lost = self.model.key, self.lost
        replicas_of(key).update_replicas([], lost)
        what = f"to register the lost engines of {self.kind}"
        await workers.ask(CALL_DEADLINE_S, what, lambda _, worker: worker.update_frozen.call_one(key, lost))

    async def note_new_engine(self, workers: ActorPool[RolloutWorker], index: int) -> list[int]:
        """Notify this process and all workers of a new engine; returns the workers that did not answer."""
        key, handle = self.model.key, self.latest[index]
        replicas_of(key).replace(index, handle)
        what = f"to register a new {self.kind}"
        answers = await workers.ask(
            CALL_DEADLINE_S, what, lambda _, worker: worker.replace_frozen.call_one(key, index, handle)
        )
        return sorted(workers.handles.keys() - answers.keys())


async def start_frozen(
    cluster: Cluster, plan: FrozenPlan, first_device: int, survivors: Sequence[FrozenPool] = ()
) -> FrozenPool:
    """Spawn the engines of a frozen model, one process mesh each; returns once their weights are verified.

    Args:
        first_device: first device of replica 0; the other replicas' devices follow.
        survivors: pools that survive a warm restart; the pool of this plan is reused, and loads the model's own folder.
    """
    for pool in survivors:
        if pool.plan == plan:
            await pool.start_all(plan.settings.replicas, pool.join)
            if pool.folder != Path(plan.model.model):
                await pool.load(Path(plan.model.model))
            return pool
    settings, model = plan.settings, plan.model

    def spawn(index: int) -> tuple[ProcMesh, FrozenEngine]:
        device, name = first_device + index * settings.tp, f"frozen_{model.name}{index}"
        mesh = cluster.spawn(name, 1, first_device=device, devices_per_process=settings.tp, preload=ENGINE_PRELOAD)
        return mesh, mesh.spawn(name, FrozenEngine)

    async def set_up(index: int, engine: FrozenEngine) -> None:
        await pool.set_up(index, engine, cluster.devices.kind == "cuda")

    await cluster.fork_server.imported(ENGINE_PRELOAD)
    pool = FrozenPool(plan, ActorFactory(cluster, spawn, set_up), first_device)
    await pool.start_all(settings.replicas)
    return pool


async def start_all_frozen(
    cluster: Cluster,
    plans: Sequence[FrozenPlan],
    first_device: int,
    generator_bytes: int,
    survivors: Sequence[FrozenPool] = (),
) -> list[FrozenPool]:
    """Start the engines of all frozen models concurrently, on consecutive devices.

    Args:
        generator_bytes: memory that the generators are about to use on a machine without GPUs.
        survivors: pools that survive a warm restart; those that no plan asks for, or that belong on other devices, are
            stopped first.
    """
    devices = [first_device + sum(plan.ranks for plan in plans[:index]) for index in range(len(plans))]
    placements = list(zip(plans, devices, strict=True))
    reused = [pool for pool in survivors if (pool.plan, pool.first_device) in placements]
    await asyncio.gather(*(pool.stop_all() for pool in survivors if pool not in reused))  # waits: it has deadlines
    new = [plan for plan in plans if all(pool.plan != plan for pool in reused)]
    if new and cluster.devices.kind == "cpu" and cluster.num_hosts == 1:
        check_free_memory(new, generator_bytes, free_memory())
    # waits: each start has deadlines
    return list(await asyncio.gather(*(start_frozen(cluster, *placement, reused) for placement in placements)))


def _file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
