"""Playing held-out items, and what comes of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from monarch_rl.algorithms.estimates import default_ks, pass_at_k, share_interval
from monarch_rl.episode.episode import Episode, mean_parts
from monarch_rl.episode.failure import Failure
from monarch_rl.episode.sampling import Sampling
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.play import all_or_none, made
from monarch_rl.rollout.policy import episode_seed
from monarch_rl.settings.ranges import CheckedSettings, Range
from monarch_rl.tasks.task import Task

EpisodeResult = list[Episode] | EpisodeFailed
"""What an episode became: its sequences, or why there are none."""
SeatReward = tuple[float, dict[str, float]]
"""The reward of a seat's sequence, and its named parts."""
RunItem = Callable[[Task, Any, int, Sampling, int], Awaitable[EpisodeResult]]
"""``play(task, item, index, sampling, group)``."""


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """How held-out items are played."""

    held_out: str = ""
    """Name of the set; empty is the task's first."""
    samples: int = 1
    """Episodes of each item."""
    temperature: float = 0.0
    pass_at: tuple[int, ...] = ()
    """See :func:`~monarch_rl.algorithms.estimates.default_ks`."""
    seed: int = 0
    """Each episode's seed derives from it, from the item and from its place among the item's episodes."""

    def sampling(self, index: int, sample: int, max_new_tokens: int, stops: tuple[int, ...]) -> Sampling:
        """How the turns of an episode are drawn."""
        seed = episode_seed(self.seed, -1 - index, sample) if self.temperature else None
        return Sampling(max_new_tokens, self.temperature, stops, seed)


