"""The buffer as a Monarch actor: :mod:`monarch_rl.buffer.core` plus waiting, leases and the cut into shards.

Rollout workers ``admit`` groups and ``submit_if_room`` small ones; for others they ``reserve`` room and then
``submit`` them. They ``drop`` groups that cannot be trained, and say why (``note_failure``); the pipeline asks for
that (``failures``). Trainer ranks ``take`` batches. The pipeline reports ``trained`` and ``published``, lets others
run the groups of a lost worker again (``release``), and ends with ``close``. All endpoints are concurrent: one that
waits never blocks another.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from monarch_rl.buffer.core import BufferCore
from monarch_rl.buffer.failures import FailureReports
from monarch_rl.buffer.groups import Batch
from monarch_rl.buffer.ledger import Counts
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.buffer.shards import CutBatch, ShardPlan
from monarch_rl.buffer.waiting import Interruptions, Line
from monarch_rl.episode.episode import Ticket
from monarch_rl.episode.group_bound import UNBOUNDED, GroupBound
from monarch_rl.episode.serialization import PackedGroup
from monarch_rl.episode.shard import PackedShard
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.deadlines import DeadlineExceeded, now
from monarch_rl.runtime.endpoint import concurrent_endpoint, lasting_endpoint
from monarch_rl.runtime.process import freeze_heap
from monarch_rl.runtime.wait_registry import Wait

SLOT_DEADLINE = "rollout.slot-deadline-s"


@dataclass(frozen=True, slots=True)
class SavedBuffer:
    """What a resumed run's buffer goes on from."""

    path: Path
    """Of :func:`write_state`."""
    generation: int
    """How often the run was resumed."""


class BufferClosed(RuntimeError):
    """The run ended before the batch was complete."""


