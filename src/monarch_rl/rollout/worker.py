"""The rollout worker: an actor that plays many groups at once and hands them to the buffer."""

from __future__ import annotations

import asyncio
import functools
import os
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from monarch.actor import current_rank

from monarch_rl.episode.episode import Episode, Group
from monarch_rl.episode.packed import pack_group
from monarch_rl.episode.sampling import Sampling
from monarch_rl.rollout.admissions import Admissions
from monarch_rl.rollout.handles import BUFFER_DEADLINE_S, BufferHandle, DispatchedGenerators
from monarch_rl.rollout.outbox import Outbox
from monarch_rl.rollout.play import EpisodeFailed, EpisodePlayer, all_or_none, episode_seed
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.tokenizer import Tokenizer
from monarch_rl.runtime import presence
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint
from monarch_rl.runtime.resilient import ResilientActor
from monarch_rl.tasks.reasoning_gym import TaskSettings, TaskSource, load_data_set, score
from monarch_rl.tasks.task import Environment, Item, SingleTurn

RECENT_EPISODES = 256
"""Episodes behind the recent means and the samples."""


@dataclass(slots=True)
class WorkerStats:
    """What one worker did so far. Evaluation episodes are not in it."""

    worker: str
    pid: int
    groups_playing: int
    groups_waiting: int
    """Group places that wait for a slot of the buffer, that is, for the trainer."""
    groups_put: int
    groups_dropped: int
    episodes: int
    """Episodes scored."""
    failed: dict[str, int]
    """Episodes lost, by reason."""
    tokens: int
    """Tokens drawn for scored episodes."""
    failed_tokens: int
    """Tokens drawn for lost episodes."""
    recent_reward: float
    """Mean reward of the last episodes (up to 256); nan before the first."""
    recent_tokens: float
    """Mean tokens drawn of the last episodes; nan before the first."""


@dataclass(slots=True)
class Evaluation:
    """Held-out items played once each."""

    rewards: np.ndarray
    """float32[n]; 0 where the episode failed."""
    failed: dict[str, int]
    """Episodes lost, by reason."""

    @property
    def accuracy(self) -> float:
        """Share of items with the full reward, 1."""
        return float(np.mean(self.rewards >= 1.0))

    def metrics(self) -> dict[str, float]:
        """By the names of docs/metrics.md."""
        reward, failed = float(np.mean(self.rewards)), float(sum(self.failed.values()))
        return {"held_out/accuracy": self.accuracy, "held_out/reward": reward, "held_out/failed": failed}

    def __str__(self) -> str:
        lost = "".join(f", {count} lost: {reason}" for reason, count in self.failed.items())
        return f"held-out accuracy {self.accuracy:.1%}, mean reward {np.mean(self.rewards):.3f}{lost}"


