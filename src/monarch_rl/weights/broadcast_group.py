"""A process group outside torch.distributed's world, in which one trainer rank broadcasts to the replicas.

gloo waits in the calling thread, notices at once when a member's connections close, and gives up at its timeout. NCCL
waits in a kernel on the device and does not notice lost members, and its watchdog would end the process. So on a device
this module enforces the deadline and aborts, and no member enqueues anything before all have joined the same transfer.
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

from monarch_rl.errors import DeadlineExceeded, TransferError
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.streams import SideStream, SideThread, device_module

_ALL = "all"
"""Stands for all members in a store key."""
NEVER = timedelta(days=365)
"""NCCL's own timeout, after which its watchdog would end the process: effectively disabled."""
MAX_CTAS = 8
"""Maximum thread blocks of a NCCL broadcast. Each one has buffers in the memory of an engine's GPU, and occupies a
multiprocessor that training or decoding would use. From NCCL's documentation; its effect here has not been measured."""
NO_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
"""Environment that torch reads when it makes a group (``ProcessGroupNCCL.cpp``). With it the watchdog raises nothing,
no monitor watches the watchdog, and an error, including an abort, neither causes a dump nor waits for one. A dump would
be requested for the whole process, and make the monitor of the process's first group end the process; that group is
configured by ``nccl_environment``."""
_SHORTEST_POLL_S, _LONGEST_POLL_S = 1e-4, 5e-3
"""Seconds between two checks whether all members have joined. Each check is a message to rank 0's process."""
_making = threading.Lock()


def make_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """torch's process group for a device: gloo on a CPU, otherwise NCCL."""
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = NEVER
    options.config.max_ctas = MAX_CTAS
    with _without_watchdog():
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Context manager: the NCCL watchdog of a group made within it reports errors, but never ends the process.

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
    """A group in which rank 0 broadcasts and the others receive. Each member uses it from one thread.

    Args:
        store: store served by rank 0's process.
        name: name of the group in the store.
        rank: rank in the group; 0 is the sender.
        size: number of members.
        device: device of the tensors that are sent.
        stream: stream of the thread, on which broadcasts are enqueued.
        timeout: timeout of the store and of gloo.
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
        # NCCL then runs on the calling thread's stream, so that neither stream waits for another.
        self._options.asyncOp = False
        self._transfers = 0
        self._aborted = threading.Event()

    def barrier(self, until: float) -> None:
        """On a device, wait until all members have joined the same transfer.

        Args:
            until: deadline, by ``time.monotonic()``.

        Raises:
            TransferError: a member has not joined by ``until``; names it. Or a thread has left the group.
        """
        # A broadcast that waits for a member is a spinning kernel. It may block kernels of training behind it, for
        # which the member may be waiting.
        if not self._on_device:
            return
        self._transfers += 1
        if self._rank:
            self._store.set(self._key(self._rank), "")
            self._await([_ALL], until)
        else:
            self._await(self._others, until)
            self._store.set(self._key(_ALL), "")
            if self._transfers > 1:  # all members have left the previous barrier
                for member in (_ALL, *self._others):
                    self._store.delete_key(self._key(member, self._transfers - 1))
        self._check()

    def _key(self, member: int | str, transfer: int | None = None) -> str:
        """Store key that is set once a member (by rank) or all members have joined a transfer, by default this one."""
        return f"{transfer or self._transfers} {member}"

    def _await(self, members: Sequence[int | str], until: float) -> None:
        """Wait until all of these members have joined."""
        pause = _SHORTEST_POLL_S  # polls, because a blocking wait of the store could not be interrupted
        while not self._store.check([self._key(member) for member in members]):
            self._check()
            if time.monotonic() > until:
                raise TransferError(f"{self._missing()} did not join the transfer")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)

    def _missing(self) -> str:
        """The members that have not joined, in words."""
        missing = [rank for rank in self._others if not self._store.check([self._key(rank)])]
        places = ", ".join(str(rank - 1) for rank in missing)  # as ``Receiver.connect`` counts them
        return f"generator {places} of {len(self._others)}" if missing else "the trainer rank"

    def broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start a broadcast: from ``tensor`` on rank 0, into ``tensor`` on the others.

        Returns:
            A function that waits until operations enqueued after it see the received tensor. On a device it does not
            wait, because the broadcast is enqueued on the same stream.
        """
        self._check()
        work = self._group.broadcast([tensor], self._options)

        def arrived() -> None:
            if work is not None:  # NCCL returns None, because the broadcast is enqueued
                work.wait()  # waits: until gloo's timeout; NCCL makes the stream wait, not the thread
            self._check()

        return arrived

    def finish(self, until: float) -> None:
        """Wait until all broadcasts on the stream are done.

        Raises:
            TransferError: they are not done by ``until`` (``time.monotonic()``), or the group was aborted.
        """
        if not self._stream.wait(until, self._aborted):
            self._check()
            raise TransferError("a broadcast did not finish by the deadline")
        self._check()

    def leave(self) -> None:
        """Leave the group: calls that wait here raise, and data received so far does not count."""
        self._aborted.set()

    def abort(self) -> None:
        """Abort the broadcasts on the device; may block for seconds.

        gloo cannot abort: there a broadcast ends when a peer closes its connections, or at the timeout.
        """
        self.leave()
        if self._on_device:
            self._group.abort()

    def _check(self) -> None:
        # An aborted broadcast ends as if it had succeeded.
        if self._aborted.is_set():
            raise TransferError("the transfer was aborted")


