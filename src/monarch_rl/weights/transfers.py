"""How an end of ``collective`` does its transfers: beside the event loop, and each within a deadline.

A transfer waits for other processes inside calls that cannot be interrupted. So it runs on a thread, and the end gives
up the thread and the groups when the transfer fails, is late, or is aborted from outside.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from monarch_rl.runtime.deadlines import DeadlineExceeded, within
from monarch_rl.runtime.streams import SideStream, SideThread
from monarch_rl.weights.broadcast_group import BroadcastGroup
from monarch_rl.weights.endpoint import TransferError

T = TypeVar("T")

_GIVES_UP = 0.95
"""Share of its deadline after which a call on the thread gives up."""


class Transfers:
    """The thread, the stream and the groups of one end.

    Args:
        device: of the stream.
        deadline_s: seconds for each transfer, and for leaving a group.
        peers: whom transfers wait for, as in ``within``.
    """

    def __init__(self, device: torch.device, deadline_s: float, peers: str) -> None:
        self.groups: list[BroadcastGroup] = []
        self._deadline_s = deadline_s
        self._device, self._peers = device, peers
        self._thread = SideThread("weights", device)
        self._aborted: list[threading.Event] = []
        """Of groups that were left; each is set when the group's broadcasts are gone from the device."""
        self._running: asyncio.Future[Any] | None = None
        self._why = ""
        """Why the running transfer, or the next one of these groups, was aborted."""

    @property
    def stream(self) -> SideStream:
        """Of the thread that runs the calls."""
        return self._thread.stream

    def until(self) -> float:
        """When a call that begins now must give up, by ``time.monotonic()``: so much before its deadline that it can
        say why."""
        return time.monotonic() + _GIVES_UP * self._deadline_s

    async def run(self, call: Callable[..., T], *arguments: Any, what: str) -> T:
        """Call on the thread.

        Args:
            what: is waited for, as in ``within``.

        Raises:
            TransferError: the call raised a RuntimeError, exceeded the deadline or was aborted, or it was to come when
                its groups were. The groups are left.
        """
        self._raise_if_aborted()
        calling = within(
            self._deadline_s, self._thread.run(call, *arguments), what, on=self._peers, flag="weights.deadline-s"
        )
        self._running = asyncio.ensure_future(calling)
        hangs = True
        try:
            return await self._running  # waits: deadline_s at most
        except DeadlineExceeded as error:
            failure = str(error)
        except RuntimeError as error:
            failure, hangs = str(error), False
            # Its frames hold the groups, whose connections are to close: that informs the others.
            error.__traceback__ = None
        except asyncio.CancelledError:
            if not self._why:  # not by abort()
                self.leave(hangs)
                raise
            failure = self._why
        finally:
            self._running = None
        self.leave(hangs)
        raise TransferError(failure)

    def _raise_if_aborted(self) -> None:
        if why := self._why:
            self.leave()
            raise TransferError(why)

    def abort(self, why: str) -> None:
        """End the call under way, or the next one before the groups are left: it raises TransferError at once.

        An end prepares what it sends before it calls, so that an abort may come first.
        """
        self._why = f"the transfer was aborted: {why}"
        if self._running is not None:
            self._running.cancel()

    def leave(self, hangs: bool = False) -> None:
        """Leave the groups, so that gloo's other members fail at once instead of at their deadline.

        Args:
            hangs: a call is under way, and is left behind with its thread. The list of groups is another one from here
                on: what the call may add to the old one is never used.
        """
        groups, self.groups = self.groups, []
        self._why = ""
        for group in groups:
            group.leave()
        if groups or hangs:
            self._thread.close()
            self._thread = SideThread("weights", self._device)
        if not groups:
            return
        self._aborted = [event for event in self._aborted if not event.is_set()]
        self._aborted.append(done := threading.Event())
        # NCCL's abort may block for seconds. Nobody joins a thread that may never end.
        threading.Thread(target=_abort, args=(groups, done), name="abort", daemon=True).start()

    async def leave_memory(self) -> None:
        """Leave the groups, and wait until no broadcast of theirs can write to the memory of the next transfer.

        Raises:
            TransferError: a broadcast could not be aborted.
        """
        self.leave()
        while self._aborted:
            if not await asyncio.to_thread(self._aborted[-1].wait, self._deadline_s):
                raise TransferError(f"a transfer that had failed was not aborted within {self._deadline_s:g} s")
            self._aborted.pop()

    def close(self) -> None:
        """Leave the groups for good."""
        self.leave()
        self._thread.close()


def _abort(groups: list[BroadcastGroup], done: threading.Event) -> None:
    try:
        while groups:
            groups.pop().abort()
    finally:
        done.set()
