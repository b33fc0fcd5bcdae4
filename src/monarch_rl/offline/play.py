"""Episodes of a task without a run: an engine, a chat template, scoring processes, and the engines of frozen models.

All are below this process; frozen models have processes of their own, as in a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.replica_memory import cpu_memory
from monarch_rl.generator.scheduler_process import ENGINE_PRELOAD
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.folder import read_config
from monarch_rl.model.lora import FULL_TRAINING
from monarch_rl.pipeline.frozen import FrozenPlan, start_all_frozen
from monarch_rl.pipeline.settings import RunSettings, episode_limits, prepare_engine
from monarch_rl.pipeline.start import PRELOADS
from monarch_rl.rollout.episode_failed import EpisodeFailed, item_failed
from monarch_rl.rollout.evaluation import EpisodeResult
from monarch_rl.rollout.frozen import connect
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


class EngineHere:
    """An engine of this process as :class:`~monarch_rl.rollout.handles.GeneratorHandle`.

    Args:
        deadline_s: seconds of one turn.
    """

    def __init__(self, engine: Engine, deadline_s: float) -> None:
        self._engine, self._deadline_s = engine, deadline_s

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        """Draw one turn."""
        drawing, flag = self._engine.generate(prompt_ids, sampling), RolloutSettings.flag("generate_deadline_s")
        return await within(self._deadline_s, drawing, "the engine to draw a turn", on="the engine", flag=flag)


class Table:
    """Plays episodes of one task, one by one or at once.

    Args:
        engine: draws the turns.
        template: of its model.
        settings: of the recipe.
        limit: tokens that an episode may have.
    """

    def __init__(
        self, engine: Engine, template: ChatTemplate, settings: RolloutSettings, task: Task, limit: int
    ) -> None:
        self.task, self.template = task, template
        self._settings, self._share = settings, settings.bound(limit).share(settings.group_size)
        self._scorer = Scorer(settings.scorer_processes, settings.score_deadline_s, task.warm_up)
        here = EngineHere(engine, settings.generate_limit_s)
        self._player = EpisodeRunner(here, template, settings, self._scorer, limit)

    async def train_episode(self, index: int, episode: int = 0) -> EpisodeResult:
        """Play the training item of a cursor as a run would, for the place ``episode`` of its group. Rewards that
        compare a group, and stages, are not computed."""
        try:
            item = await asyncio.to_thread(self.task.items, index)
        except Exception as error:  # whatever the task raises
            return item_failed(error, index)
        s = self._settings
        seed, stops = episode_seed(s.seed, index, episode), self.template.stop_token_ids
        sampling = Sampling(s.max_new_tokens, s.temperature, stops, seed, s.top_k, s.top_p, s.min_p)
        task, item = self.task.player_of(item)
        return await self.play(task, item, index, sampling, index)

    async def play(self, task: Task, item: Any, index: int, sampling: Sampling, group: int) -> EpisodeResult:
        """Play an item, with an episode's share of the group's bound. Failures of the episode are values."""
        try:
            return await self._player.play(task, index, item, sampling, group, self._share)
        except EpisodeFailed as failed:
            return failed

    async def close(self) -> None:
        """End the scoring processes."""
        await asyncio.to_thread(self._scorer.close)


@asynccontextmanager
async def table(
    settings: RunSettings, task: Task, model: Path, engine: Engine, offered: Devices
) -> AsyncIterator[Table]:
    """Play ``task`` with an engine that serves ``model``, for the block."""
    rollout = settings.rollout
    template = await asyncio.to_thread(
        ChatTemplate, str(model), rollout.template_options, tool_parser=rollout.tool_parser
    )
    if task.warm_up is not None:
        await asyncio.to_thread(task.warm_up)
    limit = min(episode_limits(settings, read_config(model), offered.kind == "cuda").values())
    opened = Table(engine, template, rollout, task, limit)
    try:
        yield opened
    finally:
        await opened.close()


@asynccontextmanager
async def engine_of(
    settings: RunSettings, offered: Devices, task: Task | None = None, version: int = 0
) -> AsyncIterator[tuple[Engine, Path]]:
    """An engine that serves the model of ``settings`` as it is, for the block, and the model's folder.

    Args:
        task: what is to be played, if it is known.
        version: number of the model's weights.

    Raises:
        ValueError: settings that cannot work; names them.
        RuntimeError: the engine does not start; says why.
    """
    from monarch_rl.generator.engine import Engine

    generator, model = prepare_engine(settings, offered, task)
    limit_s = generator.start_limit_s(offered.kind == "cuda")
    starting = Engine.start(str(model), generator, version=version)
    engine = await within(limit_s, starting, f"the engine to load {model}", on="the engine")
    try:
        yield engine, model
    finally:
        await engine.shutdown()


ENGINE_PRELOADS = [preload for preload in PRELOADS if preload.name in ("torch", "text", ENGINE_PRELOAD)]


@contextmanager
def host_for(plans: Sequence[FrozenPlan]) -> Iterator[Cluster | None]:
    """Where engines of frozen models are started, for the block; None if there are none. Outside of an event loop."""
    if not plans:
        yield None
        return
    with launch_cluster(ENGINE_PRELOADS) as cluster:
        yield cluster


async def serve_frozen(
    cluster: Cluster | None, plans: Sequence[FrozenPlan], settings: RunSettings, model: Path
) -> None:
    """Start the engines of frozen models, beside one engine that serves ``model``, and have this process ask them. They
    end with the cluster. Raises as :func:`~monarch_rl.pipeline.frozen.start_all_frozen` does."""
    if cluster is None:
        return
    beside = sum(cpu_memory(read_config(model), settings.generator, FULL_TRAINING).values())
    pools = await start_all_frozen(cluster, plans, settings.generator.tp, beside)
    await connect([(pool.model, pool.dispatcher()) for pool in pools])
