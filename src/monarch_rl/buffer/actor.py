"""The buffer as a Monarch actor: :mod:`monarch_rl.buffer.core` plus waiting, leases and splitting into shards.

Rollout workers ``admit`` groups and submit small ones by ``submit_if_room``; for larger ones they ``reserve`` memory
first and then ``submit``. They ``drop`` groups that cannot be trained, and report why (``note_failure``); the pipeline
waits for these reports (``failures``). Trainer ranks ``take`` batches. The pipeline reports ``trained`` and
``published``, makes the groups of a lost worker available to others (``requeue``), and ends the run with ``close``. All
endpoints are concurrent: one that waits never blocks another.
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
from monarch_rl.buffer.shards import ShardPlan, cut
from monarch_rl.buffer.waiting import Interruptions, WaitQueue
from monarch_rl.episode.episode import Ticket
from monarch_rl.episode.failure import Failure
from monarch_rl.episode.group_bound import UNBOUNDED, GroupBound
from monarch_rl.episode.serialization import SerializedGroup
from monarch_rl.episode.shard import PackedShard
from monarch_rl.errors import BufferClosed, DeadlineExceeded
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.deadlines import now
from monarch_rl.runtime.endpoint import concurrent_endpoint, persistent_endpoint
from monarch_rl.runtime.process import freeze_heap
from monarch_rl.runtime.wait_registry import Wait


@dataclass(frozen=True, slots=True)
class SavedBuffer:
    """The saved state from which a resumed run's buffer continues."""

    path: Path
    """File written by :func:`write_state`."""
    generation: int
    """How often the run was resumed."""
    resample: bool = False
    """Whether complete groups are restarted: the trainer computes log-probs otherwise than they were sampled."""
    columns: frozenset[str] | None = None
    """Columns that groups have from now on; complete groups with others are restarted. None: they may have any."""

    def usable(self, group: SerializedGroup) -> bool:
        """Whether a complete group can be trained in the resumed run."""
        return not self.resample and self.columns in (None, frozenset(group.columns))


