"""New versions on their way from the trainer mesh to all generator replicas: transfer, commit, served.

    trainer ranks --snapshot(v)--> a copy --transport--> an area beside each engine       decoding goes on
    pause -> load -> checksums -> version v -> continue                                    decoding stops only here

A recipe calls the :class:`Publisher`. :class:`Delivery` delivers one version and finds who is to blame when that fails,
:class:`Meeting` transfers it, :class:`Replicas` lists which replicas are there and which are lost. ``recovery.py``
replaces the lost ones while the run continues. No version counts as published before every replica that is there serves
it: the buffer's bound on the lag depends on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from monarch_rl.buffer.actor import Buffer
from monarch_rl.generator.actor import Generator
from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, bytes_s, now, within
from monarch_rl.runtime.endpoint import concurrent_endpoint, members
from monarch_rl.settings.ranges import FOREVER_S
from monarch_rl.trainer.actor import Trainer
from monarch_rl.weights.checksum import NotFinite, add_checksums
from monarch_rl.weights.endpoint import SNAPSHOTS, StillServing, TransferSettings, TransportName
from monarch_rl.weights.manifest import Manifest, lay_out, make_manifest
from monarch_rl.weights.transport import TRANSPORTS

logger = logging.getLogger("monarch_rl")

T = TypeVar("T")


@dataclass(frozen=True)
class SwapReport:
    """One version's way from trainer to generators, in seconds."""

    version: int
    snapshot_s: float
    """The local copy on the trainer: all that publishing makes it wait."""
    transfer_s: float
    """From trainer ranks to the generators, while decoding went on."""
    paused_s: float
    """The longest time that a replica did not decode."""
    verify_share: float
    """The largest share of a replica's pause in which it computed checksums."""
    nbytes: int
    """Bytes of the version."""
    sent_bytes: int
    """The most bytes that a replica received."""


@dataclass(frozen=True)
class BaseWeights:
    """The weights that training leaves as they are: no version has them, trainer and generators must both hold them."""

    manifest: Manifest
    checksums: np.ndarray
    """The trainer's, by tensor name."""

    async def verify(self, index: int, generator: Generator) -> None:
        """Raise if a generator holds another model than the one whose adapters are trained."""
        call = generator.verify_base_weights.call_one(self.manifest, self.checksums)
        await within(CALL_DEADLINE_S, call, f"generator {index} to compare its model", on=f"generator {index}")


