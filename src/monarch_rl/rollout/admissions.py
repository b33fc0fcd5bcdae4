"""Slots for the groups of a worker, asked of the buffer for all that wait in one call."""

from __future__ import annotations

import asyncio

from monarch_rl.episode.episode import Ticket
from monarch_rl.rollout.handles import BUFFER_DEADLINE_S, BufferHandle
from monarch_rl.runtime.deadlines import within


class Admissions:
    """Hands out tickets of the buffer, in the order in which they were asked for.

    Args:
        buffer: its handle.
        worker: who asks.
        slot_deadline_s: seconds that a call may wait for a slot.
    """

    def __init__(self, buffer: BufferHandle, worker: str, slot_deadline_s: float) -> None:
        self._buffer = buffer
        self._worker = worker
        self._slot_deadline_s = slot_deadline_s
        self._waiting: list[asyncio.Future[Ticket | None]] = []
        self._asking: asyncio.Task[None] | None = None

    async def ticket(self) -> Ticket | None:
        """A ticket; None when the run has ended.

        Raises:
            DeadlineExceeded: no slot became free in time; the message says what holds them.
        """
        answer: asyncio.Future[Ticket | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
        return await answer  # waits: for _ask of this worker, whose calls have deadlines

    async def _ask(self) -> None:
        """Ask for as many tickets as are waited for, until none is; the buffer answers as soon as it has one."""
        while self._waiting:
            deadline = self._slot_deadline_s
            try:
                call = self._buffer.admit_many.call_one(self._worker, len(self._waiting), deadline)
                granted = await within(
                    deadline + BUFFER_DEADLINE_S,
                    call,
                    "a slot from the buffer",
                    on="buffer",
                    flag="rollout.slot-deadline-s",
                )
            except Exception as error:
                failed, self._waiting = self._waiting, []
                for answer in failed:
                    if not answer.done():
                        answer.set_exception(error)
                return
            # No ticket is the end of the run, also for those who asked while the call was under way.
            tickets: list[Ticket | None] = [*granted] or [None] * len(self._waiting)
            served, self._waiting = self._waiting[: len(tickets)], self._waiting[len(tickets) :]
            for answer, ticket in zip(served, tickets, strict=True):
                if not answer.done():
                    answer.set_result(ticket)
