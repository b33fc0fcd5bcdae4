"""One episode: its coroutine, with a deadline. Knows no actors: the generator is anything that generates."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from monarch_rl.episode.episode import Episode
from monarch_rl.episode.group_bound import UNBOUNDED, GroupBound
from monarch_rl.episode.sampling import Sampling
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.conversation import Conversation
from monarch_rl.rollout.episode_clock import OWN_CODE, RUNNING_EPISODE, JudgeFailed, Playing
from monarch_rl.rollout.episode_failed import EpisodeFailed, ScoringFailed, item_failed
from monarch_rl.rollout.handles import GeneratorHandle
from monarch_rl.rollout.policy import EpisodeContext, Rollout, Stops
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.sequences import Outcomes
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.tracebacks import describe, suspended
from monarch_rl.runtime.deadlines import DeadlineExceeded, ends_in_time, within
from monarch_rl.tasks.task import ContextFull, EpisodeCode, Returned, Task

logger = logging.getLogger("monarch_rl")
T = TypeVar("T")
LEAVE_S = 5.0
"""Seconds in which episodes that were cancelled may close what they opened, before their worker ends."""
CONTEXT_FULL = object()
"""Stands for what a coroutine would have returned."""


class EpisodeRunner:
    """Plays episodes, token-in, token-out.

    Args:
        generator: draws the turns.
        template: of the model.
        settings: how to play.
        scorer: the scoring processes, if there are some.
        episode_limit: tokens that an episode may have, prompts and drawn ones; None is any number.
    """

    def __init__(
        self,
        generator: GeneratorHandle,
        template: ChatTemplate,
        settings: RolloutSettings,
        scorer: Scorer | None = None,
        episode_limit: int | None = None,
    ) -> None:
        self._template = template
        self._deadline_s = settings.episode_deadline_s
        stops = Stops(template.token_texts, template.decode)
        self._means = EpisodeContext(generator, scorer, stops, settings.episode_deadline_s, episode_limit)
        self._leaving: set[asyncio.Task[Any]] = set()
        """The code of episodes that are over or cancelled, until it ends."""

    async def leave(self) -> None:
        """Wait until the code of cancelled episodes has closed what it opened, in ``finally`` or ``async with``, at
        most :data:`LEAVE_S`."""
        if not self._leaving:
            return
        _, stuck = await asyncio.wait(self._leaving, timeout=LEAVE_S)
        if stuck:
            logger.warning("%d cancelled episodes did not end within %g s; the process ends them", len(stuck), LEAVE_S)

    async def play(
        self, task: Task, index: int, item: Any, sampling: Sampling, group: int, share: GroupBound = UNBOUNDED
    ) -> list[Episode]:
        """Play one episode.

        Args:
            index: of the item, for the report of a failure.
            sampling: how turns are drawn that say nothing else.
            share: what it may become.

        Returns:
            The sequences that it became: one, or those of its seats in each of its branches. ``finish_reason`` is
            ``context`` where there was no room left, else that of the last turn.

        Raises:
            EpisodeFailed: the episode's code raised, did not end in time or returned what is no reward, its first
                prompt leaves no room, or the engine's record of a token's kept set cannot be used.
            ValueError: the generator returned expert routes of another number of tokens than it was asked for.
            DeadlineExceeded: the generator did not answer in time. It and other errors of the generator are not
                this episode's fault: the first ends the run, others cost the worker.
        """
        conversation, reward = Conversation(self._template), task.full_context_reward
        play = Rollout(self._means, conversation, sampling, group, reward, share)
        playing = RUNNING_EPISODE.set(Playing(play.own_time, group))
        try:
            return play.sequences(await self._outcomes(task.episode, item, play))
        except EpisodeFailed as failed:
            failed.tokens, failed.index = play.drawn, index
            failed.prompt, failed.answer, failed.messages = play.prompt, play.answer, play.messages
            raise
        finally:
            play.end()
            RUNNING_EPISODE.reset(playing)

    async def _outcomes(self, episode: EpisodeCode, item: Any, play: Rollout) -> Outcomes:
        """What the coroutine returned; see :meth:`play`."""
        try:
            returned = await self._returned(episode, item, play)
        except (EpisodeFailed, asyncio.CancelledError):
            raise
        except ScoringFailed as error:
            raise EpisodeFailed(error.reason, error.place, error.report) from error
        except JudgeFailed as error:
            raise EpisodeFailed(error.reason, report=error.report) from error
        except Exception as error:
            if error is play.broken:
                raise
            raise EpisodeFailed(f"episode raised {type(error).__name__}", *describe(error)) from error
        if play.broken is not None:
            raise play.broken
        try:
            return play.outcomes_so_far() if returned is CONTEXT_FULL else play.outcomes(returned)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            report = f"{said}\nIt has to return a number, a dictionary of named parts, or an Outcome: docs/tasks.md."
            raise EpisodeFailed("episode returned what cannot be used", report=report) from error

    async def _returned(self, episode: EpisodeCode, item: Any, play: Rollout) -> Any:
        """Run the coroutine as a task of its own, which is left alone when it does not end in time: one that ignores
        its cancellation must not hold up the group. Raises what it raises, and EpisodeFailed."""
        coroutine: Any = episode(item, play.policy)
        task = asyncio.ensure_future(to_its_end(_with_turn_rewards(coroutine, play)))
        try:
            in_time = await ends_in_time(task, lambda: play.own_time.clock, self._deadline_s)
        finally:
            if not task.done():
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
        if not in_time:
            place, stack = suspended(coroutine)
            if not stack:  # it has ended
                place, stack = play.turn_rewards.suspended()
            task.cancel()
            if play.broken is not None:  # however its code came to wait
                raise play.broken
            if play.queue:
                report = f"{stack}\n{play.queue}: raise --rollout.scorer-processes, or --rollout.episode-deadline-s."
                raise EpisodeFailed(f"scores had no process within {self._deadline_s:g} s", place, report.lstrip())
            report = f"{stack}\nIf it may take longer, raise --rollout.episode-deadline-s.".lstrip()
            raise EpisodeFailed(f"{OWN_CODE} took over {self._deadline_s:g} s", place, report)
        error = None if task.cancelled() else task.exception()
        if play.broken is not None:
            raise play.broken
        if task.cancelled():
            raise EpisodeFailed("episode was cancelled by its own code")
        if error is not None:
            raise error
        returned = task.result()
        if isinstance(returned, BaseException):
            raise EpisodeFailed(f"episode raised {type(returned).__name__}", *describe(returned))
        return returned


async def _with_turn_rewards(coroutine: Awaitable[Returned], play: Rollout) -> Any:
    """What an episode returns, once the rewards of its turns are there, too."""
    try:
        returned: Any = await coroutine  # waits: the player has a deadline for it
    except ContextFull:
        returned = CONTEXT_FULL
    await play.turn_rewards.settled()
    return returned


async def to_its_end(coroutine: Awaitable[T]) -> T | BaseException:
    """Await it, and return what is raised beside Exceptions: SystemExit and KeyboardInterrupt would end the event loop,
    others would pass for an error of the worker."""
    try:
        return await coroutine  # waits: the player has a deadline for it
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        return error


async def all_or_none(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run them at once; the first exception cancels the others, waits for them, and is raised as it is."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)  # waits: as long as what is run, whose waits are its own
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # waits: they are done or cancelled


# -- items of a task, which are made by its author's code -------------------------------------------------------------


async def made(make: Callable[[int], Any], index: int, deadline_s: float) -> Any:
    """An item, made on a thread. One that is not made in time keeps its thread: none can be ended.

    Raises:
        EpisodeFailed: it raised, or took longer than ``deadline_s`` seconds.
    """
    what = f"item {index} from the task"
    try:
        making = asyncio.to_thread(make, index)
        return await within(deadline_s, making, what, on="the task's items", flag="rollout.episode-deadline-s")
    except DeadlineExceeded as error:
        failed = EpisodeFailed(f"item took over {deadline_s:g} s to be made", report=str(error))
        failed.index = index
        raise failed from error
    except Exception as error:  # whatever the task raises
        raise item_failed(error, index) from error
