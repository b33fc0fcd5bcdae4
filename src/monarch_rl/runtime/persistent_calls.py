"""Persistent calls: numbered calls that are all answered over one persistent channel of the caller.

Each Monarch call opens a port for its answer, of which caller and actor together never free 1 to 2 KB, so a process
that calls others throughout a run would grow with every step. Here a caller opens one port per event loop, and
introduces itself once to each actor that it calls (:meth:`AnswersCalls.attend`). That is a single Monarch call, which
never returns. When the actor's process is lost, it fails, and with it every unanswered call.

    caller                               actor
    attend(name, port) ---------------->              once; pending while the actor lives
    answer_calls([(number, endpoint, arguments), ...]) ---->
           <---- port: [(number, rank, succeeded, result), ...]

Calls made in the same iteration of the event loop are sent together, and so are answers. Arguments and results are
pickled here, by plain pickle, for three reasons: arguments that cannot be unpickled would end the actor if Monarch
unpickled them; an answer that cannot be unpickled would have no number; and Monarch's own pickler calls Python for
every object.

An actor is not notified when a caller is lost. It forgets a caller when another one introduces itself by the same name.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import operator
import pickle
import uuid
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch._src.actor.actor_mesh import ActorMesh
from monarch.actor import ActorError, Channel, ValueMesh, context
from monarch.actor import concurrent_endpoint as monarch_concurrent_endpoint
from monarch.actor import endpoint as monarch_endpoint

from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.deadlines import begun, retrieve

PERSISTENT = "_monarch_rl_lasting"
"""Attribute that marks the methods of persistent endpoints; its value is the plain method."""
Call = tuple[int, str, bytes]
"""Number of the call, name of the endpoint, pickled arguments."""
Answer = tuple[int, int, bool, bytes]
"""Number of the call, rank of the actor, whether it succeeded, pickled result or error."""


# -- the actor's side -------------------------------------------------------------------------------------------------


class AnswersCalls:
    """Base class of actors that answer persistent calls."""

    @monarch_concurrent_endpoint(instrument=False)  # type: ignore[untyped-decorator,unused-ignore]
    async def attend(self, caller: str, name: str, number: int, port: Any) -> None:
        """Accept calls of ``caller``, which reads answers from ``port``, and confirm this by answering call ``number``.

        Returns when another caller introduces itself by the same ``name``, unless the name is empty. Raises when an
        answer cannot be sent.
        """
        callers: dict[str, _AnswersToCaller] = vars(self).setdefault("_callers", {})
        for replaced in [other for key, other in callers.items() if name and other.name == name and key != caller]:
            replaced.end()
        answers = callers.setdefault(caller, _AnswersToCaller(name, port))
        answers.add((number, context().message_rank.rank, True, pickle.dumps(None)))
        try:
            await asyncio.wait([answers.ended])  # waits: for the actor's whole life
        finally:  # also if Monarch cancels this call, which it does before the actor's clean-up
            callers.pop(caller, None)
            await answers.stop()  # waits: for cancelled tasks
        answers.ended.result()

    @monarch_endpoint(instrument=False)  # type: ignore[untyped-decorator,unused-ignore]
    async def answer_calls(self, caller: str, calls: list[Call]) -> None:
        """Start to answer calls, which run concurrently."""
        answers: _AnswersToCaller | None = vars(self)["_callers"].get(caller)
        if answers is None:  # the caller's attend() has ended
            return
        for call in calls:
            answers.start(self, call)


class _AnswersToCaller:
    """Sends one caller its answers; those that become ready in the same iteration of the event loop go together.

    Args:
        name: name of the caller's actor; empty if it has none.
        port: port from which the caller reads answers.
    """

    def __init__(self, name: str, port: Any) -> None:
        self.name, self._port = name, port
        self._ready: list[Answer] = []
        self._under_way: set[asyncio.Task[None]] = set()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the caller gets no more answers: with an error, or because another caller has its name."""

    def end(self, error: Exception | None = None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)

    async def stop(self) -> None:
        """Cancel the unfinished calls, without an answer."""
        self.end()
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)  # waits: for cancelled tasks

    def start(self, actor: AnswersCalls, call: Call) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(actor, *call))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _answer(self, actor: AnswersCalls, number: int, name: str, arguments: bytes) -> None:
        rank = context().message_rank.rank
        try:
            args, kwargs = pickle.loads(arguments)
            method = getattr(getattr(type(actor), name)._method, PERSISTENT)
            result = await method(actor, *args, **kwargs)  # waits: the caller enforces the deadline
            answer = number, rank, True, pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        except BaseException as error:  # reported to the caller, as in a Monarch call
            answer = number, rank, False, _pickled_error(error, name)
            if isinstance(error, asyncio.CancelledError):
                self.add(answer)
                raise
        self.add(answer)

    def add(self, answer: Answer) -> None:
        if self.ended.done():
            return
        if not self._ready:
            asyncio.get_running_loop().call_soon(self._send)
        self._ready.append(answer)

    def _send(self) -> None:
        """Send the answers that are ready. An error ends ``attend``, so that it reaches the caller: raised here, it
        would only be logged by the event loop."""
        ready, self._ready = self._ready, []
        try:
            self._port.send(ready)
        except Exception as error:
            self.end(error)


