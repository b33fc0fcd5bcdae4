"""Publishes new policy versions from the trainer mesh to all generator replicas: transfer, commit, serve.

A publication starts after a trainer step. It is repeated for replicas that fail, which are then removed:

    Run                 Publisher.publish(v)         trainer ranks copy their weights to a snapshot; training continues
    Publisher           Publication(v).run()         once the version before v is served
      Publication       TransferGroup.transfer(v)    snapshot --transport--> staging memory next to each engine;
                                                     decoding continues
                        Generator.commit(v)          pause decoding, load, verify checksums, serve v, continue
      Publisher         Replicas.notify_workers()    as below
                        Buffer.published(v)          releases slots

The set of replicas changes when ``recovery.py`` detects a loss or has started a replacement, or when a replica fails:

    Recovery            Publisher.remove_replica     Replicas.remove; a transfer that involves the replica is aborted
                        Publisher.add                the newest version is published to the replica
    Publication         Replicas.remove              on_lost: Recovery starts a replacement
    each of them        Replicas.notify_workers      RolloutWorker.update_replicas calls Dispatcher.update_replicas:
                                                     paused replicas take no new requests, requests of lost ones are
                                                     sent to others

A version counts as published only when every live replica serves it: the buffer's lag bound depends on this.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from monarch_rl.buffer.actor import Buffer
from monarch_rl.errors import NotFinite, PublishError, StillServing
from monarch_rl.generator.actor import Generator
from monarch_rl.pipeline.actor_pool import ActorPool, last_line, ping_failure
from monarch_rl.pipeline.frozen import FrozenPool
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, bytes_s, now, within
from monarch_rl.runtime.endpoint import concurrent_endpoint, members
from monarch_rl.settings.ranges import FOREVER_S
from monarch_rl.trainer.actor import Trainer
from monarch_rl.weights.checksum import add_checksums, sums_by_layer
from monarch_rl.weights.manifest import Manifest, lay_out, make_manifest
from monarch_rl.weights.transport import SNAPSHOTS, TransferSettings, TransportName, transports_on

logger = logging.getLogger("monarch_rl")

T = TypeVar("T")


@dataclass(frozen=True)
class PublishReport:
    """Durations, in seconds, and sizes of one version's publication."""

    version: int
    snapshot_s: float
    """Local copy on the trainer, the only part of publishing that training waits for."""
    transfer_s: float
    """Transfer from trainer ranks to generators, while decoding continued."""
    paused_s: float
    """Longest decoding pause of a replica."""
    verify_share: float
    """Largest share of a replica's pause spent on checksums."""
    nbytes: int
    """Bytes of the version."""
    max_received_bytes: int
    """Most bytes received by a replica."""


@dataclass(frozen=True)
class BaseWeights:
    """LoRA's base weights: versions do not include them, so trainer and generators must both have loaded the same."""

    manifest: Manifest
    checksums: np.ndarray
    """The trainer's checksums, int64[tensors], in the manifest's order."""

    @functools.cached_property
    def by_layer(self) -> dict[str, int]:
        """See :func:`sums_by_layer`."""
        tensors = self.manifest.tensors
        return sums_by_layer([spec.name for spec in tensors], str(tensors[0].dtype), self.checksums)

    async def verify(self, index: int, generator: Generator) -> None:
        """Raise if a generator's base weights differ from the trainer's."""
        call = generator.verify_base_weights.call_one(self.manifest, self.checksums)
        await within(CALL_DEADLINE_S, call, f"generator {index} to compare its model", on=f"generator {index}")


