"""The frozen models of a run: what a recipe asks for, the checks, and the engines as a pool of replicas each."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, ProcMesh

from monarch_rl.generator.dispatcher import Dispatcher
from monarch_rl.generator.frozen import FrozenEngine, FrozenSettings
from monarch_rl.generator.memory import free_memory
from monarch_rl.generator.replica_memory import (
    VERSIONS,
    automatic_fraction,
    cpu_memory,
    longest_sequence,
    replica_memory,
)
from monarch_rl.generator.scheduler_process import ENGINE_PRELOAD
from monarch_rl.generator.settings import GeneratorSettings, check_context, check_served, engine_limits
from monarch_rl.model.folder import resolve_model
from monarch_rl.model.lora import FULL_TRAINING
from monarch_rl.model.reward_head import read_frozen, resolve_frozen, reward_labels
from monarch_rl.model.sizes import trained_model
from monarch_rl.model.tensors import check_folder, expected_tensors
from monarch_rl.model.tokens import tokenizer_difference
from monarch_rl.pipeline.actor_pool import ActorFactory, ActorPool
from monarch_rl.pipeline.memory import USABLE, describe
from monarch_rl.pipeline.publishing import answers
from monarch_rl.rollout.frozen import FrozenModel, FrozenRefused, FrozenReplicas, replicas_of
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, disk_limit_s, within
from monarch_rl.runtime.devices import Devices
from monarch_rl.weights.endpoint import TransferSettings

NAME = re.compile(r"[a-z][a-z_]*")
LOGPROB_ROWS, LOGPROB_ARRAYS = 2048, 3
"""Of prompts whose log-probs SGLang computes at once (``SGLANG_LOGPROB_CHUNK_SIZE``), and float32 arrays of the
vocabulary for each: logits, the same by temperature, and what normalising them takes."""


@dataclass(frozen=True)
class FrozenPlan:
    """A frozen model that is to be started."""

    model: FrozenModel
    settings: FrozenSettings
    snapshot_every: int = 0
    """Versions after which its engines take over the policy's weights; 0 never changes."""

    @property
    def ranks(self) -> int:
        """Engine ranks of all its replicas: devices, on a GPU."""
        return self.settings.replicas * self.settings.tp

    @property
    def kind(self) -> str:
        """What messages call a replica."""
        return f"frozen {self.model.name}"

    def same_as(self, other: FrozenPlan) -> bool:
        """Whether engines of this plan are what another one asks for."""
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
        policy: Hugging Face folder or Hub name of the model that is trained.
        offered: what the launch has.
        snapshot_every: see :class:`FrozenPlan`.
        rollout: how the policy draws, and is asked; None is as by default.

    Raises:
        ValueError: names what cannot work, and says what to do.
    """
    on_gpu, drawn = offered.kind == "cuda", rollout or RolloutSettings()
    if not NAME.fullmatch(name):
        raise ValueError(f"a frozen model is called {name!r}: give a name of small letters and _")
    try:
        folder, config = resolve_frozen(model)
        check_folder(folder, config)
        check_served(config, settings.engine, on_gpu)
        check_context(config, settings.engine)
        settings = with_memory(config, settings, offered)
        trained = resolve_model(policy)
        foreign, trained_config = tokenizer_difference(trained, folder), read_frozen(trained)
        # The policy of before is to be asked as the policy is; another model has a template of its own.
        options, parser = settings.chat(drawn if folder.samefile(trained) else RolloutSettings())
        if snapshot_every and expected_tensors(config) != expected_tensors(trained_config):
            raise ValueError(
                f"{folder} has other tensors than the policy, {trained}, whose weights it is to take over every "
                f"{snapshot_every} versions: give the policy's own folder"
            )
    except ValueError as error:
        raise ValueError(f"frozen model {name}: {error}") from error
    limit = min(engine_limits(config, settings.engine, on_gpu).values())
    key = f"{name}-{uuid.uuid4().hex}"
    asked = settings.max_new_tokens, options, settings.request_deadline_s
    compared = reward_labels(config), drawn.temperature or 1.0, drawn.truncated
    policy_ids: int = trained_config["vocab_size"]
    handle = FrozenModel(name, str(folder), key, limit, *asked, foreign, *compared, parser, policy_ids)
    return FrozenPlan(handle, settings, snapshot_every)


def with_memory(config: dict[str, Any], settings: FrozenSettings, offered: Devices) -> FrozenSettings:
    """The settings with the share of a GPU's memory that leaves room for all but weights and KV cache.

    Raises:
        ValueError: an engine does not fit its GPUs; says what takes how much.
    """
    if not offered.memory:
        return settings
    needed = frozen_memory(config, settings.engine, offered.memory)
    room = int(USABLE * offered.memory)
    if sum(needed.values()) > room:
        raise ValueError(
            f"a replica needs {sum(needed.values()) / 2**30:.1f} GiB at its peak ({describe(needed)}), and a GPU here "
            f"has {room / 2**30:.1f} to plan with: raise frozen.tp, lower frozen.context-length or "
            "frozen.max-running-requests, or take a smaller model"
        )
    automatic = automatic_fraction(needed, room, offered.memory)
    return replace(settings, memory_fraction=settings.memory_fraction or automatic)


def frozen_memory(config: dict[str, Any], engine: GeneratorSettings, device_bytes: int) -> dict[str, int]:
    """Bytes by purpose at the peak of the first engine rank: as a generator's, but no version arrives, and log-probs of
    prompts are computed."""
    model = trained_model(config, FULL_TRAINING)
    tokens = longest_sequence(engine, model.positions, model.positions)
    needed = replica_memory(
        model, engine, TransferSettings(), on_gpu=True, tokens=tokens, senders=0, device_bytes=device_bytes
    )
    needed.pop(VERSIONS, None)
    return needed | {"log-probs of prompts": LOGPROB_ROWS * model.sizes.vocabulary * 4 * LOGPROB_ARRAYS}


def check_free_memory(plans: Sequence[FrozenPlan], beside: int, free_bytes: int) -> None:
    """Refuse to start engines that a machine without GPUs has no memory for now.

    Args:
        beside: bytes that the generators are about to take.
        free_bytes: of the machine.

    Raises:
        RuntimeError: says who needs how much.
    """
    needed = {
        plan.kind: plan.settings.replicas
        * sum(cpu_memory(read_frozen(Path(plan.model.model)), plan.settings.engine, FULL_TRAINING).values())
        for plan in plans
    }
    if beside + sum(needed.values()) > free_bytes:
        raise RuntimeError(
            f"the engines need {describe(needed | {'generators': beside})} GiB of memory, and {free_bytes / 2**30:.1f} "
            f"GiB of this machine are free: use smaller KV caches (frozen.max-total-tokens), or "
            "fewer replicas"
        )


def check_frozen_devices(first_device: int, offered: Devices, plans: Sequence[FrozenPlan]) -> None:
    """Refuse more engines, from ``first_device`` on, than there are devices. Raises TooFewDevices."""
    engines = ", ".join(f"{plan.settings.replicas} of {plan.kind}" for plan in plans)
    ranks = sum(plan.ranks for plan in plans)
    what = f"{first_device} for trainer and generators, {ranks} for frozen models: {engines}"
    offered.check(first_device + ranks, what)


class FolderChanged(RuntimeError):
    """A folder that frozen engines serve was written to, so that a new one read other weights."""


class FrozenPlans(list[FrozenPlan]):
    """The frozen models of a run before it starts.

    Args:
        kept: engines that are there already: what they serve keeps its key.
    """

    def __init__(self, kept: Sequence[FrozenPool] = ()) -> None:
        super().__init__()
        self._kept = kept

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
        """Check one more, with those that are there; see :func:`plan_frozen`. Raises FrozenRefused."""
        if any(plan.model.name == name for plan in self):
            raise FrozenRefused(f"there is a frozen model called {name!r} already: give each a name of its own")
        try:
            plan = plan_frozen(name, model, settings, policy, offered, snapshot_every, rollout)
            check_frozen_devices(first_device, offered, [*self, plan])
        except ValueError as error:
            raise FrozenRefused(str(error)) from error
        plan = next((pool.plan for pool in self._kept if pool.plan.same_as(plan)), plan)
        self.append(plan)
        return plan.model


class FrozenPool(ActorPool[FrozenEngine]):
    """The engines of one frozen model; the first one's devices begin with ``first_device``."""

    def __init__(
        self, plan: FrozenPlan, factory: ActorFactory[FrozenEngine] | None = None, first_device: int = 0
    ) -> None:
        super().__init__(plan.kind, f"frozen_{plan.model.name}", factory=factory)
        self.plan, self.first_device = plan, first_device
        self.model = plan.model
        self.folder = Path(plan.model.model)
        """Whose weights the engines hold."""
        self.version: int | None = None
        """Of the policy, if they are a snapshot of it that was taken for them."""
        self.published_version = 0
        """Of the policy, when it was last asked whether the engines are to take that over."""
        self.refused_snapshots = 0
        """Of the policy, that the disk did not take."""
        self.refused = False
        """Whether the newest one that was due is among them."""
        self._loads = 0
        """How often they were told to load another folder."""
        self._loading = asyncio.Lock()
        self._checksums: np.ndarray | None = None
        """int64[tensors], of what the first engine found in the folder since; None before."""

    def is_due(self, version: int) -> bool:
        """Whether the engines are to take over ``version`` of the policy: not every version is published."""
        return version // self.plan.snapshot_every > self.published_version // self.plan.snapshot_every

    async def set_up(self, index: int, engine: FrozenEngine, on_gpu: bool) -> None:
        """Have a new engine load the folder and verify it. Raises what that raises, and FolderChanged."""
        name, folder, loads, settings = self.name(index), self.folder, self._loads, self.plan.settings.engine
        start = engine.setup.call_one(name, str(folder), settings, index)
        # Its files are read once more to be verified.
        limit_s = settings.start_limit_s(on_gpu) + disk_limit_s(_file_bytes(folder)) + CALL_DEADLINE_S
        checksums = await within(limit_s, start, f"{name} to start", on=name)
        if loads == self._loads:  # else it loads the newest, see start
            self._check_same(checksums, name)

    async def start(self, index: int) -> FrozenEngine:
        """As that of every pool; an engine that has come up with weights of before loads the newest."""
        loads = self._loads
        engine = await super().start(index)
        if self._loads != loads:
            async with self._loading:  # waits: the loads that it waits for have deadlines
                await self._load(engine, self.name(index))
        return engine

    async def join(self, index: int, engine: FrozenEngine) -> None:
        """Raise if an engine that was there before does not answer."""
        await answers(self.name(index), engine)

    async def load(self, folder: Path, version: int | None = None) -> None:
        """Have all engines serve the weights of another folder of the same shapes.

        Args:
            version: of the policy, whose weights they are.

        Raises:
            ValueError: its tensors have other names or shapes; nothing has changed.
            FolderChanged: it was written to meanwhile, and engines have read different weights.
        """
        shapes, others = (expected_tensors(read_frozen(each)) for each in (self.folder, folder))
        if shapes != others:
            raise ValueError(f"{self.kind}: {folder} holds another model than {self.folder}: other tensors, or shapes")
        check_folder(folder, read_frozen(folder))
        async with self._loading:  # waits: the loads that it waits for have deadlines
            self.folder, self.version, self._checksums = folder, version, None
            self._loads += 1
            loading = [self._load(engine, self.name(index)) for index, engine in self.handles.items()]
            for error in await asyncio.gather(*loading, return_exceptions=True):  # waits: each has a deadline
                # One that is lost meanwhile is replaced by one that loads the folder.
                if isinstance(error, BaseException) and not isinstance(error, SupervisionError | ActorError):
                    raise error

    async def _load(self, engine: FrozenEngine, name: str) -> None:
        loading = engine.load.call_one(str(self.folder))
        limit_s = disk_limit_s(_file_bytes(self.folder)) + self.plan.settings.engine.drain_deadline_s
        checksums = await within(limit_s, loading, f"{name} to load {self.folder}", on=name)
        self._check_same(checksums, name)

    def _check_same(self, checksums: np.ndarray, name: str) -> None:
        """All engines serve the same weights, although each reads the folder at another time. Raises FolderChanged."""
        if self._checksums is None:
            self._checksums = checksums
        elif not np.array_equal(self._checksums, checksums):
            raise FolderChanged(
                f"{name} found other weights in {self.folder} than the engines before it, so it does not serve: "
                "leave a folder as it is while it is served, or load it again after it was written"
            )

    def dispatcher(self) -> FrozenReplicas:
        """Hands requests to the replicas, as they are now."""
        replicas = [self.latest[index] for index in sorted(self.latest)]
        s = self.plan.settings
        flag = FrozenSettings.flag("request_deadline_s")
        return Dispatcher(replicas, s.request_deadline_s, self.kind, flag, s.request_losses)

    async def note_lost_engine(self, workers: ActorPool[RolloutWorker]) -> None:
        """Have everybody know which replicas take no requests."""
        key, lost = self.model.key, self.lost
        replicas_of(key).update_replicas([], lost)
        what = f"to take note of the lost engines of {self.kind}"
        await workers.ask(CALL_DEADLINE_S, what, lambda _, worker: worker.update_frozen.call_one(key, lost))

    async def note_new_engine(self, workers: ActorPool[RolloutWorker], index: int) -> list[int]:
        """Have everybody ask the new engine; returns the workers that did not take note of it."""
        key, handle = self.model.key, self.latest[index]
        replicas_of(key).replace(index, handle)
        what = f"to take note of a new {self.kind}"
        answers = await workers.ask(
            CALL_DEADLINE_S, what, lambda _, worker: worker.replace_frozen.call_one(key, index, handle)
        )
        return sorted(workers.handles.keys() - answers.keys())


