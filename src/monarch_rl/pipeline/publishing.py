"""New versions on their way from the trainer mesh to all generator replicas: transfer, commit, served.

    trainer ranks --snapshot(v)--> a slot --transport--> an area beside each engine       decoding goes on
    pause -> load -> checksums -> version v -> continue                                    decoding stops only here

A version is committed by a replica only when all of it has arrived there, and served only when the checksums of what
the engine then holds equal the trainer's. A replica that could not take a version is sent it again, ``attempts`` times
in all, and is out of the routing while it serves nothing; one that is gone or does not answer is given up, and the run
goes on with the rest, and with the one that takes its place (``recovery.py``). No version counts as published before
every replica that is left serves it: the buffer's bound on the lag depends on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.runtime import presence
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, now, within
from monarch_rl.runtime.meshes import members
from monarch_rl.weights.checksum import signed
from monarch_rl.weights.endpoint import SNAPSHOTS, StillServing, TransferSettings, TransportName
from monarch_rl.weights.manifest import Manifest, lay_out, make_manifest
from monarch_rl.weights.transport import TRANSPORTS

logger = logging.getLogger("monarch_rl")

ANSWER_DEADLINE_S = 20.0
"""Seconds in which a living process answers that it is there, on a machine with all cores busy."""

T = TypeVar("T")
TellWorkers = Callable[[list[int], list[int]], Awaitable[None]]
"""Tells the rollout workers which replicas take no new requests for now, and which are lost."""


class PublishError(RuntimeError):
    """A version cannot be delivered to anybody; the message names who is to blame."""


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
    """Of that time, the part that computed checksums: the largest share of a replica."""
    nbytes: int
    """Bytes of the version."""
    sent_bytes: int
    """Bytes that came at a replica."""


@dataclass
class _Delivery:
    """What the delivery of one version has taken so far, over all attempts: see :class:`SwapReport`."""

    transfer_s: float = 0.0
    paused_s: float = 0.0
    verify_share: float = 0.0
    sent_bytes: int = 0


@dataclass(eq=False)
class _Replica:
    index: int
    handle: Any
    hold_s: float
    """Seconds for which its running sequences may hold up a commit."""
    serves: int | None = None
    """The version it was last known to serve."""


@dataclass
class Publisher:
    """Takes new versions from the trainer mesh to all generators."""

    trainer: Any
    buffer: Any
    settings: TransferSettings
    manifest: Manifest
    tell_workers: TellWorkers | None = None
    last: SwapReport | None = None
    """Of the newest version that is served."""
    lost: dict[int, str] = field(default_factory=dict)
    """Replicas that were given up, and why."""
    on_lost: Callable[[int, str], None] | None = None
    """Hears of each, and says whether the run goes on when none is left; without it, that is an error here."""
    _ranks: list[Any] = field(default_factory=list, repr=False)
    _replicas: dict[int, _Replica] = field(default_factory=dict, repr=False)
    _deliveries: list[asyncio.Task[None]] = field(default_factory=list, repr=False)
    _latest: asyncio.Task[None] | None = field(default=None, repr=False)
    """The delivery that was begun last."""
    _met: list[_Replica] | None = field(default=None, repr=False)
    """The replicas that are connected with the trainer ranks."""
    _newest: int | None = field(default=None, repr=False)
    """Version of the newest snapshot."""
    _snapshot_s: dict[int, float] = field(default_factory=dict, repr=False)
    """Seconds of the snapshots of versions that are on their way."""
    _frozen: tuple[Manifest, dict[str, int]] | None = field(default=None, repr=False)
    """With adapters: the weights that are not sent, and the trainer's checksums of them."""

    @classmethod
    async def connect(
        cls,
        trainer: Any,
        generators: Mapping[int, Any],
        buffer: Any,
        settings: TransferSettings,
        dtype: str,
        tell_workers: TellWorkers | None = None,
    ) -> Publisher:
        """Plan what a version consists of, and let trainer ranks and generators, by index, meet. ``dtype``: served."""
        manifest = await _plan(trainer, dtype)
        publisher = cls(trainer, buffer, settings, manifest, tell_workers, _ranks=members(trainer))
        publisher._frozen = await _frozen(trainer, dtype)
        for index, generator in generators.items():
            await publisher._verify_frozen(index, generator)
        if settings.transport == "auto":
            publisher.settings = await publisher._fastest(generators)
        await publisher._set_up_all(generators)
        return publisher

    async def _set_up_all(self, generators: Mapping[int, Any]) -> None:
        set_up = self.trainer.weights_setup.call(self.manifest, self.settings)
        await within(CALL_DEADLINE_S, set_up, "trainer ranks to make room for snapshots", on="trainer ranks")
        for index, generator in generators.items():
            await self._set_up(index, generator)
        await self._meet(list(self._replicas.values()))

    async def _fastest(self, generators: Mapping[int, Any]) -> TransferSettings:
        """Send the weights by every transport, commit nothing, and choose; prints what was measured."""
        found: dict[TransportName, float] = {}
        for name in TRANSPORTS:
            try:
                self.settings = replace(self.settings, transport=name)
                await self._set_up_all(generators)
                found[name] = await self._rehearse()
            except Exception as error:
                logger.warning("transport %s does not work here: %s", name, last_line(error))
        if not found:
            raise PublishError("no transport works here; the reasons are above")
        rates = ", ".join(
            f"{name} {seconds * 1e3:.3g} ms ({self.manifest.nbytes / seconds / 1e9:.3g} GB/s)"
            for name, seconds in sorted(found.items(), key=lambda item: item[1])
        )
        best = min(found, key=lambda name: found[name])
        print(f"Weights travel by {best}: snapshot and transfer of {self.manifest.nbytes / 1e6:.4g} MB took {rates}.")
        return replace(self.settings, transport=best)

    async def _rehearse(self) -> float:
        """Seconds of a snapshot and its transfer; the better of two, since the first one warms up."""
        seconds = []
        for _ in range(2):
            started = now()
            await self._snapshot(0)
            _, received = await self._transfer(0, list(self._replicas.values()))
            for found in received.values():
                if isinstance(found, Exception):
                    raise found
            seconds.append(now() - started)
        return min(seconds)

    @property
    def generators(self) -> dict[int, Any]:
        """The replicas that are not lost, by index."""
        return {index: replica.handle for index, replica in self._replicas.items()}

    # -- what a recipe calls ---------------------------------------------------------------------------------------

    async def publish(self, version: int) -> None:
        """Take a snapshot of ``version`` and send it on its way; the trainer may go on when this returns.

        Two versions can be on their way; a third waits until the first is served. Raises what the first raised.
        """
        while len(self._deliveries) >= SNAPSHOTS:
            await self._deliveries.pop(0)  # waits: every wait of a delivery has a deadline of its own
        self._snapshot_s[version] = await self._snapshot(version)
        self._newest = version
        self._send_on(version)

    async def or_failed(self, work: Awaitable[T]) -> T:
        """Await ``work``, but raise at once if a version on its way cannot be delivered.

        Without generators nothing is drawn, so ``work`` may wait for a batch that cannot come.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self._clear()
                # waits: as long as the work, whose deadlines are its own
                await asyncio.wait({task, *self._deliveries}, return_when=asyncio.FIRST_COMPLETED)
            return task.result()
        finally:
            task.cancel()

    async def settled(self) -> None:
        """Wait until the newest published version is served. Raises if it could not be delivered."""
        while self._deliveries:
            await self._deliveries.pop(0)  # waits: every wait of a delivery has a deadline of its own

    async def add(self, index: int, generator: Any) -> None:
        """Take in a replica that was started anew; returns when it serves the newest version, verified.

        Raises:
            PublishError: it was given up again. What it raises is raised, too.
        """
        if self._newest is None:
            raise RuntimeError("nothing has been published yet")
        await self._verify_frozen(index, generator)
        await self._set_up(index, generator)
        self.lost.pop(index, None)
        await asyncio.shield(self._send_on(self._newest))  # waits: every wait of a delivery has a deadline of its own
        if index in self.lost:
            raise PublishError(f"generator {index} is lost again: {self.lost[index]}")

    async def give_up(self, index: int, why: str) -> None:
        """Do without a replica from now on."""
        self._give_up(index, why)
        await self.update_dispatch()

    async def update_dispatch(self) -> None:
        """Tell the rollout workers which replicas to ask.

        One that only missed a transfer serves the version before, which is whole: nothing is published yet.
        """
        if self.tell_workers is not None:
            paused = [index for index, replica in self._replicas.items() if replica.serves is None]
            await self.tell_workers(paused, list(self.lost))  # waits: pipeline.routing has a deadline

    async def _snapshot(self, version: int) -> float:
        call = self.trainer.snapshot.call(version, version % SNAPSHOTS)
        what = f"trainer ranks to copy version {version}"
        answers = await within(self.settings.deadline_s, call, what, on="trainer ranks")
        return float(max(answers.values()))

    # -- one delivery ----------------------------------------------------------------------------------------------

    def _send_on(self, version: int) -> asyncio.Task[None]:
        self._latest = delivery = asyncio.create_task(self._deliver(version, self._latest))
        delivery.add_done_callback(_heard)  # the next one fails of the same cause; one of them is awaited
        self._deliveries.append(delivery)
        return delivery

    def _clear(self) -> None:
        while self._deliveries and self._deliveries[0].done():
            self._deliveries.pop(0).result()  # waits: it is done

    async def _deliver(self, version: int, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.shield(before)  # waits: its calls have deadlines
        took, attempts = _Delivery(), 0
        while waiting := [replica for replica in self._replicas.values() if replica.serves != version]:
            last = attempts + 1 == self.settings.attempts
            # In a common transfer one that fails may take the others along: at last each has one of its own.
            parts = [[replica] for replica in waiting] if last and attempts else [waiting]
            failed: dict[int, Exception] = {}
            for part in parts:
                failed |= await self._attempt(version, part, took)
            left = {replica.index for replica in waiting if self._replicas.get(replica.index) is replica}
            alone = failed.keys() <= left  # else who is gone is to blame, perhaps replaced by now
            failed = {index: error for index, error in failed.items() if index in left}
            if not failed:
                continue
            gone = await self._gone(failed)
            asked = {replica.index: replica for replica in waiting}
            failed = {index: error for index, error in failed.items() if self._replicas.get(index) is asked[index]}
            if not gone and alone:
                attempts += 1
            for index, error in failed.items():
                if index in gone or (last and not gone):
                    why = gone.get(index) or f"no version in {attempts} attempts"
                    self._give_up(index, f"{why}: {last_line(error)}")
                elif index in self._replicas:
                    logger.warning(
                        "generator %d did not take version %d (attempt %d of %d) and is sent it again: %s",
                        *(index, version, max(attempts, 1), self.settings.attempts, last_line(error)),
                    )
            await self.update_dispatch()
            self._met = None
        if not self._replicas:
            if self.on_lost is not None:  # the next one that comes is sent the newest version
                return
            reasons = "; ".join(f"generator {index}: {why}" for index, why in self.lost.items())
            raise PublishError(f"no generator is left to serve version {version}. {reasons}")
        self.last = SwapReport(
            version,
            self._snapshot_s.pop(version, 0.0),
            took.transfer_s,
            took.paused_s,
            took.verify_share,
            self.manifest.nbytes,
            took.sent_bytes,
        )
        await self.update_dispatch()
        if version > 0:
            call = self.buffer.published.call_one(version)
            await within(CALL_DEADLINE_S, call, "the buffer to release slots", on="buffer")
        presence.progress("version published")

    async def _gone(self, indices: Iterable[int]) -> dict[int, str]:
        """Which of these replicas do not answer, and what is wrong with them."""
        asked = [self._replicas[index] for index in indices if index in self._replicas]
        answers = [self._unanswered(replica.handle, f"generator {replica.index}") for replica in asked]
        found = zip(asked, await asyncio.gather(*answers), strict=True)
        return {replica.index: why for replica, why in found if why}

    async def _attempt(self, version: int, replicas: list[_Replica], took: _Delivery) -> dict[int, Exception]:
        """Transfer to and commit on ``replicas``; why it failed, by replica. Raises PublishError if trainers fail."""
        # A rank that enters a collective early waits inside it: first every peer's answer, then the transfer.
        failed = await self._all_ready(version, replicas)
        replicas = [replica for replica in replicas if replica.index not in failed]
        if not replicas:
            return failed
        started = now()
        try:
            if self._met != replicas:
                await self._meet(replicas)
            checksums, received = await self._transfer(version, replicas)
        except Exception as error:
            await self._blame_trainer(version, error)
            return failed | {replica.index: error for replica in replicas}
        took.transfer_s += now() - started
        failed |= {index: found for index, found in received.items() if isinstance(found, Exception)}
        arrived = [replica for replica in replicas if replica.index not in failed]
        commits = await self._gather(
            (
                (
                    f"generator {replica.index}",
                    f"to commit version {version}",
                    replica.handle.commit.call_one(version, version % SNAPSHOTS, checksums),
                )
                for replica in arrived
            ),
            max((replica.hold_s for replica in arrived), default=0.0),
        )
        for replica, report in zip(arrived, commits, strict=True):
            if isinstance(report, Exception):
                failed[replica.index] = report
                if not isinstance(getattr(report, "exception", report), StillServing):  # Monarch wraps it
                    replica.serves = None
                continue
            replica.serves = version
            took.sent_bytes = max(took.sent_bytes, received[replica.index])
            took.paused_s = max(took.paused_s, report.paused_seconds)
            took.verify_share = max(took.verify_share, report.verification_share)
        return failed

    async def _transfer(self, version: int, replicas: list[_Replica]) -> tuple[dict[str, int], dict[int, Any]]:
        """All bytes to all ``replicas``; the trainer's checksum of each tensor, and what each replica received, in
        bytes, or why it did not."""
        slot = version % SNAPSHOTS
        ranks = self._ranks
        answers = await self._gather(
            [
                (f"trainer rank {r}", f"to send version {version}", rank.send.call_one(version, slot))
                for r, rank in enumerate(ranks)
            ]
            + [
                (
                    f"generator {replica.index}",
                    f"to receive version {version}",
                    replica.handle.receive.call_one(version, slot),
                )
                for replica in replicas
            ]
        )
        sums, received = answers[: len(ranks)], answers[len(ranks) :]
        unsent = [found for found in sums if isinstance(found, Exception)]
        if unsent:
            raise unsent[0]
        totals = [signed(sum(column)) for column in zip(*sums, strict=True)]
        by_replica = {replica.index: found for replica, found in zip(replicas, received, strict=True)}
        return dict(zip(self.manifest.names, totals, strict=True)), by_replica

    async def _gather(self, calls: Any, hold_s: float = 0.0) -> list[Any]:
        """Answers or exceptions of ``(who, to do what, call)``, each within the deadline of a transfer + ``hold_s``."""
        deadline = self.settings.deadline_s + CALL_DEADLINE_S + hold_s
        waits = [within(deadline, call, f"{who} {what}", on=who) for who, what, call in calls]
        return await asyncio.gather(*waits, return_exceptions=True)

    async def _all_ready(self, version: int, replicas: list[_Replica]) -> dict[int, Exception]:
        absent, rank = await asyncio.gather(self._gone(replica.index for replica in replicas), self._absent_rank())
        if rank is not None:
            raise PublishError(f"version {version} cannot be sent: {rank}")
        return {index: PublishError(why) for index, why in absent.items()}

    async def _blame_trainer(self, version: int, error: Exception) -> None:
        rank = await self._absent_rank()
        if rank is not None:
            raise PublishError(f"version {version} could not be sent: {rank} ({last_line(error)})") from error

    async def _absent_rank(self) -> str | None:
        """None if all trainer ranks answer, or what is wrong with one of them."""
        asked = [self._unanswered(rank, f"trainer rank {r}") for r, rank in enumerate(self._ranks)]
        return next((why for why in await asyncio.gather(*asked) if why), None)

    @staticmethod
    async def _unanswered(actor: Any, name: str) -> str | None:
        """None if the actor answers, or what is wrong with it."""
        try:
            await within(ANSWER_DEADLINE_S, actor.ready.call_one(), f"{name} to say that it is there", on=name)
        except Exception as error:
            return f"{name} does not answer: {last_line(error)}"
        return None

    def _give_up(self, index: int, why: str) -> None:
        if self._replicas.pop(index, None) is None:  # meanwhile, by somebody else
            return
        self._met = None
        self.lost[index] = why
        left = ", ".join(str(other) for other in self._replicas) or "none"
        logger.error("generator %d is lost (%s); generators left: %s", index, why, left)
        if self.on_lost is not None:
            self.on_lost(index, why)

    # -- meetings --------------------------------------------------------------------------------------------------

    async def _set_up(self, index: int, generator: Any) -> None:
        set_up = generator.weights_setup.call_one(self.manifest, self.settings)
        name = f"generator {index}"
        hold_s = await within(CALL_DEADLINE_S, set_up, f"{name} to make room for versions", on=name)
        self._replicas[index] = _Replica(index, generator, hold_s)

    async def _verify_frozen(self, index: int, generator: Any) -> None:
        """Raise if adapters that are trained here are to be served on another model."""
        if self._frozen is not None:
            call = generator.verify_frozen.call_one(*self._frozen)
            await within(CALL_DEADLINE_S, call, f"generator {index} to compare its model", on=f"generator {index}")

    async def _meet(self, replicas: list[_Replica]) -> None:
        """Connect the trainer ranks with these replicas, and nobody else."""
        self._met = None
        call = self.trainer.weights_open.call()
        opened = await within(CALL_DEADLINE_S, call, "trainer ranks to open a meeting", on="trainer ranks")
        addresses = [address for _, address in sorted(opened.values())]
        count = len(replicas)
        answers = await self._gather(
            [("trainer ranks", "to meet the generators", self.trainer.weights_connect.call(addresses, count))]
            + [
                (
                    f"generator {replica.index}",
                    "to meet the trainer ranks",
                    replica.handle.weights_connect.call_one(addresses, position, count),
                )
                for position, replica in enumerate(replicas)
            ]
        )
        for error in answers:
            if isinstance(error, Exception):
                raise error
        self._met = list(replicas)


async def _plan(trainer: Any, dtype: str) -> Manifest:
    call = trainer.owned_runs.call()
    answers = await within(CALL_DEADLINE_S, call, "trainer ranks to say what they own", on="trainer ranks")
    by_rank = sorted(answers.values(), key=lambda answer: answer[0])
    served = getattr(torch, dtype)
    tensors = [(name, shape, served) for name, shape in by_rank[0][1]]
    return make_manifest(tensors, [runs for _, _, runs in by_rank])


async def _frozen(trainer: Any, dtype: str) -> tuple[Manifest, dict[str, int]] | None:
    """What all trainer ranks leave as it is, and its checksums; None if that is nothing."""
    call = trainer.frozen_checksums.call(dtype)
    answers = list(
        (
            await within(CALL_DEADLINE_S, call, "trainer ranks to sum up their frozen weights", on="trainer ranks")
        ).values()
    )
    tensors = answers[0][0]
    if not tensors:
        return None
    specs, nbytes = lay_out([(name, shape, getattr(torch, dtype)) for name, shape in tensors])
    totals = [signed(sum(column)) for column in zip(*(sums for _, sums in answers), strict=True)]
    return Manifest(specs, nbytes, ()), dict(zip((name for name, _ in tensors), totals, strict=True))


def _heard(delivery: asyncio.Task[None]) -> None:
    if not delivery.cancelled():
        delivery.exception()
