"""Stages: code of a recipe that processes a whole group after its episodes have ended and before it is submitted.

    async def teacher(item, group):
        for episode in group.episodes:
            episode.fill_column("teacher", await teacher_engine.logprobs(episode.token_ids))

    await run.start(..., stages=[Stage(teacher, fills=("teacher",))])

A stage fills columns, changes rewards, or drops the group (:class:`DropGroup`). Workers run other groups meanwhile.
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
from monarch_rl.episode.failure import KINDS, UNUSABLE, Failure, shortened
from monarch_rl.episode.serialization import BEHAVIOUR, column_names
from monarch_rl.errors import EpisodeError, JudgeFailed, LoopBlocked, ScoringFailed, UnusableReward, is_infrastructure
from monarch_rl.rollout.episode_clock import RUNNING_EPISODE, EpisodeClock, RunningEpisode
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.play import value_or_exit
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.tracebacks import describe, suspended
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.deadlines import DeadlineClock, ends_in_time, now
from monarch_rl.tasks.task import (
    GroupRewards,
    Outcome,
    Task,
    as_outcome,
    as_outcomes,
    is_coroutine_function,
    returned_by,
)
from monarch_rl.user_code import definition, place_of

REASON_CHARACTERS = 60
"""Maximum characters of the reason for which a stage drops groups, because it becomes part of a metric's name."""


class DropGroup(Exception):
    """Raised by a stage to drop a group from training. The reason is short, because groups are counted by it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Stage:
    """One stage. It is pickled by value, with its function, and sent to the workers."""

    function: Callable[[Any, Group], Awaitable[None]]
    """``async def stage(item, group)``."""
    fills: tuple[str, ...] = ()
    """Names of the columns that it fills, for every turn of every group."""
    concurrency: int = 8
    """Maximum number of groups in it at a time, per worker. Further groups wait."""
    deadline_s: float = 300.0
    """Maximum seconds of a group in it, not counting the wait to enter it."""
    name: str = ""
    """Name for metrics and messages; empty means the function's name."""
    only_fills: bool = False
    """Whether it only fills its columns, so that it is refused if nothing reads them."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", getattr(self.function, "__name__", type(self.function).__name__))
        if self.concurrency < 1 or not 0 < self.deadline_s < math.inf:
            raise ValueError(
                f"stage {self.name}: concurrency must be at least 1 and deadline_s above 0, got {self.concurrency} and "
                f"{self.deadline_s}"
            )


class StageFailed(EpisodeError):
    """The group is dropped; ``failure`` is the report for its author, None if the stage dropped the group
    deliberately."""

    def __init__(self, reason: str, failure: Failure | None = None) -> None:
        super().__init__(reason)
        self.reason, self.failure = reason, failure


def columns_filled(stages: Sequence[Stage]) -> dict[str, str]:
    """Columns that stages fill, with the name of the stage. Raises ValueError if two stages have the same name or fill
    the same column, or if one fills a column that every group has."""
    names = [stage.name for stage in stages]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two stages are called {twice!r}: rename one of them, Stage(..., name=...)")
    filled: dict[str, str] = {}
    for stage in stages:
        for column in stage.fills:
            if column == BEHAVIOUR:
                raise ValueError(
                    f"stage {stage.name!r} fills the column {column!r}, which is reserved for the engine's log-probs: "
                    "rename it"
                )
            if column in filled:
                raise ValueError(f"stages {filled[column]!r} and {stage.name!r} both fill the column {column!r}")
            filled[column] = stage.name
    return filled


def columns_for_training(stages: Sequence[Stage]) -> list[str]:
    """Columns that only an advantage or an objective can read: those of stages that only fill columns and are not
    followed by a stage that does anything else."""
    others = [index for index, stage in enumerate(stages) if not stage.only_fills]
    return [column for stage in stages[max(others, default=-1) + 1 :] for column in stage.fills]


class Stages:
    """The stages of one worker, which each group passes one after another.

    Args:
        note_time: called for every group and stage with the stage's name, the seconds that the group waited to enter
            it, and the seconds that it spent in it.
    """

    def __init__(self, stages: Sequence[Stage], note_time: Callable[[str, float, float], None]) -> None:
        columns_filled(stages)
        self._stages = [(stage, asyncio.Semaphore(stage.concurrency)) for stage in stages]
        self._note_time = note_time
        self._reasons: set[str] = set()
        """Reasons that stages gave for dropping groups."""
        self.max_groups = sum(stage.concurrency for stage in stages)
        """Maximum number of groups in stages at a time."""

    async def run(self, item: Any, group: Group) -> None:
        """Run all stages on a group.

        Raises:
            StageFailed: a stage dropped the group, raised, did not end in time, or left a group that cannot be trained.
        """
        for stage, semaphore in self._stages:
            began = now()
            async with semaphore:
                entered = now()
                try:
                    await _run(stage, item, group)
                except DropGroup as dropped:
                    raise StageFailed(self._reason(stage, dropped.reason)) from dropped
                finally:
                    self._note_time(stage.name, entered - began, now() - entered)

    def _reason(self, stage: Stage, given: str) -> str:
        """Reason by which a dropped group is counted. Each reason is a metric, so their number is limited."""
        reason = f"stage {stage.name}: {shortened(str(given), REASON_CHARACTERS)}"
        if reason not in self._reasons and len(self._reasons) >= KINDS:
            return f"stage {stage.name}: other reasons"
        self._reasons.add(reason)
        return reason


async def _run(stage: Stage, item: Any, group: Group) -> None:
    """Run one stage on a group. Raises DropGroup and StageFailed."""
    what, before = f"stage {stage.name}", _structure(group)
    coroutine: Any = _run_function(stage, item, group)
    # A separate task that is not awaited after its deadline: one that ignores cancellation must not delay other groups.
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
        report = f"{stack}\nIf it may take longer, raise the stage's deadline_s.".lstrip()
        raise _failed(f"{what} took over {stage.deadline_s:g} s", group, place, report)
    error = asyncio.CancelledError() if task.cancelled() else task.result()
    if isinstance(error, DropGroup):
        raise error
    if isinstance(error, JudgeFailed):
        raise _failed(f"{what}: {error.reason}", group, report=error.report) from error
    if error is not None:
        raise _failed(_how(what, error), group, *describe(error)) from error
    problem = _problem(stage, group, before)
    if problem:
        raise _failed(f"{what} left a group that cannot be trained", group, report=problem)


def _how(what: str, error: BaseException) -> str:
    return f"{what} blocked the worker" if isinstance(error, LoopBlocked) else f"{what} raised {type(error).__name__}"


async def _run_function(stage: Stage, item: Any, group: Group) -> BaseException | None:
    """Run the stage's function; returns the exception that it raised, because a SystemExit would end the event loop."""
    try:
        running: Any = stage.function(item, group)
        if not inspect.isawaitable(running):
            raise TypeError(f"stage {stage.name} is not a coroutine function: write `async def`")
        await running  # waits: _run has a deadline for it
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return error
    return None


