"""Groups between worker and buffer: tickets for slots, stages, space in the buffer, and submission."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monarch_rl.episode.episode import Group, Ticket
from monarch_rl.episode.failure import KINDS, Failure
from monarch_rl.episode.serialization import serialize_group
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.handles import BUFFER_DEADLINE_S, BufferHandle
from monarch_rl.rollout.record import EpisodeRecord
from monarch_rl.rollout.stages import Stage, StageFailed, Stages
from monarch_rl.rollout.statistics import Statistics
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.deadlines import now, within
from monarch_rl.runtime.endpoint import Endpoint

MESSAGE_BYTES = 4 * 2**20
"""Maximum bytes of groups in one call; a larger group is sent in a call of its own."""
UNASKED_BYTES = 2**17
"""Maximum bytes of a group that is submitted without reserving space: a rejected submission costs about as much as a
reservation."""
PACE_S = 0.02
"""Minimum seconds between two calls, so that groups that are completed at about the same time are sent together."""


class SubmitQueue:
    """Submits the groups of one worker; groups that are completed at about the same time are sent in one call.

    A group stays here until the buffer has accepted it. A group that waits for space does not delay others.

    Args:
        buffer: handle of the buffer.
        worker: name of the worker, for messages.
        room_deadline_s: seconds that a group may wait for space.
    """

    def __init__(self, buffer: BufferHandle, worker: str, room_deadline_s: float) -> None:
        self._buffer = buffer
        self._worker = worker
        self._room_deadline_s = room_deadline_s
        self._unasked: list[_Parcel] = []
        """Groups to submit without a reservation."""
        self._granted: list[_Parcel] = []
        """Groups whose space in the buffer is reserved."""
        self._sending: asyncio.Task[None] | None = None
        self._next_at = -math.inf
        """Time at which the next call may be made."""

    async def submit(self, group_id: int, attempt: int, data: bytes) -> None:
        """Return once the buffer has accepted the group.

        Raises:
            DeadlineExceeded: there was no space in time; the message says what occupies the buffer.
        """
        if len(data) <= UNASKED_BYTES and await self._send(self._unasked, group_id, data):
            return
        room = self._buffer.reserve.call_one(group_id, attempt, len(data), self._worker, self._room_deadline_s)
        what = f"room in the buffer for group {group_id}"
        await within(self._room_deadline_s + BUFFER_DEADLINE_S, room, what, on="buffer")
        await self._send(self._granted, group_id, data)

    async def _send(self, parcels: list[_Parcel], group_id: int, data: bytes) -> bool:
        """Send a group together with others; returns whether the buffer accepted it."""
        parcel = _Parcel(group_id, data, asyncio.get_running_loop().create_future())
        parcels.append(parcel)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send_all())
        return await parcel.submitted  # waits: for _send_all of this worker, whose calls have deadlines

    async def _send_all(self) -> None:
        """Send all parcels; parcels that are added meanwhile are sent with the next call, :data:`PACE_S` later."""
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
        except Exception as error:  # all parcels fail, whichever caused it: the worker cannot submit, and is lost
            for parcel in parcels:
                if not parcel.submitted.done():
                    parcel.submitted.set_exception(error)
            return
        for parcel, is_submitted in zip(parcels, submitted, strict=True):
            if not parcel.submitted.done():  # else its waiter was cancelled
                parcel.submitted.set_result(is_submitted)


@dataclass(eq=False, slots=True)
class _Parcel:
    group_id: int
    data: bytes
    submitted: asyncio.Future[bool]
    """Whether the buffer accepted the group."""


def _take(parcels: list[_Parcel]) -> list[_Parcel]:
    """Remove and return the first parcels that fit into one call, at least one if there are any."""
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


# -- tickets: slots for a worker's groups, requested in one call for all that wait ------------------------------------


class TicketQueue:
    """Requests tickets from the buffer and hands them out in the order in which they were requested.

    Args:
        buffer: handle of the buffer.
        worker: name of the worker, for messages.
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
        """Request as many tickets as are waited for, until nobody waits; the buffer answers as soon as it has one."""
        while self._waiting:
            deadline = self._slot_deadline_s
            try:
                call = self._buffer.admit_many.call_one(self._worker, len(self._waiting), deadline)
                granted = await within(
                    deadline + BUFFER_DEADLINE_S,
                    call,
                    "a slot from the buffer",
                    on="buffer",
                    flag="patience",
                )
            except Exception as error:
                failed, self._waiting = self._waiting, []
                for answer in failed:
                    if not answer.done():
                        answer.set_exception(error)
                return
            # No ticket means the end of the run, also for callers that joined the queue during the call.
            tickets: list[Ticket | None] = [*granted] or [None] * len(self._waiting)
            served, self._waiting = self._waiting[: len(tickets)], self._waiting[len(tickets) :]
            for answer, ticket in zip(served, tickets, strict=True):
                if not answer.done():
                    answer.set_result(ticket)


