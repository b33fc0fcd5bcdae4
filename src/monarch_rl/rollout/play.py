"""Runs one episode: its coroutine, with a deadline. Independent of actors: any object with ``generate`` is a
generator."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from monarch_rl.episode.episode import Episode
from monarch_rl.episode.failure import UNUSABLE
from monarch_rl.episode.group_bound import UNBOUNDED, GroupBound
from monarch_rl.episode.sampling import Sampling
from monarch_rl.errors import (
    ContextFull,
    DeadlineExceeded,
    JudgeFailed,
    LoopBlocked,
    ScoringFailed,
    UnusableReward,
    is_infrastructure,
)
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.conversation import Conversation
from monarch_rl.rollout.episode_clock import OWN_CODE, RUNNING_EPISODE, EpisodeClock, RunningEpisode
from monarch_rl.rollout.episode_failed import EpisodeFailed, item_failed
from monarch_rl.rollout.handles import GeneratorHandle
from monarch_rl.rollout.policy import EpisodeContext, Rollout, Stops
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.sequences import Outcomes
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.statistics import EpisodeProgress
from monarch_rl.rollout.tracebacks import describe, suspended
from monarch_rl.runtime.deadlines import ends_in_time, within
from monarch_rl.tasks.task import EpisodeCode, Returned, Task, returned_by

logger = logging.getLogger("monarch_rl")
T = TypeVar("T")
LEAVE_S = 5.0
"""Seconds that cancelled episodes get to close what they opened, before their worker ends."""
CONTEXT_FULL = object()
"""Stands for the return value of a coroutine that a full context ended."""


class InProgress(Protocol):
    """A running episode, or a group that runs as a unit."""

    @property
    def group(self) -> int: ...

    @property
    def length(self) -> tuple[int, int]:
        """Turns and tokens of the longest conversation so far."""
        ...

    @property
    def clock(self) -> EpisodeClock: ...


class EpisodeRunner:
    """Runs episodes, token-in, token-out.

    Args:
        generator: generates the turns.
        template: chat template of the model.
        settings: deadline and limits of episodes.
        scorer: scoring processes, if there are any.
        episode_limit: maximum tokens of a sequence, prompts included; None means no limit.
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
        self._context = EpisodeContext(
            generator, scorer, stops, settings.episode_deadline_s, episode_limit, settings.max_turns
        )
        self._running: dict[int, tuple[InProgress, str, int]] = {}
        """What is running, by identity and in the order of the start, with the name of the task and the index of the
        item."""
        self._leaving: set[asyncio.Task[Any]] = set()
        """Code of ended or cancelled episodes that is still running."""

    async def leave(self) -> None:
        """Wait up to :data:`LEAVE_S` until the code of cancelled episodes has run its ``finally`` and ``async with``
        exits."""
        if not self._leaving:
            return
        _, stuck = await asyncio.wait(self._leaving, timeout=LEAVE_S)
        if stuck:
            logger.warning("%d cancelled episodes did not end within %g s; the process ends them", len(stuck), LEAVE_S)

    def longest(self, groups: Collection[int] | None) -> EpisodeProgress | None:
        """The running episode with most tokens, and the earliest of equals; None if none is running.

        Args:
            groups: only episodes of these groups; None: only those of held-out items.
        """
        running = [
            EpisodeProgress(task, item, one.group, *one.length, *one.clock.state)
            for one, task, item in self._running.values()
            if (one.group < 0 if groups is None else one.group in groups)
        ]
        return max(running, key=lambda progress: progress.tokens, default=None)

    @contextmanager
    def running(self, one: InProgress, task: str, item: int) -> Iterator[None]:
        """Report ``one`` as running during the block."""
        self._running[id(one)] = one, task, item
        try:
            yield
        finally:
            del self._running[id(one)]

    async def play(
        self, task: Task, index: int, item: Any, sampling: Sampling, group: int, share: GroupBound = UNBOUNDED
    ) -> list[Episode]:
        """Run one episode.

        Args:
            index: index of the item, for the report of a failure.
            sampling: sampling parameters of turns that do not set their own.
            share: bound on the sequences and tokens of the episode.

        Returns:
            The episode's sequences: one, or one per seat and branch. ``finish_reason`` is ``context`` if there was no
            room left, ``turns`` if it was refused one more than ``max_turns``, else that of the last turn.

        Raises:
            EpisodeFailed: the episode's code raised, did not end in time or returned a value that is not a reward, its
                first prompt leaves no room, or the engine's record of a token's sampling mask cannot be used.
            ValueError: the generator returned expert routes for a different number of tokens than requested.
            DeadlineExceeded: the generator did not answer in time. This and other errors of the generator are not the
                episode's fault: DeadlineExceeded ends the run, others cost the worker.
        """
        conversation, reward = Conversation(self._template), task.full_context_reward
        rollout = Rollout(self._context, conversation, sampling, group, reward, share)
        running = RUNNING_EPISODE.set(RunningEpisode(rollout.clock, group, rollout.times))
        with self.running(rollout, task.name, index):
            try:
                return rollout.sequences(await self._outcomes(task.episode, item, rollout))
            except EpisodeFailed as failed:
                failed.tokens, failed.index = rollout.num_trainable, index
                failed.prompt, failed.answer, failed.messages = rollout.prompt, rollout.answer, rollout.messages
                failed.turns, failed.times = rollout.turns, rollout.times
                raise
            finally:
                rollout.times.ended = time.time()
                rollout.end()
                RUNNING_EPISODE.reset(running)

    async def _outcomes(self, episode: EpisodeCode, item: Any, rollout: Rollout) -> Outcomes:
        """Outcomes that the coroutine returned; raises as :meth:`play` does."""
        try:
            returned = await self._returned(episode, item, rollout)
        except (EpisodeFailed, asyncio.CancelledError):
            raise
        except ScoringFailed as error:
            raise score_failed(error) from error
        except JudgeFailed as error:
            raise EpisodeFailed(error.reason, report=error.report, infrastructure=error.infrastructure) from error
        except UnusableReward as error:
            raise EpisodeFailed(f"{error.what} {UNUSABLE}", error.place, str(error)) from error
        except Exception as error:
            if error is rollout.broken:
                raise
            reason = f"episode raised {type(error).__name__}"
            raise EpisodeFailed(reason, *describe(error), is_infrastructure(error)) from error
        if rollout.broken is not None:
            raise rollout.broken
        if returned is CONTEXT_FULL:
            return rollout.outcomes_so_far()
        try:
            return returned_by(episode, returned, rollout.outcomes)
        except UnusableReward as error:
            report = f"{error}\nIt has to return a number, a dictionary of named parts, or an Outcome: docs/tasks.md."
            raise EpisodeFailed(f"episode {UNUSABLE}", error.place, report) from error

    async def _returned(self, episode: EpisodeCode, item: Any, rollout: Rollout) -> Any:
        """Return value of the coroutine. Raises what the coroutine raises, and EpisodeFailed."""
        coroutine: Any = episode(item, rollout.policy)
        # A separate task, not awaited after its deadline: one that ignores cancellation must not delay the group.
        task = asyncio.ensure_future(value_or_exit(_with_turn_rewards(coroutine, rollout)))
        try:
            in_time = await ends_in_time(task, lambda: rollout.clock.deadline, self._deadline_s)
        finally:
            if not task.done():
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
        if not in_time:
            place, stack = suspended(coroutine)
            if not stack:  # the coroutine has returned, so a turn's reward is pending
                place, stack = rollout.turn_rewards.suspended()
            task.cancel()
            if rollout.broken is not None:  # whatever the code waits for
                raise rollout.broken
            raise too_late(self._deadline_s, place, stack, rollout.scoring_queue_report)
        error = None if task.cancelled() else task.exception()
        if rollout.broken is not None:
            raise rollout.broken
        if task.cancelled():
            raise EpisodeFailed("episode was cancelled by its own code")
        if error is not None:
            raise error
        returned = task.result()
        if isinstance(returned, LoopBlocked):
            place, stack = describe(returned)
            raise EpisodeFailed(f"{OWN_CODE} took over {self._deadline_s:g} s", place, stack)
        if isinstance(returned, BaseException):
            raise EpisodeFailed(f"episode raised {type(returned).__name__}", *describe(returned))
        return returned