class Publisher:
    """Publishes new versions from the trainer mesh to all generators. Create one with :meth:`connect`.

    Args:
        transfer_group: connects the trainer ranks with the replicas.
        buffer: releases slots when a version is published.
        replicas: the generators to publish to.
        base_weights: weights that versions leave out; None if versions contain all weights.
    """

    def __init__(
        self,
        transfer_group: TransferGroup,
        buffer: Buffer,
        replicas: Replicas,
        base_weights: BaseWeights | None = None,
    ) -> None:
        self.transfer_group, self.replicas = transfer_group, replicas
        self.last: PublishReport | None = None
        """Report of the newest version that is served."""
        self._buffer, self._base_weights = buffer, base_weights
        self._unfinished: list[asyncio.Task[None]] = []
        """Publications that have not been awaited to their end, oldest first."""
        self._latest: asyncio.Task[None] | None = None
        """The publication that was started last."""
        self._newest: int | None = None
        """Version of the newest snapshot."""
        self._snapshot_s: dict[int, float] = {}
        """Seconds of each snapshot whose version is being published."""

    @classmethod
    async def connect(
        cls,
        trainer: Trainer,
        generators: Mapping[int, Generator],
        buffer: Buffer,
        settings: TransferSettings,
        dtype: str,
        workers: ActorPool[RolloutWorker] | None = None,
        frozen: Sequence[FrozenPool] = (),
        on_gpu: bool = False,
    ) -> Publisher:
        """Plan the tensors of a version, and connect the trainer ranks with the generators.

        Args:
            generators: the replicas, by index.
            settings: the transfer settings; with transport ``auto``, every transport that works on these devices is
                measured and the fastest used.
            dtype: dtype that generators serve.
            workers: rollout workers, which are notified of the replicas that take requests; None if there are none.
            frozen: engines of frozen models; see :class:`Replicas`.
            on_gpu: whether trainer ranks and generators run on GPUs.

        Raises:
            WeightMismatch: a generator's base weights differ from the trainer's (wrapped by Monarch).
            PublishError: with ``auto``, no transport works.
        """
        group = TransferGroup(trainer, members(trainer), await _plan(trainer, dtype), settings)
        replicas, base_weights = Replicas(workers, frozen), await _base_weights(trainer, dtype)
        if base_weights is not None:
            for index, generator in generators.items():
                await base_weights.verify(index, generator)
        if settings.transport == "auto":
            group.settings = await _fastest(group, replicas, generators, on_gpu)
        await _set_up_all(group, replicas, generators)
        return cls(group, buffer, replicas, base_weights)

    # -- called by the run -----------------------------------------------------------------------------------------

    def base_weights_by_layer(self) -> dict[str, int]:
        """See :attr:`BaseWeights.by_layer`; empty if versions contain all weights."""
        return {} if self._base_weights is None else self._base_weights.by_layer

    async def publish(self, version: int) -> None:
        """Snapshot ``version`` and start publishing it. Training may continue when this returns.

        While earlier versions are in flight, versions must increase by exactly 1, because the two snapshot buffers
        alternate (:func:`snapshot_index`). At most two versions are in flight: a third call waits for the oldest, and
        raises that version's error if it failed.
        """
        while len(self._unfinished) >= SNAPSHOTS:
            await self._unfinished.pop(0)  # waits: every wait of a publication has a deadline of its own
        self._snapshot_s[version] = await self.transfer_group.snapshot(version)
        self._newest = version
        self._start(version)

    async def unless_publishing_fails(self, work: Awaitable[T]) -> T:
        """Await ``work``, but raise immediately if a version in progress cannot be published.

        Without generators nothing is sampled, so ``work`` might wait for a batch that never comes.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self._raise_failed()
                # waits: as long as the work, whose deadlines are its own
                await asyncio.wait({task, *self._unfinished}, return_when=asyncio.FIRST_COMPLETED)
            return task.result()
        finally:
            task.cancel()

    async def wait_until_served(self) -> None:
        """Wait until every version whose publication was started is served by all live replicas. Raises PublishError
        if one failed."""
        while self._unfinished:
            await self._unfinished.pop(0)  # waits: every wait of a publication has a deadline of its own

    def cancel(self) -> None:
        """Cancel the versions in progress."""
        for publication in self._unfinished:
            publication.cancel()

    async def add(self, index: int, generator: Generator) -> None:
        """Add a restarted replica; returns when it serves the newest version, with verified checksums.

        Raises:
            PublishError: the replica was removed again, or a version in flight failed.
            RuntimeError: nothing has been published yet.
            Exception: whatever setting up the replica raises.
        """
        if self._newest is None:
            raise RuntimeError(
                f"cannot add generator {index}: publish() has not been called, so there is no version to send"
            )
        if self._base_weights is not None:
            await self._base_weights.verify(index, generator)
        self.replicas.add(await self.transfer_group.set_up_replica(index, generator))
        publication = self._start(self._newest)
        await asyncio.shield(publication)  # waits: every wait of a publication has a deadline of its own
        if index in self.replicas.lost:
            raise PublishError(f"generator {index} is lost again: {self.replicas.lost[index]}")

    async def remove_replica(self, index: int, reason: str) -> None:
        """Stop publishing to a replica, because it is lost."""
        removed = self.replicas.remove(index, reason)
        if removed is not None:
            self.transfer_group.lose(removed, reason)
        await self.replicas.notify_workers()

    # -- publications in progress: each waits for the previous one -------------------------------------------------

    def _start(self, version: int) -> asyncio.Task[None]:
        self._latest = publication = asyncio.create_task(self._publish(version, self._latest))
        publication.add_done_callback(_retrieve)  # the next one fails with the same error, and one of them is awaited
        self._unfinished.append(publication)
        return publication

    def _raise_failed(self) -> None:
        """Drop the publications that are done; raise the error of the first that failed."""
        while self._unfinished and self._unfinished[0].done():
            self._unfinished.pop(0).result()  # waits: it is done

    async def _publish(self, version: int, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await asyncio.shield(previous)  # waits: its calls have deadlines
        publication = Publication(version, self.transfer_group, self.replicas)
        await publication.run()
        if not len(self.replicas):
            if self.replicas.on_lost is None:
                lost = self.replicas.lost.items()
                reasons = "; ".join(f"generator {index}: {reason}" for index, reason in lost)
                raise PublishError(f"version {version} is abandoned: no generator is left to serve it. {reasons}")
            return  # a replacement is sent the newest version when it is added
        if version in self._snapshot_s:  # otherwise it was already reported, and this sent it to a restarted replica
            self.last = PublishReport(
                version=version,
                snapshot_s=self._snapshot_s[version],
                transfer_s=publication.transfer_s,
                paused_s=publication.paused_s,
                verify_share=publication.verify_share,
                nbytes=self.transfer_group.manifest.nbytes,
                max_received_bytes=publication.max_received_bytes,
            )
            self._snapshot_s = {later: taken for later, taken in self._snapshot_s.items() if later > version}
        await self.replicas.notify_workers()
        if version > 0:
            call = self._buffer.published.call_one(version)
            await within(CALL_DEADLINE_S, call, "the buffer to release slots", on="buffer")
        wait_registry.progress("version published")


async def _set_up_all(group: TransferGroup, replicas: Replicas, generators: Mapping[int, Generator]) -> None:
    """Allocate memory for versions on all members, and connect the trainer ranks with all generators."""
    await group.set_up_trainer()
    for index, generator in generators.items():
        replicas.add(await group.set_up_replica(index, generator))
    await group.connect(list(replicas))


async def _fastest(
    group: TransferGroup, replicas: Replicas, generators: Mapping[int, Generator], on_gpu: bool
) -> TransferSettings:
    """Time a transfer, without commit, by every transport that works on these devices; prints the measurements and
    returns the fastest."""
    seconds: dict[TransportName, float] = {}
    for name in transports_on(on_gpu):
        try:
            group.settings = replace(group.settings, transport=name)
            await _set_up_all(group, replicas, generators)
            seconds[name] = await group.measure(list(replicas))
        except Exception as error:
            logger.warning("weights.transport %s does not work here: %s", name, last_line(error))
    if not seconds:
        raise PublishError(
            "no weight transport works on this machine (see the warnings above). Set --weights.transport explicitly to "
            "see the full error"
        )
    nbytes = group.manifest.nbytes
    rates = ", ".join(
        f"{name} {taken * 1e3:.3g} ms ({nbytes / taken / 1e9:.3g} GB/s)"
        for name, taken in sorted(seconds.items(), key=lambda item: item[1])
    )
    best = min(seconds, key=lambda name: seconds[name])
    print(f"Weights are transferred by {best}: snapshot and transfer of {nbytes / 1e6:.4g} MB took {rates}.")
    return replace(group.settings, transport=best)


async def _plan(trainer: Trainer, dtype: str) -> Manifest:
    """The tensors of a version in ``dtype``, and the spans of them that each trainer rank sends."""
    call = trainer.owned_spans.call()
    answers = await within(CALL_DEADLINE_S, call, "trainer ranks to report their shards", on="trainer ranks")
    by_rank = sorted(answers.values(), key=lambda answer: answer[0])
    served = getattr(torch, dtype)
    tensors = [(name, shape, served) for name, shape in by_rank[0][1]]
    return make_manifest(tensors, [spans for _, _, spans in by_rank])


async def _base_weights(trainer: Trainer, dtype: str) -> BaseWeights | None:
    """The untrained base weights, with checksums of them in ``dtype``; None if all weights are trained."""
    call = trainer.base_checksums.call(dtype)
    answers = await within(
        CALL_DEADLINE_S, call, "trainer ranks to compute checksums of the base weights", on="trainer ranks"
    )
    by_rank = list(answers.values())
    tensors = by_rank[0][0]
    if not tensors:
        return None
    specs, nbytes = lay_out([(name, shape, getattr(torch, dtype)) for name, shape in tensors])
    return BaseWeights(Manifest(specs, nbytes, ()), add_checksums([sums for _, sums in by_rank]))


def _retrieve(publication: asyncio.Task[None]) -> None:
    """Retrieve a task's exception, so that asyncio does not report it as never retrieved."""
    if not publication.cancelled():
        publication.exception()