class Buffer(FailureReports):
    """The only buffer of a run.

    Args:
        groups_per_step: groups per batch.
        settings: the buffer's settings.
        version: batches trained, and version served, at the start.
        task_cursor: start position in the stream of tasks.
        resumed: saved state to resume from, in place of ``version`` and ``task_cursor``.
        bound: maximum sequences and tokens of each group.
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
        super().__init__(groups_per_step, lambda: self._core.first_in_progress)
        self._core = BufferCore(groups_per_step, settings, version, task_cursor, bound)
        if resumed is not None:
            state = read_state(resumed.path)
            generation, usable = resumed.generation, resumed.usable
            self._core = BufferCore.restore(groups_per_step, settings, state, generation, bound, usable)
            self._failures.note_submitted()  # groups were submitted before the run was resumed
        self._staged: dict[str, Any] | None = None
        """State that the next :meth:`write_checkpoint` writes."""
        self._leases: dict[int, Lease] = {}
        self._split: tuple[tuple[int, ShardPlan], list[PackedShard]] | None = None
        """The batch being taken, split once, so that all ranks get shards of the same split: the version and plan that
        the first rank requested, and the shards."""
        self._held = False
        """Whether :meth:`hold` was called: no new batch is given out."""
        self._slots, self._memory, self._batches = WaitQueue(alike=True), WaitQueue(), WaitQueue()
        """Callers that wait for a slot, for memory, and for a batch."""
        self._lost: Counter[str] = Counter()
        """How often a worker of this name was lost."""
        self._awaited: tuple[float, Counter[str]] | None = None
        """While a trainer rank waits for a batch: since when, and the groups dropped before, by reason."""
        self._held_back = Interruptions()
        """Times that a batch waited for a slow group although enough groups were complete, while a rank waited."""
        wait_registry.register("buffer", lambda: waits(self._core, self._leases.copy()))

    @concurrent_endpoint
    async def setup(self) -> None:
        """Reduce garbage collection for a long run; optional."""
        freeze_heap()

    @persistent_endpoint
    async def admit(self, worker: str, timeout_s: float) -> Ticket | None:
        """Wait for a slot and start a group in it; None if the run has ended, or the worker was reported lost.

        The deadline is enforced here and not by the caller: a caller that no longer listens would still get a slot.

        Raises:
            DeadlineExceeded: no slot within ``timeout_s`` seconds; names the holders of the slots.
        """
        tickets = await self._admit(worker, 1, timeout_s)
        return tickets[0] if tickets else None

    @persistent_endpoint
    async def admit_many(self, worker: str, max_groups: int, timeout_s: float) -> list[Ticket]:
        """Like :meth:`admit`, for up to ``max_groups`` groups: waits for one slot and takes all that are free, up to
        that number. Empty if the run has ended, or the worker was reported lost."""
        return await self._admit(worker, max_groups, timeout_s)

    async def _admit(self, worker: str, max_groups: int, timeout_s: float) -> list[Ticket]:
        tickets: list[Ticket] = []
        losses = self._lost[worker]

        def try_admit() -> bool:
            if self._lost[worker] != losses:
                return True
            while len(tickets) < max_groups and (ticket := self._core.admit()) is not None:
                tickets.append(ticket)
                self._leases[ticket.group_id] = Lease(worker, now(), ticket.attempt)
            return bool(tickets) or self._core.closed

        await self._wait(self._slots, try_admit, timeout_s, worker, "a free slot of the buffer", "patience")
        return tickets

    @persistent_endpoint
    async def reserve(self, group_id: int, attempt: int, nbytes: int, worker: str, timeout_s: float) -> None:
        """Wait until a complete group of ``nbytes`` may be submitted.

        Raises:
            DeadlineExceeded: not enough memory within ``timeout_s`` seconds; reports what uses it.
        """

        def try_reserve() -> bool:
            return self._core.reserve(group_id, nbytes, attempt)

        what = f"memory for the {nbytes} bytes of group {group_id}"
        await self._wait(self._memory, try_reserve, timeout_s, worker, what, "patience")
        self._slots.serve()  # a trained group that was retired to free memory may have freed its slot

    @persistent_endpoint
    async def submit(self, *groups: bytes) -> None:
        """Submit complete groups, each from ``serialize_group``.

        Raises:
            ValueError: a group is not in progress, or does not fit and had no memory reserved.
        """
        self._submit([SerializedGroup.read(data) for data in groups])

    @persistent_endpoint
    async def submit_if_room(self, *groups: bytes) -> list[bool]:
        """Submit the groups that fit in memory; returns for each group whether it did."""
        read = [SerializedGroup.read(data) for data in groups]
        has_room = [self._core.reserve(group.group_id, group.nbytes, group.attempt) for group in read]
        self._submit([group for group, fits in zip(read, has_room, strict=True) if fits])
        return has_room

    def _submit(self, groups: list[SerializedGroup]) -> None:
        for group in groups:
            self._core.submit(group)
            self._end_lease(group.group_id, group.attempt)
            self._failures.note_submitted()
        self._serve()

    @persistent_endpoint
    async def drop(self, group_id: int, reason: str, tokens: int = 0, attempt: int = 0) -> None:
        """Drop a group for which ``tokens`` tokens were sampled. Raises ValueError if it is not in the buffer."""
        self._drop(group_id, reason, tokens, attempt)

    def _drop(self, group_id: int, reason: str, tokens: int, attempt: int) -> None:
        if self._core.drop(group_id, reason, tokens, attempt):
            self.note_dropped(group_id, reason, self._core.groups.next_id)
        self._end_lease(group_id, attempt)
        self._serve()

    @persistent_endpoint
    async def requeue(self, worker: str, dropped: tuple[int, Failure] | None = None) -> list[int]:
        """A worker is lost: other workers restart its groups, in the same slots and queue places.

        Groups that it still submits are ignored, and its calls that wait for a slot get none. Another worker may use
        its name from now on. Returns the ids of the requeued groups.

        Args:
            dropped: one of them that is dropped instead, and why.
        """
        self._lost[worker] += 1
        if dropped is not None:
            group_id, failure = dropped
            if (lease := self._leases.get(group_id)) is not None and lease.worker == worker:
                self._failures.note(failure)
                self._drop(group_id, failure.reason, 0, lease.attempt)
        held = [group_id for group_id, lease in self._leases.items() if lease.worker == worker]
        for group_id in held:
            del self._leases[group_id]
        requeued = self._core.requeue(held)
        self._slots.serve(everybody=True)
        self._serve()
        return requeued

    @persistent_endpoint
    async def take(
        self,
        version: int,
        dp_rank: int,
        plan: ShardPlan,
        timeout_s: float,
    ) -> PackedShard:
        """Wait for the batch that updates ``version`` and return one rank's shard of it.

        All ranks must pass the same arguments, except for ``dp_rank``. Repeated calls are harmless.

        Args:
            version: version being updated.
            dp_rank: index of the shard to return.
            plan: how the batch is split.
            timeout_s: seconds to wait for the batch.

        Raises:
            DeadlineExceeded: the batch was not complete in time; names the missing groups, their workers and since when
                these hold them.
            BufferClosed: the run has ended.
            ValueError: another version is being updated, ranks disagree, an episode exceeds a micro-batch, or groups
                lack a column.
        """
        if not 0 <= dp_rank < plan.dp_size:
            raise ValueError(f"dp_rank {dp_rank} is not within dp_size {plan.dp_size}")
        batch: Batch | None = None

        def try_take() -> bool:
            nonlocal batch
            if not self._held or self._core.taken:  # late ranks still get the batch that is being trained
                batch = self._core.take(version)
            self._held_back.note(self._core.held_back)
            return batch is not None or self._core.closed

        what = f"the batch that updates version {version}"
        self._awaited = self._awaited or (now(), Counter(self._core.counts().dropped))
        try:
            await self._wait(self._batches, try_take, timeout_s, f"trainer rank {dp_rank}", what, "patience")
        finally:
            self._awaited = None
        self._memory.serve()  # other groups are now first in the queue, and these always fit
        if batch is None:
            raise BufferClosed(f"no batch for version {version}: the run has ended")
        if self._split is None:
            self._split = (batch.version, plan), cut(batch, plan)
        requested, shards = self._split
        if requested != (batch.version, plan):
            raise ValueError(
                f"trainer ranks disagree on version and {ShardPlan._fields}: first {requested}, now "
                f"{(batch.version, plan)}"
            )
        return shards[dp_rank]

    @persistent_endpoint
    async def hold(self) -> int:
        """Give out no more batches, because the run ends. Groups stay in the buffer. Returns the version that the run
        reaches once the batch being trained, if there is one, is done."""
        self._held = True
        return self._core.version + (1 if self._core.taken else 0)

    @persistent_endpoint
    async def trained(self, version: int) -> None:
        """Every rank has trained the batch that made ``version``."""
        self._core.trained(version)
        self._split = None
        self._serve()

    @persistent_endpoint
    async def note_supervised_version(self, version: int) -> None:
        """A supervised step made ``version`` without a batch; see :meth:`BufferCore.note_supervised_version`."""
        self._core.note_supervised_version(version)

    @persistent_endpoint
    async def note_replayed(self, version: int, group_ids: list[int], lag_counts: np.ndarray) -> Counts:
        """The trainer of a resumed run has replayed the step that made ``version``; see
        :meth:`BufferCore.note_replayed`."""
        self._core.note_replayed(version, group_ids, lag_counts)
        return self._counts()

    @persistent_endpoint
    async def published(self, version: int) -> None:
        """Every generator serves ``version``."""
        self._core.published(version)
        self._serve()

    @persistent_endpoint
    async def counts(self) -> Counts:
        return self._counts()

    @persistent_endpoint
    async def awaited_batch(self) -> AwaitedBatch | None:
        """What the batch lacks that trainer ranks wait for; None if they wait for none."""
        if self._awaited is None:
            return None
        (since, dropped), missing, counts = self._awaited, self._core.missing(), self._core.counts()
        return AwaitedBatch(
            waited_s=now() - since,
            groups=self._core.groups_per_step,
            missing=[group_id for group_id in missing if group_id is not None],
            unstarted=missing.count(None),
            running=counts.playing,
            dropped=dict(Counter(counts.dropped) - dropped),
        )

    @persistent_endpoint
    async def report(self) -> str:
        """One line on slots, drops, and which worker has held which group for how long."""
        return self._report()

    @persistent_endpoint
    async def stage(self) -> int:
        """Stage the current state for :meth:`write_checkpoint`; returns its version."""
        self._staged = self._core.state()
        return self._core.version

    @persistent_endpoint
    async def write_checkpoint(self, path: str) -> list[tuple[str, int]]:
        """Write the last staged state, while the run continues. Returns where its records end (:func:`write_state`).
        Raises OSError, and RuntimeError without :meth:`stage`."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise RuntimeError("nothing to write: call stage() before write_checkpoint()")
        return await asyncio.to_thread(write_state, Path(path), staged)

    @persistent_endpoint
    async def close(self) -> Counts:
        """End the run: waiting workers get None, waiting trainer ranks BufferClosed. Returns the final counts."""
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
        """Serve all waiting callers that can be served, after a change of state."""
        self._batches.serve()
        self._slots.serve()
        self._memory.serve()

    async def _wait(
        self, queue: WaitQueue, try_serve: Callable[[], bool], timeout_s: float, who: str, what: str, flag: str
    ) -> None:
        """Wait in ``queue``. At the deadline, which ``flag`` sets, raise an error that names what was waited for and
        reports the buffer's state."""
        if not await queue.wait(try_serve, timeout_s, what):  # waits: timeout_s, stretched where there are no cores
            message = f"{who} waited {timeout_s:g} s for {what} (see --{flag}); {self._report()}"
            raise DeadlineExceeded(message, what, timeout_s)

    def _report(self) -> str:
        return report(self._core, self._leases)


