"""Environments with ``reset`` and ``step``, as in gymnasium, local or remote; each episode is a conversation with one.

Environment(lambda seed: gymnasium.make("FrozenLake-v1", is_slippery=False), moves, show)
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from monarch_rl.tasks.orders import Seeds
from monarch_rl.tasks.task import Outcome, Policy, Task
from monarch_rl.values import plain

MOST_STEPS = 32
"""Default maximum of actions per episode."""


class Steps(Protocol):
    """The part of gymnasium's ``Env`` that is used. Each method may be a coroutine, and must be one if it waits for a
    server or a thread, because otherwise it would block all episodes of its worker."""

    def reset(self, *, seed: int) -> Any:
        """Returns ``(observation, info)``."""
        ...

    def step(self, action: Any, /) -> Any:
        """Returns ``(observation, reward, terminated, truncated, info)``."""
        ...

    def close(self) -> Any:
        """Release resources."""
        ...


def as_shown(observation: Any, info: dict[str, Any]) -> str:
    """The default of ``show``. Raises ValueError if an observation is not a JSON value, such as NaN or an object."""
    if isinstance(observation, str):
        return observation
    try:
        return json.dumps(plain(observation), ensure_ascii=False)
    except ValueError as error:
        raise ValueError(f"an observation cannot be shown ({error}): give show= to Environment") from error


class Environment(Task):
    """Episodes in an environment. The policy gets each observation and answers with an action; the reward of an episode
    is the sum of the rewards of its steps.

    Items are seeds: the item of a cursor depends only on the cursor.

    Args:
        make: makes an environment for an item's seed; called in the worker for each episode, which closes it.
        action: parses the action from a reply's text. If it raises ValueError, the episode ends.
        show: returns the user message for ``(observation, info)``; by default text as it is, and other values as JSON.
        system: system message; "" for none.
        most_steps: maximum actions of an episode. If the environment has a limit of its own, the smaller one applies.
        no_action_reward: added to the reward if a reply has no action.
        success_reward: as in :class:`~monarch_rl.tasks.task.Task`.
        held_out: number of held-out seeds.
        name: name for metrics.
    """

    def __init__(
        self,
        make: Callable[[int], Steps],
        action: Callable[[str], Any],
        show: Callable[[Any, dict[str, Any]], str] = as_shown,
        *,
        system: str = "",
        most_steps: int = MOST_STEPS,
        no_action_reward: float = 0.0,
        success_reward: float | None = None,
        held_out: int = 0,
        name: str = "environment",
    ) -> None:
        if most_steps < 1:
            raise ValueError(f"most_steps must be at least 1, got {most_steps}")
        episode = _EnvironmentEpisode(make, action, show, system, most_steps, no_action_reward)
        seeds = Seeds()
        sets: dict[str, Sequence[int]] = {"held_out": seeds.held_out(held_out)} if held_out else {}
        super().__init__(seeds.training, episode.run, sets, name, success_reward=success_reward, probe=False)


class _EnvironmentEpisode:
    """The episode of a seed."""

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

    async def run(self, seed: int, policy: Policy) -> Outcome:
        """Run the episode of a seed."""
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
    return await value if inspect.isawaitable(value) else value  # waits: EpisodeRunner has a deadline for it