@dataclass(frozen=True)
class EvaluationSettings(CheckedSettings, flags="evaluation"):
    """How held-out items are played."""

    sets: tuple[str, ...] = ()
    """Names of the held-out sets that an evaluation plays, one after the other, each all of it; none is the task's
    first set, of which held-out says how many items."""
    samples: Annotated[int, Range(1, 10_000)] = 1
    """Episodes of each held-out item. More than one need a temperature; they give pass@k beside pass@1."""
    temperature: Annotated[float, Range(0, 100)] = 0.0
    """Of held-out episodes; 0 is greedy. Each episode has a seed of its own, derived from rollout.seed."""
    pass_at: Annotated[tuple[int, ...], Range(1, 10_000)] = ()
    """The k of pass@k beside 1, at most samples; none is samples."""
    share: Annotated[float, Range(0, 1, "0 lets the next update wait")] = 0.0
    """Share of the replicas' places (max-running-requests) that an evaluation may take while training goes on. Then
    several versions may draw its tokens: the result names the oldest and the newest. 0 has the next update wait, and
    one version plays all items."""
    best: str = ""
    """Metric of an evaluation by which the best version is remembered, in best.json; the highest value wins. Empty is
    the accuracy of the first set that is played."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples > 1 and not self.temperature:
            raise ValueError(
                f"evaluation.samples {self.samples} with evaluation.temperature 0: greedy episodes of an item are all "
                "the same. Give a temperature, 1 for example, or one sample"
            )
        if too_large := [k for k in self.pass_at if k > self.samples]:
            raise ValueError(
                f"evaluation.pass-at {too_large[0]} cannot be estimated from evaluation.samples {self.samples}: play "
                f"at least {too_large[0]}"
            )

    @property
    def best_metric(self) -> str:
        """``best``, or what that is if it is empty: ``held_out/accuracy``, ``held_out/<set>/accuracy``."""
        return self.best or "/".join(("held_out", *self.sets[:1], "accuracy"))

    def plan(self, held_out: str, seed: int) -> EvaluationPlan:
        """How a set is played."""
        return EvaluationPlan(held_out, self.samples, self.temperature, self.pass_at, seed)

    def places(self, requests: int, workers: int) -> int:
        """Episodes that each worker may play at once beside training.

        Args:
            requests: that all replicas run at once.
        """
        return max(1, round(self.share * requests / max(workers, 1)))


@dataclass(slots=True)
class Evaluation:
    """Held-out items, each played ``samples`` times."""

    indices: np.ndarray
    """int64[items]: which items, ascending."""
    rewards: np.ndarray
    """float32[items, samples]: of an episode of several sequences, their mean; 0 where the episode failed."""
    failed: dict[str, int]
    """Episodes that failed, by reason."""
    first: dict[str, Failure] = field(default_factory=dict)
    """The first of these failures, by reason."""
    tasks: list[str] = field(default_factory=list)
    """The task of each item."""
    parts: list[list[dict[str, float] | None]] = field(default_factory=list)
    """Of each episode of each item: the named parts of its reward, each the mean over its sequences; None where it
    failed."""
    versions: tuple[int, int] | None = None
    """The oldest and the newest verified version that drew a token; None if no token was drawn."""
    plan: EvaluationPlan = field(default_factory=EvaluationPlan)
    """How they were played."""
    by_seat: dict[tuple[str, str], list[SeatReward]] = field(default_factory=dict)
    """By task and seat: those of its sequences; empty without seats."""

    @classmethod
    def of(
        cls, plan: EvaluationPlan, indices: Sequence[int], played: Sequence[tuple[str, Sequence[EpisodeResult]]]
    ) -> Evaluation:
        """The result of the episodes of each item, with the name of its task."""
        plays = [play for _, of_item in played for play in of_item]
        failures = [play for play in plays if isinstance(play, EpisodeFailed)]
        rewards = [0.0 if isinstance(play, EpisodeFailed) else _mean_reward(play) for play in plays]
        by_item = np.asarray(rewards, np.float32).reshape(len(indices), plan.samples)
        parts = [[None if isinstance(one, EpisodeFailed) else _parts(one) for one in of_item] for _, of_item in played]
        first = {failed.reason: failed.failure for failed in reversed(failures)}
        counted = dict(Counter(failure.reason for failure in failures))
        sequences = [sequence for play in plays if not isinstance(play, EpisodeFailed) for sequence in play]
        by_seat = _by_seat(played)
        tasks, played_items = [task for task, _ in played], np.asarray(indices, np.int64)
        versions = _versions(sequences)
        return cls(played_items, by_item, counted, first, tasks, parts, versions, plan, by_seat).in_order()

    @classmethod
    def joined(cls, parts: Iterable[Evaluation]) -> Evaluation:
        """The result of items that were played by several workers."""
        parts, failed, first = list(parts), Counter[str](), dict[str, Failure]()
        for part in parts:
            failed.update(part.failed)
            first = part.first | first
        indices, rewards = np.concatenate([part.indices for part in parts]), np.concatenate([p.rewards for p in parts])
        known = [part.versions for part in parts if part.versions]
        versions = (min(low for low, _ in known), max(high for _, high in known)) if known else None
        tasks, of_items = ([one for part in parts for one in getattr(part, name)] for name in ("tasks", "parts"))
        by_seat: dict[tuple[str, str], list[SeatReward]] = {}
        for seat, of_seat in (known for part in parts for known in part.by_seat.items()):
            by_seat.setdefault(seat, []).extend(of_seat)
        return cls(indices, rewards, dict(failed), first, tasks, of_items, versions, parts[0].plan, by_seat).in_order()

    def in_order(self) -> Evaluation:
        """The same, by ascending items: whoever played them."""
        order = np.argsort(self.indices, kind="stable")
        tasks, parts = [self.tasks[i] for i in order], [self.parts[i] for i in order]
        return replace(self, indices=self.indices[order], rewards=self.rewards[order], tasks=tasks, parts=parts)

    @property
    def right(self) -> np.ndarray:
        """int64[items]: episodes with the full reward, 1."""
        return np.asarray((self.rewards >= 1.0).sum(axis=1), np.int64)

    @property
    def accuracy(self) -> float:
        """Share of episodes with the full reward, 1: pass@1."""
        return float(np.mean(self.rewards >= 1.0))

    def pass_at(self, k: int) -> np.ndarray:
        """float64[items]: see :func:`~monarch_rl.algorithms.estimates.pass_at_k`."""
        return pass_at_k(self.right, self.plan.samples, k)

    def metrics(self) -> dict[str, float]:
        """By the names of docs/metrics.md."""
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
            means = mean_parts([parts for _, parts in of_seat])
            values |= {f"{name}/{part}": mean for part, mean in means.items()}
        if self.versions is not None:
            values[f"{group}/oldest_version"], values[f"{group}/newest_version"] = map(float, self.versions)
        return values

    def _metrics(self, group: str, items: list[int], parts: bool = True) -> dict[str, float]:
        """Of some items; each part of a reward over the episodes that have it."""
        episodes = [episode for item in items for episode in self.parts[item]]
        played = [of_episode for of_episode in episodes if of_episode is not None]
        values = mean_parts(played) if parts else {}
        values["accuracy"] = float(np.mean(self.rewards[items] >= 1.0))
        values["reward"] = float(np.mean(self.rewards[items]))
        values["failed"] = float(len(episodes) - len(played))
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
        said = f"held-out accuracy {self.accuracy:.1%} [{low:.1%}, {high:.1%}]{passed}"
        return f"{self.sampled_by}: {said}, mean reward {np.mean(self.rewards):.3f}{failed}"

    @property
    def sampled_by(self) -> str:
        """The verified versions that drew the tokens, in words."""
        oldest, newest = self.versions or (0, 0)
        return f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"


def _mean_reward(play: Sequence[Episode]) -> float:
    return float(np.mean([sequence.reward for sequence in play]))


def _parts(play: Sequence[Episode]) -> dict[str, float]:
    return mean_parts([sequence.parts for sequence in play])


def _by_seat(played: Iterable[tuple[str, Sequence[EpisodeResult]]]) -> dict[tuple[str, str], list[SeatReward]]:
    found: dict[tuple[str, str], list[SeatReward]] = {}
    for task, of_item in played:
        for sequence in (one for play in of_item if not isinstance(play, EpisodeFailed) for one in play):
            if sequence.seat:
                found.setdefault((task, sequence.seat), []).append((sequence.reward, sequence.parts))
    return found


def _versions(episodes: Iterable[Episode]) -> tuple[int, int] | None:
    drawn = [versions for episode in episodes if len(versions := episode.policy_versions[episode.trainable])]
    return (min(int(v.min()) for v in drawn), max(int(v.max()) for v in drawn)) if drawn else None


async def run_held_out(
    plan: EvaluationPlan,
    task: Task,
    indices: Sequence[int],
    play: RunItem,
    *,
    max_new_tokens: int,
    stops: tuple[int, ...],
    item_deadline_s: float,
    places: int,
) -> Evaluation:
    """Play items of a held-out set of ``task``.

    Args:
        play: plays one episode; failures are values.
        item_deadline_s: seconds that an item may take to be made.
        places: episodes at once.

    Raises ValueError if the task has no such set.
    """
    items, free = task.held_out_items(plan.held_out), asyncio.Semaphore(places)

    async def run_one(index: int, sample: int) -> tuple[str, EpisodeResult]:
        async with free:
            try:
                item = await made(items.__getitem__, index, item_deadline_s)
            except EpisodeFailed as failed:
                return task.name, failed
            player, item = task.player_of(item)
            sampling = plan.sampling(index, sample, max_new_tokens, stops)
            return player.name, await play(player, item, index, sampling, -1 - index)

    episodes = await all_or_none([run_one(index, sample) for index in indices for sample in range(plan.samples)])
    by_item = [episodes[i * plan.samples : (i + 1) * plan.samples] for i in range(len(indices))]
    named = [(of_item[0][0], [episode for _, episode in of_item]) for of_item in by_item]
    return Evaluation.of(plan, indices, named)