class Buffer(FailureReports):
    """The one buffer of a run.

    Args:
        groups_per_step: groups of a batch.
        settings: see there.
        version: batches trained, and served, at the start.
        task_cursor: where in the stream of tasks to start.
        resumed: what to go on from instead.
        bound: what each group may hold.
    """

    def __init__(
        self,
        groups_per_step: int,
        settings: BufferSettings,
        version: int = 0,
        task_cursor: int = 0,
        resumed: SavedBuffer | None = None,
        bound: GroupBound = UNBOUNDED,
    ) -> None:
        super().__init__(groups_per_step, lambda: self._core.first_playing)
        self._core = BufferCore(groups_per_step, settings, version, task_cursor, bound)
        if resumed is not None:
            state = read_state(resumed.path)
            self._core = BufferCore.restore(groups_per_step, settings, state, resumed.generation, bound)
            self._failures.note_put()  # it has worked before
        self._staged: dict[str, Any] | None = None
        """What is written next."""
        self._leases: dict[int, Lease] = {}
        self._cut = CutBatch()
        self._held = False
        """No more batches are given out."""
        self._slots, self._room, self._batches = Line(alike=True), Line(), Line()
        self._lost: Counter[str] = Counter()
        """How often a worker of this name was lost."""
        self._held_back = Interruptions()
        """Of batches, for a slow group; counted while a rank waits for a batch."""
        wait_registry.register("buffer", lambda: waits(self._core, self._leases.copy()))

    @concurrent_endpoint
    async def setup(self) -> None:
        """Get ready for a long run; everything works without."""
        freeze_heap()

    @lasting_endpoint
    async def admit(self, worker: str, timeout_s: float) -> Ticket | None:
        """Wait for a slot and start a group in it; None when the run has ended, or the worker was reported as lost.

        The deadline is kept here and not by the caller: a caller that no longer listens would still be given a slot.

        Raises:
            DeadlineExceeded: no slot within ``timeout_s`` seconds; says what holds them.
        """
        tickets = await self._admit(worker, 1, timeout_s)
        return tickets[0] if tickets else None

    @lasting_endpoint
    async def admit_many(self, worker: str, max_groups: int, timeout_s: float) -> list[Ticket]:
        """:meth:`admit` for up to ``max_groups`` groups: waits for one slot and takes those free; none at the end."""
        return await self._admit(worker, max_groups, timeout_s)

    async def _admit(self, worker: str, max_groups: int, timeout_s: float) -> list[Ticket]:
        tickets: list[Ticket] = []
        losses = self._lost[worker]

        def served() -> bool:
            if self._lost[worker] != losses:
                return True
            while len(tickets) < max_groups and (ticket := self._core.admit()) is not None:
                tickets.append(ticket)
                self._leases[ticket.group_id] = Lease(worker, now(), ticket.attempt)
            return bool(tickets) or self._core.closed

        await self._wait(self._slots, served, timeout_s, worker, "a free slot of the buffer", SLOT_DEADLINE)
        return tickets

    @lasting_endpoint
    async def reserve(self, group_id: int, attempt: int, nbytes: int, worker: str, timeout_s: float) -> None:
        """Wait until a complete group of ``nbytes`` may be put.

        Raises:
            DeadlineExceeded: no room within ``timeout_s`` seconds; says what takes it.
        """

        def served() -> bool:
            return self._core.reserve(group_id, nbytes, attempt)

        what = f"room for the {nbytes} bytes of group {group_id}"
        await self._wait(self._room, served, timeout_s, worker, what, SLOT_DEADLINE)
        self._slots.serve()  # a group that was let go to make room may have given its slot back

    @lasting_endpoint
    async def submit(self, *groups: bytes) -> None:
        """Hand in complete groups, each packed (``pack_group``).

        Raises:
            ValueError: a group is not being played, or does not fit and had no room reserved.
        """
        self._put([PackedGroup.read(data) for data in groups])

    @lasting_endpoint
    async def submit_if_room(self, *groups: bytes) -> list[bool]:
        """:meth:`submit` for those groups that there is room for; says of each whether it was."""
        read = [PackedGroup.read(data) for data in groups]
        has_room = [self._core.reserve(group.group_id, group.nbytes, group.attempt) for group in read]
        self._put([group for group, fits in zip(read, has_room, strict=True) if fits])
        return has_room

    def _put(self, groups: list[PackedGroup]) -> None:
        for group in groups:
            self._core.submit(group)
            self._end_lease(group.group_id, group.attempt)
            self._failures.note_put()
        self._serve()

    @lasting_endpoint
    async def drop(self, group_id: int, reason: str, tokens: int = 0, attempt: int = 0) -> None:
        """Drop a group for which ``tokens`` were drawn. Raises ValueError if it is not here."""
        if self._core.drop(group_id, reason, tokens, attempt):
            self.note_dropped(group_id, reason, self._core.groups.next_id)
        self._end_lease(group_id, attempt)
        self._serve()

    @lasting_endpoint
    async def release(self, worker: str) -> list[int]:
        """A worker is lost: other workers start its groups again, in the same slots and places.

        If it still puts them, that is ignored; its calls that wait for a slot get none. Another worker may have its
        name from now on. Returns the groups' ids.
        """
        self._lost[worker] += 1
        held = [group_id for group_id, lease in self._leases.items() if lease.worker == worker]
        for group_id in held:
            del self._leases[group_id]
        released = self._core.release(held)
        self._slots.serve(everybody=True)
        self._serve()
        return released

    @lasting_endpoint
    async def take(
        self,
        version: int,
        dp_rank: int,
        dp_size: int,
        token_budget: int,
        timeout_s: float,
        columns: tuple[str, ...] = (),
        minibatches: int = 1,
    ) -> PackedShard:
        """Wait for the batch that updates ``version`` and get one rank's share of it.

        All ranks must ask for the same, but for their ``dp_rank``; asking again is harmless.

        Args:
            version: the version being updated.
            dp_rank, dp_size: which share, of how many; token_budget: tokens of one micro-batch.
            timeout_s: seconds to wait for the batch.
            columns, minibatches: see :class:`monarch_rl.buffer.shards.ShardPlan`.

        Raises:
            DeadlineExceeded: the batch was not complete in time; names the missing groups, who holds them, since when.
            BufferClosed: the run has ended.
            ValueError: another version is being updated, ranks do not agree, an episode exceeds the budget, or groups
                lack a column.
        """
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank {dp_rank} is not within dp_size {dp_size}")
        batch: Batch | None = None

        def served() -> bool:
            nonlocal batch
            if not self._held or self._core.taken:  # ranks that ask late for the batch under way get it
                batch = self._core.take(version)
            self._held_back.note(self._core.held_back)
            return batch is not None or self._core.closed

        what = f"the batch that updates version {version}"
        await self._wait(self._batches, served, timeout_s, f"trainer rank {dp_rank}", what, "update-deadline-s")
        self._room.serve()  # other groups are due next now, and these always have room
        if batch is None:
            raise BufferClosed(f"no batch for version {version}: the run has ended")
        return self._cut.shards(batch, ShardPlan(dp_size, token_budget, columns, minibatches))[dp_rank]

    @lasting_endpoint
    async def hold(self) -> int:
        """Give out no more batches: the run ends. Groups stay here. Returns the version that there is once the batch
        that was given out last, if one is being trained, is."""
        self._held = True
        return self._core.version + (1 if self._core.taken else 0)

    @lasting_endpoint
    async def trained(self, version: int) -> None:
        """The batch that made ``version`` is trained on every rank."""
        self._core.trained(version)
        self._cut.forget()
        self._serve()

    @lasting_endpoint
    async def begin_at(self, version: int) -> None:
        """The trainer has made ``version`` without any group: see :meth:`BufferCore.begin_at`."""
        self._core.begin_at(version)

    @lasting_endpoint
    async def note_replayed(self, version: int, group_ids: list[int], lag_counts: np.ndarray) -> Counts:
        """The trainer of a resumed run has made ``version`` again: see :meth:`BufferCore.note_replayed`."""
        self._core.note_replayed(version, group_ids, lag_counts)
        return self._counts()

    @lasting_endpoint
    async def published(self, version: int) -> None:
        """Every generator serves ``version``."""
        self._core.published(version)
        self._serve()

    @lasting_endpoint
    async def counts(self) -> Counts:
        return self._counts()

    @lasting_endpoint
    async def report(self) -> str:
        """One line on the slots, the drops and who holds which group since when."""
        return self._report()

    @lasting_endpoint
    async def stage(self) -> int:
        """Remember what is here for :meth:`write_checkpoint`; returns the version that it belongs to."""
        self._staged = self._core.state()
        return self._core.version

    @lasting_endpoint
    async def write_checkpoint(self, path: str) -> None:
        """Write what was staged last, while the run goes on. Raises OSError."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise RuntimeError("stage() must come first")
        await asyncio.to_thread(write_state, Path(path), staged)

    @lasting_endpoint
    async def close(self) -> Counts:
        """End the run: waiting workers get None, waiting trainer ranks BufferClosed. Returns the last counts."""
        self._core.close()
        self._leases.clear()
        self._slots.serve(everybody=True)
        self._serve()
        return self._counts()

    def _counts(self) -> Counts:
        return replace(self._core.counts(), order_waits=self._held_back.count, order_wait_s=self._held_back.seconds)

    def _end_lease(self, group_id: int, attempt: int) -> None:
        lease = self._leases.get(group_id)
        if lease is not None and lease.attempt == attempt:
            del self._leases[group_id]

    def _serve(self) -> None:
        """The state has changed: let callers go on that can."""
        self._batches.serve()
        self._slots.serve()
        self._room.serve()

    async def _wait(
        self, line: Line, served: Callable[[], bool], timeout_s: float, who: str, what: str, flag: str
    ) -> None:
        """Wait in ``line``; at the deadline, which ``flag`` sets, say what was waited for and what is here."""
        if not await line.wait(served, timeout_s, what):  # waits: timeout_s, stretched where there are no cores
            message = f"{who} waited {timeout_s:g} s for {what} (see --{flag}); {self._report()}"
            raise DeadlineExceeded(message, what, timeout_s)

    def _report(self) -> str:
        return report(self._core, self._leases)


# -- status: who holds which group since when, and what the next batch misses -----------------------------------------


@dataclass(frozen=True, slots=True)
class Lease:
    """Who plays a group, and since when (:func:`now`, seconds)."""

    worker: str
    since: float
    attempt: int = 0


def report(core: BufferCore, leases: Mapping[int, Lease]) -> str:
    """One line on the slots, the drops and who holds which group since when."""
    counts, moment = core.counts(), now()
    holders = [
        f"group {group_id} by {lease.worker} for {moment - lease.since:.1f} s" for group_id, lease in leases.items()
    ]
    missing = core.missing()
    playing = [str(group_id) for group_id in missing if group_id is not None]
    unadmitted = len(missing) - len(playing)
    next_batch = f"groups {', '.join(playing)}" if playing else "no admitted group"
    if unadmitted:
        next_batch += f" and {unadmitted} that no worker has asked for"
    return (
        f"policy version {counts.version}, published {counts.published}; slots: "
        f"{'any number' if counts.slots is None else f'{counts.slots_free} free of {counts.slots}'}, "
        f"{counts.playing} playing, {counts.complete} complete, {counts.taken} in training, "
        f"{f'{counts.again} trained and kept for another time, ' if counts.again else ''}"
        f"{counts.unpublished} trained and not published; the next batch misses "
        f"{next_batch if missing else 'nothing'}; {counts.nbytes / 2**20:.1f} MiB; "
        f"held: {'; '.join(holders) or 'none'}; "
        f"dropped so far: {counts.dropped or 'none'}"
    )


def waits(core: BufferCore, leases: Mapping[int, Lease]) -> list[Wait]:
    """What the next batch lacks, as waits: groups on who plays them, new ones on workers and on what frees slots.

    Called on another thread: it only reads what is right at every moment.
    """
    missing = core.missing()
    here = f"{core.groups_per_step - len(missing)} of {core.groups_per_step} groups of the batch are in"
    owed = []
    for group_id in missing:
        lease = leases.get(group_id) if group_id is not None else None
        if lease is not None:
            what = f"group {group_id}, held by {lease.worker} ({here})"
            owed.append(Wait("buffer", what, lease.worker, lease.since, math.inf))
    if None in missing:
        moment = time.monotonic()  # on another thread than the event loop's
        owed.append(Wait("buffer", f"workers to start groups ({here})", "rollout workers", moment, math.inf))
        if core.version > core.published_version:
            what = f"version {core.version} to be served, which frees slots ({here})"
            owed.append(Wait("buffer", what, "controller", moment, math.inf))
    return owed


# -- the buffer's part of a checkpoint: one file with complete groups as bytes, and the core's state ------------------
#     4 bytes "BUF3", 8 bytes length of the header, the header (JSON), then the groups one after the other
#
# The header is :meth:`BufferCore.state` with the number of bytes in place of each complete group.

FORMAT = b"BUF3"
"""The last character is the version of the format."""
_LENGTH = struct.Struct("<Q")


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write what :meth:`BufferCore.state` gave, and have the disk hold it. Raises OSError."""
    groups = [group for *_, group in state["live"] if group is not None]
    live = [(*place, None if group is None else len(group)) for *place, group in state["live"]]
    header = json.dumps(state | {"live": live}, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(FORMAT + _LENGTH.pack(len(header)) + header)
        for group in groups:
            file.write(group)
        file.flush()
        os.fsync(file.fileno())


def read_state(path: Path) -> dict[str, Any]:
    """The inverse of :func:`write_state`. Raises OSError, and ValueError for another format or missing bytes."""
    with path.open("rb") as file:
        start = file.read(len(FORMAT) + _LENGTH.size)
        if start[: len(FORMAT)] != FORMAT:
            raise ValueError(f"{path} cannot be read: its format is {start[: len(FORMAT)]!r}, not {FORMAT!r}")
        state: dict[str, Any] = json.loads(file.read(_LENGTH.unpack(start[len(FORMAT) :])[0]))
        state["live"] = [(*place, None if nbytes is None else file.read(nbytes)) for *place, nbytes in state["live"]]
    state["attempts"] = {int(group_id): attempt for group_id, attempt in state["attempts"].items()}
    return state
