"""A process group outside torch.distributed's world, in which one trainer rank broadcasts to the replicas.

gloo waits in the calling thread, hears at once of a member whose connections close, and gives up at its timeout. NCCL
waits in a kernel on the device, hears of nobody, and its watchdog would end the process. So on a device it is this
module that keeps the deadline and aborts, and no member enqueues anything before all have come to the same transfer.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from monarch_rl.runtime.deadlines import DeadlineExceeded, within
from monarch_rl.runtime.streams import SideStream, SideThread, device_module
from monarch_rl.weights.endpoint import TransferError

_ALL = "all"
"""In place of a member."""
NEVER = timedelta(days=365)
"""NCCL's own timeout, by which its watchdog would end the process."""
MAX_CTAS = 8
"""Thread blocks that NCCL may take for a broadcast: each has buffers in the memory of an engine's GPU, and a processor
that training or decoding would use. From NCCL's documentation; its effect here has not been measured."""
NO_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
"""What torch reads when it makes a group (``ProcessGroupNCCL.cpp``): its watchdog raises nothing, no monitor watches
the watchdog, and an error, which an abort is too, is followed by no dump and no wait for one. A dump is asked for in
the whole process, and has the monitor of the process's first group end it: that one hears of ``nccl_environment``."""
_SHORTEST_POLL_S, _LONGEST_POLL_S = 1e-4, 5e-3
"""Between two questions whether all members have come. Each is a message to rank 0's process."""
_making = threading.Lock()


def make_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """torch's process group for a device: gloo on a CPU, else NCCL."""
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = NEVER
    options.config.max_ctas = MAX_CTAS
    with _without_watchdog():
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """NCCL's watchdog of a group that is made in the block reports errors and ends nothing.

    The trainer's world keeps its own watchdog, which ends a rank whose peers are gone.
    """
    with _making:
        before = {name: os.environ.get(name) for name in NO_WATCHDOG}
        os.environ.update(NO_WATCHDOG)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


class BroadcastGroup:
    """Rank 0 broadcasts, the others receive; all use it from one thread each.

    Args:
        store: of rank 0's process.
        name: of the group in the store.
        rank: 0 for the sender.
        size: members.
        device: of the tensors that are sent.
        stream: of the thread; broadcasts are enqueued on it.
        timeout: of the store, and of gloo.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        stream: SideStream,
        timeout: timedelta,
    ) -> None:
        self._store = dist.PrefixStore(name, store)
        self._rank, self._others, self._stream = rank, range(1, size), stream
        self._on_device = device_module(device) is not None
        self._group = make_group(self._store, rank, size, device, timeout)
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._options.rootTensor = 0
        # NCCL then runs on the stream of the calling thread, and neither waits for the other.
        self._options.asyncOp = False
        self._transfers = 0
        self._aborted = threading.Event()

    def meet(self, until: float) -> None:
        """Return when all members have come here for the same transfer.

        On a device only. A broadcast that waits for a member is a kernel that spins; behind it, kernels of training may
        be held up, and the member may be waiting for those.

        Args:
            until: when to raise, by ``time.monotonic()``.

        Raises:
            TransferError: a member has not come by ``until``; names it. Or the group was left, by whichever thread.
        """
        if not self._on_device:
            return
        self._transfers += 1
        if self._rank:
            self._store.set(self._key(self._rank), "")
            self._await([_ALL], until)
        else:
            self._await(self._others, until)
            self._store.set(self._key(_ALL), "")
            if self._transfers > 1:  # all members have left the one before
                for member in (_ALL, *self._others):
                    self._store.delete_key(self._key(member, self._transfers - 1))
        self._check()

    def _key(self, member: int | str, transfer: int | None = None) -> str:
        """Is set once a member, by rank, has come to a transfer, by default this one; or once all have."""
        return f"{transfer or self._transfers} {member}"

    def _await(self, members: Sequence[int | str], until: float) -> None:
        """Wait until all of these have come. Asks again and again: a wait of the store could not be ended."""
        pause = _SHORTEST_POLL_S
        while not self._store.check([self._key(member) for member in members]):
            self._check()
            if time.monotonic() > until:
                raise TransferError(f"{self._missing()} has not come to the transfer")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)

    def _missing(self) -> str:
        """Who has not come."""
        missing = [rank for rank in self._others if not self._store.check([self._key(rank)])]
        places = ", ".join(str(rank - 1) for rank in missing)  # as ``Receiver.connect`` counts them
        return f"generator {places} of {len(self._others)}" if missing else "the trainer rank"

    def broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start a broadcast of ``tensor`` or into it.

        Returns:
            A function that waits until what the thread enqueues next finds the tensor received. On a device that is no
            wait, because the broadcast is enqueued on the same stream.
        """
        self._check()
        work = self._group.broadcast([tensor], self._options)

        def arrived() -> None:
            if work is not None:  # None is NCCL's answer: the broadcast is enqueued
                work.wait()  # waits: until gloo's timeout; NCCL has the stream wait, not the thread
            self._check()

        return arrived

    def finish(self, until: float) -> None:
        """Wait until all broadcasts on the stream are done.

        Raises:
            TransferError: not by ``until`` (``time.monotonic()``), or the group was aborted.
        """
        if not self._stream.wait(until, self._aborted):
            self._check()
            raise TransferError("the deadline has passed, and a broadcast is not done")
        self._check()

    def leave(self) -> None:
        """Do no more: whoever waits here raises, and what has been received does not count."""
        self._aborted.set()

    def abort(self) -> None:
        """Abort what is on the device; may block for seconds.

        Gloo cannot: there a broadcast ends when a peer closes its connections, or at the timeout.
        """
        self.leave()
        if self._on_device:
            self._group.abort()

    def _check(self) -> None:
        # An aborted broadcast ends like one that is done.
        if self._aborted.is_set():
            raise TransferError("the transfer was aborted")


# -- how an end of ``collective`` does its transfers: beside the event loop, and each within a deadline ---------------
# A transfer waits for other processes inside calls that cannot be interrupted. So it runs on a thread, and the end
# gives up the thread and the groups when the transfer fails, is late, or is aborted from outside.

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
