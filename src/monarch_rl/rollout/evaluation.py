"""Evaluation: runs held-out items and summarises the results."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from monarch_rl.algorithms.estimates import default_ks, pass_at_k, share_interval
from monarch_rl.episode.episode import Episode, mean_parts
from monarch_rl.episode.failure import Failure
from monarch_rl.episode.sampling import Sampling
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.play import all_or_none, make_item
from monarch_rl.rollout.policy import episode_seed
from monarch_rl.settings.ranges import CheckedSettings, Range
from monarch_rl.tasks.task import Task

EpisodeResult = list[Episode] | EpisodeFailed
"""Result of an episode: its sequences, or why it failed."""
SeatReward = tuple[float, dict[str, float]]
"""Reward of a seat's sequence, and its named parts."""
RunItem = Callable[[Task, Any, int, Sampling, int], Awaitable[EpisodeResult]]
"""``play(task, item, index, sampling, group)``: runs one episode."""
EpisodeEnded = Callable[[EpisodeResult, Task, Any, int, int], Awaitable[None]]
"""``ended(result, task, item, index, sample)``: receives the result of an episode; ``sample`` is its number among the
item's episodes. If the item could not be made, ``item`` is None, and ``task`` the whole task."""


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """How to run held-out items."""

    held_out: str = ""
    """Name of the held-out set; empty means the first set of the task."""
    samples: int = 1
    """Episodes per item."""
    temperature: float = 0.0
    pass_at: tuple[int, ...] = ()
    """The k of pass@k; see :func:`~monarch_rl.algorithms.estimates.default_ks`."""
    seed: int = 0
    """The seed of each episode is derived from this one, the item and the index of the episode among those of the
    item."""

    def sampling(self, index: int, sample: int, max_new_tokens: int, stops: tuple[int, ...]) -> Sampling:
        """Sampling parameters of an episode's turns."""
        seed = episode_seed(self.seed, -1 - index, sample) if self.temperature else None
        return Sampling(max_new_tokens, self.temperature, stops, seed)


@dataclass(frozen=True)
class EvaluationSettings(CheckedSettings, flags="evaluation"):
    """How to run held-out items."""

    sets: tuple[str, ...] = ()
    """Names of the held-out sets that an evaluation runs completely, one after another. Without names it runs the first
    `held-out` items of the task's first set."""
    samples: Annotated[int, Range(1, 10_000)] = 1
    """Episodes per held-out item. More than one requires a temperature above 0, and adds pass@k to pass@1."""
    temperature: Annotated[float, Range(0, 100)] = 0.0
    """Temperature of held-out episodes; 0 is greedy. Each episode has its own seed, derived from rollout.seed."""
    pass_at: Annotated[tuple[int, ...], Range(1, 10_000)] = ()
    """Values of k for pass@k besides 1, at most samples; none means only samples itself."""
    share: Annotated[float, Range(0, 1, "0 lets the next update wait")] = 0.0
    """Share of the replicas' request slots (max-running-requests) that an evaluation may use while training continues.
    Several policy versions may then sample its tokens: the result names the oldest and the newest. With 0 the next
    update waits, and one version runs all items."""
    best: str = ""
    """Evaluation metric that selects the best version, which is recorded in best.json; the highest value wins. Empty
    means the accuracy of the first set, or its mean reward if the task has no success_reward."""

    def contradictions(self) -> Iterator[str]:
        if self.samples > 1 and not self.temperature:
            yield (
                f"evaluation.samples {self.samples} with evaluation.temperature 0: greedy episodes of an item are all "
                "the same. Set evaluation.temperature above 0, for example to 1, or evaluation.samples to 1"
            )
        if too_large := [k for k in self.pass_at if k > self.samples]:
            yield (
                f"evaluation.pass-at {too_large[0]} cannot be estimated from evaluation.samples {self.samples}: set "
                f"evaluation.samples to at least {too_large[0]}"
            )

    @property
    def best_metrics(self) -> tuple[str, ...]:
        """Metrics of which the first that an evaluation has selects the best version."""
        first = "/".join(("held_out", *self.sets[:1]))
        return (self.best,) if self.best else (f"{first}/accuracy", f"{first}/reward")

    def plan(self, held_out: str, seed: int) -> EvaluationPlan:
        """The plan for one held-out set."""
        return EvaluationPlan(held_out, self.samples, self.temperature, self.pass_at, seed)

    def max_concurrent(self, requests: int, workers: int) -> int:
        """Number of episodes that each worker may run at once next to training.

        Args:
            requests: number of requests that all replicas together run at once.
        """
        return max(1, round(self.share * requests / max(workers, 1)))


