"""Rewards that compare the episodes of a group (``Task.group_rewards``), once these have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from monarch_rl.episode.episode import Episode
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.outside import PLAYING, JudgeFailed, Playing
from monarch_rl.rollout.own_time import OwnTime
from monarch_rl.rollout.play import to_its_end
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.scoring_failed import ScoringFailed
from monarch_rl.rollout.tracebacks import describe, suspended
from monarch_rl.runtime.deadlines import ends_in_time
from monarch_rl.tasks.task import GroupRewards, Outcome, Task, as_outcome, as_outcomes, is_coroutine_function

Played = list[Episode] | EpisodeFailed
OWN_CODE = "the group's rewards"


class GroupRewarder:
    """Gives groups the rewards that their tasks give them as a whole.

    Args:
        scorer: the scoring processes.
        deadline_s: seconds that a coroutine may take.
    """

    def __init__(self, scorer: Scorer, deadline_s: float) -> None:
        self._scorer, self._deadline_s = scorer, deadline_s

    async def added(self, task: Task, item: Any, index: int, played: Sequence[Played]) -> list[Played]:
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
            return [play if isinstance(play, EpisodeFailed) else _failed(play, why, index) for play in played]
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
    own_time = OwnTime(deadline_s, OWN_CODE)
    playing = PLAYING.set(Playing(own_time, index))
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
        PLAYING.reset(playing)
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


def _failed(play: Sequence[Episode], why: EpisodeFailed, index: int) -> EpisodeFailed:
    """An episode that cannot be trained because of its group's rewards."""
    failed = EpisodeFailed(why.reason, why.place, why.report)
    failed.tokens, failed.index = sum(sequence.num_trainable for sequence in play), index
    return failed