class Publisher:
    """Takes new versions from the trainer mesh to all generators. :meth:`connect` makes one.

    Args:
        meeting: connects the trainer's ranks with the replicas.
        buffer: releases slots when a version is published.
        replicas: the generators that are served.
        frozen: the weights that versions leave out; None if versions are whole.
    """

    def __init__(self, meeting: Meeting, buffer: Buffer, replicas: Replicas, frozen: BaseWeights | None = None) -> None:
        self.meeting, self.replicas = meeting, replicas
        self.last: SwapReport | None = None
        """Of the newest version that is served."""
        self._buffer, self._frozen = buffer, frozen
        self._deliveries: list[asyncio.Task[None]] = []
        """The deliveries that nobody has awaited to their end, oldest first."""
        self._latest: asyncio.Task[None] | None = None
        """The delivery that was begun last."""
        self._newest: int | None = None
        """Version of the newest snapshot."""
        self._snapshot_s: dict[int, float] = {}
        """Seconds of the snapshots of versions that are on their way."""

    @classmethod
    async def connect(
        cls,
        trainer: Trainer,
        generators: Mapping[int, Generator],
        buffer: Buffer,
        settings: TransferSettings,
        dtype: str,
        update_workers: UpdateDispatch | None = None,
    ) -> Publisher:
        """Plan what a version consists of, and connect the trainer ranks with the generators.

        Args:
            generators: by index.
            settings: with the transport ``auto``, every transport is measured and the fastest is taken.
            dtype: what generators serve.
            update_workers: called when rollout workers should ask other replicas than before.
        """
        meeting = Meeting(trainer, members(trainer), await _plan(trainer, dtype), settings)
        replicas, frozen = Replicas(update_workers), await _base_weights(trainer, dtype)
        if frozen is not None:
            for index, generator in generators.items():
                await frozen.verify(index, generator)
        if settings.transport == "auto":
            meeting.settings = await _fastest(meeting, replicas, generators)
        await _set_up_all(meeting, replicas, generators)
        return cls(meeting, buffer, replicas, frozen)

    @property
    def manifest(self) -> Manifest:
        """What a version consists of."""
        return self.meeting.manifest

    @property
    def settings(self) -> TransferSettings:
        """With the transport that was chosen."""
        return self.meeting.settings

    @property
    def generators(self) -> dict[int, Generator]:
        """The replicas that are there, by index."""
        return self.replicas.handles

    @property
    def lost(self) -> dict[int, str]:
        """Replicas that were removed, by index, and why."""
        return self.replicas.lost

    @property
    def on_lost(self) -> Callable[[int, str], None] | None:
        """Called with the index of a removed replica and the reason; see :class:`Replicas`."""
        return self.replicas.on_lost

    @on_lost.setter
    def on_lost(self, call: Callable[[int, str], None] | None) -> None:
        self.replicas.on_lost = call

    # -- what a recipe calls ---------------------------------------------------------------------------------------

    async def publish(self, version: int) -> None:
        """Take a snapshot of ``version`` and start its delivery; the trainer may go on when this returns.

        Two versions can be on their way; a third waits until the first is served. Raises what the first raised.
        """
        while len(self._deliveries) >= SNAPSHOTS:
            await self._deliveries.pop(0)  # waits: every wait of a delivery has a deadline of its own
        self._snapshot_s[version] = await self.meeting.snapshot(version)
        self._newest = version
        self._start_delivery(version)

    async def or_failed(self, work: Awaitable[T]) -> T:
        """Await ``work``, but raise at once if a version on its way cannot be delivered.

        Without generators nothing is drawn, so ``work`` may wait for a batch that cannot come.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self._raise_failed()
                # waits: as long as the work, whose deadlines are its own
                await asyncio.wait({task, *self._deliveries}, return_when=asyncio.FIRST_COMPLETED)
            return task.result()
        finally:
            task.cancel()

    async def settled(self) -> None:
        """Wait until the newest published version is served. Raises PublishError if it was abandoned."""
        while self._deliveries:
            await self._deliveries.pop(0)  # waits: every wait of a delivery has a deadline of its own

    def cancel(self) -> None:
        """Give up the versions that are on their way."""
        for delivery in self._deliveries:
            delivery.cancel()

    async def add(self, index: int, generator: Generator) -> None:
        """Take in a replica that was restarted; returns when it serves the newest version, verified.

        Raises:
            PublishError: it was removed again. Whatever its set-up raises is raised, too.
        """
        if self._newest is None:
            raise RuntimeError("nothing has been published yet")
        if self._frozen is not None:
            await self._frozen.verify(index, generator)
        self.replicas.add(await self.meeting.set_up_replica(index, generator))
        self.lost.pop(index, None)
        delivery = self._start_delivery(self._newest)
        await asyncio.shield(delivery)  # waits: every wait of a delivery has a deadline of its own
        if index in self.lost:
            raise PublishError(f"generator {index} is lost again: {self.lost[index]}")

    async def remove_replica(self, index: int, why: str) -> None:
        """Do without a replica from now on."""
        removed = self.replicas.remove(index, why)
        if removed is not None:
            self.meeting.lose(removed, why)
        await self.update_dispatch()

    async def update_dispatch(self) -> None:
        """Tell the rollout workers which replicas to ask."""
        await self.replicas.update_dispatch()

    # -- deliveries: each waits for the one before -----------------------------------------------------------------

    def _start_delivery(self, version: int) -> asyncio.Task[None]:
        self._latest = delivery = asyncio.create_task(self._deliver(version, self._latest))
        delivery.add_done_callback(_retrieve)  # the next one fails of the same cause; one of them is awaited
        self._deliveries.append(delivery)
        return delivery

    def _raise_failed(self) -> None:
        """Forget the deliveries that are done; raise what one of them raised."""
        while self._deliveries and self._deliveries[0].done():
            self._deliveries.pop(0).result()  # waits: it is done

    async def _deliver(self, version: int, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.shield(before)  # waits: its calls have deadlines
        delivery = Delivery(version, self.meeting, self.replicas)
        await delivery.run()
        if not len(self.replicas):
            if self.on_lost is None:
                reasons = "; ".join(f"generator {index}: {why}" for index, why in self.lost.items())
                raise PublishError(f"version {version} is abandoned: no generator is left to serve it. {reasons}")
            return  # the next replica that comes is sent the newest version
        if version in self._snapshot_s:  # else it is sent again, to a replica that was restarted
            self.last = SwapReport(
                version,
                self._snapshot_s[version],
                delivery.transfer_s,
                delivery.paused_s,
                delivery.verify_share,
                self.manifest.nbytes,
                delivery.sent_bytes,
            )
            self._snapshot_s = {later: taken for later, taken in self._snapshot_s.items() if later > version}
        await self.update_dispatch()
        if version > 0:
            call = self._buffer.published.call_one(version)
            await within(CALL_DEADLINE_S, call, "the buffer to release slots", on="buffer")
        wait_registry.progress("version published")


async def _set_up_all(meeting: Meeting, replicas: Replicas, generators: Mapping[int, Generator]) -> None:
    """Make room for versions everywhere, and connect the trainer ranks with all generators."""
    await meeting.set_up_trainer()
    for index, generator in generators.items():
        replicas.add(await meeting.set_up_replica(index, generator))
    await meeting.connect(list(replicas))


async def _fastest(meeting: Meeting, replicas: Replicas, generators: Mapping[int, Generator]) -> TransferSettings:
    """Send the weights by every transport, commit nothing, and choose one; prints what was measured."""
    seconds: dict[TransportName, float] = {}
    for name in TRANSPORTS:
        try:
            meeting.settings = replace(meeting.settings, transport=name)
            await _set_up_all(meeting, replicas, generators)
            seconds[name] = await meeting.rehearse(list(replicas))
        except Exception as error:
            logger.warning("transport %s does not work here: %s", name, last_line(error))
    if not seconds:
        raise PublishError("no transport works here; the reasons are above")
    nbytes = meeting.manifest.nbytes
    rates = ", ".join(
        f"{name} {taken * 1e3:.3g} ms ({nbytes / taken / 1e9:.3g} GB/s)"
        for name, taken in sorted(seconds.items(), key=lambda item: item[1])
    )
    best = min(seconds, key=lambda name: seconds[name])
    print(f"Weights travel by {best}: snapshot and transfer of {nbytes / 1e6:.4g} MB took {rates}.")
    return replace(meeting.settings, transport=best)


async def _plan(trainer: Trainer, dtype: str) -> Manifest:
    """The tensors of a version in ``dtype``, and the parts of them that each trainer rank sends."""
    call = trainer.owned_runs.call()
    answers = await within(CALL_DEADLINE_S, call, "trainer ranks to say what they own", on="trainer ranks")
    by_rank = sorted(answers.values(), key=lambda answer: answer[0])
    served = getattr(torch, dtype)
    tensors = [(name, shape, served) for name, shape in by_rank[0][1]]
    return make_manifest(tensors, [runs for _, _, runs in by_rank])


async def _base_weights(trainer: Trainer, dtype: str) -> BaseWeights | None:
    """The weights that no trainer rank changes, with checksums of them in ``dtype``; None if all are trained."""
    call = trainer.frozen_checksums.call(dtype)
    answers = await within(
        CALL_DEADLINE_S, call, "trainer ranks to compute checksums of their frozen weights", on="trainer ranks"
    )
    by_rank = list(answers.values())
    tensors = by_rank[0][0]
    if not tensors:
        return None
    specs, nbytes = lay_out([(name, shape, getattr(torch, dtype)) for name, shape in tensors])
    return BaseWeights(Manifest(specs, nbytes, ()), add_checksums([sums for _, sums in by_rank]))


def _retrieve(delivery: asyncio.Task[None]) -> None:
    """Take the exception of a delivery, so that asyncio does not report it as never retrieved."""
    if not delivery.cancelled():
        delivery.exception()


# -- joint calls: members answer them together; once one is lost, the others are told to stop -------------------------
# Members of a transfer wait for each other. One that is gone would hold up the rest until the transfer's deadline; on
# GPUs nobody but the controller hears that it is gone.


class Member(Protocol):
    """An actor that takes part in transfers."""

    @concurrent_endpoint
    async def weights_abort(self, why: str) -> None:
        """End a transfer under way."""


@dataclass(eq=False)
class GroupCall:
    """One of several calls that are answered together."""

    name: str
    """Who is asked."""
    what: str
    """Completes the sentence "waited for <name> ..."."""
    answer: Awaitable[Any]
    """The call itself."""
    members: Sequence[Member]
    """The actors that the call is made to."""
    replica: Replica | None = None
    """If it is made to one."""
    lost: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Why the replica is lost; done when it is."""


