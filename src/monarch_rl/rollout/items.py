"""The items of a task, which are made by its author's code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from monarch_rl.rollout.episode_failed import EpisodeFailed, item_failed
from monarch_rl.runtime.deadlines import DeadlineExceeded, within


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