def _pickled_error(error: BaseException, name: str) -> bytes:
    """The error in the form in which Monarch reports errors of actors, with its traceback, even if it cannot be
    pickled."""
    message = f"Actor call {context().actor_instance.name}.{name} failed."
    reported = ActorError(error, message)
    try:
        pickled = pickle.dumps(reported)
        pickle.loads(pickled)
    except Exception:
        substitute = ActorError(RuntimeError(_words_of(error)), message)
        substitute.exception_formatted = reported.exception_formatted
        pickled = pickle.dumps(substitute)
    return pickled


def _words_of(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its own __str__ raised
        return type(error).__name__


# -- the caller's side ------------------------------------------------------------------------------------------------


async def next_message(receiver: Any) -> Any:
    """The next message of a channel, without its ``recv``, which runs Python on Monarch's threads for each message."""
    return receiver._process(await receiver._receiver.recv_task().spawn_handle())  # waits: for the caller's whole life


@dataclass(eq=False, slots=True)
class _PendingCall:
    endpoint: str
    missing: int
    """Number of actors that have not answered."""
    to_answer: Callable[[list[Any]], Any]
    """Turns the results, in rank order, into the caller's result."""
    answer: asyncio.Future[Any]
    results: dict[int, Any] = field(default_factory=dict)

    def add(self, rank: int, succeeded: bool, content: bytes) -> None:
        if self.answer.done():
            return
        try:
            result = pickle.loads(content)
        except Exception as error:  # only this call fails
            succeeded, result = False, error
        if not succeeded:
            self.answer.set_exception(result)
            return
        self.results[rank] = result
        self.missing -= 1
        if self.missing:
            return
        try:
            self.answer.set_result(self.to_answer([self.results[rank] for rank in sorted(self.results)]))
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class _ReplyPort:
    """The persistent port of one event loop, and the calls that will be answered there."""

    def __init__(self) -> None:
        self.port, self._receiver = Channel[list[Answer]].open()
        self.name = uuid.uuid4().hex
        self._pending: dict[int, _PendingCall] = {}
        self._numbers = itertools.count()
        self.reading = asyncio.get_running_loop().create_task(self._read())

    def expect(
        self, endpoint: str, actors: int, to_answer: Callable[[list[Any]], Any] = list
    ) -> tuple[int, _PendingCall]:
        """Assign a number to a call. The number is released once the call is answered or abandoned."""
        number = next(self._numbers)
        pending = _PendingCall(endpoint, actors, to_answer, asyncio.get_running_loop().create_future())
        self._pending[number] = pending
        pending.answer.add_done_callback(lambda answer: self._forget(number, answer))
        return number, pending

    def fail(self, number: int, error: Exception) -> None:
        """Fail call ``number``, if it is pending."""
        if number in self._pending:
            self._pending[number].fail(error)

    def _forget(self, number: int, answer: asyncio.Future[Any]) -> None:
        del self._pending[number]
        if not answer.cancelled():
            answer.exception()  # retrieved here, because asyncio logs it if the caller no longer waits

    async def _read(self) -> None:
        try:
            while True:
                answers: list[Answer] = await next_message(self._receiver)  # waits: for the loop's whole life
                for number, rank, succeeded, content in answers:
                    if number in self._pending:  # else the caller has abandoned the call
                        self._pending[number].add(rank, succeeded, content)
        except asyncio.CancelledError:  # the loop ends: this task would keep it alive, and with it the weak entry
            _reply_ports.pop(asyncio.get_running_loop(), None)
            raise
        except Exception as error:
            for pending in list(self._pending.values()):
                pending.fail(error)


_reply_ports: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _ReplyPort] = weakref.WeakKeyDictionary()


