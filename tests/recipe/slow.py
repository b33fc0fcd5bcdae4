"""recipes/grpo.py with episodes that sleep for seconds, as if they used slow tools: ``slow.py ARGUMENTS...``

For tests that do not wait for steps: a run at full speed would take the cores from other tests.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "recipes"))

import grpo  # noqa: E402

from monarch_rl.pipeline.run import launch  # noqa: E402
from monarch_rl.settings.cli import cli  # noqa: E402
from monarch_rl.tasks.reasoning_gym import ReasoningGym  # noqa: E402
from monarch_rl.tasks.task import EpisodeCode, Policy, Task  # noqa: E402

TOOL_S = 3.0
"""Seconds that an episode sleeps before it asks the policy; with some 20 concurrent groups, a step takes about 1 s."""


async def slow_episode(episode: EpisodeCode, item: Any, policy: Policy) -> Any:
    await asyncio.sleep(TOOL_S)
    return await episode(item, policy)


def task(s: grpo.Settings) -> Task:
    reasoning_gym = ReasoningGym(s.task)
    episode = functools.partial(slow_episode, reasoning_gym.episode)
    return reasoning_gym.with_episode(episode, success_reward=1.0)


if __name__ == "__main__":
    launch(grpo.train, cli(grpo.Settings), task)