# -- the generator replicas of a run: which are alive, which version each serves, which are lost ----------------------

REPEAT_S = 30.0
"""Seconds after which workers are notified of the replicas' state again, even if it has not changed."""


@dataclass(eq=False)
class Replica:
    """One generator process. After a loss, another ``Replica`` takes its index."""

    index: int
    handle: Generator
    max_commit_delay_s: float
    """Seconds for which its running sequences may delay a commit."""
    version: int | None = None
    """The version it is known to serve; None if it serves nothing."""

    @property
    def name(self) -> str:
        return f"generator {self.index}"


class Replicas:
    """The live replicas, by index, and the lost ones. The rollout workers are notified which replicas take requests.

    Args:
        workers: the rollout workers of the run; None if there are none.
        frozen: engines of frozen models, of whose losses the workers are reminded, too.
    """

    def __init__(self, workers: ActorPool[RolloutWorker] | None = None, frozen: Sequence[FrozenPool] = ()) -> None:
        self.workers = workers or ActorPool[RolloutWorker]("rollout worker", "rollout")
        self.lost: dict[int, str] = {}
        """Why each removed replica was removed, by index."""
        self.on_lost: Callable[[str, Exception], None] | None = None
        """Called with the name of a removed replica and the reason. While it is set, a run that has lost all replicas
        waits for a new one; without it, that is an error."""
        self._frozen = frozen
        self._alive: dict[int, Replica] = {}
        self._notified: dict[int, tuple[RolloutWorker, list[int], list[int]]] = {}
        """Each worker that has answered a notification, and the paused and lost replicas named in it, by index."""
        self._all_notified_at = -math.inf

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._alive.values()))

    def __len__(self) -> int:
        return len(self._alive)

    def __contains__(self, replica: Replica) -> bool:
        """Whether this very process is alive; another one may have taken its index."""
        return self._alive.get(replica.index) is replica

    @property
    def handles(self) -> dict[int, Generator]:
        """Handles of the live replicas, by index."""
        return {replica.index: replica.handle for replica in self}

    def behind(self, version: int) -> list[Replica]:
        """The live replicas that do not serve ``version``."""
        return [replica for replica in self if replica.version != version]

    def add(self, replica: Replica) -> None:
        """Add a replica; it replaces another one with its index, which may be lost."""
        self._alive[replica.index] = replica
        self.lost.pop(replica.index, None)

    def remove(self, index: int, reason: str) -> Replica | None:
        """Mark a replica as lost and return it; None if it was removed already."""
        removed = self._alive.pop(index, None)
        if removed is None:
            return None
        self.lost[index] = reason
        others = ", ".join(f"generator {other}" for other in self._alive) or "none"
        logger.error("generator %d is lost (%s); remaining generators: %s", index, reason, others)
        if self.on_lost is not None:
            self.on_lost(removed.name, RuntimeError(reason))
        return removed

    async def notify_workers(self) -> None:
        """Notify the rollout workers which replicas are paused (they take no new requests), and which are lost.

        Called for every version, but calls only workers whose last notification differs.
        """
        # A replica that merely missed a transfer is not paused: it still serves the previous version, complete.
        paused = [replica.index for replica in self if replica.version is None]
        lost = list(self.lost)
        # All workers are notified every REPEAT_S: one may have marked a replica as lost because of an error of its own,
        # and would never use it again. The same holds for frozen engines, of which they are otherwise notified on
        # changes only.
        if now() > self._all_notified_at + REPEAT_S:
            self._notified.clear()
            self._all_notified_at = now()
            for pool in self._frozen:
                await pool.note_lost_engine(self.workers)  # waits: it has a deadline
        pending = {
            index: worker
            for index, worker in self.workers.handles.items()
            if self._notified.get(index) != (worker, paused, lost)
        }
        answers = await self.workers.ask(
            CALL_DEADLINE_S,
            "to update its replicas",
            lambda _, worker: worker.update_replicas.call_one(paused, lost),
            pending,
        )
        self._notified.update({index: (pending[index], paused, lost) for index in answers})


