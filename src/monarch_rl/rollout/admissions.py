"""Slots for the places of a worker, asked of the buffer for all of them in one call."""

from __future__ import annotations

import asyncio
from typing import Any

from monarch_rl.rollout.outbox import BUFFER_DEADLINE_S
from monarch_rl.runtime.deadlines import within


class Admissions:
    """Hands out tickets of the buffer, in the order in which places ask.

    Args:
        buffer: its handle.
        worker: who asks.
        slot_deadline_s: seconds that a call may wait for a slot.
    """

    def __init__(self, buffer: Any, worker: str, slot_deadline_s: float) -> None:
        self._buffer = buffer
        self._worker = worker
        self._slot_deadline_s = slot_deadline_s
        self._waiting: list[asyncio.Future[Any]] = []
        self._asking: asyncio.Task[None] | None = None

    async def ticket(self) -> Any:
        """A ticket; None when the run has ended.

        Raises:
            DeadlineExceeded: no slot in time; says what holds them.
        """
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
        return await answer  # waits: for _ask of this worker, whose calls have deadlines

    async def _ask(self) -> None:
        """Ask for as many as wait, until nobody does; the buffer answers as soon as it has one."""
        while self._waiting:
            most, deadline = len(self._waiting), self._slot_deadline_s
            try:
                call = self._buffer.admit_many.call_one(self._worker, most, deadline)
                tickets = await within(deadline + BUFFER_DEADLINE_S, call, "a slot from the buffer", on="buffer")
            except Exception as error:
                waiting, self._waiting = self._waiting, []
                for answer in waiting:
                    if not answer.done():
                        answer.set_exception(error)
                return
            if not tickets:  # the end: for those who asked meanwhile, too
                tickets = [None] * len(self._waiting)
            served, self._waiting = self._waiting[: len(tickets)], self._waiting[len(tickets) :]
            for answer, ticket in zip(served, tickets, strict=True):
                if not answer.done():
                    answer.set_result(ticket)
