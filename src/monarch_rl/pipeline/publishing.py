"""New versions on their way from the trainer mesh to all generator replicas: transfer, commit, served.

    trainer ranks --snapshot(v)--> a copy --transport--> an area beside each engine       decoding goes on
    pause -> load -> checksums -> version v -> continue                                    decoding stops only here

A recipe calls the :class:`Publisher`. ``delivery.py`` delivers one version and finds who is to blame when that fails,
``meeting.py`` transfers it, ``replicas.py`` knows which replicas are there and which are lost. ``recovery.py`` replaces
the lost ones while the run goes on. No version counts as published before every replica that is there serves it: the
buffer's bound on the lag depends on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from monarch_rl.buffer.actor import Buffer
from monarch_rl.generator.actor import Generator
from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.pipeline.delivery import Delivery, PublishError
from monarch_rl.pipeline.meeting import Meeting
from monarch_rl.pipeline.replicas import Replicas, UpdateDispatch
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, within
from monarch_rl.runtime.endpoint import members
from monarch_rl.trainer.actor import Trainer
from monarch_rl.weights.checksum import add_checksums
from monarch_rl.weights.endpoint import SNAPSHOTS, TransferSettings, TransportName
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
class FrozenWeights:
    """The weights that training leaves as they are: no version has them, trainer and generators must both hold them."""

    manifest: Manifest
    checksums: np.ndarray
    """The trainer's, by tensor name."""

    async def verify(self, index: int, generator: Generator) -> None:
        """Raise if a generator holds another model than the one whose adapters are trained."""
        call = generator.verify_frozen.call_one(self.manifest, self.checksums)
        await within(CALL_DEADLINE_S, call, f"generator {index} to compare its model", on=f"generator {index}")


class Publisher:
    """Takes new versions from the trainer mesh to all generators. :meth:`connect` makes one.

    Args:
        meeting: connects the trainer's ranks with the replicas.
        buffer: releases slots when a version is published.
        replicas: the generators that are served.
        frozen: the weights that versions leave out; None if versions are whole.
    """

    def __init__(
        self, meeting: Meeting, buffer: Buffer, replicas: Replicas, frozen: FrozenWeights | None = None
    ) -> None:
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
        replicas, frozen = Replicas(update_workers), await _frozen_weights(trainer, dtype)
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


async def _frozen_weights(trainer: Trainer, dtype: str) -> FrozenWeights | None:
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
    return FrozenWeights(Manifest(specs, nbytes, ()), add_checksums([sums for _, sums in by_rank]))


def _retrieve(delivery: asyncio.Task[None]) -> None:
    """Take the exception of a delivery, so that asyncio does not report it as never retrieved."""
    if not delivery.cancelled():
        delivery.exception()