# -- status: which worker holds which group, and which groups the next batch is missing -------------------------------


@dataclass(frozen=True, slots=True)
class Lease:
    """Which worker generates a group."""

    worker: str
    since: float
    """Start in seconds, by :func:`now`."""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class AwaitedBatch:
    """A batch that trainer ranks wait for, and what it lacks."""

    waited_s: float
    groups: int
    """Groups of the batch."""
    missing: list[int]
    """Those of them that are in progress."""
    unstarted: int
    """Number of those that no worker has started."""
    running: int
    """All groups in progress, including those of later batches."""
    dropped: dict[str, int]
    """Groups dropped since the wait began, by reason."""


def report(core: BufferCore, leases: Mapping[int, Lease]) -> str:
    """One line on slots, drops, and which worker has held which group for how long."""
    counts, moment = core.counts(), now()
    holders = [
        f"group {group_id} by {lease.worker} for {moment - lease.since:.1f} s" for group_id, lease in leases.items()
    ]
    missing = core.missing()
    in_progress = [str(group_id) for group_id in missing if group_id is not None]
    unadmitted = len(missing) - len(in_progress)
    next_batch = f"groups {', '.join(in_progress)}" if in_progress else "no admitted group"
    if unadmitted:
        next_batch += f" and {unadmitted} that no worker has started"
    return (
        f"policy version {counts.version}, published {counts.published}; slots: "
        f"{'unlimited' if counts.slots is None else f'{counts.slots_free} free of {counts.slots}'}, "
        f"{counts.playing} in progress, {counts.complete} complete, {counts.taken} in training, "
        f"{f'{counts.again} trained before and still in use, ' if counts.again else ''}"
        f"{counts.unpublished} trained and not published; the next batch is missing "
        f"{next_batch if missing else 'nothing'}; {counts.nbytes / 2**20:.1f} MiB; "
        f"held: {'; '.join(holders) or 'none'}; "
        f"dropped so far: {counts.dropped or 'none'}"
    )


