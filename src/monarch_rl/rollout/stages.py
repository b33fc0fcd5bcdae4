"""Stages: what a recipe does with a whole group between playing it and handing it in.

    async def teacher(item, group):
        for episode in group.episodes:
            episode.fill_column("teacher", await teacher_engine.logprobs(episode.token_ids))

    await run.start(task, ..., stages=[Stage(teacher, fills=("teacher",))])

A stage fills columns, changes rewards, or drops the group (:class:`DropGroup`). Workers play other groups meanwhile.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from monarch_rl.episode.episode import Episode, Fork, Group
from monarch_rl.episode.failure import KINDS, Failure, shortened
from monarch_rl.episode.serialization import BEHAVIOUR, column_names
from monarch_rl.rollout.episode_clock import RUNNING_EPISODE, EpisodeClock, JudgeFailed, Playing
from monarch_rl.rollout.episode_failed import EpisodeFailed, ScoringFailed
from monarch_rl.rollout.play import to_its_end
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.tracebacks import describe, suspended
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.deadlines import DeadlineClock, ends_in_time, now
from monarch_rl.tasks.task import GroupRewards, Outcome, Task, as_outcome, as_outcomes, is_coroutine_function

REASON_CHARACTERS = 60
"""Of a reason for which a stage drops groups: it is a part of a metric's name."""