class _CallChannel:
    """The caller's end of the connection between one event loop and the actors behind one handle.

    Args:
        handle: handle of the actors.
        channels: the handle's channels by event loop; this one is removed when its loop ends.
    """

    def __init__(
        self, handle: Any, channels: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _CallChannel]
    ) -> None:
        loop, self._channels = asyncio.get_running_loop(), channels
        self._reply_port = _reply_ports.get(loop) or _reply_ports.setdefault(loop, _ReplyPort())
        self._answer_calls, self.actors = handle.answer_calls, len(handle._ndslice)
        self._unsent: list[Call] = []
        self._pending: set[_PendingCall] = set()
        self._is_open = self._is_lost = False
        number, opened = self._reply_port.expect("attend", self.actors)
        opened.answer.add_done_callback(self._opened)
        self._attending = loop.create_task(self._attend(handle.attend, number, opened))

    @property
    def ended(self) -> bool:
        """Whether it accepts no more calls."""
        return self._is_lost or self._reply_port.reading.done()

    def call(
        self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any], to_answer: Callable[[list[Any]], Any]
    ) -> asyncio.Future[Any]:
        """Call all actors. Raises if the arguments cannot be pickled."""
        arguments = pickle.dumps((args, kwargs), pickle.HIGHEST_PROTOCOL)
        number, pending = self._reply_port.expect(endpoint, self.actors, to_answer)
        self._pending.add(pending)
        pending.answer.add_done_callback(lambda _: self._pending.discard(pending))
        if self._is_open and not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append((number, endpoint, arguments))
        return pending.answer

    def _opened(self, opened: asyncio.Future[Any]) -> None:
        self._is_open = not opened.cancelled() and opened.exception() is None
        if self._is_open:
            self._send()

    def _send(self) -> None:
        """Send the queued calls. An error fails these calls: raised here, it would only be logged by the event loop."""
        calls, self._unsent = self._unsent, []
        if not calls or self._is_lost:
            return
        try:
            self._answer_calls.broadcast(self._reply_port.name, calls)
        except Exception as error:
            for number, _, _ in calls:
                self._reply_port.fail(number, error)

    async def _attend(self, attend: Any, number: int, opened: _PendingCall) -> None:
        name = wait_registry.registered_name()
        try:
            await attend.call(
                self._reply_port.name, name, number, self._reply_port.port
            )  # waits: for the actors' whole life
            self._lose([opened, *self._pending], RuntimeError(f"another process named {name} has taken its place"))
        except asyncio.CancelledError:  # the loop ends
            self._channels.pop(asyncio.get_running_loop(), None)
            raise
        except Exception as error:
            self._lose([opened, *self._pending], error)

    def _lose(self, unanswered: list[_PendingCall], error: Exception) -> None:
        self._is_lost = True
        for pending in unanswered:
            pending.fail(_named(error, pending.endpoint))


def _named(error: Exception, endpoint: str) -> Exception:
    """The loss of an actor, reported as if by a Monarch call of ``endpoint``."""
    if not isinstance(error, SupervisionError):
        return error
    return SupervisionError(str(error).replace(".attend() failed", f".{endpoint}() failed", 1))


class PersistentEndpoint:
    """Monarch's endpoint of a handle, with persistent calls in place of :meth:`call` and :meth:`call_one`.

    Without a running event loop, and if the actors are lost, these two are Monarch's as well, and raise its errors.
    """

    def __init__(self, handle: Any, name: str, monarchs: Any) -> None:
        self._handle, self._name, self._monarchs = handle, name, monarchs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._monarchs, name)

    def call_one(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Call the only actor of a mesh of one. The call is sent even if the result is not awaited."""
        channel = self._channel()
        if channel is None or channel.actors != 1:
            return _begun(self._monarchs.call_one(*args, **kwargs))
        return channel.call(self._name, args, kwargs, operator.itemgetter(0))

    def call(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Call every actor of the mesh. The call is sent even if the result is not awaited."""
        channel = self._channel()
        if channel is None:
            return _begun(self._monarchs.call(*args, **kwargs))
        return channel.call(self._name, args, kwargs, functools.partial(ValueMesh, self._handle._shape))

    def _channel(self) -> _CallChannel | None:
        """The running event loop's channel to the actors; None without a loop, or if the channel has ended."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return None
        channels = vars(self._handle).setdefault("_channels", weakref.WeakKeyDictionary())
        channel: _CallChannel = channels.get(loop) or channels.setdefault(loop, _CallChannel(self._handle, channels))
        return None if channel.ended else channel


def _begun(call: Any) -> Awaitable[Any]:
    """A Monarch call; on an event loop, a task that awaits it, which a caller's frame may hold: see :func:`begun`."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return cast(Awaitable[Any], call)
    task = begun(call)
    task.add_done_callback(retrieve)
    return task


def _endpoint(handle: Any, name: Any, method: Any, propagator: Any) -> Any:
    """Replacement for Monarch's ``ActorMesh._endpoint``, which creates the endpoints of a handle."""
    made = _monarchs_endpoint(handle, name, method, propagator)
    lasting = hasattr(method, PERSISTENT) and issubclass(handle._class, AnswersCalls)
    return PersistentEndpoint(handle, name.name, made) if lasting else made


_monarchs_endpoint = ActorMesh._endpoint
ActorMesh._endpoint = _endpoint


# -- the base class of a run's actors ---------------------------------------------------------------------------------

if TYPE_CHECKING:

    class Actor:
        """Placeholder for Monarch's class, which is untyped: a base class of type ``Any`` would hide misspelled
        endpoints from mypy."""

else:
    from monarch.actor import Actor


class ResilientActor(AnswersCalls, Actor):
    """An actor that survives the loss of the actors that it calls and answers."""

    def _handle_undeliverable_message(self, message: Any) -> bool:
        return True  # handled; by default Monarch fails the sender of a message to a lost process