# -- completed groups: stages and submission, or dropping; and reports of failures ------------------------------------

INLINE_TOKENS = 8192
"""Maximum tokens of a group that is serialized on the event loop. It takes a millisecond or two; a thread costs part
of that and also delays the loop."""


class GroupSubmitter:
    """Submits or drops the completed groups of one worker.

    Args:
        worker: name of the worker.
        slot_deadline_s: seconds to wait for space in the buffer.
        record: records the episodes of groups that are submitted, or dropped by a stage; None records none.
    """

    def __init__(
        self,
        buffer: BufferHandle,
        worker: str,
        slot_deadline_s: float,
        stages: Sequence[Stage],
        statistics: Statistics,
        record: EpisodeRecord | None = None,
    ) -> None:
        self._buffer = buffer
        self._record = record
        self._queue = SubmitQueue(buffer, worker, slot_deadline_s)
        self._stages = Stages(stages, statistics.add_stage)
        self._statistics = statistics
        self._known_failures: set[tuple[str, str]] = set()
        """Kinds of failures that the buffer has been told about."""

    @property
    def max_groups_in_stages(self) -> int:
        """Maximum number of groups in stages at a time."""
        return self._stages.max_groups

    async def submit(self, ticket: Ticket, item: Any, group: Group) -> None:
        """Run the stages, then submit the group; drop it if a stage drops it or fails."""
        try:
            await self._stages.run(item, group)
        except StageFailed as failed:
            if failed.failure is not None:
                await self.note(failed.failure)
            if self._record is not None:
                await self._record.add_group(group, item, failed.reason)
            await self.drop(ticket, failed.reason, sum(episode.num_trainable for episode in group.episodes))
            return
        small = sum(episode.num_tokens for episode in group.episodes) <= INLINE_TOKENS
        data = serialize_group(group) if small else await asyncio.to_thread(serialize_group, group)
        if self._record is not None:
            await self._record.add_group(group, item)
        await self._queue.submit(group.group_id, group.attempt, data)
        self._statistics.add_submitted()
        wait_registry.progress("group submitted")

    async def drop(self, ticket: Ticket, reason: str, tokens: int) -> None:
        """Drop a group for which ``tokens`` were sampled."""
        drop = self._buffer.drop.call_one(ticket.group_id, reason, tokens, ticket.attempt)
        await within(BUFFER_DEADLINE_S, drop, f"the buffer to drop group {ticket.group_id}", on="buffer")
        self._statistics.add_dropped()  # not recorded as progress: a run that only drops groups does not advance

    async def reported(self, failed: EpisodeFailed) -> EpisodeFailed:
        """``failed``, once the first failure of its kind has been reported."""
        await self.note(failed.failure)
        return failed

    async def note(self, failure: Failure) -> None:
        """Report the first failure of its kind to the buffer."""
        if failure.kind not in self._known_failures and len(self._known_failures) < KINDS:
            self._known_failures.add(failure.kind)
            noted = self._buffer.note_failure.call_one(failure)
            await within(BUFFER_DEADLINE_S, noted, "the buffer to take note of a failure", on="buffer")
