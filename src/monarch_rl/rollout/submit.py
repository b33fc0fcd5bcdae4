"""Groups between worker and buffer: slots to start them, their way through the stages, room, and submission."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monarch_rl.episode.episode import Group, Ticket
from monarch_rl.episode.failure import KINDS, Failure
from monarch_rl.episode.serialization import pack_group
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.handles import BUFFER_DEADLINE_S, BufferHandle
from monarch_rl.rollout.stages import Stage, StageFailed, Stages
from monarch_rl.rollout.statistics import Statistics
from monarch_rl.rollout.transcripts import Transcripts
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.deadlines import now, within
from monarch_rl.runtime.endpoint import Endpoint

MESSAGE_BYTES = 4 * 2**20
"""Bytes of groups that travel in one call, or one group if it is larger."""
UNASKED_BYTES = 2**17
"""Bytes of a group that is put without reserving room: to send it in vain costs about as much as to ask."""
PACE_S = 0.02
"""Seconds between two puts, at least, so that groups that are complete at about the same time go together."""


class SubmitQueue:
    """Puts the groups of one worker; those that are complete at about the same time go in one call.

    A group stays here until the buffer has it. A group that waits for room holds up no other.

    Args:
        buffer: its handle.
        worker: whose outbox this is, for messages.
        room_deadline_s: seconds that a group may wait for room.
    """

    def __init__(self, buffer: BufferHandle, worker: str, room_deadline_s: float) -> None:
        self._buffer = buffer
        self._worker = worker
        self._room_deadline_s = room_deadline_s
        self._unasked: list[_Parcel] = []
        """The buffer may have room for them."""
        self._granted: list[_Parcel] = []
        """It has."""
        self._sending: asyncio.Task[None] | None = None
        self._next_at = -math.inf
        """When the next call may be made."""

    async def submit(self, group_id: int, attempt: int, data: bytes) -> None:
        """Return once the buffer has the group.

        Raises:
            DeadlineExceeded: there was no room in time; the message says what takes it.
        """
        if len(data) <= UNASKED_BYTES and await self._send(self._unasked, group_id, data):
            return
        room = self._buffer.reserve.call_one(group_id, attempt, len(data), self._worker, self._room_deadline_s)
        what = f"room in the buffer for group {group_id}"
        await within(self._room_deadline_s + BUFFER_DEADLINE_S, room, what, on="buffer")
        await self._send(self._granted, group_id, data)

    async def _send(self, parcels: list[_Parcel], group_id: int, data: bytes) -> bool:
        """Have a group put with others; returns whether the buffer has it."""
        parcel = _Parcel(group_id, data, asyncio.get_running_loop().create_future())
        parcels.append(parcel)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send_all())
        return await parcel.submitted  # waits: for _send_all of this worker, whose calls have deadlines

    async def _send_all(self) -> None:
        """Send all parcels; those that become complete meanwhile go with the next call, :data:`PACE_S` later."""
        while self._unasked or self._granted:
            await asyncio.sleep(max(0.0, self._next_at - now()))
            unasked, granted = _take(self._unasked), _take(self._granted)
            if unasked:
                await self._call(unasked, self._buffer.submit_if_room)
            if granted:
                await self._call(granted, self._buffer.submit)
            self._next_at = now() + PACE_S

    async def _call(self, parcels: list[_Parcel], endpoint: Endpoint[..., list[bool] | None]) -> None:
        what = f"the buffer to take group {', '.join(str(parcel.group_id) for parcel in parcels)}"
        try:
            call = endpoint.call_one(*(parcel.data for parcel in parcels))
            submitted = await within(BUFFER_DEADLINE_S, call, what, on="buffer") or [True] * len(parcels)
        except Exception as error:  # whichever it is of: all groups of the worker go this way, and it is lost
            for parcel in parcels:
                if not parcel.submitted.done():
                    parcel.submitted.set_exception(error)
            return
        for parcel, is_submitted in zip(parcels, submitted, strict=True):
            if not parcel.submitted.done():  # who waited for it was cancelled
                parcel.submitted.set_result(is_submitted)


@dataclass(eq=False, slots=True)
class _Parcel:
    group_id: int
    data: bytes
    submitted: asyncio.Future[bool]
    """Whether the buffer has the group."""


def _take(parcels: list[_Parcel]) -> list[_Parcel]:
    """Remove the first parcels that fit into one call, at least one if there are any."""
    size = 0
    for count, parcel in enumerate(parcels):
        size += len(parcel.data)
        if count and size > MESSAGE_BYTES:
            break
    else:
        count = len(parcels)
    taken = parcels[:count]
    del parcels[:count]
    return taken


# -- slots for a worker's groups, asked of the buffer in one call for all that wait -----------------------------------


class TicketQueue:
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


# -- a played group: through the stages into the buffer, or dropped; and what failed is shown -------------------------

INLINE_TOKENS = 8192
"""Tokens of a group that is packed on the event loop: that takes a millisecond or two, and a thread costs a part of it
and holds up the loop likewise."""


class GroupSubmitter:
    """Of one worker, by its name.

    Args:
        slot_deadline_s: seconds to wait for room in the buffer.
        transcripts: keeps what was said in the groups that are put; None keeps nothing.
    """

    def __init__(
        self,
        buffer: BufferHandle,
        worker: str,
        slot_deadline_s: float,
        stages: Sequence[Stage],
        statistics: Statistics,
        transcripts: Transcripts | None = None,
    ) -> None:
        self._buffer = buffer
        self._transcripts = transcripts
        self._queue = SubmitQueue(buffer, worker, slot_deadline_s)
        self._stages = Stages(stages, statistics.add_stage)
        self._statistics = statistics
        self._known_failures: set[tuple[str, str]] = set()
        """Kinds of failures of which the buffer has the first."""

    @property
    def places(self) -> int:
        """Groups that may be in stages at a time."""
        return self._stages.places

    async def submit(self, ticket: Ticket, item: Any, group: Group) -> None:
        """Put a group that passes the stages; drop one that a stage leaves out or fails at."""
        try:
            await self._stages.run(item, group)
        except StageFailed as failed:
            if failed.failure is not None:
                await self.note(failed.failure)
            await self.drop(ticket, failed.reason, sum(episode.num_trainable for episode in group.episodes))
            return
        small = sum(episode.num_tokens for episode in group.episodes) <= INLINE_TOKENS
        data = pack_group(group) if small else await asyncio.to_thread(pack_group, group)
        if self._transcripts is not None:
            self._transcripts.add(group)
        await self._queue.submit(group.group_id, group.attempt, data)
        self._statistics.add_put()
        wait_registry.progress("group put")

    async def drop(self, ticket: Ticket, reason: str, tokens: int) -> None:
        """Drop a group for which ``tokens`` were drawn."""
        drop = self._buffer.drop.call_one(ticket.group_id, reason, tokens, ticket.attempt)
        await within(BUFFER_DEADLINE_S, drop, f"the buffer to drop group {ticket.group_id}", on="buffer")
        self._statistics.add_dropped()  # it is no progress: a run that only drops groups does not go on

    async def reported(self, failed: EpisodeFailed) -> EpisodeFailed:
        """The same, once it is sure that the first failure of its kind is shown."""
        await self.note(failed.failure)
        return failed

    async def note(self, failure: Failure) -> None:
        """Have the first failure of its kind shown."""
        if failure.kind not in self._known_failures and len(self._known_failures) < KINDS:
            self._known_failures.add(failure.kind)
            noted = self._buffer.note_failure.call_one(failure)
            await within(BUFFER_DEADLINE_S, noted, "the buffer to take note of a failure", on="buffer")