async def start_frozen(
    cluster: Cluster, plan: FrozenPlan, first_device: int, kept: Sequence[FrozenPool] = ()
) -> FrozenPool:
    """Spawn the engines of a frozen model, one process mesh each; they answer once their weights are verified.

    Args:
        first_device: of replica 0; those of the others follow.
        kept: pools that are there already; the one of this plan stays, and serves the model's own folder again.
    """
    for pool in kept:
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
    beside: int,
    kept: Sequence[FrozenPool] = (),
) -> list[FrozenPool]:
    """Start the engines of all frozen models at once, on devices that follow each other.

    Args:
        beside: bytes that the generators are about to take of a machine without GPUs.
        kept: pools that are there already; the engines of those that are not asked for any more, or should be on other
            devices, are ended first.
    """
    devices = [first_device + sum(plan.ranks for plan in plans[:index]) for index in range(len(plans))]
    places = list(zip(plans, devices, strict=True))
    staying = [pool for pool in kept if (pool.plan, pool.first_device) in places]
    await asyncio.gather(*(pool.stop_all() for pool in kept if pool not in staying))  # waits: it has deadlines
    new = [plan for plan in plans if all(pool.plan != plan for pool in staying)]
    if new and cluster.devices.kind == "cpu" and cluster.num_hosts == 1:
        check_free_memory(new, beside, free_memory())
    return list(await asyncio.gather(*(start_frozen(cluster, *place, staying) for place in places)))  # waits: deadlines


def _file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