# -- the publication of one version to all replicas: readiness, transfer, commit, blame -------------------------------
# A replica commits a version only when it has arrived completely, and serves it only when the checksums of the weights
# in its engine equal the trainer's. A replica that answers but did not take the version is sent it again, and is
# removed after ``attempts`` attempts. A replica that does not answer is removed immediately.

Failures = dict[Replica, BaseException]
"""Why each of some replicas did not take a version."""


async def unresponsive_replicas(replicas: list[Replica]) -> dict[Replica, str]:
    """The reason for each of these replicas that does not answer."""
    reasons = await asyncio.gather(*(ping_failure(replica.name, replica.handle) for replica in replicas))
    return {replica: reason for replica, reason in zip(replicas, reasons, strict=True) if reason}


class Publication:
    """The publication of one version to every replica that does not serve it yet.

    Args:
        version: a version of which the trainer holds a snapshot.
        transfer_group: transfers the version.
        replicas: receive the version; those that fail are removed.
    """

    def __init__(self, version: int, transfer_group: TransferGroup, replicas: Replicas) -> None:
        self.version = version
        self.transfer_s = 0.0
        """Seconds of all transfers, which may be several attempts."""
        self.paused_s = 0.0
        """Longest decoding pause of a replica, in seconds."""
        self.verify_share = 0.0
        """Largest share of a replica's pause spent on checksums."""
        self.max_received_bytes = 0
        """Most bytes received by a replica."""
        self._group, self._replicas = transfer_group, replicas
        self._attempts = 0
        """Attempts that failed although all members answered."""

    async def run(self) -> None:
        """Return when every live replica serves the version, or when none is left.

        Raises:
            PublishError: a trainer rank does not answer, or the version is not finite.
        """
        while behind := self._replicas.behind(self.version):
            is_last = self._attempts + 1 == self._group.settings.attempts
            failed: Failures = {}
            # In a common transfer, one failing replica can fail the others, so the last attempt sends to each alone.
            for together in [[replica] for replica in behind] if is_last and self._attempts else [behind]:
                failed |= await self._attempt(together)
            await self._handle_failures(failed, is_last)

    async def _attempt(self, replicas: list[Replica]) -> Failures:
        """Transfer the version to ``replicas`` and have them commit it; returns those that failed. Raises
        PublishError."""
        # A rank that enters a collective early blocks inside it, so every member must answer before the transfer.
        failed = await self._ping_members(replicas)
        replicas = [replica for replica in replicas if replica not in failed]
        if not replicas:
            return failed
        started = now()
        try:
            if self._group.connected != replicas:
                await self._group.connect(replicas)
            checksums, received = await self._group.transfer(self.version, replicas)
        except Exception as error:
            self._raise_if_not_finite(error)
            await self._raise_if_trainer_unresponsive(error)
            return failed | {replica: error for replica in replicas}
        self.transfer_s += now() - started
        arrived: dict[Replica, int] = {}
        for replica, nbytes in received.items():
            if isinstance(nbytes, BaseException):
                failed[replica] = nbytes
            else:
                arrived[replica] = nbytes
        return failed | await self._commit(arrived, checksums)

    async def _ping_members(self, replicas: list[Replica]) -> Failures:
        """Check that every member answers; returns the replicas that do not. Raises PublishError for trainer ranks."""
        asked = [replica for replica in replicas if replica in self._replicas]
        absent, reason = await asyncio.gather(unresponsive_replicas(asked), self._group.unresponsive_rank())
        if reason is not None:
            raise PublishError(f"version {self.version} cannot be sent: {reason}")
        return {replica: PublishError(reason) for replica, reason in absent.items()}

    def _raise_if_not_finite(self, error: Exception) -> None:
        """Raise PublishError if the transfer's ``error`` is that the version has non-finite weights."""
        cause = getattr(error, "exception", error)  # Monarch wraps it
        if isinstance(cause, NotFinite):
            if self.version == 0:
                raise PublishError(
                    f"the initial model has non-finite weights: {cause}. Check the checkpoint"
                ) from error
            raise PublishError(
                f"version {self.version}, produced by step {self.version}, has non-finite weights and will not be "
                f"served: {cause}. Start a new run with a lower --trainer.lr (a resumed run keeps "
                "its learning rates), clip gradients more tightly, or reduce the scale of your loss or advantages"
            ) from error

    async def _raise_if_trainer_unresponsive(self, error: Exception) -> None:
        """Raise PublishError if a trainer rank does not answer after a transfer has failed with ``error``."""
        reason = await self._group.unresponsive_rank()
        if reason is not None:
            raise PublishError(f"version {self.version} could not be sent: {reason} ({last_line(error)})") from error

    async def _commit(self, arrived: dict[Replica, int], checksums: np.ndarray) -> Failures:
        """Have replicas commit the version; returns those that failed. ``arrived``: bytes received by each replica."""
        snapshot = snapshot_index(self.version)
        # Running sequences may delay a commit.
        deadline_s = self._group.call_deadline_s + max((replica.max_commit_delay_s for replica in arrived), default=0.0)
        commits = [
            within(
                deadline_s,
                replica.handle.commit.call_one(self.version, snapshot, checksums),
                f"{replica.name} to commit version {self.version}",
                on=replica.name,
                flag="patience",
            )
            for replica in arrived
        ]
        reports = await asyncio.gather(*commits, return_exceptions=True)
        failed: Failures = {}
        for replica, report in zip(arrived, reports, strict=True):
            if isinstance(report, BaseException):
                failed[replica] = report
                if not isinstance(getattr(report, "exception", report), StillServing):  # Monarch wraps it
                    replica.version = None
                continue
            replica.version = self.version
            self.max_received_bytes = max(self.max_received_bytes, arrived[replica])
            self.paused_s = max(self.paused_s, report.paused_seconds)
            self.verify_share = max(self.verify_share, report.verification_share)
        return failed

    async def _handle_failures(self, failed: Failures, is_last: bool) -> None:
        """Remove replicas that do not answer or failed at the last attempt; the others are sent the version again."""
        present = [replica for replica in failed if replica in self._replicas]  # others were removed meanwhile
        if not present:
            return
        gone = await unresponsive_replicas(present)
        # An attempt counts only if all members answer: otherwise the unresponsive one is to blame for every failure.
        if not gone and len(present) == len(failed):
            self._attempts += 1
        for replica in present:
            if replica not in self._replicas:  # removed while it was asked
                continue
            error = last_line(failed[replica])
            if replica in gone or (is_last and not gone):
                reason = gone.get(replica) or (
                    f"failed to load version {self.version} in {self._attempts} attempts; raise --patience for more"
                )
                self._replicas.remove(replica.index, f"{reason}: {error}")
            else:
                logger.warning(
                    "generator %d failed to load version %d (attempt %d of %d), retrying: %s",
                    replica.index,
                    self.version,
                    max(self._attempts, 1),
                    self._group.settings.attempts,
                    error,
                )
        await self._replicas.notify_workers()
        self._group.connected = None


