"""The delivery of one version to all replicas: who is ready, the transfer, the commits, and who is to blame.

A replica commits a version only when all of it has arrived, and serves it only when the checksums of what its engine
then holds equal the trainer's. A replica that answers but did not take the version is sent it again, and is removed
after ``attempts`` attempts. A replica that does not answer is removed at once.
"""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.pipeline.meeting import Meeting, snapshot_index
from monarch_rl.pipeline.replicas import Replica, Replicas, silent
from monarch_rl.runtime.deadlines import now
from monarch_rl.weights.checksum import NotFinite
from monarch_rl.weights.endpoint import StillServing

logger = logging.getLogger("monarch_rl")

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
        absent, rank = await asyncio.gather(silent(asked), self._meeting.silent_rank())
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
        rank = await self._meeting.silent_rank()
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