# -- transfers of a ``collective`` sender or receiver: on a thread, each within a deadline ----------------------------
# A transfer waits for other processes inside calls that cannot be interrupted. So it runs on its own thread, and the
# sender or receiver abandons the thread and the groups when the transfer fails, is late, or is aborted.

T = TypeVar("T")

_GIVES_UP = 0.95
"""Share of its deadline after which a call on the thread gives up."""


class Transfers:
    """The thread, the stream and the groups of one sender or receiver.

    Args:
        device: device of the stream.
        deadline_s: seconds for each transfer, and for leaving a group.
        peers: who transfers wait for, as ``on`` of ``within``.
    """

    def __init__(self, device: torch.device, deadline_s: float, peers: str) -> None:
        self.groups: list[BroadcastGroup] = []
        self._deadline_s = deadline_s
        self._device, self._peers = device, peers
        self._thread = SideThread("weights", device)
        self._aborted: list[threading.Event] = []
        """One event per :meth:`leave` of groups; it is set when their broadcasts are gone from the device."""
        self._running: asyncio.Future[Any] | None = None
        self._why = ""
        """Why the running transfer, or the next one of these groups, was aborted."""

    @property
    def stream(self) -> SideStream:
        """The stream of the thread that runs the calls."""
        return self._thread.stream

    def until(self) -> float:
        """When a call that begins now must give up, by ``time.monotonic()``: early enough before its deadline that it
        can report the reason."""
        return time.monotonic() + _GIVES_UP * self._deadline_s

    async def run(self, call: Callable[..., T], *arguments: Any, what: str) -> T:
        """Run a call on the thread.

        Args:
            call: the function to call.
            arguments: its arguments.
            what: description of the wait, as in ``within``.

        Raises:
            TransferError: the call raised a RuntimeError, exceeded the deadline or was aborted, or :meth:`abort` came
                before it. The groups are left.
        """
        self._raise_if_aborted()
        calling = within(self._deadline_s, self._thread.run(call, *arguments), what, on=self._peers, flag="patience")
        self._running = asyncio.ensure_future(calling)
        hangs = True
        try:
            return await self._running  # waits: deadline_s at most
        except DeadlineExceeded as error:
            failure = str(error)
        except RuntimeError as error:
            failure, hangs = str(error), False
            # The traceback's frames hold the groups, whose connections must close: that notifies the other members.
            error.__traceback__ = None
        except asyncio.CancelledError:
            if not self._why:  # cancelled by the caller, not by abort()
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
        """Make the running call raise TransferError at once, or the next one if the groups are not left before it.

        An abort may come before its call, because senders prepare data before they call.
        """
        self._why = f"the transfer was aborted: {why}"
        if self._running is not None:
            self._running.cancel()

    def leave(self, hangs: bool = False) -> None:
        """Leave the groups, so that gloo's other members fail at once instead of at their deadline.

        Args:
            hangs: whether a call is still running, which is abandoned together with its thread.
        """
        # A new list, so that groups which an abandoned call adds to the old one are never used.
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
        # NCCL's abort may block for seconds, or forever, so the thread is never joined.
        threading.Thread(target=_abort, args=(groups, done), name="abort", daemon=True).start()

    async def leave_memory(self) -> None:
        """Leave the groups, and wait until no broadcast of theirs can write to the memory of the next transfer.

        Raises:
            TransferError: a broadcast could not be aborted.
        """
        self.leave()
        while self._aborted:
            if not await asyncio.to_thread(self._aborted[-1].wait, self._deadline_s):
                raise TransferError(f"could not abort a failed transfer within {self._deadline_s:g} s")
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