class DropGroup(Exception):
    """Raised by a stage: the group is not trained. The reason is short, because groups are counted by it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Stage:
    """One stage. It travels to the workers by value, with the function in it."""

    function: Callable[[Any, Group], Awaitable[None]]
    """``async def stage(item, group)``."""
    fills: tuple[str, ...] = ()
    """Names of the columns that it fills, for every turn of every group."""
    concurrency: int = 8
    """Groups that may be in it at a time, in each worker. Further ones wait."""
    deadline_s: float = 300.0
    """Seconds that a group may spend in it, waiting for its turn left out."""
    name: str = ""
    """For metrics and messages; empty is the function's name."""
    only_fills: bool = False
    """It does nothing but fill its columns, so one that nobody reads is refused."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", getattr(self.function, "__name__", type(self.function).__name__))
        if self.concurrency < 1 or not 0 < self.deadline_s < math.inf:
            raise ValueError(
                f"stage {self.name}: concurrency must be at least 1 and deadline_s above 0, got {self.concurrency} and "
                f"{self.deadline_s}"
            )


class StageFailed(Exception):
    """The group is dropped; ``failure`` is what its author is shown, None where the stage dropped it by itself."""

    def __init__(self, reason: str, failure: Failure | None = None) -> None:
        super().__init__(reason)
        self.reason, self.failure = reason, failure


def columns_filled(stages: Sequence[Stage]) -> dict[str, str]:
    """The columns that stages fill, each with the name of its stage. Raises ValueError if two stages have one name or
    fill the same column, or one that every group has."""
    names = [stage.name for stage in stages]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two stages are called {twice!r}: give one of them another name, Stage(..., name=...)")
    filled: dict[str, str] = {}
    for stage in stages:
        for column in stage.fills:
            if column == BEHAVIOUR:
                raise ValueError(
                    f"stage {stage.name!r} fills the column {column!r}, which holds the engine's log-probs"
                )
            if column in filled:
                raise ValueError(f"stages {filled[column]!r} and {stage.name!r} both fill the column {column!r}")
            filled[column] = stage.name
    return filled


def columns_for_training(stages: Sequence[Stage]) -> list[str]:
    """The columns that nothing reads unless an advantage or an objective does: of stages that only fill columns, and
    after which none comes that may do something with them."""
    doing = [place for place, stage in enumerate(stages) if not stage.only_fills]
    return [column for stage in stages[max(doing, default=-1) + 1 :] for column in stage.fills]


class Stages:
    """The stages of one worker, one after the other for each group.

    Args:
        note_time: is told, of every group and stage: the stage's name, seconds that the group waited for its turn, and
            seconds that it spent in it.
    """

    def __init__(self, stages: Sequence[Stage], note_time: Callable[[str, float, float], None]) -> None:
        columns_filled(stages)
        self._stages = [(stage, asyncio.Semaphore(stage.concurrency)) for stage in stages]
        self._note_time = note_time
        self._reasons: set[str] = set()
        """Those that stages gave for dropping groups."""
        self.places = sum(stage.concurrency for stage in stages)
        """Groups that may be in stages at a time."""

    async def run(self, item: Any, group: Group) -> None:
        """Run all stages on a group that was played.

        Raises:
            StageFailed: a stage dropped the group, raised, did not end in time, or left what cannot be trained.
        """
        for stage, places in self._stages:
            began = now()
            async with places:
                entered = now()
                try:
                    await _run(stage, item, group)
                except DropGroup as dropped:
                    raise StageFailed(self._reason(stage, dropped.reason)) from dropped
                finally:
                    self._note_time(stage.name, entered - began, now() - entered)

    def _reason(self, stage: Stage, given: str) -> str:
        """By which a group that a stage dropped is counted: a metric each, so there must not be ever new ones."""
        reason = f"stage {stage.name}: {shortened(str(given), REASON_CHARACTERS)}"
        if reason not in self._reasons and len(self._reasons) >= KINDS:
            return f"stage {stage.name}: other reasons"
        self._reasons.add(reason)
        return reason


async def _run(stage: Stage, item: Any, group: Group) -> None:
    """As a task of its own, which is left alone when it does not end in time: one that ignores its cancellation must
    not hold up other groups. Raises DropGroup and StageFailed."""
    what, before = f"stage {stage.name}", _places(group)
    coroutine: Any = _to_its_end(stage, item, group)
    task = asyncio.ensure_future(coroutine)
    clock, wait = (
        DeadlineClock(stage.deadline_s, what),
        wait_registry.begin_wait(what, "a stage's code", stage.deadline_s),
    )
    try:
        in_time = await ends_in_time(task, lambda: clock, stage.deadline_s)
    finally:
        wait_registry.end_wait(wait)
    if not in_time:
        place, stack = suspended(coroutine.cr_await)
        task.cancel()
        report = f"{stack}\nIf it may take longer, raise deadline_s of the stage.".lstrip()
        raise _failed(f"{what} took over {stage.deadline_s:g} s", group, place, report)
    error = asyncio.CancelledError() if task.cancelled() else task.result()
    if isinstance(error, DropGroup):
        raise error
    if isinstance(error, JudgeFailed):
        raise _failed(f"{what}: {error.reason}", group, report=error.report) from error
    if error is not None:
        raise _failed(f"{what} raised {type(error).__name__}", group, *describe(error)) from error
    problem = _problem(stage, group, before)
    if problem:
        raise _failed(f"{what} left what cannot be trained", group, report=problem)


async def _to_its_end(stage: Stage, item: Any, group: Group) -> BaseException | None:
    """What the stage raised. A SystemExit, as it is, would end the event loop."""
    try:
        running: Any = stage.function(item, group)
        if not inspect.isawaitable(running):
            raise TypeError(f"stage {stage.name} is no coroutine: write `async def`")
        await running  # waits: its caller has a deadline for it
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return error
    return None


def _failed(reason: str, group: Group, place: str = "", report: str = "") -> StageFailed:
    item = f"Group {group.group_id}, item {group.task_index}"
    return StageFailed(reason, Failure(reason, place, f"{report}\n{item}".lstrip(), "a stage"))


def _places(group: Group) -> list[tuple[int, str, int, Fork | None]]:
    """What says which sequences a group has, and how they belong together: a fork names another one by its place."""
    return [(id(episode), episode.seat, episode.play, episode.fork) for episode in group.episodes]


def _problem(stage: Stage, group: Group, before: list[tuple[int, str, int, Fork | None]]) -> str:
    """Why a group cannot be trained as the stage left it; empty if it can. Makes plain numbers of its rewards.

    Args:
        before: its places when the stage was given it.
    """
    if _places(group) != before:
        return (
            f"It was given {len(before)} episodes and left {len(group.episodes)}, or others: they must stay the same, "
            "in their order. Raise DropGroup(reason) to drop a group."
        )
    for number, episode in enumerate(group.episodes):
        try:
            _make_plain(episode)
        except (TypeError, ValueError, OverflowError) as error:
            return f"Episode {number}: {error}."
    try:
        names = column_names(group)
    except ValueError as error:
        return str(error)
    missing = [name for name in stage.fills if name not in names]
    if missing:
        return f"It has to fill the columns {', '.join(stage.fills)}, but {missing[0]} is not there."
    wrong = [_not_finite(episode, stage.fills) for episode in group.episodes]
    # One that some have costs these alone: the trainer leaves them out, names and counts them (finite_only). Where all
    # have one, it would train nothing of the group.
    return f"No episode has finite columns: of episode 0 {wrong[0]}" if all(wrong) else ""


def _not_finite(episode: Episode, names: Sequence[str]) -> str:
    """Which column is not finite, and where; empty if all are."""
    for name in names:
        values = episode.column(name)
        if len(wrong := np.flatnonzero(~np.isfinite(values))):
            return f"column {name} is {values[wrong[0]]} at token {wrong[0]} of {len(values)}."
    return ""


def _make_plain(episode: Episode) -> None:
    """Make plain numbers of what a stage may have set. Raises TypeError or ValueError if that cannot be."""
    outcome = as_outcome(Outcome(episode.reward, episode.parts, episode.info))
    episode.reward, episode.parts = outcome.reward, outcome.parts
    for place, turn in enumerate(episode.turns):
        try:
            turn.reward = None if turn.reward is None else as_outcome(turn.reward).reward
        except (TypeError, ValueError) as error:
            raise ValueError(f"turn {place}: {error}") from error


# -- group rewards: they compare the episodes of a group (``Task.group_rewards``), once these have ended --------------

EpisodeResult = list[Episode] | EpisodeFailed
OWN_CODE = "the group's rewards"


class GroupRewarder:
    """Gives groups the rewards that their tasks give them as a whole.

    Args:
        scorer: the scoring processes.
        deadline_s: seconds that a coroutine may take.
    """

    def __init__(self, scorer: Scorer, deadline_s: float) -> None:
        self._scorer, self._deadline_s = scorer, deadline_s

    async def added(self, task: Task, item: Any, index: int, played: Sequence[EpisodeResult]) -> list[EpisodeResult]:
        """The group with these rewards, if its task has such. If they fail, all of its episodes have failed.

        Args:
            task: that plays the item.
            index: of the item, for the report of a failure.
            played: the group: the sequences of each episode, which are compared in this order. Episodes that failed are
                not.
        """
        plays = [play for play in played if not isinstance(play, EpisodeFailed)]
        episodes = [sequence for play in plays for sequence in play]
        if task.group_rewards is None or not episodes:
            return list(played)
        before = [
            Outcome(of.reward, of.parts, of.info, of.answer, of.seat, number)
            for number, play in enumerate(plays)
            for of in play
        ]
        try:
            rewards = await self._rewards(task.group_rewards, item, index, before)
            joined = [_joined(old, new) for old, new in zip(before, rewards, strict=True)]
        except EpisodeFailed as why:
            return [
                play if isinstance(play, EpisodeFailed) else _group_rewards_failed(play, why, index) for play in played
            ]
        for episode, new in zip(episodes, joined, strict=True):
            episode.reward, episode.parts, episode.info = new.reward, new.parts, new.info
        return list(played)

    async def _rewards(self, function: GroupRewards, item: Any, index: int, outcomes: list[Outcome]) -> list[Outcome]:
        """A reward for each of ``outcomes``. Raises EpisodeFailed."""
        if is_coroutine_function(function):
            rewards = await _in_worker(function, item, index, outcomes, self._deadline_s)
        else:
            try:
                rewards = await self._scorer.score_group(function, item, outcomes)  # waits: it has a deadline
            except ScoringFailed as error:
                raise EpisodeFailed(f"group rewards: {error.reason}", error.place, error.report) from error
            except TypeError as error:  # they, the item or an outcome cannot be sent
                raise EpisodeFailed("group rewards raised TypeError", *describe(error)) from error
        if len(rewards) != len(outcomes):
            report = f"{len(rewards)} rewards were returned for the {len(outcomes)} episodes of a group."
            raise EpisodeFailed("group rewards are not one for each episode", report=report)
        return rewards


def _joined(old: Outcome, new: Outcome) -> Outcome:
    """The reward of the group, with parts and info of both. Raises EpisodeFailed if these are too many together."""
    try:
        return as_outcome(Outcome(new.reward, old.parts | new.parts, old.info | new.info))
    except (TypeError, ValueError) as error:
        raise EpisodeFailed("group rewards cannot be used", report=f"With those of its episode: {error}") from error


async def _in_worker(
    function: GroupRewards, item: Any, index: int, outcomes: list[Outcome], deadline_s: float
) -> list[Outcome]:
    """What a coroutine returns. It runs as a task that is left alone if it does not end in time; while it asks a judge,
    its clock stands still. Raises EpisodeFailed."""
    own_time = EpisodeClock(deadline_s, OWN_CODE)
    playing = RUNNING_EPISODE.set(Playing(own_time, index))
    try:
        coroutine: Any = function(item, outcomes)
        task = asyncio.ensure_future(to_its_end(coroutine))
        if not await ends_in_time(task, lambda: own_time.clock, deadline_s):
            place, stack = suspended(coroutine)
            task.cancel()
            report = f"{stack}\nIf they may take longer, raise --rollout.episode-deadline-s.".lstrip()
            raise EpisodeFailed(f"group rewards took over {deadline_s:g} s", place, report)
    finally:
        own_time.end()
        RUNNING_EPISODE.reset(playing)
    if task.cancelled():
        raise EpisodeFailed("group rewards were cancelled by their own code")
    error = task.exception() or task.result()
    if isinstance(error, JudgeFailed):
        raise EpisodeFailed(f"group rewards: {error.reason}", report=error.report) from error
    if isinstance(error, BaseException):
        raise EpisodeFailed(f"group rewards raised {type(error).__name__}", *describe(error)) from error
    try:
        return as_outcomes(task.result())
    except Exception as error:
        report = f"{type(error).__name__}: {error}\nThey have to be a list with a reward for each episode."
        raise EpisodeFailed("group rewards cannot be used", report=report) from error


def _group_rewards_failed(play: Sequence[Episode], why: EpisodeFailed, index: int) -> EpisodeFailed:
    """An episode that cannot be trained because of its group's rewards."""
    failed = EpisodeFailed(why.reason, why.place, why.report)
    failed.tokens, failed.index = sum(sequence.num_trainable for sequence in play), index
    return failed
