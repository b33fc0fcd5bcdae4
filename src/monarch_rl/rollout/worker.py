"""The rollout worker: an actor that plays groups of episodes on the generators and puts them into the buffer."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

from monarch.actor import current_rank

from monarch_rl.episode.episode import Episode, Group
from monarch_rl.episode.failure import KINDS
from monarch_rl.episode.packed import pack_group
from monarch_rl.episode.sampling import Sampling
from monarch_rl.episode.ticket import Ticket
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.rollout.admissions import Admissions
from monarch_rl.rollout.episode_failed import EpisodeFailed, item_failed
from monarch_rl.rollout.evaluation import Evaluation
from monarch_rl.rollout.handles import BUFFER_DEADLINE_S, BufferHandle, DispatchedGenerators
from monarch_rl.rollout.outbox import Outbox
from monarch_rl.rollout.play import EpisodePlayer, all_or_none, episode_seed
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.statistics import Statistics, WorkerStats
from monarch_rl.runtime import presence
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint, lasting_endpoint
from monarch_rl.runtime.heap import freeze_heap
from monarch_rl.runtime.resilient import ResilientActor
from monarch_rl.tasks.task import Task

INLINE_TOKENS = 8192
"""Tokens of a group that is packed on the event loop: that takes a millisecond or two, and a thread costs a part of it
and holds up the loop likewise."""


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


class RolloutWorker(ResilientActor):
    """One process that plays groups.

    Args:
        settings: how to play.
        task: what to play, a :class:`Task`.
        model: Hugging Face folder or Hub name, for its tokenizer.
        name: of this worker; empty takes its rank in the mesh.
        keep_expert_routes: keep by which experts the generators read each token; not of held-out items.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        task: ByValue[Task],
        model: str,
        name: str = "",
        keep_expert_routes: bool = False,
    ) -> None:
        self._settings = settings
        self._handed = task
        self._model = model
        self._keep_expert_routes = keep_expert_routes
        self._name = name or f"rollout worker {current_rank().rank}"
        presence.register(self._name)
        self._scorer: Scorer | None = None
        self._running: asyncio.Task[None] | None = None
        self._statistics = Statistics(self._name)
        self._known_failures: set[tuple[str, str]] = set()
        """Kinds of failures of which the buffer has the first."""

    @concurrent_endpoint
    async def setup(
        self, buffer: BufferHandle, generator: DispatchedGenerators, episode_limit: int | None = None
    ) -> None:
        """Load what playing needs. Raises what loading raises (OSError, ValueError).

        Args:
            episode_limit: tokens that an episode may have, prompts and drawn ones; None is any number.
        """
        resources = await Resources.load(self._settings, self._handed, self._model)
        self.connect(buffer, generator, resources, episode_limit)
        freeze_heap()

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
        self._admissions = Admissions(buffer, self._name, self._settings.slot_deadline_s)
        self._outbox = Outbox(buffer, self._name, self._settings.slot_deadline_s)
        self._player = EpisodePlayer(generator, resources.template, self._settings, resources.scorer, episode_limit)

    @concurrent_endpoint
    async def run(self) -> None:
        """Play until the buffer or this worker is closed. Raises any error that is not one episode's own failure."""
        if self._running is not None:
            raise RuntimeError(f"{self._name} runs already")
        self._running = running = asyncio.ensure_future(self._play_until_closed())
        try:
            await asyncio.wait({running})  # waits: as long as the run; close() ends it
        finally:
            running.cancel()
            self._running = None
        if not running.cancelled():
            running.result()

    @lasting_endpoint
    async def evaluate(self, indices: list[int], held_out: str = "") -> Evaluation:
        """Play items of a held-out set (empty: the first one) once each, greedily, beside the training rollouts.
        Nothing of it goes to the buffer."""
        items = self._task.held_out_items(held_out)
        places = asyncio.Semaphore(self._settings.concurrent_groups * self._settings.group_size)
        sampling = Sampling(self._settings.max_new_tokens, 0.0, self._template.stop_token_ids)

        async def play(index: int) -> Episode | EpisodeFailed:
            async with places:
                try:
                    item = await asyncio.to_thread(lambda: items[index])
                except Exception as error:
                    return await self._reported(item_failed(error, index))
                episode = await self._play_episode(item, index, sampling, group=-1 - index)
                if isinstance(episode, Episode):
                    presence.progress("held-out item played")
                return episode

        return Evaluation.of(await all_or_none([play(index) for index in indices]))

    @lasting_endpoint
    async def stats(self) -> WorkerStats:
        """What this worker did so far."""
        return self._statistics.stats()

    @lasting_endpoint
    async def samples(self, limit: int) -> list[dict[str, Any]]:
        """The newest ``limit`` training episodes since the last call, as JSON objects to look at."""
        newest, template = self._statistics.take_samples(limit), self._template
        # Decoding long answers takes tens of milliseconds: on a thread, and only those that were asked for.
        return await asyncio.to_thread(lambda: [sample.row(template.plain, template.decode) for sample in newest])

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

    async def _play_until_closed(self) -> None:
        """Play ``concurrent_groups`` at once. The first place to end, by an error or the end of the run, ends all."""
        places = [asyncio.ensure_future(self._play_groups()) for _ in range(self._settings.concurrent_groups)]
        try:
            # waits: as long as the run; close() ends it
            done, _ = await asyncio.wait(places, return_when=asyncio.FIRST_COMPLETED)
            for place in done:
                place.result()
        finally:
            for place in places:
                place.cancel()
            await asyncio.gather(*places, return_exceptions=True)  # waits: they are done or cancelled

    async def _play_groups(self) -> None:
        """Play one group after the other until the run ends."""
        while True:
            with self._statistics.group_waiting():
                ticket = await self._admissions.ticket()
            if ticket is None:
                return
            with self._statistics.group_playing():
                await self._play_group(ticket)

    async def _play_group(self, ticket: Ticket) -> None:
        """Play a group and put it, or drop it if too few of its episodes are left to be compared."""
        size, cursor = self._settings.group_size, ticket.task_cursor
        item: Any = None
        played: list[Episode | EpisodeFailed]
        try:
            item = await asyncio.to_thread(self._task.items, cursor)
        except Exception as error:
            played = [await self._reported(item_failed(error, cursor))] * size
        else:
            seeds = [episode_seed(self._settings.seed, ticket.group_id, i) for i in range(size)]
            played = await all_or_none(
                [self._play_episode(item, cursor, self._sampling(seed), ticket.group_id) for seed in seeds]
            )
        self._statistics.add_episodes(ticket.group_id, cursor, item, played)
        episodes = [episode for episode in played if isinstance(episode, Episode)]
        failures = [episode for episode in played if isinstance(episode, EpisodeFailed)]
        if len(episodes) >= min(2, size):
            group = Group(ticket.group_id, cursor, episodes, len(failures), ticket.attempt, task=self._task.name)
            await self._put(group)
        else:
            reason = Counter(failure.reason for failure in failures).most_common(1)[0][0]
            await self._drop(ticket, reason, sum(episode.num_trainable for episode in episodes))

    async def _put(self, group: Group) -> None:
        small = sum(episode.num_tokens for episode in group.episodes) <= INLINE_TOKENS
        data = pack_group(group) if small else await asyncio.to_thread(pack_group, group)
        await self._outbox.put(group.group_id, group.attempt, data)
        self._statistics.add_put()
        presence.progress("group put")

    async def _drop(self, ticket: Ticket, reason: str, tokens: int) -> None:
        drop = self._buffer.drop.call_one(ticket.group_id, reason, tokens, ticket.attempt)
        await within(BUFFER_DEADLINE_S, drop, f"the buffer to drop group {ticket.group_id}", on="buffer")
        self._statistics.add_dropped()  # it is no progress: a run that only drops groups does not go on

    async def _play_episode(self, item: Any, index: int, sampling: Sampling, group: int) -> Episode | EpisodeFailed:
        """The episode, or why it failed: failures are values here, so that they do not cancel other episodes."""
        if self._scorer is None:
            raise RuntimeError(f"{self._name} is not set up, or closed")
        try:
            return await self._player.play(self._task, index, item, sampling, group)
        except EpisodeFailed as failed:
            return await self._reported(failed)

    async def _reported(self, failed: EpisodeFailed) -> EpisodeFailed:
        """The same, once it is sure that the first failure of its kind is shown."""
        failure = failed.failure
        if failure.kind not in self._known_failures and len(self._known_failures) < KINDS:
            self._known_failures.add(failure.kind)
            noted = self._buffer.note_failure.call_one(failure)
            await within(BUFFER_DEADLINE_S, noted, "the buffer to take note of a failure", on="buffer")
        return failed

    def _sampling(self, seed: int | None) -> Sampling:
        s, expert_routes_from = self._settings, 0 if self._keep_expert_routes else None
        stops = self._template.stop_token_ids
        return Sampling(s.max_new_tokens, s.temperature, stops, seed, s.top_k, s.top_p, s.min_p, expert_routes_from)