def _failed(reason: str, group: Group, place: str = "", report: str = "") -> StageFailed:
    item = f"Group {group.group_id}, item {group.task_index}"
    return StageFailed(reason, Failure(reason, place, f"{report}\n{item}".lstrip(), "a stage"))


def _structure(group: Group) -> list[tuple[int, str, int, Fork | None]]:
    """Identities and relations of a group's sequences, which a stage must not change: forks refer to sequences by
    index."""
    return [(id(episode), episode.seat, episode.rollout, episode.fork) for episode in group.episodes]


def _problem(stage: Stage, group: Group, before: list[tuple[int, str, int, Fork | None]]) -> str:
    """Why a group cannot be trained as the stage left it; empty if it can. Converts its rewards to plain numbers.

    Args:
        before: structure of the group before the stage.
    """
    if _structure(group) != before:
        return (
            f"It got {len(before)} episodes and left {len(group.episodes)}, or other ones: a stage must keep the "
            "episodes and their order. Raise DropGroup(reason) to drop a group."
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
        return f"It has to fill the columns {', '.join(stage.fills)}, but {missing[0]} is missing."
    wrong = [_not_finite(episode, stage.fills) for episode in group.episodes]
    # If only some episodes have non-finite values, the trainer leaves these out, reports and counts them (finite_only).
    # If all have some, it would train nothing of the group.
    return f"No episode has finite columns: of episode 0 {wrong[0]}" if all(wrong) else ""


def _not_finite(episode: Episode, names: Sequence[str]) -> str:
    """Which column is not finite, and where; empty if all are finite."""
    for name in names:
        values = episode.column(name)
        if len(wrong := np.flatnonzero(~np.isfinite(values))):
            return f"column {name} is {values[wrong[0]]} at token {wrong[0]} of {len(values)}."
    return ""


def _make_plain(episode: Episode) -> None:
    """Convert the rewards that a stage may have set to plain numbers. Raises TypeError or ValueError if that is
    impossible."""
    outcome = as_outcome(Outcome(episode.reward, episode.parts, episode.info))
    episode.reward, episode.parts = outcome.reward, outcome.parts
    for number, turn in enumerate(episode.turns):
        try:
            turn.reward = None if turn.reward is None else as_outcome(turn.reward).reward
        except (TypeError, ValueError) as error:
            raise ValueError(f"turn {number}: {error}") from error


# -- group rewards, which compare the episodes of a group after they have ended (``Task.group_rewards``) --------------

EpisodeResult = list[Episode] | EpisodeFailed
OWN_CODE = "the group's rewards"


class GroupRewarder:
    """Computes the rewards that tasks give to whole groups.

    Args:
        scorer: the scoring processes.
        deadline_s: deadline in seconds of a coroutine.
    """

    def __init__(self, scorer: Scorer, deadline_s: float) -> None:
        self._scorer, self._deadline_s = scorer, deadline_s

    async def added(self, task: Task, item: Any, index: int, results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
        """The group with its group rewards, if the task defines any. If they fail, all episodes of the group fail.

        Args:
            task: the task that the item belongs to.
            index: index of the item, for the report of a failure.
            results: the group: the sequences of each episode, in the order in which they are compared. Failed episodes
                are not compared.
        """
        succeeded = [result for result in results if not isinstance(result, EpisodeFailed)]
        episodes = [sequence for result in succeeded for sequence in result]
        if task.group_rewards is None or not episodes:
            return list(results)
        before = [
            Outcome(of.reward, of.parts, of.info, of.answer, of.seat, number)
            for number, result in enumerate(succeeded)
            for of in result
        ]
        try:
            rewards = await self._rewards(task.group_rewards, item, index, before)
            merged = [_merged(old, new) for old, new in zip(before, rewards, strict=True)]
        except EpisodeFailed as why:
            return [
                result if isinstance(result, EpisodeFailed) else _group_rewards_failed(result, why, index)
                for result in results
            ]
        for episode, new in zip(episodes, merged, strict=True):
            episode.reward, episode.parts, episode.info = new.reward, new.parts, new.info
        return list(results)

    async def _rewards(self, function: GroupRewards, item: Any, index: int, outcomes: list[Outcome]) -> list[Outcome]:
        """One reward per outcome. Raises EpisodeFailed."""
        if is_coroutine_function(function):
            rewards = await _in_worker(function, item, index, outcomes, self._deadline_s)
        else:
            try:
                rewards = await self._scorer.score_group(function, item, outcomes)  # waits: it has a deadline
            except ScoringFailed as error:
                reason = f"group rewards: {error.reason}"
                raise EpisodeFailed(reason, error.place, error.report, error.infrastructure) from error
            except TypeError as error:  # the function, the item or an outcome cannot be pickled
                raise EpisodeFailed("group rewards raised TypeError", *describe(error)) from error
        if len(rewards) != len(outcomes):
            report = f"{place_of(function)} returned {len(rewards)} rewards for {len(outcomes)} outcomes of a group."
            raise EpisodeFailed(f"group rewards {UNUSABLE}", definition(function)[1], report)
        return rewards


def _merged(old: Outcome, new: Outcome) -> Outcome:
    """The group's reward, with the parts and info of both outcomes. Raises EpisodeFailed if these are too many
    together."""
    try:
        return as_outcome(Outcome(new.reward, old.parts | new.parts, old.info | new.info))
    except (TypeError, ValueError) as error:
        report = f"Together with the parts and info of the episode's own reward: {error}"
        raise EpisodeFailed("group rewards cannot be used", report=report) from error


async def _in_worker(
    function: GroupRewards, item: Any, index: int, outcomes: list[Outcome], deadline_s: float
) -> list[Outcome]:
    """Rewards that a coroutine returns. Its clock stops while it asks a judge. Raises EpisodeFailed."""
    clock = EpisodeClock(deadline_s, OWN_CODE)
    running = RUNNING_EPISODE.set(RunningEpisode(clock, index))
    try:
        coroutine: Any = function(item, outcomes)
        # A separate task that is not awaited after its deadline, in case it ignores its cancellation.
        task = asyncio.ensure_future(value_or_exit(coroutine))
        if not await ends_in_time(task, lambda: clock.deadline, deadline_s):
            place, stack = suspended(coroutine)
            task.cancel()
            report = f"{stack}\nIf they may take longer, raise --rollout.episode-deadline-s.".lstrip()
            raise EpisodeFailed(f"group rewards took over {deadline_s:g} s", place, report)
    finally:
        clock.end()
        RUNNING_EPISODE.reset(running)
    if task.cancelled():
        raise EpisodeFailed("group rewards were cancelled by their own code")
    error = task.exception() or task.result()
    if isinstance(error, JudgeFailed):
        reason = f"group rewards: {error.reason}"
        raise EpisodeFailed(reason, report=error.report, infrastructure=error.infrastructure) from error
    if isinstance(error, BaseException):
        raise EpisodeFailed(_how("group rewards", error), *describe(error), is_infrastructure(error)) from error
    try:
        return returned_by(function, task.result(), as_outcomes)
    except UnusableReward as error:
        report = f"{error}\nIt has to return a list with one reward per outcome."
        raise EpisodeFailed(f"group rewards {UNUSABLE}", error.place, report) from error


def _group_rewards_failed(sequences: Sequence[Episode], why: EpisodeFailed, index: int) -> EpisodeFailed:
    """The failure of an episode whose group rewards failed."""
    failed = EpisodeFailed(why.reason, why.place, why.report, why.infrastructure)
    failed.tokens, failed.index = sum(sequence.num_trainable for sequence in sequences), index
    return failed
