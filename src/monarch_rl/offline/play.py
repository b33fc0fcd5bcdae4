"""Runs episodes of a task without a run: with an engine, a chat template, scoring processes and frozen models.

All are children of this process; the engines of frozen models have processes of their own, as in a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.scheduler_process import ENGINE_PRELOAD
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.config import ModelConfig
from monarch_rl.model.lora import FULL_TRAINING
from monarch_rl.pipeline.frozen import FrozenPlan, start_all_frozen
from monarch_rl.pipeline.memory import cpu_memory
from monarch_rl.pipeline.preloads import PRELOADS
from monarch_rl.pipeline.settings import RunSettings, episode_limits, prepare_engine
from monarch_rl.rollout.episode_failed import EpisodeFailed, item_failed
from monarch_rl.rollout.evaluation import EpisodeResult
from monarch_rl.rollout.frozen import connect_frozen_models
from monarch_rl.rollout.play import EpisodeRunner
from monarch_rl.rollout.policy import episode_seed
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.runtime.cluster import Cluster, launch_cluster
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.devices import Devices
from monarch_rl.tasks.task import Task

if TYPE_CHECKING:
    from monarch_rl.generator.engine import Engine


class LocalEngine:
    """Adapts an engine of this process to :class:`~monarch_rl.rollout.handles.GeneratorHandle`.

    Args:
        deadline_s: seconds that one turn may take.
    """

    def __init__(self, engine: Engine, deadline_s: float) -> None:
        self._engine, self._deadline_s = engine, deadline_s

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        """Generate one turn."""
        generating = self._engine.generate(prompt_ids, sampling)
        what = "the engine to generate a turn"
        return await within(self._deadline_s, generating, what, on="the engine", flag="patience")


class Table:
    """Runs episodes of one task, one by one or concurrently.

    Args:
        engine: generates the turns.
        template: chat template of the engine's model.
        settings: the recipe's rollout settings.
        task: the task to run.
        episode_limit: maximum tokens of a sequence, prompts included.
    """

    def __init__(
        self, engine: Engine, template: ChatTemplate, settings: RolloutSettings, task: Task, episode_limit: int
    ) -> None:
        self.task, self.template = task, template
        self._settings, self._share = settings, settings.bound(episode_limit).share(settings.group_size)
        self._scorer = Scorer(settings.scorer_processes, settings.score_deadline_s, task.warm_up)
        handle = LocalEngine(engine, settings.generate_limit_s)
        self._runner = EpisodeRunner(handle, template, settings, self._scorer, episode_limit)

    async def train_episode(self, index: int, episode: int = 0) -> EpisodeResult:
        """Run the episode at position ``episode`` in the group of training item ``index``, as a run would. Rewards that
        compare episodes of a group, and stages, are not computed."""
        try:
            item = await asyncio.to_thread(self.task.items, index)
        except Exception as error:  # any error of the task's code
            return item_failed(error, index)
        s = self._settings
        seed, stops = episode_seed(s.seed, index, episode), self.template.stop_token_ids
        sampling = Sampling(s.max_new_tokens, s.temperature, stops, seed, s.top_k, s.top_p, s.min_p)
        task, item = self.task.owner_of(item)
        return await self.play(task, item, index, sampling, index)

    async def play(self, task: Task, item: Any, index: int, sampling: Sampling, group: int) -> EpisodeResult:
        """Run an episode of an item, limited to its share of the group's bound. A failed episode is returned, not
        raised."""
        try:
            return await self._runner.play(task, index, item, sampling, group, self._share)
        except EpisodeFailed as failed:
            return failed

    async def close(self) -> None:
        """Stop the scoring processes."""
        await asyncio.to_thread(self._scorer.close)


@asynccontextmanager
async def table(
    settings: RunSettings, task: Task, model: ModelConfig, engine: Engine, offered: Devices
) -> AsyncIterator[Table]:
    """A :class:`Table` for ``task`` with an engine that serves ``model``, for the block."""
    rollout = settings.with_patience().rollout
    template = await asyncio.to_thread(
        ChatTemplate,
        str(model.folder),
        rollout.template_options,
        tool_parser=rollout.tool_parser,
        allow_control_tokens=rollout.allow_control_tokens,
    )
    if task.warm_up is not None:
        await asyncio.to_thread(task.warm_up)
    episode_limit = min(episode_limits(settings, model, offered.kind == "cuda").values())
    opened = Table(engine, template, rollout, task, episode_limit)
    try:
        yield opened
    finally:
        await opened.close()


@asynccontextmanager
async def engine_of(
    settings: RunSettings, offered: Devices, task: Task | None = None, version: int = 0
) -> AsyncIterator[tuple[Engine, ModelConfig]]:
    """An engine in this process that serves the model of ``settings``, and the model's config, for the block.

    Args:
        offered: the devices of this machine.
        task: the task to run, if it is known.
        version: version number that the engine reports for the model's weights.

    Raises:
        ValueError: settings that cannot work; names them.
        RuntimeError: the engine did not start; says why.
    """
    from monarch_rl.generator.engine import Engine

    generator, model = prepare_engine(settings, offered, task)
    limit_s = generator.start_limit_s(offered.kind == "cuda")
    memory = None if offered.kind == "cuda" else cpu_memory(model, generator, FULL_TRAINING)
    starting = Engine.start(str(model.folder), generator, version=version, memory=memory)
    engine = await within(limit_s, starting, f"the engine to load {model.folder}", on="the engine")
    try:
        yield engine, model
    finally:
        await engine.shutdown()


ENGINE_PRELOADS = [preload for preload in PRELOADS if preload.name in ("torch", "text", ENGINE_PRELOAD)]


@contextmanager
def host_for(plans: Sequence[FrozenPlan]) -> Iterator[Cluster | None]:
    """A cluster on which to start the engines of frozen models, for the block; None if there are no models. Must be
    called outside of an event loop."""
    if not plans:
        yield None
        return
    with launch_cluster(ENGINE_PRELOADS) as cluster:
        yield cluster


async def serve_frozen(
    cluster: Cluster | None, plans: Sequence[FrozenPlan], settings: RunSettings, model: ModelConfig
) -> None:
    """Start the engines of frozen models next to an engine that serves ``model``, and connect this process to them.
    They end with the cluster. Raises the errors of :func:`~monarch_rl.pipeline.frozen.start_all_frozen`."""
    if cluster is None:
        return
    generator_bytes = sum(cpu_memory(model, settings.generator, FULL_TRAINING).values())
    pools = await start_all_frozen(cluster, plans, settings.generator.tp, generator_bytes)
    await connect_frozen_models([(pool.model, pool.dispatcher()) for pool in pools])
