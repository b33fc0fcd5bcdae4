"""One episode: its coroutine, with a deadline. Knows no actors: the generator is anything that generates."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

from monarch_rl.episode.episode import Episode
from monarch_rl.episode.sampling import Sampling
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.conversation import Conversation
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.handles import GeneratorHandle
from monarch_rl.rollout.policy import OWN_CODE, EpisodePolicy, Means
from monarch_rl.rollout.scoring import Scorer, ScoringFailed
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.stops import Stops
from monarch_rl.rollout.tracebacks import describe, suspended
from monarch_rl.runtime.deadlines import ends_in_time
from monarch_rl.tasks.task import ContextFull, EpisodeCode, Outcome, Reward, Task, as_outcome

T = TypeVar("T")


class EpisodePlayer:
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
        self._means = Means(
            generator,
            scorer,
            stops,
            settings.generate_limit_s,
            settings.episode_deadline_s,
            episode_limit,
        )

    async def play(self, task: Task, index: int, item: Any, sampling: Sampling, group: int) -> Episode:
        """Play one episode.

        Args:
            index: of the item, for the report of a failure.
            sampling: how turns are drawn that say nothing else.

        Returns:
            The episode; ``finish_reason`` is ``context`` if it had no room left, else that of its last turn.

        Raises:
            EpisodeFailed: the episode's code raised, did not end in time or returned what is no reward, its first
                prompt leaves no room, or the engine's record of a token's kept set cannot be used.
            ValueError: the generator returned expert routes of another number of tokens than it was asked for.
            DeadlineExceeded: the generator did not answer in time. It and other errors of the generator are not
                this episode's fault: the first ends the run, others cost the worker.
        """
        policy = EpisodePolicy(self._means, Conversation(self._template), sampling, group, task.full_context_reward)
        try:
            return policy.episode(await self._outcome(task.episode, item, policy))
        except EpisodeFailed as failed:
            failed.tokens, failed.index = policy.drawn, index
            failed.prompt, failed.answer = policy.prompt, policy.answer
            raise
        finally:
            policy.end()

    async def _outcome(self, episode: EpisodeCode, item: Any, policy: EpisodePolicy) -> Outcome:
        """What the coroutine returned; see :meth:`play`."""
        try:
            returned = await self._returned(episode, item, policy)
        except (EpisodeFailed, asyncio.CancelledError):
            raise
        except ContextFull:
            returned = policy.reward_so_far
        except ScoringFailed as error:
            raise EpisodeFailed(error.reason, error.place, error.report) from error
        except Exception as error:
            if error is policy.broken:
                raise
            raise EpisodeFailed(f"episode raised {type(error).__name__}", *describe(error)) from error
        if policy.broken is not None:
            raise policy.broken
        try:
            return as_outcome(returned)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            report = f"{said}\nIt has to return a number, a dictionary of named parts, or an Outcome."
            raise EpisodeFailed("episode returned what cannot be used", report=report) from error

    async def _returned(self, episode: EpisodeCode, item: Any, policy: EpisodePolicy) -> Reward:
        """Run the coroutine as a task of its own, which is left alone when it does not end in time: one that ignores
        its cancellation must not hold up the group. Raises what it raises, and EpisodeFailed."""
        coroutine: Any = episode(item, policy)
        task = asyncio.ensure_future(_to_its_end(coroutine))
        if not await ends_in_time(task, lambda: policy.own_time.clock, self._deadline_s):
            place, stack = suspended(coroutine)
            task.cancel()
            if policy.broken is not None:  # however its code came to wait
                raise policy.broken
            report = f"{stack}\nIf it may take longer, raise --rollout.episode-deadline-s.".lstrip()
            raise EpisodeFailed(f"{OWN_CODE} took over {self._deadline_s:g} s", place, report)
        error = None if task.cancelled() else task.exception()
        if policy.broken is not None:
            raise policy.broken
        if task.cancelled():
            raise EpisodeFailed("episode was cancelled by its own code")
        if error is not None:
            raise error
        returned = task.result()
        if isinstance(returned, SystemExit):
            raise EpisodeFailed("episode raised SystemExit", *describe(returned))
        return returned


async def _to_its_end(coroutine: Awaitable[T]) -> T | SystemExit:
    """Await it; a SystemExit would end the event loop."""
    try:
        return await coroutine  # waits: the player has a deadline for it
    except SystemExit as error:
        return error


def episode_seed(seed: int | None, group_id: int, episode: int) -> int | None:
    """A seed of 31 bits for one episode, the same in every process; None if draws are free."""
    if seed is None:
        return None
    digest = hashlib.sha256(f"{seed}/{group_id}/{episode}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF


async def all_or_none(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run them at once; the first exception cancels the others, waits for them, and is raised as it is."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)  # waits: as long as what is run, whose waits are its own
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # waits: they are done or cancelled
