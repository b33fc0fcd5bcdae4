"""A persistent channel from a caller to actors: many numbered messages, and many answers to each.

Each Monarch call opens a port for its answer, of which caller and actor together never free 1 to 2 KB, and each Monarch
message costs some 0.1 ms of CPU on each side. So a caller opens one port per event loop, for the answers of all its
channels. A channel is opened by a single Monarch call that never returns: when the actors' process is lost, it fails,
and with it everything that they have not answered. Messages and answers that are added in the same iteration of an
event loop are sent together (:class:`Batch`).

    caller: PersistentChannel                 actor: Callers
    attend(channel, port) -------------------->              once; pending while the actor lives
    numbered messages of a channel ----------->              may arrive before the port
           <---- port: (channel, numbered answers)

A channel's name starts with the caller's name in the run, and an id of its event loop. An actor is not notified when a
caller is lost; it ends the caller's channels when another event loop opens one under the same name.

Users: persistent endpoints (``runtime/persistent_calls.py``) and requests to replicas (``generator/connection.py``).
They differ in what they send, in how they serialize it, and in which errors an answer may hold.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import uuid
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from monarch.actor import Channel

from monarch_rl.runtime import wait_registry

T = TypeVar("T")
_REMEMBERED = 256
"""Number of ended channels to remember; messages that were in transit when they ended arrive within a second."""


class Batch(Generic[T]):
    """Collects items, and sends those of one iteration of the event loop together.

    Args:
        send: sends a list of items; must not raise. While it is None, items wait.
        pace_s: minimum seconds between two calls of ``send``. Items wait, and collect more, if it was called later.
    """

    def __init__(self, send: Callable[[list[T]], None] | None, pace_s: float = 0.0) -> None:
        self.send, self._pace_s = send, pace_s
        self._items: list[T] = []
        self._next_at = -math.inf
        """Earliest time of the next call of ``send``, by the event loop's clock."""

    def add(self, item: T) -> None:
        if not self._items:
            loop = asyncio.get_running_loop()
            if not self._pace_s or loop.time() >= self._next_at:
                loop.call_soon(self.flush)
            else:
                loop.call_at(self._next_at, self.flush)
        self._items.append(item)

    def flush(self) -> None:
        """Send the items now."""
        if self._items and self.send is not None:
            self.send(self.take())
            if self._pace_s:
                self._next_at = asyncio.get_running_loop().time() + self._pace_s

    def take(self) -> list[T]:
        """Remove and return the items."""
        items, self._items = self._items, []
        return items


# -- the caller's side ------------------------------------------------------------------------------------------------


class Pending(Protocol):
    """A message of a channel that has not been answered."""

    answer: asyncio.Future[Any]
    """Set by :meth:`receive` or :meth:`lose`. Once it is done, or cancelled by the caller, answers are dropped."""

    def receive(self, answer: Any) -> None:
        """Take an answer or a partial one: a tuple that starts with the message's number."""
        ...

    def lose(self, error: BaseException) -> None:
        """Fail because of the error that ended the channel."""
        ...


