"""The rollout worker: an actor that plays groups of episodes on the generators and puts them into the buffer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monarch.actor import current_rank

from monarch_rl.episode.episode import Group, Ticket
from monarch_rl.episode.group_bound import GroupBound
from monarch_rl.episode.sampled import TrainedEpisode
from monarch_rl.episode.sampling import Sampling
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.evaluation import EpisodeResult, Evaluation, EvaluationPlan, run_held_out
from monarch_rl.rollout.frozen import AsksFrozenModels, FrozenModel, FrozenReplicas, connect
from monarch_rl.rollout.handles import BUFFER_DEADLINE_S, BufferHandle, DispatchedGenerators
from monarch_rl.rollout.play import EpisodeRunner, all_or_none, made
from monarch_rl.rollout.policy import episode_seed
from monarch_rl.rollout.process_limits import bound_printing, check_open_files, end_copies
from monarch_rl.rollout.run_tools import check_hung_tools
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.stages import GroupRewarder, Stage
from monarch_rl.rollout.statistics import Statistics, WorkerStats
from monarch_rl.rollout.submit import GroupSubmitter, TicketQueue
from monarch_rl.rollout.transcripts import Transcripts, rows
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint, lasting_endpoint
from monarch_rl.runtime.process import freeze_heap
from monarch_rl.tasks.task import Task

GREEDY = EvaluationPlan()


@dataclass(frozen=True)
class Resources:
    """What a worker loads before it plays."""

    template: ChatTemplate
    task: Task
    scorer: Scorer

    @classmethod
    async def load(cls, settings: RolloutSettings, handed: ByValue[Task], model: str) -> Resources:
        """Load chat template and task, start the scoring processes. Raises what loading raises."""
        options, parser = settings.template_options, settings.tool_parser
        template = await asyncio.to_thread(ChatTemplate, model, options, tool_parser=parser)
        task = await asyncio.to_thread(handed.load)
        if task.warm_up is not None:
            await asyncio.to_thread(task.warm_up)
        await asyncio.to_thread(task.items, 0)  # collects what the items are made from
        return cls(template, task, Scorer(settings.scorer_processes, settings.score_deadline_s, task.warm_up))


class RolloutWorker(AsksFrozenModels):
    """One process that plays groups.

    Args:
        settings: how to play.
        task: what to play, a :class:`Task`.
        model: Hugging Face folder or Hub name, for its tokenizer.
        name: of this worker; empty takes its rank in the mesh.
        keep_expert_routes: keep by which experts the generators read each token; not of held-out items.
        stages: what is done with a group that was played, before it is put.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        task: ByValue[Task],
        model: str,
        name: str = "",
        keep_expert_routes: bool = False,
        stages: ByValue[Sequence[Stage]] | None = None,
    ) -> None:
        self._settings = settings
        self._handed, self._handed_stages = task, stages
        self._model = model
        self._keep_expert_routes = keep_expert_routes
        self._name = name or f"rollout worker {current_rank().rank}"
        wait_registry.register(self._name)
        self._scorer: Scorer | None = None
        self._resources: Resources | None = None
        self._running: asyncio.Task[None] | None = None
        self._evaluating: set[asyncio.Task[Evaluation]] = set()
        self._statistics = Statistics(self._name)
        self._playing = asyncio.Semaphore(settings.concurrent_groups)
        self._transcripts = Transcripts()

    @concurrent_endpoint
    async def setup(
        self,
        buffer: BufferHandle,
        generator: DispatchedGenerators,
        episode_limit: int | None = None,
        frozen: Sequence[tuple[FrozenModel, FrozenReplicas]] = (),
    ) -> None:
        """Load what playing needs. Raises what loading raises (OSError, ValueError).

        Called again, it gives up what it plays, and from then on plays for this buffer, and counts anew; what it has
        loaded stays.

        Args:
            episode_limit: tokens that an episode may have, prompts and drawn ones; None is any number.
            frozen: models that episodes may ask, and their engines.
        """
        await connect(frozen)
        if self._resources is not None:
            await self._give_up()
            self._statistics = Statistics(self._name)  # what was counted before is the checkpoint's to know
            self.connect(buffer, generator, self._resources, episode_limit)
            return
        self._resources = await Resources.load(self._settings, self._handed, self._model)
        self.connect(buffer, generator, self._resources, episode_limit)
        self.guard_process()
        freeze_heap()

    async def _give_up(self) -> None:
        """End what is played, for training and held out: whoever asked for it is no more."""
        playing = [*self._evaluating, *([] if self._running is None else [self._running])]
        for task in playing:
            task.cancel()
        ended = asyncio.gather(*playing, return_exceptions=True)
        await within(BUFFER_DEADLINE_S, ended, "episodes that were cancelled to end", on="an episode's code")

    def guard_process(self) -> None:
        """Bound what episodes' code may do to this process, which is the worker's alone."""
        bound_printing(f"the code of {self._name}")
        end_copies()

    def connect(
        self,
        buffer: BufferHandle,
        generator: DispatchedGenerators,
        resources: Resources,
        episode_limit: int | None = None,
    ) -> None:
        """From now on play with these; the rest of :meth:`setup`."""
        self._buffer = buffer
        self._generator = generator
        self._template, self._task, self._scorer = resources.template, resources.task, resources.scorer
        stages = () if self._handed_stages is None else self._handed_stages.load()
        kept = self._transcripts if self._settings.logged_groups else None
        self._hand_in = GroupSubmitter(
            buffer, self._name, self._settings.slot_deadline_s, stages, self._statistics, kept
        )
        self._admissions = TicketQueue(buffer, self._name, self._settings.slot_deadline_s)
        self._group_rewards = GroupRewarder(resources.scorer, self._settings.episode_deadline_s)
        s = self._settings
        self._held_out_share = s.bound(episode_limit).share(s.group_size)
        """What an episode of a held-out item may become: as much as one of a group, or it would be another episode."""
        self._player = EpisodeRunner(generator, resources.template, s, resources.scorer, episode_limit)

    @concurrent_endpoint
    async def run(self) -> None:
        """Play until the buffer or this worker is closed. Raises any error that is not one episode's own failure."""
        if self._running is not None:
            raise RuntimeError(f"{self._name} runs already")
        self._running = running = asyncio.ensure_future(self._run_until_closed())
        try:
            await asyncio.wait({running})  # waits: as long as the run; close() ends it
        finally:
            running.cancel()
            self._running = None
        if not running.cancelled():
            running.result()

    @lasting_endpoint
    async def evaluate(
        self, indices: list[int], plan: EvaluationPlan = GREEDY, places: int | None = None
    ) -> Evaluation:
        """Play items of a held-out set beside the training rollouts. Nothing of it goes to the buffer.

        Args:
            places: episodes at once; None is as many as are played for training.
        """
        settings = self._settings
        playing = run_held_out(
            plan,
            self._task,
            indices,
            self._run_held_out,
            max_new_tokens=settings.max_new_tokens,
            stops=self._template.stop_token_ids,
            item_deadline_s=settings.episode_deadline_s,
            places=places or settings.concurrent_groups * settings.group_size,
        )
        self._evaluating.add(task := asyncio.ensure_future(playing))
        task.add_done_callback(self._evaluating.discard)
        result = await task  # waits: every wait of an episode has a deadline of its own
        for failure in result.first.values():
            await self._hand_in.note(failure)
        return result

    async def _run_held_out(self, task: Task, item: Any, index: int, sampling: Sampling, group: int) -> EpisodeResult:
        played = await self._run_episode(task, item, index, sampling, group, self._held_out_share)
        if not isinstance(played, EpisodeFailed):
            wait_registry.progress("held-out item played")
        return played

    @lasting_endpoint
    async def stats(self) -> WorkerStats:
        """What this worker did so far."""
        return self._statistics.stats()

    @lasting_endpoint
    async def rollouts(
        self, trained: list[TrainedEpisode], played_here: bool = True, again: bool = False
    ) -> list[dict[str, Any]]:
        """Episodes that were trained as rows to look at; unless ``played_here`` also those with messages elsewhere.
        What was said before is forgotten, unless groups are trained ``again``."""
        said = zip(trained, self._transcripts.take(trained, again), strict=True)
        asked = [(one, messages) for one, messages in said if messages is not None or not played_here]
        # Decoding takes milliseconds, and so may an item: on a thread.
        return await asyncio.to_thread(rows, asked, self._task, self._template)

    @lasting_endpoint
    async def update_replicas(self, paused: list[int], lost: list[int]) -> None:
        """Send no new requests to the ``paused`` replicas, and ask others for what the ``lost`` ones owe."""
        self._generator.update_replicas(paused, lost)

    @concurrent_endpoint
    async def replace(self, replica: int, handle: object) -> None:
        """From now on ``replica`` is the generator behind ``handle``."""
        self._generator.replace(replica, handle)

    @concurrent_endpoint
    async def lives(self) -> None:
        """Never return: the call fails when this process is lost."""
        await asyncio.Event().wait()  # waits: as long as the process lives

    @concurrent_endpoint
    async def close(self) -> None:
        """End ``run`` and the scoring processes."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running}, timeout=BUFFER_DEADLINE_S)
        await self._close_scorer()

    async def __cleanup__(self, exc: Exception | None) -> None:
        await self._close_scorer()

    async def _close_scorer(self) -> None:
        scorer, self._scorer = self._scorer, None
        if scorer is not None:
            await asyncio.to_thread(scorer.close)

    async def _run_until_closed(self) -> None:
        """Play ``concurrent_groups`` at once, while others are in stages. The first place to end, by an error or the
        end of the run, ends all."""
        count = self._settings.concurrent_groups + self._hand_in.places
        places = [asyncio.ensure_future(self._run_groups()) for _ in range(count)]
        try:
            # waits: as long as the run; close() ends it
            done, _ = await asyncio.wait(places, return_when=asyncio.FIRST_COMPLETED)
            for place in done:
                place.result()
        finally:
            for place in places:
                place.cancel()
            await asyncio.gather(*places, return_exceptions=True)  # waits: they are done or cancelled
            await self._player.leave()

    async def _run_groups(self) -> None:
        """Play one group after the other until the run ends."""
        while True:
            check_open_files()
            check_hung_tools()
            async with self._playing:
                with self._statistics.group_waiting():
                    ticket = await self._admissions.ticket()
                if ticket is None:
                    return
                with self._statistics.group_running():
                    item, group = await self._run_group(ticket)
            if group is not None:
                await self._hand_in.submit(ticket, item, group)

    async def _run_group(self, ticket: Ticket) -> tuple[Any, Group | None]:
        """The item and the group that was played, which is dropped if too few of its episodes are left to compare."""
        size, cursor, task = self._settings.group_size, ticket.task_cursor, self._task
        item: Any = None
        played: list[EpisodeResult]
        try:
            item = await made(self._task.items, cursor, self._settings.episode_deadline_s)
        except EpisodeFailed as failed:
            played = [await self._hand_in.reported(failed)] * size
        else:
            seeds = [episode_seed(self._settings.seed, ticket.group_id, i) for i in range(size)]
            task, item = self._task.player_of(item)
            share, group = ticket.bound.share(size), ticket.group_id
            played = await all_or_none(
                [self._run_episode(task, item, cursor, self._sampling(seed), group, share) for seed in seeds]
            )
            compared = await self._group_rewards.added(task, item, cursor, played)
            played = [await self._hand_in.reported(e) if isinstance(e, EpisodeFailed) else e for e in compared]
        self._statistics.add_episodes(played)
        failures = [play for play in played if isinstance(play, EpisodeFailed)]
        plays = [play for play in played if not isinstance(play, EpisodeFailed)]
        for number, play in enumerate(plays):
            for episode in play:
                episode.play = number
        episodes = [episode for play in plays for episode in play]
        if len(plays) >= min(2, size):
            return item, Group(ticket.group_id, cursor, episodes, len(failures), ticket.attempt, task=task.name)
        reason = Counter(failure.reason for failure in failures).most_common(1)[0][0]
        await self._hand_in.drop(ticket, reason, sum(episode.num_trainable for episode in episodes))
        return item, None

    async def _run_episode(
        self, task: Task, item: Any, index: int, sampling: Sampling, group: int, share: GroupBound
    ) -> EpisodeResult:
        """What an episode became, or why it failed: failures are values here, so that they do not cancel others."""
        if self._scorer is None:
            raise RuntimeError(f"{self._name} is not set up, or closed")
        try:
            return await self._player.play(task, index, item, sampling, group, share)
        except EpisodeFailed as failed:
            return await self._hand_in.reported(failed)

    def _sampling(self, seed: int | None) -> Sampling:
        s, expert_routes_from = self._settings, 0 if self._keep_expert_routes else None
        stops = self._template.stop_token_ids
        return Sampling(s.max_new_tokens, s.temperature, stops, seed, s.top_k, s.top_p, s.min_p, expert_routes_from)
