"""recipes/grpo.py, whose episodes take seconds and no core, as those with slow tools do: ``slow.py ARGUMENTS...``

For tests that wait for something else than steps: a run at full speed would take their cores from other tests.
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
"""Seconds that an episode waits before it asks the policy: some 20 groups are played at once, so a step takes one."""


async def unhurried(play: EpisodeCode, item: Any, policy: Policy) -> Any:
    await asyncio.sleep(TOOL_S)
    return await play(item, policy)


def task(s: grpo.Settings) -> Task:
    made = ReasoningGym(s.task)
    return made.with_episode(functools.partial(unhurried, made.episode))


if __name__ == "__main__":
    grpo.task = task
    launch(grpo.train, cli(grpo.Settings), task)