def waits(core: BufferCore, leases: Mapping[int, Lease]) -> list[Wait]:
    """The waits of the next batch for its missing groups: for the workers of those in progress; for the rollout workers
    to start the others; and, if that may free slots, for the controller to publish a version.

    Called on another thread, so it only reads state that is consistent at any time.
    """
    missing = core.missing()
    here = f"{core.groups_per_step - len(missing)} of {core.groups_per_step} groups of the batch are in"
    waiting_for = []
    for group_id in missing:
        lease = leases.get(group_id) if group_id is not None else None
        if lease is not None:
            what = f"group {group_id}, held by {lease.worker} ({here})"
            waiting_for.append(Wait("buffer", what, lease.worker, lease.since, math.inf))
    if None in missing:
        moment = time.monotonic()  # not now(), which needs the event loop's thread
        waiting_for.append(Wait("buffer", f"workers to start groups ({here})", "rollout workers", moment, math.inf))
        if core.version > core.published_version:
            what = f"version {core.version} to be served, which frees slots ({here})"
            waiting_for.append(Wait("buffer", what, "controller", moment, math.inf))
    return waiting_for


# -- checkpoint: one file with the core's state and the complete groups as bytes --------------------------------------
#     4 bytes "BUF3", 8 bytes length of the header, the header (JSON), then the groups one after the other
#
# The header is :meth:`BufferCore.state`, with the number of bytes in place of each complete group.

FORMAT = b"BUF3"
"""The last character is the version of the format."""
_LENGTH = struct.Struct("<Q")


def write_state(path: Path, state: dict[str, Any]) -> list[tuple[str, int]]:
    """Write a state from :meth:`BufferCore.state`, and flush it to disk. Returns the name of each record, which is the
    header or a group, and the position in bytes behind it. Raises OSError."""
    groups = {group_id: group for group_id, *_, group in state["live"] if group is not None}
    live = [(*place, None if group is None else len(group)) for *place, group in state["live"]]
    header = json.dumps(state | {"live": live}, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(FORMAT + _LENGTH.pack(len(header)) + header)
        ends = [("the header", file.tell())]
        for group_id, group in groups.items():
            file.write(group)
            ends.append((f"group {group_id}", file.tell()))
        file.flush()
        os.fsync(file.fileno())
    return ends


def read_state(path: Path) -> dict[str, Any]:
    """The inverse of :func:`write_state`. Raises OSError, and ValueError for another format or missing bytes."""
    with path.open("rb") as file:

        def read(nbytes: int) -> bytes:
            if len(data := file.read(nbytes)) < nbytes:
                raise ValueError(f"{path} is cut off: it has {file.tell()} bytes, {nbytes - len(data)} too few")
            return data

        if (form := read(len(FORMAT))) != FORMAT:
            raise ValueError(f"{path} cannot be read: its format is {form!r}, not {FORMAT!r}")
        state: dict[str, Any] = json.loads(read(_LENGTH.unpack(read(_LENGTH.size))[0]))
        state["live"] = [(*place, None if nbytes is None else read(nbytes)) for *place, nbytes in state["live"]]
    state["attempts"] = {int(group_id): attempt for group_id, attempt in state["attempts"].items()}
    return state