def score_failed(error: ScoringFailed) -> EpisodeFailed:
    """The failure of an episode whose score failed in a scoring process."""
    return EpisodeFailed(error.reason, error.place, error.report, error.infrastructure)


def too_late(deadline_s: float, place: str, stack: str, queue: str) -> EpisodeFailed:
    """The failure of an episode whose code did not end in time.

    Args:
        queue: describes the calls that wait for the scoring processes, if the episode waited for them.
    """
    if queue:
        report = f"{stack}\n{queue}: raise --rollout.scorer-processes, or --rollout.episode-deadline-s.".lstrip()
        return EpisodeFailed(f"scores had no process within {deadline_s:g} s", place, report, infrastructure=True)
    report = f"{stack}\nIf it may take longer, raise --rollout.episode-deadline-s.".lstrip()
    return EpisodeFailed(f"{OWN_CODE} took over {deadline_s:g} s", place, report)


async def _with_turn_rewards(coroutine: Awaitable[Returned], rollout: Rollout) -> Any:
    """Return value of an episode, once the rewards of its turns have been computed."""
    try:
        returned: Any = await coroutine  # waits: EpisodeRunner has a deadline for it
    except ContextFull:
        returned = CONTEXT_FULL
    await rollout.turn_rewards.settled()
    return returned


CALLS_EPISODE = _with_turn_rewards.__code__
"""In the stack of a thread, it shows that the thread runs an episode's code."""


async def value_or_exit(coroutine: Awaitable[T]) -> T | BaseException:
    """Await ``coroutine``; exceptions that do not derive from Exception are returned, except CancelledError.

    SystemExit and KeyboardInterrupt would end the event loop; others would look like an error of the worker.
    """
    try:
        return await coroutine  # waits: EpisodeRunner has a deadline for it
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        return error


async def all_or_none(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the coroutines concurrently. The first exception cancels the others, waits for them, and is raised
    unchanged."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)  # waits: as long as the coroutines, which have their own deadlines
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # waits: they are done or cancelled
        raise


# -- items of a task, made by its author's code -----------------------------------------------------------------------


async def make_item(make: Callable[[int], Any], index: int, deadline_s: float) -> Any:
    """Make an item on a thread. An item that is not made in time keeps its thread, because threads cannot be ended.

    Raises:
        EpisodeFailed: ``make`` raised, or took longer than ``deadline_s`` seconds.
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