class RolloutWorker(ResilientActor):
    """One process that plays groups.

    Args:
        settings: how to play.
        task: what to play.
        model: Hugging Face folder or Hub name, for its tokenizer.
        name: of this worker; empty takes its rank in the mesh.
        keep_routes: keep by which experts the generators read each token; not of held-out items.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        task: TaskSettings,
        model: str,
        name: str = "",
        keep_expert_routes: bool = False,
    ) -> None:
        self._settings = settings
        self._task = task
        self._model = model
        self._keep_expert_routes = keep_expert_routes
        self._name = name or f"rollout worker {current_rank().rank}"
        presence.register(self._name)
        self._scorer: Scorer | None = None
        self._running: asyncio.Task[None] | None = None
        self._waiting = 0
        self._playing = 0
        self._groups: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._episodes = 0
        self._tokens = 0
        self._failed_tokens = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT_EPISODES)
        self._samples: deque[tuple[int, Item, Episode]] = deque(maxlen=RECENT_EPISODES)

    @concurrent_endpoint
    async def setup(
        self, buffer: BufferHandle, generator: DispatchedGenerators, episode_limit: int | None = None
    ) -> None:
        """Load tokenizer and task, start the scoring processes. Raises what loading raises (OSError, ValueError).

        Args:
            episode_limit: tokens that an episode may have, prompts and drawn ones; None is any number.
        """
        self._buffer = buffer
        self._admissions = Admissions(buffer, self._name, self._settings.slot_deadline_s)
        self._outbox = Outbox(buffer, self._name, self._settings.slot_deadline_s)
        self._generator = generator
        self._tokenizer = await asyncio.to_thread(Tokenizer, self._model)
        self._player = EpisodePlayer(generator, self._tokenizer, self._settings, episode_limit)
        self._train = await asyncio.to_thread(TaskSource, self._task, "train")
        self._held_out = await asyncio.to_thread(TaskSource, self._task, "held_out")
        await asyncio.to_thread(self._train.item, 0)  # collects the held-out questions
        warm_up = functools.partial(load_data_set, self._task, "train")
        self._scorer = Scorer(self._settings.scorer_processes, self._settings.score_deadline_s, warm_up)

    @concurrent_endpoint
    async def run(self) -> None:
        """Play until the buffer is closed, or this worker. Raises what is not one episode's own failure."""
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

    @concurrent_endpoint
    async def evaluate(self, indices: list[int]) -> Evaluation:
        """Play held-out items once each, greedily, beside the training rollouts. Nothing of it goes to the buffer."""
        places = asyncio.Semaphore(self._settings.concurrent_groups * self._settings.group_size)
        sampling = Sampling(self._settings.max_new_tokens, 0.0, self._tokenizer.stop_token_ids)

        async def one(index: int) -> Episode | EpisodeFailed:
            async with places:
                item = await asyncio.to_thread(self._held_out.item, index)
                episode = await self._episode(item, sampling, group=-1 - index)
                presence.progress("held-out item played")
                return episode

        episodes = await all_or_none([one(index) for index in indices])
        failed = Counter(episode.reason for episode in episodes if isinstance(episode, EpisodeFailed))
        rewards = [0.0 if isinstance(episode, EpisodeFailed) else episode.reward for episode in episodes]
        return Evaluation(np.asarray(rewards, np.float32), dict(failed))

    @concurrent_endpoint
    async def stats(self) -> WorkerStats:
        rewards, tokens = zip(*self._recent, strict=True) if self._recent else ((), ())
        return WorkerStats(
            worker=self._name,
            pid=os.getpid(),
            groups_playing=self._playing,
            groups_waiting=self._waiting,
            groups_put=self._groups["put"],
            groups_dropped=self._groups["dropped"],
            episodes=self._episodes,
            failed=dict(self._failed),
            tokens=self._tokens,
            failed_tokens=self._failed_tokens,
            recent_reward=float(np.mean(rewards)) if rewards else float("nan"),
            recent_tokens=float(np.mean(tokens)) if tokens else float("nan"),
        )

    @concurrent_endpoint
    async def samples(self, limit: int) -> list[dict[str, Any]]:
        """The newest ``limit`` training episodes since the last call, as JSON objects to look at."""
        newest = list(self._samples)[-limit:]
        self._samples.clear()
        # Text of long answers takes tens of milliseconds: on a thread, and only of what is asked for.
        return await asyncio.to_thread(lambda: [self._sample(*episode) for episode in newest])

    @concurrent_endpoint
    async def update_replicas(self, paused: list[int], lost: list[int]) -> None:
        """Take note of replicas that take no new requests for now, and of those that are lost."""
        self._generator.update_replicas(paused, lost)

    @concurrent_endpoint
    async def replace(self, replica: int, handle: object) -> None:
        """From now on a generator is the one behind ``handle``."""
        self._generator.replace(replica, handle)

    @concurrent_endpoint
    async def lives(self) -> None:
        """Return never: the call fails when this process is lost."""
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
        """Every place plays one group after the other; the first that hears of the end ends the others."""
        places = [asyncio.ensure_future(self._place()) for _ in range(self._settings.concurrent_groups)]
        try:
            # waits: as long as the run; close() ends it
            done, _ = await asyncio.wait(places, return_when=asyncio.FIRST_COMPLETED)
            for place in done:
                place.result()
        finally:
            for place in places:
                place.cancel()
            await asyncio.gather(*places, return_exceptions=True)  # waits: they are done or cancelled

    async def _place(self) -> None:
        while True:
            self._waiting += 1
            try:
                ticket = await self._admissions.ticket()
            finally:
                self._waiting -= 1
            if ticket is None:
                return
            self._playing += 1
            try:
                await self._play_group(ticket.group_id, ticket.task_cursor, ticket.attempt)
            finally:
                self._playing -= 1

    async def _play_group(self, group_id: int, task_cursor: int, attempt: int) -> None:
        """Play a group and put it, or drop it when too few of its episodes are left to be compared."""
        item = await asyncio.to_thread(self._train.item, task_cursor)
        size = self._settings.group_size
        samplings = [self._sampling(episode_seed(self._settings.seed, group_id, i)) for i in range(size)]
        played = await all_or_none([self._episode(item, sampling, group_id) for sampling in samplings])
        lost = [episode for episode in played if isinstance(episode, EpisodeFailed)]
        self._failed.update(episode.reason for episode in lost)
        self._failed_tokens += sum(episode.tokens for episode in lost)
        episodes = [episode for episode in played if isinstance(episode, Episode)]
        for episode in episodes:
            self._record(group_id, item, episode)
        if len(episodes) >= min(2, size):
            group = Group(group_id, item.index, episodes, failed=len(lost), attempt=attempt, task=self._task.name)
            data = await asyncio.to_thread(pack_group, group)
            await self._outbox.put(group_id, attempt, data)
            self._groups["put"] += 1
            presence.progress("group put")
        else:
            reason = Counter(episode.reason for episode in lost).most_common(1)[0][0]
            tokens = sum(episode.num_trainable for episode in episodes)
            drop = self._buffer.drop.call_one(group_id, reason, tokens, attempt)
            await within(BUFFER_DEADLINE_S, drop, f"the buffer to drop group {group_id}", on="buffer")
            self._groups["dropped"] += 1
            presence.progress("group dropped")

    async def _episode(self, item: Item, sampling: Sampling, group: int) -> Episode | EpisodeFailed:
        """The episode, or why it failed: failures are values here, so that they cost no other episode."""
        try:
            return await self._player.play(self._environment(item), sampling, group)
        except EpisodeFailed as failure:
            return failure

    def _environment(self, item: Item) -> Environment:
        scorer = self._scorer
        if scorer is None:
            raise RuntimeError(f"{self._name} is not set up, or closed")
        return SingleTurn(item.prompt, lambda text: scorer.score(score, self._task, item.entry, text))

    def _sampling(self, seed: int | None) -> Sampling:
        s, stops, expert_routes_from = (
            self._settings,
            self._tokenizer.stop_token_ids,
            0 if self._keep_expert_routes else None,
        )
        return Sampling(s.max_new_tokens, s.temperature, stops, seed, s.top_k, s.top_p, s.min_p, expert_routes_from)

    def _record(self, group_id: int, item: Item, episode: Episode) -> None:
        self._episodes += 1
        self._tokens += episode.num_trainable
        self._recent.append((episode.reward, episode.num_trainable))
        self._samples.append((group_id, item, episode))

    def _sample(self, group_id: int, item: Item, episode: Episode) -> dict[str, Any]:
        versions = episode.policy_versions[episode.trainable]
        return {
            "group": group_id,
            "task_index": item.index,
            "prompt": item.prompt,
            "turns": [self._tokenizer.decode(turn.token_ids[turn.trainable].tolist()) for turn in episode.turns],
            "answer": item.answer,
            "reward": episode.reward,
            "finish_reason": episode.finish_reason,
            "tokens": episode.num_trainable,
            "versions": [int(versions.min()), int(versions.max())] if len(versions) else [],
        }