class PersistentChannel:
    """The caller's end of a channel. Belongs to the running event loop. Once closed, it stays so.

    Args:
        attend: calls :meth:`Callers.attend` of the actors with the channel's name and the caller's port. The channel
            ends when this call does.
        send: sends a list of numbered messages to the actors, with the channel's name. If it raises, these messages
            fail with its error, and no other.
        deserialize: the answers in a message, each a tuple that starts with a number; an error ends the channel.
        pace_s: minimum seconds between two calls of ``send``.
    """

    def __init__(
        self,
        attend: Callable[[str, Any], Awaitable[Any]],
        send: Callable[[str, list[Any]], None],
        deserialize: Callable[[Any], Iterable[Any]] = iter,
        pace_s: float = 0.0,
    ) -> None:
        loop = asyncio.get_running_loop()
        replies = _reply_ports.get(loop)
        if replies is None or replies.reading.done():
            replies = _reply_ports[loop] = _ReplyPort()
        self._caller = wait_registry.registered_name()
        self.name = f"{self._caller}/{replies.owner}/{next(replies.numbers)}"
        self.closed = False
        self._replies, self._send_messages, self._deserialize = replies, send, deserialize
        self._unsent: Batch[tuple[int, Any]] = Batch(self._send, pace_s)
        self._pending: dict[int, Pending] = {}
        self._numbers = itertools.count()
        replies.channels[self.name] = self
        self.attending: asyncio.Task[None] = loop.create_task(self._attend(attend))
        """Cancelled if the channel is closed from here, or if the event loop ends."""
        self.attending.add_done_callback(self._attended)

    def ask(self, message: Any, pending: Pending) -> None:
        """Send a message, whose answers ``pending`` takes."""
        number = next(self._numbers)
        self._pending[number] = pending
        pending.answer.add_done_callback(partial(self._forget, number))
        self._unsent.add((number, message))

    def close(self, error: BaseException) -> None:
        """End the channel: everything that is not answered fails."""
        if self.closed:
            return
        self.closed = True
        self._replies.channels.pop(self.name, None)
        self.attending.cancel()
        self._unsent.take()
        for pending in list(self._pending.values()):
            if not pending.answer.done():
                pending.lose(error)

    def _send(self, messages: list[tuple[int, Any]]) -> None:
        try:
            self._send_messages(self.name, messages)
        except Exception as error:  # raised here, the event loop would only log it
            for number, _ in messages:
                pending = self._pending.get(number)
                if pending is not None and not pending.answer.done():
                    pending.answer.set_exception(error)

    def receive(self, message: Any) -> None:
        """Take a message of answers."""
        try:
            for answer in self._deserialize(message):
                pending = self._pending.get(answer[0])
                if pending is not None and not pending.answer.done():  # else the caller has abandoned it
                    pending.receive(answer)
        except Exception as error:
            self.close(error)

    def _forget(self, number: int, answer: asyncio.Future[Any]) -> None:
        del self._pending[number]
        if not answer.cancelled():
            answer.exception()  # retrieved here, because asyncio logs it if the caller no longer waits

    async def _attend(self, attend: Callable[[str, Any], Awaitable[Any]]) -> None:
        await attend(self.name, self._replies.port)  # waits: for the actors' whole life

    def _attended(self, attending: asyncio.Task[None]) -> None:
        if attending.cancelled():
            return
        replaced = RuntimeError(f"another process named {self._caller} has taken its place")
        self.close(attending.exception() or replaced)


async def next_message(receiver: Any) -> Any:
    """The next message of a port, without its ``recv``, which runs Python on Monarch's threads for each message."""
    return receiver._process(await receiver._receiver.recv_task().spawn_handle())  # waits: for the caller's whole life


class _ReplyPort:
    """The port of one event loop, on which the answers of all its channels arrive."""

    def __init__(self) -> None:
        self.port, self._receiver = Channel[tuple[str, Any]].open()
        self.owner = uuid.uuid4().hex
        self.numbers = itertools.count()
        self.channels: dict[str, PersistentChannel] = {}
        """The open channels, by name."""
        self.reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        try:
            while True:
                name, message = await next_message(self._receiver)  # waits: for the loop's whole life
                channel = self.channels.get(name)
                if channel is not None:  # else it was closed
                    channel.receive(message)
        except asyncio.CancelledError:  # the loop ends: this task would keep it alive, and with it the weak entry
            _reply_ports.pop(asyncio.get_running_loop(), None)
            raise
        except Exception as error:
            for channel in list(self.channels.values()):
                channel.close(error)


_reply_ports: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _ReplyPort] = weakref.WeakKeyDictionary()


# -- the actor's side -------------------------------------------------------------------------------------------------


