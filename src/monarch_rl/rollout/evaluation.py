"""Evaluation: runs held-out items and summarises the results."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
    means the accuracy of the first set."""

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
    def best_metric(self) -> str:
        """``best``, or its default if that is empty: ``held_out/accuracy`` or ``held_out/<set>/accuracy``."""
        return self.best or "/".join(("held_out", *self.sets[:1], "accuracy"))

    def plan(self, held_out: str, seed: int) -> EvaluationPlan:
        """The plan for one held-out set."""
        return EvaluationPlan(held_out, self.samples, self.temperature, self.pass_at, seed)

    def max_concurrent(self, requests: int, workers: int) -> int:
        """Number of episodes that each worker may run at once next to training.

        Args:
            requests: number of requests that all replicas together run at once.
        """
        return max(1, round(self.share * requests / max(workers, 1)))


@dataclass(slots=True)
class Evaluation:
    """Results of held-out items, each run ``samples`` times."""

    indices: np.ndarray
    """int64[items]: indices of the items, ascending."""
    rewards: np.ndarray
    """float32[items, samples]: reward per episode; the mean for an episode with several sequences, and 0 for a failed
    one."""
    failed: dict[str, int]
    """Number of failed episodes by reason."""
    first: dict[str, Failure] = field(default_factory=dict)
    """The first failure of each reason."""
    tasks: list[str] = field(default_factory=list)
    """Task of each item."""
    parts: list[list[dict[str, float] | None]] = field(default_factory=list)
    """Named parts of the reward for each episode of each item, each the mean over the episode's sequences; None if it
    failed."""
    versions: tuple[int, int] | None = None
    """The oldest and the newest verified version that sampled a token; None if no token was sampled."""
    plan: EvaluationPlan = field(default_factory=EvaluationPlan)
    """The plan that was followed."""
    by_seat: dict[tuple[str, str], list[SeatReward]] = field(default_factory=dict)
    """Rewards of sequences by task and seat; empty without seats."""

    @classmethod
    def of(
        cls, plan: EvaluationPlan, indices: Sequence[int], by_item: Sequence[tuple[str, Sequence[EpisodeResult]]]
    ) -> Evaluation:
        """Summarise the episodes of each item, which come with the name of the item's task."""
        results = [result for _, of_item in by_item for result in of_item]
        failures = [result for result in results if isinstance(result, EpisodeFailed)]
        flat = [0.0 if isinstance(result, EpisodeFailed) else _mean_reward(result) for result in results]
        rewards = np.asarray(flat, np.float32).reshape(len(indices), plan.samples)
        parts = [[None if isinstance(one, EpisodeFailed) else _parts(one) for one in of_item] for _, of_item in by_item]
        first = {failed.reason: failed.failure for failed in reversed(failures)}
        counted = dict(Counter(failure.reason for failure in failures))
        sequences = [sequence for result in results if not isinstance(result, EpisodeFailed) for sequence in result]
        by_seat = _by_seat(by_item)
        tasks, items = [task for task, _ in by_item], np.asarray(indices, np.int64)
        versions = _versions(sequences)
        return cls(items, rewards, counted, first, tasks, parts, versions, plan, by_seat).in_order()

    @classmethod
    def joined(cls, parts: Iterable[Evaluation]) -> Evaluation:
        """Merge the results of several workers."""
        parts, failed, first = list(parts), Counter[str](), dict[str, Failure]()
        for part in parts:
            failed.update(part.failed)
            first = part.first | first
        indices, rewards = np.concatenate([part.indices for part in parts]), np.concatenate([p.rewards for p in parts])
        ranges = [part.versions for part in parts if part.versions]
        versions = (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None
        tasks, of_items = ([one for part in parts for one in getattr(part, name)] for name in ("tasks", "parts"))
        by_seat: dict[tuple[str, str], list[SeatReward]] = {}
        for seat, of_seat in (entry for part in parts for entry in part.by_seat.items()):
            by_seat.setdefault(seat, []).extend(of_seat)
        return cls(indices, rewards, dict(failed), first, tasks, of_items, versions, parts[0].plan, by_seat).in_order()

    def in_order(self) -> Evaluation:
        """The same results sorted by item, so that they do not depend on which worker ran an item."""
        order = np.argsort(self.indices, kind="stable")
        tasks, parts = [self.tasks[i] for i in order], [self.parts[i] for i in order]
        return replace(self, indices=self.indices[order], rewards=self.rewards[order], tasks=tasks, parts=parts)

    @property
    def right(self) -> np.ndarray:
        """int64[items]: number of episodes with a reward of at least 1."""
        return np.asarray((self.rewards >= 1.0).sum(axis=1), np.int64)

    @property
    def accuracy(self) -> float:
        """Share of episodes with a reward of at least 1, which is pass@1."""
        return float(np.mean(self.rewards >= 1.0))

    def pass_at(self, k: int) -> np.ndarray:
        """float64[items]: pass@k per item; see :func:`~monarch_rl.algorithms.estimates.pass_at_k`."""
        return pass_at_k(self.right, self.plan.samples, k)

    def metrics(self) -> dict[str, float]:
        """Metrics under the names of docs/metrics.md."""
        group = f"held_out/{self.plan.held_out}" if self.plan.held_out else "held_out"
        tasks, values = list(dict.fromkeys(self.tasks)), dict[str, float]()
        if len(tasks) > 1:
            for task in tasks:
                items = [item for item, name in enumerate(self.tasks) if name == task]
                values |= self._metrics(f"{group}/{task}", items)
        values |= self._metrics(group, list(range(len(self.rewards))), parts=len(tasks) < 2)
        for (task, seat), of_seat in self.by_seat.items():
            name = f"{group}/{task}/seat/{seat}" if len(tasks) > 1 else f"{group}/seat/{seat}"
            values[name] = float(np.mean([reward for reward, _ in of_seat]))
            of_parts = mean_parts([parts for _, parts in of_seat])
            values |= {f"{name}/{part}": mean for part, mean in of_parts.items()}
        if self.versions is not None:
            values[f"{group}/oldest_version"], values[f"{group}/newest_version"] = map(float, self.versions)
        return values

    def _metrics(self, group: str, items: list[int], parts: bool = True) -> dict[str, float]:
        """Metrics of some items; each part of a reward is averaged over the episodes that have it."""
        episodes = [episode for item in items for episode in self.parts[item]]
        succeeded = [of_episode for of_episode in episodes if of_episode is not None]
        values = mean_parts(succeeded) if parts else {}
        values["accuracy"] = float(np.mean(self.rewards[items] >= 1.0))
        values["reward"] = float(np.mean(self.rewards[items]))
        values["failed"] = float(len(episodes) - len(succeeded))
        values["accuracy_low"], values["accuracy_high"] = share_interval(self.pass_at(1)[items])
        for k in default_ks(self.plan.samples, self.plan.pass_at):
            by_item = self.pass_at(k)[items]
            values[f"pass_at_{k}"] = float(by_item.mean())
            values[f"pass_at_{k}_low"], values[f"pass_at_{k}_high"] = share_interval(by_item)
        return {f"{group}/{name}": value for name, value in values.items()}

    def __str__(self) -> str:
        failed = "".join(f", {count} failed: {reason}" for reason, count in self.failed.items())
        low, high = share_interval(self.pass_at(1))
        passed = ""
        for k in default_ks(self.plan.samples, self.plan.pass_at):
            by_item = self.pass_at(k)
            passed += f", pass@{k} {by_item.mean():.1%} [{'{:.1%}, {:.1%}'.format(*share_interval(by_item))}]"
        accuracy = f"held-out accuracy {self.accuracy:.1%} [{low:.1%}, {high:.1%}]{passed}"
        return f"{self.sampled_by}: {accuracy}, mean reward {np.mean(self.rewards):.3f}{failed}"

    @property
    def sampled_by(self) -> str:
        """The verified versions that sampled the tokens, for messages."""
        oldest, newest = self.versions or (0, 0)
        return f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"


def _mean_reward(sequences: Sequence[Episode]) -> float:
    return float(np.mean([sequence.reward for sequence in sequences]))


def _parts(sequences: Sequence[Episode]) -> dict[str, float]:
    return mean_parts([sequence.parts for sequence in sequences])


def _by_seat(by_item: Iterable[tuple[str, Sequence[EpisodeResult]]]) -> dict[tuple[str, str], list[SeatReward]]:
    found: dict[tuple[str, str], list[SeatReward]] = {}
    for task, of_item in by_item:
        for sequence in (one for result in of_item if not isinstance(result, EpisodeFailed) for one in result):
            if sequence.seat:
                found.setdefault((task, sequence.seat), []).append((sequence.reward, sequence.parts))
    return found


def _versions(episodes: Iterable[Episode]) -> tuple[int, int] | None:
    sampled = [versions for episode in episodes if len(versions := episode.policy_versions[episode.trainable])]
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
) -> Evaluation:
    """Run items of a held-out set of ``task``.

    Args:
        play: runs one episode; failures are returned, not raised.
        item_deadline_s: deadline in seconds for making an item.
        max_concurrent: number of episodes that run at once.

    Raises ValueError if the task has no such set.
    """
    items, free = task.held_out_items(plan.held_out), asyncio.Semaphore(max_concurrent)

    async def run_one(index: int, sample: int) -> tuple[str, EpisodeResult]:
        async with free:
            try:
                item = await make_item(items.__getitem__, index, item_deadline_s)
            except EpisodeFailed as failed:
                return task.name, failed
            owner, item = task.owner_of(item)
            sampling = plan.sampling(index, sample, max_new_tokens, stops)
            return owner.name, await play(owner, item, index, sampling, -1 - index)

    episodes = await all_or_none([run_one(index, sample) for index in indices for sample in range(plan.samples)])
    by_item = [episodes[i * plan.samples : (i + 1) * plan.samples] for i in range(len(indices))]
    named = [(of_item[0][0], [episode for _, episode in of_item]) for of_item in by_item]
    return Evaluation.of(plan, indices, named)
