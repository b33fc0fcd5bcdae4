"""Complete groups on their way from a worker to the buffer: room first, then each group once."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from monarch_rl.rollout.handles import BUFFER_DEADLINE_S, BufferHandle
from monarch_rl.runtime.deadlines import now, within
from monarch_rl.runtime.endpoint import Endpoint

MESSAGE_BYTES = 4 * 2**20
"""Bytes of groups that travel in one call, or one group if it is larger."""
UNASKED_BYTES = 2**17
"""Bytes of a group that is put without reserving room: to send it in vain costs about as much as to ask."""
PACE_S = 0.02
"""Seconds between two puts, at least, so that groups that are complete at about the same time go together."""


class Outbox:
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

    async def put(self, group_id: int, attempt: int, data: bytes) -> None:
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
        return await parcel.put  # waits: for _send_all of this worker, whose calls have deadlines

    async def _send_all(self) -> None:
        """Send all parcels; those that become complete meanwhile go with the next call, :data:`PACE_S` later."""
        while self._unasked or self._granted:
            await asyncio.sleep(max(0.0, self._next_at - now()))
            unasked, granted = _take(self._unasked), _take(self._granted)
            if unasked:
                await self._call(unasked, self._buffer.put_if_room)
            if granted:
                await self._call(granted, self._buffer.put)
            self._next_at = now() + PACE_S

    async def _call(self, parcels: list[_Parcel], endpoint: Endpoint[..., list[bool] | None]) -> None:
        what = f"the buffer to take group {', '.join(str(parcel.group_id) for parcel in parcels)}"
        try:
            call = endpoint.call_one(*(parcel.data for parcel in parcels))
            put = await within(BUFFER_DEADLINE_S, call, what, on="buffer") or [True] * len(parcels)
        except Exception as error:  # whichever it is of: all groups of the worker go this way, and it is lost
            for parcel in parcels:
                if not parcel.put.done():
                    parcel.put.set_exception(error)
            return
        for parcel, is_put in zip(parcels, put, strict=True):
            if not parcel.put.done():  # who waited for it was cancelled
                parcel.put.set_result(is_put)


@dataclass(eq=False, slots=True)
class _Parcel:
    group_id: int
    data: bytes
    put: asyncio.Future[bool]
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
