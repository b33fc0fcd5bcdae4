"""Environments with ``reset`` and ``step``, as gymnasium has them, and those behind a connection: a conversation each.

Environment(lambda seed: gymnasium.make("FrozenLake-v1", is_slippery=False), moves, show)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from monarch_rl.tasks.orders import Seeds
from monarch_rl.tasks.task import Outcome, Policy, Task

MOST_STEPS = 32
"""Actions of an episode, unless the task says how many."""


class Steps(Protocol):
    """gymnasium's ``Env``, as far as it is used. Each method may be a coroutine: one that waits for a server, or for a
    thread, must be, because it would hold up all episodes of its worker."""

    def reset(self, *, seed: int) -> Any:
        """``(observation, info)``."""
        ...

    def step(self, action: Any, /) -> Any:
        """``(observation, reward, terminated, truncated, info)``."""
        ...

    def close(self) -> Any:
        """Free what it holds."""
        ...


class Environment(Task):
    """Episodes in an environment. The policy is shown what is observed, and answers with an action; what an episode is
    worth is the sum of the rewards of its steps.

    Items are seeds: what is played at a cursor depends on nothing but the cursor.

    Args:
        make: makes an environment for an item's seed, in the worker, for each episode, which closes it.
        action: reads the action out of a reply's text. Where it raises ValueError, the episode ends.
        show: the user's message for ``(observation, info)``.
        system: the system message; "" is none.
        most_steps: actions of an episode, at most. Where the environment has a limit of its own, the smaller counts.
        no_action_reward: what is added where a reply has no action.
        held_out: seeds that are held out.
        name: for metrics.
    """

    def __init__(
        self,
        make: Callable[[int], Steps],
        action: Callable[[str], Any],
        show: Callable[[Any, dict[str, Any]], str] = lambda observation, _: str(observation),
        *,
        system: str = "",
        most_steps: int = MOST_STEPS,
        no_action_reward: float = 0.0,
        held_out: int = 0,
        name: str = "environment",
    ) -> None:
        if most_steps < 1:
            raise ValueError(f"most_steps must be at least 1, got {most_steps}")
        playing = _Playing(make, action, show, system, most_steps, no_action_reward)
        seeds = Seeds()
        sets: dict[str, Sequence[int]] = {"held_out": seeds.held_out(held_out)} if held_out else {}
        super().__init__(seeds.training, playing.play, sets, name)


class _Playing:
    """How a seed is played."""

    def __init__(
        self,
        make: Callable[[int], Steps],
        action: Callable[[str], Any],
        show: Callable[[Any, dict[str, Any]], str],
        system: str,
        most_steps: int,
        no_action_reward: float,
    ) -> None:
        self._make, self._action, self._show = make, action, show
        self._system, self._most_steps, self._no_action_reward = system, most_steps, no_action_reward

    async def play(self, seed: int, policy: Policy) -> Outcome:
        """The episode of a seed."""
        if self._system:
            policy.read({"role": "system", "content": self._system})
        environment = await _awaited(self._make(seed))
        try:
            return await self._steps(environment, seed, policy)
        finally:
            await _awaited(environment.close())

    async def _steps(self, environment: Steps, seed: int, policy: Policy) -> Outcome:
        observation, info = await _awaited(environment.reset(seed=seed))
        for step in range(1, self._most_steps + 1):
            reply = await policy.reply(self._show(observation, info))
            try:
                action = self._action(reply.text)
            except ValueError as error:
                reward = policy.reward_so_far + self._no_action_reward
                return Outcome(reward, info={"steps": step, "end": f"no action: {error}"})
            observation, reward, terminated, truncated, info = await _awaited(environment.step(action))
            policy.reward_so_far += float(reward)
            if terminated or truncated:
                end = "terminated" if terminated else "truncated"
                return Outcome(policy.reward_so_far, info={"steps": step, "end": end})
        return Outcome(policy.reward_so_far, info={"steps": self._most_steps, "end": "most_steps"})


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value  # waits: the player has a deadline for it