@dataclass(frozen=True, slots=True)
class EvaluatedItem:
    """Results of the episodes of one held-out item."""

    index: int
    task: str
    rewards: tuple[float, ...]
    """Reward per episode; the mean for an episode with several sequences, 0 for a failed one, NaN for one that failed
    because of infrastructure (:func:`~monarch_rl.errors.is_infrastructure`), which is left out of all metrics."""
    parts: tuple[dict[str, float] | None, ...]
    """Named parts of the reward per episode, each the mean over the episode's sequences; None if it failed."""
    without_turn: int = 0
    """Number of episodes that ended before the policy's turn. Their rewards count."""


@dataclass(slots=True)
class Evaluation:
    """Results of held-out items, each run ``samples`` times."""

    items: list[EvaluatedItem]
    """By index, ascending, so that they do not depend on which worker ran an item."""
    failed: dict[str, int]
    """Number of failed episodes by reason."""
    first: dict[str, Failure] = field(default_factory=dict)
    """The first failure of each reason."""
    versions: tuple[int, int] | None = None
    """The oldest and the newest verified version that sampled a token; None if no token was sampled."""
    plan: EvaluationPlan = field(default_factory=EvaluationPlan)
    """The plan that was followed."""
    by_seat: dict[tuple[str, str], list[SeatReward]] = field(default_factory=dict)
    """Rewards of sequences by task and seat; empty without seats."""
    success_rewards: dict[str, float | None] = field(default_factory=dict)
    """:attr:`~monarch_rl.tasks.task.Task.success_reward` of each task."""

    def __post_init__(self) -> None:
        self.items = sorted(self.items, key=lambda item: item.index)

    @classmethod
    def of(
        cls,
        plan: EvaluationPlan,
        indices: Sequence[int],
        by_item: Sequence[tuple[str, Sequence[EpisodeResult]]],
        success_rewards: Mapping[str, float | None],
    ) -> Evaluation:
        """Summarise the episodes of each item, which come with the name of the item's task."""
        results = [result for _, of_item in by_item for result in of_item]
        failures = [result for result in results if isinstance(result, EpisodeFailed)]
        sequences = [sequence for result in results if not isinstance(result, EpisodeFailed) for sequence in result]
        return cls(
            [_evaluated(index, *item) for index, item in zip(indices, by_item, strict=True)],
            failed=dict(Counter(failure.reason for failure in failures)),
            first={failed.reason: failed.failure for failed in reversed(failures)},
            versions=_versions(sequences),
            plan=plan,
            by_seat=_by_seat(by_item),
            success_rewards=dict(success_rewards),
        )

    @classmethod
    def joined(cls, parts: Iterable[Evaluation]) -> Evaluation:
        """Merge the results of several workers."""
        parts, failed, first = list(parts), Counter[str](), dict[str, Failure]()
        for part in parts:
            failed.update(part.failed)
            first = part.first | first
        ranges = [part.versions for part in parts if part.versions]
        by_seat: dict[tuple[str, str], list[SeatReward]] = {}
        for seat, of_seat in (entry for part in parts for entry in part.by_seat.items()):
            by_seat.setdefault(seat, []).extend(of_seat)
        return cls(
            [item for part in parts for item in part.items],
            failed=dict(failed),
            first=first,
            versions=(min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None,
            plan=parts[0].plan,
            by_seat=by_seat,
            success_rewards={task: mark for part in parts for task, mark in part.success_rewards.items()},
        )

    @property
    def rewards(self) -> np.ndarray:
        """float32[items, samples]: :attr:`EvaluatedItem.rewards` of all items."""
        return self._rewards(self.items)

    def _rewards(self, items: Sequence[EvaluatedItem]) -> np.ndarray:
        return np.asarray([item.rewards for item in items], np.float32).reshape(len(items), self.plan.samples)

    @property
    def without_turn(self) -> int:
        """Number of episodes that ended before the policy's turn."""
        return sum(item.without_turn for item in self.items)

    @property
    def accuracy(self) -> float | None:
        """Share of successful episodes (:attr:`success_rewards`), which is pass@1; None if a task defines no success,
        or all episodes were left out."""
        of_items = self.pass_at(1)
        return None if of_items is None or not len(of_items) else float(of_items.mean())

    @property
    def mean_reward(self) -> float:
        """Mean reward; NaN if all episodes were left out. A failed episode counts as 0, or as the lowest reward of its
        task's episodes if that is below 0, so that a failure is never an improvement."""
        return self._mean_reward(self.items)

    def _mean_reward(self, items: Sequence[EvaluatedItem]) -> float:
        rewards: list[np.ndarray] = []
        for own in _by_task(items).values():
            of_task = self._rewards(own).astype(np.float64)
            failed = np.asarray([[parts is None for parts in item.parts] for item in own]) & ~np.isnan(of_task)
            of_task[failed] = np.nanmin(of_task) if failed.any() else 0.0  # failed ones are 0 here
            rewards.append(of_task[~np.isnan(of_task)])
        counted = np.concatenate(rewards)
        return float(counted.mean()) if len(counted) else math.nan

    def pass_at(self, k: int, items: Sequence[EvaluatedItem] | None = None) -> np.ndarray | None:
        """float64: pass@k (:func:`~monarch_rl.algorithms.estimates.pass_at_k`) of each of the ``items``, by default of
        all, of which at least k episodes were not left out. None if a task of theirs defines no success."""
        items = self.items if items is None else items
        marks = [self.success_rewards.get(item.task) for item in items]
        if None in marks:
            return None
        rewards = self._rewards(items)
        completed = np.asarray([[parts is not None for parts in item.parts] for item in items])
        right = ((rewards >= np.asarray(marks, np.float32)[:, None]) & completed).sum(axis=1)
        samples = (~np.isnan(rewards)).sum(axis=1)
        enough = samples >= k
        return pass_at_k(right[enough], samples[enough], k)

    def metrics(self) -> dict[str, float]:
        """Metrics under the names of docs/metrics.md."""
        group = f"held_out/{self.plan.held_out}" if self.plan.held_out else "held_out"
        tasks, values = _by_task(self.items), dict[str, float]()
        if len(tasks) > 1:
            for task, items in tasks.items():
                values |= self._metrics(f"{group}/{task}", items)
        values |= self._metrics(group, self.items, parts=len(tasks) < 2)
        for (task, seat), of_seat in self.by_seat.items():
            name = f"{group}/{task}/seat/{seat}" if len(tasks) > 1 else f"{group}/seat/{seat}"
            values[name] = float(np.mean([reward for reward, _ in of_seat]))
            of_parts = mean_parts([parts for _, parts in of_seat])
            values |= {f"{name}/{part}": mean for part, mean in of_parts.items()}
        if self.versions is not None:
            values[f"{group}/oldest_version"], values[f"{group}/newest_version"] = map(float, self.versions)
        return values

    def _metrics(self, group: str, items: Sequence[EvaluatedItem], parts: bool = True) -> dict[str, float]:
        """Metrics of some items; each part of a reward is averaged over the episodes that have it."""
        episodes = [episode for item in items for episode in item.parts]
        succeeded = [of_episode for of_episode in episodes if of_episode is not None]
        values = mean_parts(succeeded) if parts else {}
        left_out = int(np.isnan(self._rewards(items)).sum())
        values["failed"] = float(len(episodes) - len(succeeded) - left_out)
        values["left_out"] = float(left_out)
        values["without_turn"] = float(sum(item.without_turn for item in items))
        if not math.isnan(reward := self._mean_reward(items)):
            values["reward"] = reward
        for k, by_item in self._passed(items):
            name = "accuracy" if k == 1 else f"pass_at_{k}"
            values[name] = float(by_item.mean())
            values[f"{name}_low"], values[f"{name}_high"] = share_interval(by_item)
        return {f"{group}/{name}": value for name, value in values.items()}

    def _passed(self, items: Sequence[EvaluatedItem]) -> Iterator[tuple[int, np.ndarray]]:
        """Each k for which pass@k can be estimated, beginning with 1, and :meth:`pass_at` of it."""
        for k in (1, *default_ks(self.plan.samples, self.plan.pass_at)):
            by_item = self.pass_at(k, items)
            if by_item is not None and len(by_item):
                yield k, by_item

    def __str__(self) -> str:
        found = [
            f"{'accuracy' if k == 1 else f'pass@{k}'} {by_item.mean():.1%} "
            f"[{'{:.1%}, {:.1%}'.format(*share_interval(by_item))}]"
            for k, by_item in self._passed(self.items)
        ]
        if not math.isnan(self.mean_reward):
            found.append(f"mean reward {self.mean_reward:.3f}")
        if by_task := self._of_tasks():
            found.append(f"by task: {by_task}")
        if self.without_turn:
            found.append(f"{self.without_turn} ended before the policy's turn")
        found += [f"{count} failed: {reason}" for reason, count in self.failed.items()]
        if left_out := int(np.isnan(self.rewards).sum()):
            found.append(f"{left_out} of these left out: infrastructure")
        return f"{self.sampled_by}: held-out {', '.join(found)}"

    def _of_tasks(self) -> str:
        """Accuracy, or else mean reward, of each task, if there are several."""
        found = []
        for task, items in _by_task(self.items).items():
            passed = dict(self._passed(items))
            found.append(f"{task} {passed[1].mean():.1%}" if passed else f"{task} {self._mean_reward(items):.3f}")
        return ", ".join(found) if len(found) > 1 else ""

    @property
    def sampled_by(self) -> str:
        """The verified versions that sampled the tokens, for messages."""
        oldest, newest = self.versions or (0, 0)
        return f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"


def _by_task(items: Iterable[EvaluatedItem]) -> dict[str, list[EvaluatedItem]]:
    found: dict[str, list[EvaluatedItem]] = {}
    for item in items:
        found.setdefault(item.task, []).append(item)
    return found


def _evaluated(index: int, task: str, results: Sequence[EpisodeResult]) -> EvaluatedItem:
    parts = (None if isinstance(one, EpisodeFailed) else mean_parts([each.parts for each in one]) for one in results)
    without_turn = sum(not _has_turn(result) for result in results)
    return EvaluatedItem(index, task, tuple(map(_reward, results)), tuple(parts), without_turn)


def _reward(result: EpisodeResult) -> float:
    if isinstance(result, EpisodeFailed):
        return math.nan if result.infrastructure else 0.0
    return float(np.mean([sequence.reward for sequence in result]))


def _has_turn(result: EpisodeResult) -> bool:
    return isinstance(result, EpisodeFailed) or any(sequence.turns for sequence in result)


def _by_seat(by_item: Iterable[tuple[str, Sequence[EpisodeResult]]]) -> dict[tuple[str, str], list[SeatReward]]:
    found: dict[tuple[str, str], list[SeatReward]] = {}
    for task, of_item in by_item:
        for sequence in (one for result in of_item if not isinstance(result, EpisodeFailed) for one in result):
            if sequence.seat:
                found.setdefault((task, sequence.seat), []).append((sequence.reward, sequence.parts))
    return found


def _versions(episodes: Iterable[Episode]) -> tuple[int, int] | None:
    with_turns = (episode for episode in episodes if episode.turns)
    sampled = [versions for episode in with_turns if len(versions := episode.policy_versions[episode.trainable])]
    return (min(int(v.min()) for v in sampled), max(int(v.max()) for v in sampled)) if sampled else None


async def run_held_out(
    plan: EvaluationPlan,
    task: Task,
    indices: Sequence[int],
    play: RunItem,
    *,
    max_new_tokens: int,
    stops: tuple[int, ...],
    item_deadline_s: float,
    max_concurrent: int,
    ended: EpisodeEnded | None = None,
) -> Evaluation:
    """Run items of a held-out set of ``task``.

    Args:
        play: runs one episode; failures are returned, not raised.
        item_deadline_s: deadline in seconds for making an item.
        max_concurrent: number of episodes that run at once.
        ended: is awaited at the end of each episode, also of one whose item could not be made.

    Raises ValueError if the task has no such set.
    """
    items, free = task.held_out_items(plan.held_out), asyncio.Semaphore(max_concurrent)
    success_rewards = {task.name: task.success_reward}

    async def run_one(index: int, sample: int) -> tuple[str, EpisodeResult]:
        owner, item = task, None
        result: EpisodeResult
        async with free:
            try:
                item = await make_item(items.__getitem__, index, item_deadline_s)
            except EpisodeFailed as failed:
                result = failed
            else:
                owner, item = task.owner_of(item)
                success_rewards[owner.name] = owner.success_reward
                sampling = plan.sampling(index, sample, max_new_tokens, stops)
                result = await play(owner, item, index, sampling, -1 - index)
            if ended is not None:
                await ended(result, owner, item, index, sample)
            return owner.name, result

    episodes = await all_or_none([run_one(index, sample) for index in indices for sample in range(plan.samples)])
    by_item = [episodes[i * plan.samples : (i + 1) * plan.samples] for i in range(len(indices))]
    named = [(of_item[0][0], [episode for _, episode in of_item]) for of_item in by_item]
    return Evaluation.of(plan, indices, named, success_rewards)
