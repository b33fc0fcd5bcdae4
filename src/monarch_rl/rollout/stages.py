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
from monarch_rl.rollout.outside import JudgeFailed
from monarch_rl.rollout.tracebacks import describe, suspended
from monarch_rl.runtime import presence
from monarch_rl.runtime.deadline_clock import DeadlineClock
from monarch_rl.runtime.deadlines import ends_in_time, now
from monarch_rl.tasks.task import Outcome, as_outcome

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
    clock, wait = DeadlineClock(stage.deadline_s, what), presence.begin_wait(what, "a stage's code", stage.deadline_s)
    try:
        in_time = await ends_in_time(task, lambda: clock, stage.deadline_s)
    finally:
        presence.end_wait(wait)
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