# -- the transfer group: trainer ranks and generator replicas are connected, and versions are transferred -------------
#     connect            all members connect, whenever the set of replicas changes
#     snapshot(v)        trainer ranks copy their weights; then training may continue
#     transfer(v)        trainer ranks send, replicas receive; decoding continues
#
# Members of a transfer wait for each other, so a lost one would block the rest until the transfer's deadline, and on
# GPUs only the controller is notified of a lost process. Therefore :class:`Publication` checks that every member
# answers before a transfer, and once a call of a transfer fails, the members of the other calls abort.


class Member(Protocol):
    """An actor that takes part in transfers."""

    @concurrent_endpoint
    async def weights_abort(self, why: str) -> None:
        """Abort a transfer in progress."""


@dataclass(eq=False)
class TransferCall:
    """One of the calls of a transfer, which are answered together."""

    name: str
    """Name of the called actors in messages."""
    what: str
    """Completes the sentence "waited for <name> ..."."""
    answer: Awaitable[Any]
    """The call."""
    members: Sequence[Member]
    """The called actors."""
    replica: Replica | None = None
    """The called replica; None if trainer ranks are called."""
    lost: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Resolves to the reason once the replica is lost."""


async def _answer_or_loss(call: TransferCall, deadline_s: float) -> Any:
    """The answer to a call. Raises RuntimeError if its replica is lost meanwhile: a hung replica never answers."""
    what = f"{call.name} {call.what}"
    answer = asyncio.ensure_future(within(deadline_s, call.answer, what, on=call.name, flag="patience"))
    try:
        # waits: until the call's deadline
        await asyncio.wait({answer, call.lost}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        late = not answer.done()
        answer.cancel()
    if late:
        raise RuntimeError(f"{call.name} is lost: {call.lost.result()}")
    return answer.result()


def snapshot_index(version: int) -> int:
    """Index of the trainer's snapshot buffer for ``version``: the ``SNAPSHOTS`` buffers are used in turn."""
    return version % SNAPSHOTS