class GroupCalls:
    """The calls under way of one meeting."""

    def __init__(self) -> None:
        self._under_way: list[GroupCall] = []

    def lose(self, replica: Replica, why: str) -> None:
        """Do not wait for this replica any more."""
        for call in self._under_way:
            if call.replica is replica and not call.lost.done():
                call.lost.set_result(why)

    async def run(self, calls: list[GroupCall], deadline_s: float) -> list[Any]:
        """Await all calls, each within ``deadline_s``; once one has failed, tell the others' actors to abort.

        Returns:
            The answer to each call, or what it raised.
        """
        self._under_way = calls
        waits = [asyncio.ensure_future(_answer_or_loss(call, deadline_s)) for call in calls]
        try:
            # waits: until each call's own deadline
            await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
            failed = [error for wait in waits if wait.done() and (error := wait.exception())]
            late = [call for call, wait in zip(calls, waits, strict=True) if not wait.done()]
            aborts = [abort for call in late for abort in _aborts(call, last_line(failed[0]))]
            # waits: until each call's own deadline
            answers = await asyncio.gather(*waits, *aborts, return_exceptions=True)
            return answers[: len(waits)]
        finally:
            self._under_way = []
            for wait in waits:
                wait.cancel()


def _aborts(call: GroupCall, why: str) -> list[Awaitable[None]]:
    """Tell all that are called to end what they do."""
    what = f"{call.name} to abort a transfer"
    return [within(CALL_DEADLINE_S, member.weights_abort.call_one(why), what, on=call.name) for member in call.members]


