"""The meeting of trainer ranks and generator replicas: they are connected, and versions are transferred.

    connect            all members meet, whenever the set of replicas changes
    snapshot(v)        trainer ranks copy their weights; then the trainer may go on
    transfer(v)        trainer ranks send, replicas receive; decoding goes on

A member that is gone can hold up all others, so ``delivery.py`` asks every member before a transfer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from monarch_rl.generator.actor import Generator
from monarch_rl.pipeline.joint_calls import JointCall, JointCalls
from monarch_rl.pipeline.replicas import Replica, silence_of
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, bytes_s, now, within
from monarch_rl.settings.ranges import FOREVER_S
from monarch_rl.trainer.actor import Trainer
from monarch_rl.weights.checksum import add_checksums
from monarch_rl.weights.endpoint import SNAPSHOTS, TransferSettings
from monarch_rl.weights.manifest import Manifest

T = TypeVar("T")


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
        self._joint = JointCalls()

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
        calls = [JointCall("trainer ranks", "to meet the generators", meeting, self._ranks)]
        what = "to meet the trainer ranks"
        for position, replica in enumerate(replicas):
            connecting = replica.handle.weights_connect.call_one(addresses, position, count)
            calls.append(JointCall(replica.name, what, connecting, [replica.handle], replica))
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
            JointCall(f"trainer rank {r}", what, rank.send.call_one(version, snapshot), [rank])
            for r, rank in enumerate(self._ranks)
        ]
        what = f"to receive version {version}"
        for replica in replicas:
            receiving = replica.handle.receive.call_one(version, snapshot)
            calls.append(JointCall(replica.name, what, receiving, [replica.handle], replica))
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

    async def silent_rank(self) -> str | None:
        """What is wrong with a trainer rank that does not answer; None if all answer."""
        asked = [silence_of(f"trainer rank {r}", rank) for r, rank in enumerate(self._ranks)]
        return next((reason for reason in await asyncio.gather(*asked) if reason), None)
