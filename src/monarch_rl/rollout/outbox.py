"""Complete groups on their way from a worker to the buffer: room first, then each group once."""

from __future__ import annotations

import asyncio

from monarch_rl.rollout.handles import BUFFER_DEADLINE_S, BufferHandle
from monarch_rl.runtime.deadlines import within

MESSAGE_BYTES = 4 * 2**20
"""Bytes of groups that travel in one call, or one group if it is larger. Calls cost about as much as 100 KiB."""


class Outbox:
    """Puts the groups of one worker; those that are complete at the same time go in one call.

    A group stays here until the buffer has room for it. A group that waits for room holds up no other.

    Args:
        buffer: its handle.
        worker: whose outbox this is, for messages.
        room_deadline_s: seconds that a group may wait for room.
    """

    def __init__(self, buffer: BufferHandle, worker: str, room_deadline_s: float) -> None:
        self._buffer = buffer
        self._worker = worker
        self._room_deadline_s = room_deadline_s
        self._new: list[_Parcel] = []
        """The buffer has not been asked for room yet."""
        self._granted: list[_Parcel] = []
        """The buffer has room for them."""
        self._sending: asyncio.Task[None] | None = None

    async def put(self, group_id: int, attempt: int, data: bytes) -> None:
        """Return once the buffer has the group.

        Raises:
            DeadlineExceeded: there was no room in time; the message says what takes it.
        """
        parcel = _Parcel(group_id, attempt, data, asyncio.get_running_loop().create_future())
        self._new.append(parcel)
        self._wake()
        if await parcel.step:  # waits: for _send of this worker, whose calls have deadlines
            return
        parcel.step = asyncio.get_running_loop().create_future()
        room = self._buffer.reserve.call_one(group_id, attempt, len(data), self._worker, self._room_deadline_s)
        what = f"room in the buffer for group {group_id}"
        await within(self._room_deadline_s + BUFFER_DEADLINE_S, room, what, on="buffer")
        self._granted.append(parcel)
        self._wake()
        await parcel.step  # waits: as above

    def _wake(self) -> None:
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send())

    async def _send(self) -> None:
        """Send all parcels; those that become complete meanwhile go with the next call."""
        while self._new or self._granted:
            new, self._new = self._new, []
            try:
                await self._offer(new)
                granted, self._granted = _fill(self._granted)
                if granted:
                    await self._put(granted)
            except Exception as error:
                # An error fails all parcels, whichever it is of: all groups of the worker go this way, and it is lost.
                for parcel in [*new, *self._new, *self._granted]:
                    parcel.settle(error)
                self._new, self._granted = [], []

    async def _offer(self, new: list[_Parcel]) -> None:
        if not new:
            return
        sizes = [(parcel.group_id, parcel.attempt, len(parcel.data)) for parcel in new]
        call = self._buffer.offer.call_one(sizes)
        answers = await within(BUFFER_DEADLINE_S, call, "the buffer to say whether it has room", on="buffer")
        for parcel, has_room in zip(new, answers, strict=True):
            if has_room:
                self._granted.append(parcel)
            else:
                parcel.settle(False)

    async def _put(self, parcels: list[_Parcel]) -> None:
        names = ", ".join(str(parcel.group_id) for parcel in parcels)
        call = self._buffer.put.call_one(*(parcel.data for parcel in parcels))
        try:
            await within(BUFFER_DEADLINE_S, call, f"the buffer to take group {names}", on="buffer")
        except Exception as error:
            for parcel in parcels:
                parcel.settle(error)
            return
        for parcel in parcels:
            parcel.settle(True)


class _Parcel:
    def __init__(self, group_id: int, attempt: int, data: bytes, step: asyncio.Future[bool]) -> None:
        self.group_id = group_id
        self.attempt = attempt
        self.data = data
        self.step = step
        """True when the buffer has the group, False when it has no room."""

    def settle(self, outcome: bool | Exception) -> None:
        if self.step.done():  # who waited for it was cancelled
            return
        if isinstance(outcome, Exception):
            self.step.set_exception(outcome)
        else:
            self.step.set_result(outcome)


def _fill(parcels: list[_Parcel]) -> tuple[list[_Parcel], list[_Parcel]]:
    """The first parcels that fit into one call, at least one, and the rest."""
    size = 0
    for i, parcel in enumerate(parcels):
        size += len(parcel.data)
        if i and size > MESSAGE_BYTES:
            return parcels[:i], parcels[i:]
    return parcels, []