async def _answer_or_loss(call: GroupCall, deadline_s: float) -> Any:
    """The answer to a call. Raises RuntimeError if its replica is lost meanwhile: one that hangs never answers."""
    answer = asyncio.ensure_future(within(deadline_s, call.answer, f"{call.name} {call.what}", on=call.name))
    try:
        # waits: until the call's deadline
        await asyncio.wait({answer, call.lost}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        late = not answer.done()
        answer.cancel()
    if late:
        raise RuntimeError(f"{call.name} is lost: {call.lost.result()}")
    return answer.result()


# -- the meeting of trainer ranks and generator replicas: they connect, and versions are transferred ------------------
#     connect            all members meet, whenever the set of replicas changes
#     snapshot(v)        trainer ranks copy their weights; then the trainer may go on
#     transfer(v)        trainer ranks send, replicas receive; decoding goes on
#
# A member that is gone can hold up all others, so :class:`Delivery` asks every member before a transfer.


def snapshot_index(version: int) -> int:
    """Which of the trainer's ``SNAPSHOTS`` buffers holds ``version``: they are used in turn."""
    return version % SNAPSHOTS


class Meeting:
    """The trainer ranks, and the replicas that they are connected with.

    Args:
        trainer: the mesh of all ranks.
        ranks: its members, by rank.
        manifest: of every version.
        settings: the transport and its deadlines.
    """

    def __init__(self, trainer: Trainer, ranks: list[Trainer], manifest: Manifest, settings: TransferSettings) -> None:
        # What a large version takes where the network is slow comes on top, for every end of the transport.
        deadline_s = min(settings.deadline_s + bytes_s(manifest.nbytes), FOREVER_S)
        self.manifest, self.settings = manifest, replace(settings, deadline_s=deadline_s)
        self.connected: list[Replica] | None = None
        """The replicas that the trainer ranks are connected with; None if they must be connected again."""
        self._trainer, self._ranks = trainer, ranks
        self._joint = GroupCalls()

    async def set_up_trainer(self) -> None:
        """Make room for snapshots on every trainer rank."""
        set_up = self._trainer.weights_setup.call(self.manifest, self.settings)
        await within(CALL_DEADLINE_S, set_up, "trainer ranks to make room for snapshots", on="trainer ranks")

    async def set_up_replica(self, index: int, generator: Generator) -> Replica:
        """Make room for versions on a replica."""
        set_up = generator.weights_setup.call_one(self.manifest, self.settings)
        name = f"generator {index}"
        hold_s = await within(CALL_DEADLINE_S, set_up, f"{name} to make room for versions", on=name)
        return Replica(index, generator, hold_s)

    async def connect(self, replicas: list[Replica]) -> None:
        """Connect the trainer ranks with these replicas, and with nobody else."""
        self.connected = None
        call = self._trainer.weights_open.call()
        opened = await within(CALL_DEADLINE_S, call, "trainer ranks to open a meeting", on="trainer ranks")
        addresses = [address for _, address in sorted(opened.values())]
        count = len(replicas)
        meeting = self._trainer.weights_connect.call(addresses, count)
        calls = [GroupCall("trainer ranks", "to meet the generators", meeting, self._ranks)]
        what = "to meet the trainer ranks"
        for position, replica in enumerate(replicas):
            connecting = replica.handle.weights_connect.call_one(addresses, position, count)
            calls.append(GroupCall(replica.name, what, connecting, [replica.handle], replica))
        for answer in await self._joint.run(calls, self._deadline_s):
            if isinstance(answer, BaseException):
                raise answer
        self.connected = list(replicas)

    async def snapshot(self, version: int) -> float:
        """Copy the trainer's weights, which are those of ``version``; returns the seconds of the slowest rank."""
        call = self._trainer.snapshot.call(version, snapshot_index(version))
        what = f"trainer ranks to copy version {version}"
        seconds = await within(self.settings.deadline_s, call, what, on="trainer ranks", flag="weights.deadline-s")
        return float(max(seconds.values()))

    async def transfer(
        self, version: int, replicas: list[Replica]
    ) -> tuple[np.ndarray, dict[Replica, int | BaseException]]:
        """Send all bytes of ``version`` to all ``replicas``, which must be the connected ones.

        Returns:
            The trainer's checksum of each tensor, int64[tensors]; and the bytes that each replica received, or why it
            did not.

        Raises whatever a trainer rank raised.
        """
        snapshot, what = snapshot_index(version), f"to send version {version}"
        calls = [
            GroupCall(f"trainer rank {r}", what, rank.send.call_one(version, snapshot), [rank])
            for r, rank in enumerate(self._ranks)
        ]
        what = f"to receive version {version}"
        for replica in replicas:
            receiving = replica.handle.receive.call_one(version, snapshot)
            calls.append(GroupCall(replica.name, what, receiving, [replica.handle], replica))
        answers = await self._joint.run(calls, self._deadline_s)
        received = answers[len(self._ranks) :]
        sums: list[np.ndarray] = []
        for answer in answers[: len(self._ranks)]:
            if isinstance(answer, BaseException):
                raise answer
            sums.append(answer)
        return add_checksums(sums), dict(zip(replicas, received, strict=True))

    def lose(self, replica: Replica, why: str) -> None:
        """Do not wait for a replica any more; a transfer that it takes part in is aborted at once."""
        self._joint.lose(replica, why)

    @property
    def _deadline_s(self) -> float:
        """Seconds for a call that takes part in a transfer, which has its own deadline."""
        return self.settings.deadline_s + CALL_DEADLINE_S

    async def rehearse(self, replicas: list[Replica]) -> float:
        """Seconds of a snapshot and its transfer; the better of two, because the first one warms up."""
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

    async def answers(
        self, calls: Iterable[tuple[str, str, Awaitable[T]]], hold_s: float = 0.0
    ) -> list[T | BaseException]:
        """Await calls at once, each within the deadline of a transfer + ``hold_s``.

        Args:
            calls: who is asked, to do what, and the call itself.
            hold_s: seconds for which running sequences may hold up an answer.

        Returns:
            The answer to each call, or what it raised.
        """
        deadline = self._deadline_s + hold_s
        waits = [within(deadline, call, f"{who} {what}", on=who) for who, what, call in calls]
        return await asyncio.gather(*waits, return_exceptions=True)

    async def unresponsive_rank(self) -> str | None:
        """What is wrong with a trainer rank that does not answer; None if all answer."""
        asked = [silence_of(f"trainer rank {r}", rank) for r, rank in enumerate(self._ranks)]
        return next((reason for reason in await asyncio.gather(*asked) if reason), None)


# -- the generator replicas of a run: which are there, which version each serves, which are lost ----------------------

ANSWER_DEADLINE_S = 20.0
"""Seconds in which a living process answers, on a machine with all cores busy."""

UpdateDispatch = Callable[[list[int], list[int]], Awaitable[None]]
"""Tells the rollout workers which replicas take no new requests for now, and which are lost."""


@dataclass(eq=False)
class Replica:
    """One generator process. After a loss, another ``Replica`` takes its index."""

    index: int
    handle: Generator
    hold_s: float
    """Seconds for which its running sequences may hold up a commit."""
    version: int | None = None
    """The version it was last known to serve; None if it serves nothing."""

    @property
    def name(self) -> str:
        return f"generator {self.index}"


class Replicas:
    """The replicas that are there, by index, and the ones that are lost.

    Args:
        update_workers: called whenever the dispatch of requests should change; None calls nothing.
    """

    def __init__(self, update_workers: UpdateDispatch | None = None) -> None:
        self.update_workers = update_workers
        self.lost: dict[int, str] = {}
        """Replicas that were removed, by index, and why."""
        self.on_lost: Callable[[int, str], None] | None = None
        """Called with the index of a removed replica and the reason. While it is set, a run that has lost all replicas
        waits for a new one; without it, that is an error."""
        self._present: dict[int, Replica] = {}

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._present.values()))

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, replica: Replica) -> bool:
        """Whether this very process is there: another one may have taken its index."""
        return self._present.get(replica.index) is replica

    @property
    def handles(self) -> dict[int, Generator]:
        """The replicas that are there, by index."""
        return {replica.index: replica.handle for replica in self}

    def behind(self, version: int) -> list[Replica]:
        """The replicas that do not serve ``version``."""
        return [replica for replica in self if replica.version != version]

    def add(self, replica: Replica) -> None:
        """Add a replica; it takes the place of another one with its index."""
        self._present[replica.index] = replica

    def remove(self, index: int, why: str) -> Replica | None:
        """Take a replica as lost and return it. None if it was removed already."""
        removed = self._present.pop(index, None)
        if removed is None:
            return None
        self.lost[index] = why
        others = ", ".join(f"generator {other}" for other in self._present) or "no generator"
        logger.error("generator %d is lost (%s); left: %s", index, why, others)
        if self.on_lost is not None:
            self.on_lost(index, why)
        return removed

    async def update_dispatch(self) -> None:
        """Tell the rollout workers which replicas to ask.

        A replica that only missed a transfer takes requests: it serves the version before, which is whole.
        """
        if self.update_workers is not None:
            paused = [replica.index for replica in self if replica.version is None]
            await self.update_workers(paused, list(self.lost))  # waits: replica_updates has a deadline


