"""Episodes of one turn: a prompt, an answer and its reward.

Most tasks are of this kind. A rollout worker runs a group of such episodes as a unit (``rollout/one_turn.py``), and
everything else, such as a held-out item, runs the coroutine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from monarch_rl.tasks.task import Outcome, Policy, PromptLike, as_outcome, is_coroutine_function, returned_by


def _item(item: Any) -> tuple[Any, ...]:
    return (item,)


@dataclass(frozen=True)
class OneTurn:
    """An episode for :attr:`monarch_rl.tasks.task.Task.episode`."""

    prompt: Callable[[Any], PromptLike]
    """Messages of an item; a pure function, which a group calls once for all its episodes."""
    reward: Callable[..., Any]
    """``reward(*reward_args(item), answer)``. A plain function runs in a scoring process, a coroutine function in the
    worker."""
    reward_args: Callable[[Any], tuple[Any, ...]] = _item
    """Arguments of the reward before the answer's text; by default the item."""

    async def __call__(self, item: Any, policy: Policy) -> Outcome:
        """Run one episode."""
        reply = await policy.reply(self.prompt(item))
        arguments = (*self.reward_args(item), reply.text)
        if self.rewards_in_worker:
            rewarded = await self.reward(*arguments)  # waits: EpisodeRunner has a deadline for it
            return returned_by(self.reward, rewarded, as_outcome)
        return await policy.in_scorer(self.reward, *arguments)

    @property
    def rewards_in_worker(self) -> bool:
        """Whether the reward is a coroutine function."""
        return is_coroutine_function(self.reward)
