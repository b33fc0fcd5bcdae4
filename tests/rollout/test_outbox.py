"""The submit queue of a worker, with a stand-in for the buffer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from monarch_rl.rollout.submit import UNASKED_BYTES, SubmitQueue
from tests.patience import patiently


class Buffer:
    """Has room for everything."""

    def __init__(self) -> None:
        self.reserve = self.submit = self.submit_if_room = self
        self.groups: list[bytes] = []

    async def call_one(self, *arguments: Any) -> list[bool]:
        self.groups += [argument for argument in arguments if isinstance(argument, bytes)]
        return [True] * len(arguments)


class Unsendable:
    """An endpoint to which nothing can be sent."""

    def call_one(self, *_: object) -> None:
        raise OSError("nothing can be sent")


def test_a_send_error_reaches_all_waiters() -> None:
    """The error is raised before there is anything to await. Groups that are submitted later are accepted."""

    async def submit() -> None:
        buffer: Any = Buffer()
        queue = SubmitQueue(buffer, "worker 0", 600.0)
        small, large = b"small", bytes(UNASKED_BYTES + 1)
        buffer.submit = buffer.submit_if_room = Unsendable()
        waiting = [
            asyncio.ensure_future(queue.submit(*group)) for group in ((0, 0, small), (1, 0, large), (2, 0, small))
        ]
        for group in waiting:
            with pytest.raises(OSError, match="nothing can be sent"):
                await patiently(group)
        buffer.submit = buffer.submit_if_room = buffer
        for group_id, data in ((3, small), (4, large)):
            await patiently(queue.submit(group_id, 0, data))
        assert buffer.groups == [small, large]

    asyncio.run(submit())