class Answering(Protocol):
    """An actor that can be asked whether it is alive."""

    @concurrent_endpoint
    async def ready(self) -> None:
        """Raise what is wrong with the actor."""


async def answers(name: str, actor: Answering) -> None:
    """Raise if an actor does not answer within ``ANSWER_DEADLINE_S``."""
    await within(ANSWER_DEADLINE_S, actor.ready.call_one(), f"{name} to say that it is there", on=name)


async def silence_of(name: str, actor: Answering) -> str | None:
    """What is wrong with an actor that does not answer within ``ANSWER_DEADLINE_S``; None if it answers."""
    try:
        await answers(name, actor)
    except Exception as error:
        return f"{name} does not answer: {last_line(error)}"
    return None


async def silent(replicas: list[Replica]) -> dict[Replica, str]:
    """Which of these replicas do not answer, and what is wrong with each."""
    reasons = await asyncio.gather(*(silence_of(replica.name, replica.handle) for replica in replicas))
    return {replica: reason for replica, reason in zip(replicas, reasons, strict=True) if reason}


# -- the delivery of one version to all replicas: who is ready, transfer, commits, who is to blame --------------------
# A replica commits a version only when all of it has arrived, and serves it only when the checksums of what its
# engine then holds equal the trainer's. A replica that answers but did not take the version is sent it again, and is
# removed after ``attempts`` attempts. A replica that does not answer is removed at once.