class TransferGroup:
    """The trainer ranks, and the replicas that they are connected with.

    Args:
        trainer: the mesh of all ranks.
        ranks: the mesh's actors, by rank.
        manifest: tensors of every version, and their layout.
        settings: the transport and its deadlines.
    """

    def __init__(self, trainer: Trainer, ranks: list[Trainer], manifest: Manifest, settings: TransferSettings) -> None:
        # The time that a large version takes on a slow network is added to the deadline of every member.
        deadline_s = min(settings.deadline_s + bytes_s(manifest.nbytes), FOREVER_S)
        self.manifest, self.settings = manifest, replace(settings, deadline_s=deadline_s)
        self.connected: list[Replica] | None = None
        """The replicas that the trainer ranks are connected with; None if they must be connected again."""
        self._trainer, self._ranks = trainer, ranks
        self._calls: list[TransferCall] = []
        """The calls in progress."""

    async def set_up_trainer(self) -> None:
        """Allocate memory for snapshots on every trainer rank."""
        set_up = self._trainer.weights_setup.call(self.manifest, self.settings)
        await within(CALL_DEADLINE_S, set_up, "trainer ranks to allocate snapshots", on="trainer ranks")

    async def set_up_replica(self, index: int, generator: Generator) -> Replica:
        """Allocate memory for incoming versions on a replica."""
        set_up = generator.weights_setup.call_one(self.manifest, self.settings)
        name = f"generator {index}"
        max_commit_delay_s = await within(CALL_DEADLINE_S, set_up, f"{name} to allocate memory for versions", on=name)
        return Replica(index, generator, max_commit_delay_s)

    async def connect(self, replicas: list[Replica]) -> None:
        """Connect the trainer ranks with exactly these replicas."""
        self.connected = None
        call = self._trainer.weights_open.call()
        opened = await within(CALL_DEADLINE_S, call, "trainer ranks to accept connections", on="trainer ranks")
        addresses = [address for _, address in sorted(opened.values())]
        count = len(replicas)
        accepting = self._trainer.weights_connect.call(addresses, count)
        calls = [TransferCall("trainer ranks", "to connect to the generators", accepting, self._ranks)]
        what = "to connect to the trainer ranks"
        for position, replica in enumerate(replicas):
            connecting = replica.handle.weights_connect.call_one(addresses, position, count)
            calls.append(TransferCall(replica.name, what, connecting, [replica.handle], replica))
        for answer in await self._answers(calls):
            if isinstance(answer, BaseException):
                raise answer
        self.connected = list(replicas)

    async def snapshot(self, version: int) -> float:
        """Copy the trainer's weights as ``version``; returns the seconds of the slowest rank."""
        call = self._trainer.snapshot.call(version, snapshot_index(version))
        what = f"trainer ranks to copy version {version}"
        seconds = await within(self.settings.deadline_s, call, what, on="trainer ranks", flag="patience")
        return float(max(seconds.values()))

    async def transfer(
        self, version: int, replicas: list[Replica]
    ) -> tuple[np.ndarray, dict[Replica, int | BaseException]]:
        """Send ``version`` to ``replicas``, which must be the connected ones.

        Returns:
            The trainer's checksum of each tensor, int64[tensors]; and for each replica the bytes received, or the
            exception it raised.

        Raises the first error of a trainer rank.
        """
        snapshot, what = snapshot_index(version), f"to send version {version}"
        calls = [
            TransferCall(f"trainer rank {r}", what, rank.send.call_one(version, snapshot), [rank])
            for r, rank in enumerate(self._ranks)
        ]
        what = f"to receive version {version}"
        for replica in replicas:
            receiving = replica.handle.receive.call_one(version, snapshot)
            calls.append(TransferCall(replica.name, what, receiving, [replica.handle], replica))
        answers = await self._answers(calls)
        received = answers[len(self._ranks) :]
        sums: list[np.ndarray] = []
        for answer in answers[: len(self._ranks)]:
            if isinstance(answer, BaseException):
                raise answer
            sums.append(answer)
        return add_checksums(sums), dict(zip(replicas, received, strict=True))

    def lose(self, replica: Replica, reason: str) -> None:
        """Stop waiting for a replica; a transfer that involves it is aborted immediately."""
        for call in self._calls:
            if call.replica is replica and not call.lost.done():
                call.lost.set_result(reason)

    @property
    def call_deadline_s(self) -> float:
        """Seconds for a call that is part of a transfer. Longer than the transfer's own deadline, which comes first."""
        return self.settings.deadline_s + CALL_DEADLINE_S

    async def measure(self, replicas: list[Replica]) -> float:
        """Seconds of a snapshot and its transfer: the better of two, because the first one warms up."""
        seconds = []
        for _ in range(2):
            started = now()
            await self.snapshot(0)
            _, received = await self.transfer(0, replicas)
            for answer in received.values():
                if isinstance(answer, BaseException):
                    raise answer
            seconds.append(now() - started)
        return min(seconds)

    async def unresponsive_rank(self) -> str | None:
        """Why a trainer rank does not answer; None if all answer."""
        asked = [ping_failure(f"trainer rank {r}", rank) for r, rank in enumerate(self._ranks)]
        return next((reason for reason in await asyncio.gather(*asked) if reason), None)

    async def _answers(self, calls: list[TransferCall]) -> list[Any]:
        """The answer to each call, or the exception it raised. Once one has failed, the other members abort."""
        self._calls = calls
        waits = [asyncio.ensure_future(_answer_or_loss(call, self.call_deadline_s)) for call in calls]
        try:
            # waits: until each call's own deadline
            await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
            failed = [error for wait in waits if wait.done() and (error := wait.exception())]
            late = [call for call, wait in zip(calls, waits, strict=True) if not wait.done()]
            aborts = [
                within(
                    CALL_DEADLINE_S,
                    member.weights_abort.call_one(last_line(failed[0])),
                    f"{call.name} to abort a transfer",
                    on=call.name,
                )
                for call in late
                for member in call.members
            ]
            # waits: until each call's own deadline
            answers = await asyncio.gather(*waits, *aborts, return_exceptions=True)
            return answers[: len(waits)]
        finally:
            self._calls = []
            for wait in waits:
                wait.cancel()