class AnswerPort(Protocol):
    """The sending end of a caller's port."""

    def send(self, obj: Any, /) -> None: ...


class AnswerSender(Generic[T]):
    """The actor's end of a channel: sends answers, and holds the tasks that work on them.

    Args:
        channel: name of the channel.
        serialize: encodes a list of answers, each a tuple that starts with a number, for ``deserialize`` of the other
            end.
        pace_s: minimum seconds between two messages.
    """

    def __init__(self, channel: str, serialize: Callable[[list[T]], Any], pace_s: float) -> None:
        self._channel, self._serialize = channel, serialize
        self._port: AnswerPort | None = None
        self._ready: Batch[T] = Batch(None, pace_s)
        self._running: set[asyncio.Task[None]] = set()
        """The event loop itself holds no references to tasks."""
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        """Done when the caller gets no more answers: with the error, or None if another caller has its name."""

    def open(self, port: AnswerPort) -> None:
        """Send to ``port`` from now on, starting with answers that are ready already."""
        self._port = port
        self._ready.send = self._send
        self._ready.flush()

    def add(self, answer: T) -> None:
        if not self.ended.done():
            self._ready.add(answer)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that adds answers."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def end(self, error: Exception | None = None) -> None:
        """Send the ready answers, and end, unless it has ended already."""
        self._ready.flush()
        if not self.ended.done():
            self.ended.set_result(error)

    async def cancel(self) -> None:
        """Cancel the running tasks of an ended channel, and wait for their ends."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)  # waits: for cancelled tasks

    def _send(self, answers: list[T]) -> None:
        # An error ends attend(), so that it reaches the caller: raised here, the event loop would only log it.
        assert self._port is not None
        try:
            self._port.send((self._channel, self._serialize(answers)))
        except Exception as error:
            self.end(error)


class Callers(Generic[T]):
    """The actor's ends of all channels to it.

    Args:
        serialize: see :class:`AnswerSender`.
        pace_s: see :class:`AnswerSender`.
        cancel: whether the running tasks of a channel are cancelled when it ends.
    """

    def __init__(self, serialize: Callable[[list[T]], Any], pace_s: float = 0.0, cancel: bool = False) -> None:
        self._serialize, self._pace_s, self._cancel = serialize, pace_s, cancel
        self.senders: dict[str, AnswerSender[T]] = {}
        """By name of the channel."""
        self._ended: deque[str] = deque(maxlen=_REMEMBERED)
        """Ended channels, whose messages may still arrive."""

    async def attend(self, channel: str, port: AnswerPort) -> None:
        """Send the channel's answers to ``port``. Returns when another event loop opens a channel under the caller's
        name; raises the error that ends the channel."""
        sender = self.senders.get(channel) or self._open(channel)
        sender.open(port)
        try:
            error = await sender.ended  # waits: for the actor's whole life
        finally:  # also if Monarch cancels this call, which it does before the actor's clean-up
            self.senders.pop(channel, None)
            self._ended.append(channel)
            if self._cancel:
                await sender.cancel()  # waits: for cancelled tasks
        if error is not None:
            raise error

    def sender(self, channel: str) -> AnswerSender[T] | None:
        """Sends the answers to a message that has arrived, possibly before the port. None: the channel has ended."""
        sender = self.senders.get(channel)
        return self._open(channel) if sender is None and channel not in self._ended else sender

    def _open(self, channel: str) -> AnswerSender[T]:
        name, owner = caller_of(channel)
        for other, sender in list(self.senders.items()):
            other_name, other_owner = caller_of(other)
            if name and other_name == name and other_owner != owner:
                sender.end()
        self.senders[channel] = opened = AnswerSender(channel, self._serialize, self._pace_s)
        return opened


def caller_of(channel: str) -> tuple[str, str]:
    """Name of a channel's caller, empty if it has none, and id of the caller's event loop."""
    name, _, owner = channel.rpartition("/")[0].rpartition("/")
    return name, owner