Failures = dict[Replica, BaseException]
"""Why each of some replicas did not take a version."""


class PublishError(RuntimeError):
    """A version is abandoned because it cannot be delivered; the message names who is to blame."""


class Delivery:
    """The delivery of one version to every replica that does not serve it.

    Args:
        version: the trainer holds a snapshot of it.
        meeting: transfers it.
        replicas: receive it; those that fail are removed from them.
    """

    def __init__(self, version: int, meeting: Meeting, replicas: Replicas) -> None:
        self.version = version
        self.transfer_s = 0.0
        """Seconds of all transfers: there may have been several attempts."""
        self.paused_s = 0.0
        """The longest time, in seconds, that a replica did not decode."""
        self.verify_share = 0.0
        """The largest share of a replica's pause in which it computed checksums."""
        self.sent_bytes = 0
        """The most bytes that a replica received."""
        self._meeting, self._replicas = meeting, replicas
        self._attempts = 0
        """Attempts that failed although all members answered."""

    async def run(self) -> None:
        """Return when every replica that is there serves the version, also when none is left.

        Raises:
            PublishError: a trainer rank does not answer, or the version is not finite.
        """
        while behind := self._replicas.behind(self.version):
            is_last = self._attempts + 1 == self._meeting.settings.attempts
            failed: Failures = {}
            # In a common transfer, one replica that fails can fail the others: the last attempt sends to each alone.
            for together in [[replica] for replica in behind] if is_last and self._attempts else [behind]:
                failed |= await self._attempt(together)
            await self._judge(failed, is_last)

    async def _attempt(self, replicas: list[Replica]) -> Failures:
        """Transfer the version to ``replicas`` and let them commit it; returns why some failed. Raises PublishError."""
        # A rank that enters a collective early waits inside it: first every peer's answer, then the transfer.
        failed = await self._all_ready(replicas)
        replicas = [replica for replica in replicas if replica not in failed]
        if not replicas:
            return failed
        started = now()
        try:
            if self._meeting.connected != replicas:
                await self._meeting.connect(replicas)
            checksums, received = await self._meeting.transfer(self.version, replicas)
        except Exception as error:
            self._check_finite(error)
            await self._blame_trainer(error)
            return failed | {replica: error for replica in replicas}
        self.transfer_s += now() - started
        arrived: dict[Replica, int] = {}
        for replica, nbytes in received.items():
            if isinstance(nbytes, BaseException):
                failed[replica] = nbytes
            else:
                arrived[replica] = nbytes
        return failed | await self._commit(arrived, checksums)

    async def _all_ready(self, replicas: list[Replica]) -> Failures:
        """Ask every member whether it is there; returns the replicas that do not answer. Raises PublishError."""
        asked = [replica for replica in replicas if replica in self._replicas]
        absent, rank = await asyncio.gather(silent(asked), self._meeting.unresponsive_rank())
        if rank is not None:
            raise PublishError(f"version {self.version} cannot be sent: {rank}")
        return {replica: PublishError(why) for replica, why in absent.items()}

    def _check_finite(self, error: Exception) -> None:
        """Raise PublishError if a transfer has failed with ``error`` because of the version itself."""
        cause = getattr(error, "exception", error)  # Monarch wraps it
        if isinstance(cause, NotFinite):
            made = f"which step {self.version} made" if self.version else "the model that was loaded"
            raise PublishError(
                f"version {self.version}, {made}, is not served: {cause}. Lower trainer.lr, or what scales the update "
                "in your objective"
            ) from error

    async def _blame_trainer(self, error: Exception) -> None:
        """Raise PublishError if a trainer rank does not answer after a transfer has failed with ``error``."""
        rank = await self._meeting.unresponsive_rank()
        if rank is not None:
            raise PublishError(f"version {self.version} could not be sent: {rank} ({last_line(error)})") from error

    async def _commit(self, arrived: dict[Replica, int], checksums: np.ndarray) -> Failures:
        """Let replicas serve the version; returns why some do not. ``arrived``: the bytes that each has received."""
        snapshot, what = snapshot_index(self.version), f"to commit version {self.version}"
        commits = [
            (replica.name, what, replica.handle.commit.call_one(self.version, snapshot, checksums))
            for replica in arrived
        ]
        hold_s = max((replica.hold_s for replica in arrived), default=0.0)
        reports = await self._meeting.answers(commits, hold_s)
        failed: Failures = {}
        for replica, report in zip(arrived, reports, strict=True):
            if isinstance(report, BaseException):
                failed[replica] = report
                if not isinstance(getattr(report, "exception", report), StillServing):  # Monarch wraps it
                    replica.version = None
                continue
            replica.version = self.version
            self.sent_bytes = max(self.sent_bytes, arrived[replica])
            self.paused_s = max(self.paused_s, report.paused_seconds)
            self.verify_share = max(self.verify_share, report.verification_share)
        return failed

    async def _judge(self, failed: Failures, is_last: bool) -> None:
        """Remove the replicas that are gone, or failed at the last attempt; the others are sent the version again.

        An attempt counts only if all members answer: otherwise the silent one is to blame for every failure.
        """
        present = [replica for replica in failed if replica in self._replicas]  # others were removed meanwhile
        if not present:
            return
        gone = await silent(present)
        if not gone and len(present) == len(failed):
            self._attempts += 1
        for replica in present:
            if replica not in self._replicas:  # removed while it was asked
                continue
            error = last_line(failed[replica])
            if replica in gone or (is_last and not gone):
                why = gone.get(replica) or f"no version in {self._attempts} attempts"
                self._replicas.remove(replica.index, f"{why}: {error}")
            else:
                logger.warning(
                    "generator %d did not take version %d (attempt %d of %d) and is sent it again: %s",
                    *(replica.index, self.version, max(self._attempts, 1), self._meeting.settings.attempts, error),
                )
        await self._replicas.update_dispatch()
        self._meeting.connected = None
