"""The buffer as a Monarch actor: :mod:`monarch_rl.buffer.core` plus waiting, leases and the cut into shards.

Rollout workers ``admit`` groups and ``put_if_room`` small ones; for others they ``reserve`` room and then ``put`` them.
They ``drop`` groups that cannot be trained, and say why (``note_failure``); the pipeline asks for that (``failures``).
Trainer ranks ``take`` batches. The pipeline reports ``trained`` and ``published``, lets others play the groups of
a lost worker again (``release``), and ends with ``close``. All endpoints are concurrent: one that waits never blocks
another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from monarch_rl.algorithms.packing import SharingGroup, plan_microbatches
from monarch_rl.buffer.core import Batch, BufferCore
from monarch_rl.buffer.failures import FailureReports
from monarch_rl.buffer.ledger import Counts
from monarch_rl.buffer.report import Lease, report, waits
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.buffer.waiting import Interruptions, Line
from monarch_rl.episode.packed import PackedGroup, PackedShard
from monarch_rl.episode.ticket import Ticket
from monarch_rl.runtime import presence
from monarch_rl.runtime.deadlines import DeadlineExceeded, now
from monarch_rl.runtime.endpoint import concurrent_endpoint, lasting_endpoint
from monarch_rl.runtime.heap import freeze_heap

SLOT_DEADLINE = "rollout.slot-deadline-s"


class BufferClosed(RuntimeError):
    """The run ended before the batch was complete."""


class Buffer(FailureReports):
    """The one buffer of a run.

    Args:
        groups_per_step: groups of one optimiser step.
        settings: see there.
        version: optimiser steps done, and served, at the start.
        task_cursor: where in the stream of tasks to start.
    """

    def __init__(self, groups_per_step: int, settings: BufferSettings, version: int = 0, task_cursor: int = 0) -> None:
        super().__init__(groups_per_step, lambda: self._core.first_playing)
        self._core = BufferCore(groups_per_step, settings, version, task_cursor)
        self._leases: dict[int, Lease] = {}
        self._plan: tuple[tuple[int, int, int], list[PackedShard]] | None = None
        self._slots, self._room, self._batches = Line(alike=True), Line(), Line()
        self._lost: Counter[str] = Counter()
        """How often a worker of this name was lost."""
        self._held_back = Interruptions()
        """Of batches, for a slow group; counted while a rank waits for a batch."""
        presence.register("buffer", lambda: waits(self._core, self._leases.copy()))

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

    @lasting_endpoint
    async def put(self, *groups: bytes) -> None:
        """Hand in complete groups, each packed (``pack_group``).

        Raises:
            ValueError: a group is not being played, or does not fit and had no room reserved.
        """
        self._put([PackedGroup.read(data) for data in groups])

    @lasting_endpoint
    async def put_if_room(self, *groups: bytes) -> list[bool]:
        """:meth:`put` for those groups that there is room for; says of each whether it was."""
        read = [PackedGroup.read(data) for data in groups]
        has_room = [self._core.reserve(group.group_id, group.nbytes, group.attempt) for group in read]
        self._put([group for group, fits in zip(read, has_room, strict=True) if fits])
        return has_room

    def _put(self, groups: list[PackedGroup]) -> None:
        for group in groups:
            self._core.put(group)
            self._end_lease(group.group_id, group.attempt)
            self._failures.note_put()
        self._serve()

    @lasting_endpoint
    async def drop(self, group_id: int, reason: str, tokens: int = 0, attempt: int = 0) -> None:
        """Drop a group for which ``tokens`` were drawn. Raises ValueError if it is not here."""
        if self._core.drop(group_id, reason, tokens, attempt):
            self.note_dropped(group_id, reason, self._core.groups.admitted)
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
    async def take(self, version: int, dp_rank: int, dp_size: int, token_budget: int, timeout_s: float) -> PackedShard:
        """Wait for the batch that updates ``version`` and get one rank's share of it.

        All ranks must ask with the same ``version``, ``dp_size`` and ``token_budget``; asking again is harmless.

        Args:
            version: the version being updated.
            dp_rank, dp_size: which share, of how many.
            token_budget: tokens of one micro-batch.
            timeout_s: seconds to wait for the batch.

        Raises:
            DeadlineExceeded: the batch was not complete in time; names the missing groups, who holds them, since when.
            BufferClosed: the run has ended.
            ValueError: another version is being updated, or the ranks do not agree, or an episode exceeds the budget.
        """
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank {dp_rank} is not within dp_size {dp_size}")
        batch: Batch | None = None

        def served() -> bool:
            nonlocal batch
            batch = self._core.take(version)
            self._held_back.note(self._core.held_back)
            return batch is not None or self._core.closed

        what = f"the batch that updates version {version}"
        await self._wait(self._batches, served, timeout_s, f"trainer rank {dp_rank}", what, "update-deadline-s")
        self._room.serve()  # other groups are due next now, and these always have room
        if batch is None:
            raise BufferClosed(f"no batch for version {version}: the run has ended")
        return self._shards(batch, version, dp_size, token_budget)[dp_rank]

    @lasting_endpoint
    async def trained(self, version: int) -> None:
        """The optimiser step that made ``version`` is done on every rank."""
        self._core.trained(version)
        self._plan = None
        self._serve()

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

    def _shards(self, batch: Batch, version: int, dp_size: int, token_budget: int) -> list[PackedShard]:
        key = (version, dp_size, token_budget)
        if self._plan is None:
            self._plan = key, cut(batch, dp_size, token_budget)
        elif self._plan[0] != key:
            raise ValueError(
                f"trainer ranks disagree on (version, dp_size, token_budget): {self._plan[0]} before, {key} now"
            )
        return self._plan[1]

    def _report(self) -> str:
        return report(self._core, self._leases)


def cut(batch: Batch, dp_size: int, token_budget: int) -> list[PackedShard]:
    """One shard a rank, all with the same number of micro-batches, balanced: see :func:`plan_microbatches`."""
    groups = [SharingGroup([one.tokens for one in group.episodes], *group.tree) for group in batch.groups]
    plan = plan_microbatches(groups, token_budget, dp_size)

    def data(place: tuple[int, int]) -> bytes | memoryview:
        group, episode = place
        return batch.groups[group].episodes[episode].data

    return [
        PackedShard(
            version=batch.version,
            rewards=[group.rewards for group in batch.groups],
            places=[[(*place, len(data(place))) for place in microbatch] for microbatch in microbatches],
            data=b"".join(data(place) for microbatch in microbatches for place in microbatch),
            trainable_tokens=int(batch.lag_counts.sum()),
            lag_counts=batch.lag_counts,
            oldest=batch.oldest,
            lengths=[group.lengths for group in batch.groups],
            cut=[group.cut for group in batch.groups],
            tasks=[group.task for group in batch.groups],
            parts=[[episode.parts for episode in group.episodes] for group in batch.groups],
        )
        for microbatches in plan
    ]
