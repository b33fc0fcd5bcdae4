"""The process rewards of an episode's turns, some of which are computed while the episode goes on."""

from __future__ import annotations

import asyncio
from typing import Any

from monarch_rl.episode.episode import Turn
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.outside import JudgeFailed
from monarch_rl.rollout.scoring_failed import ScoringFailed
from monarch_rl.rollout.tracebacks import describe, suspended
from monarch_rl.tasks.task import Reply


class TurnRewards:
    """The rewards that an episode's code sets (:attr:`Reply.reward`), on their way to its turns."""

    def __init__(self) -> None:
        self._turns: list[tuple[Reply, Turn]] = []

    def add(self, reply: Reply, turn: Turn) -> None:
        """The next turn, and what the code has of it."""
        self._turns.append((reply, turn))

    async def settled(self) -> None:
        """Wait for the rewards that are still being computed, and give each turn its own.

        Raises:
            EpisodeFailed: one raised, or was cancelled.
            ScoringFailed: one failed in a scoring process.
            JudgeFailed: a judge that one asked did not answer.
        """
        while True:
            rewards = self._awaited()
            for reward in rewards:
                if reward.done():
                    _check(reward)
            pending = [reward for reward in rewards if not reward.done()]
            if not pending:
                break
            # waits: the player has a deadline for the episode's code, which these belong to
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for reply, turn in self._turns:
            turn.reward = reply.reward

    def suspended(self) -> tuple[str, str]:
        """Where the first reward that is still being computed waits, as by ``tracebacks.suspended``."""
        for reward in self._awaited():
            if isinstance(reward, asyncio.Task) and not reward.done():
                coroutine: Any = reward.get_coro()
                return suspended(coroutine)
        return "", ""

    def end(self) -> None:
        """The episode is over: no reward can be set any more, and none is computed on."""
        for reply, _ in self._turns:
            reply.end()

    def _awaited(self) -> list[asyncio.Future[float]]:
        rewards = [reply.awaited_reward for reply, _ in self._turns]
        return [reward for reward in rewards if reward is not None]


def _check(reward: asyncio.Future[Any]) -> None:
    if reward.cancelled():
        raise EpisodeFailed("turn reward was cancelled by the episode's own code")
    error = reward.exception()
    if isinstance(error, ScoringFailed | EpisodeFailed | JudgeFailed):
        raise error
    if error is not None:
        raise EpisodeFailed(f"turn reward raised {type(error).__name__}", *describe(error)) from error
