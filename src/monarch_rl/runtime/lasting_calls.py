"""Calls that leave no port behind: numbered, and answered over one lasting port of the caller.

Each call of Monarch opens a port for its answer, of which caller and actor together never free 1 to 2 KB, so that a
process that calls others for as long as a run lasts grows with its steps. Here a caller opens one port for each of its
event loops, and introduces itself once to each actor that it calls (:meth:`AnswersCalls.attend`). That is one call of
Monarch, which never returns. It fails when the actor's process is lost, and with it every call that is not answered.

    caller                               actor
    attend(name, port) ---------------->              once; pending as long as the actor lives
    answer_calls([(number, endpoint, arguments), ...]) ---->
           <---- port: [(number, rank, succeeded, result), ...]

Calls that are made in one turn of the event loop travel together, and so do answers. What travels is pickled here and
by plain pickle: arguments that cannot be read would end the actor if Monarch read them, an answer that cannot be read
has no number, and Monarch's own pickler calls Python for every object.

An actor is not told when a caller is lost. It forgets it when another one of the same name introduces itself.
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

LASTING = "_monarch_rl_lasting"
"""Attribute of the methods that are called so."""
Call = tuple[int, str, bytes]
"""Its number, the endpoint's name, its pickled arguments."""
Answer = tuple[int, int, bool, bytes]
"""Number of the call, rank of the actor, whether it succeeded, the pickled result or error."""


# ---- the actor -------------------------------------------------------------------------------------------------------


class AnswersCalls:
    """The part of an actor that answers numbered calls."""

    @monarch_concurrent_endpoint(instrument=False)  # type: ignore[untyped-decorator,unused-ignore]
    async def attend(self, caller: str, name: str, number: int, port: Any) -> None:
        """Take calls of ``caller``, whose port this is, and say so as the answer to call ``number``.

        Return when another caller has this ``name``, unless it is empty; raise when no answer can be sent.
        """
        callers: dict[str, _AnswersToCaller] = vars(self).setdefault("_callers", {})
        for replaced in [other for key, other in callers.items() if name and other.name == name and key != caller]:
            replaced.end()
        answers = callers.setdefault(caller, _AnswersToCaller(name, port))
        answers.add((number, context().message_rank.rank, True, pickle.dumps(None)))
        try:
            await asyncio.wait([answers.ended])  # waits: as long as the actor lives
        finally:  # also where Monarch cancels this, before the actor's clean-up
            callers.pop(caller, None)
            await answers.stop()  # waits: for what is cancelled
        answers.ended.result()

    @monarch_endpoint(instrument=False)  # type: ignore[untyped-decorator,unused-ignore]
    async def answer_calls(self, caller: str, calls: list[Call]) -> None:
        """Start to answer; a call waits for no other."""
        answers: _AnswersToCaller | None = vars(self)["_callers"].get(caller)
        if answers is None:  # its attend() has ended
            return
        for call in calls:
            answers.start(self, call)


class _AnswersToCaller:
    """Sends one caller its answers; those that are ready in one turn of the event loop go together.

    Args:
        name: of the caller's actor; empty if it has none.
        port: of the caller.
    """

    def __init__(self, name: str, port: Any) -> None:
        self.name, self._port = name, port
        self._ready: list[Answer] = []
        self._under_way: set[asyncio.Task[None]] = set()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the caller gets no more answers: with the error, or because another one has its name."""

    def end(self, error: Exception | None = None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)

    async def stop(self) -> None:
        """Cancel the calls that are under way, without an answer."""
        self.end()
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)  # waits: they are cancelled

    def start(self, actor: AnswersCalls, call: Call) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(actor, *call))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _answer(self, actor: AnswersCalls, number: int, name: str, arguments: bytes) -> None:
        rank = context().message_rank.rank
        try:
            args, kwargs = pickle.loads(arguments)
            method = getattr(getattr(type(actor), name)._method, LASTING)
            result = await method(actor, *args, **kwargs)  # waits: the caller keeps the deadline
            answer = number, rank, True, pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        except BaseException as error:  # the caller's to judge, as it would be in a call of Monarch
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
        """Send what is ready. An error ends ``attend``, and so reaches the caller: the event loop would only log it."""
        ready, self._ready = self._ready, []
        try:
            self._port.send(ready)
        except Exception as error:
            self.end(error)


def _pickled_error(error: BaseException, name: str) -> bytes:
    """The error as Monarch reports those of actors: with its traceback, also where it cannot be pickled itself."""
    message = f"Actor call {context().actor_instance.name}.{name} failed."
    reported = ActorError(error, message)
    try:
        pickled = pickle.dumps(reported)
        pickle.loads(pickled)
    except Exception:
        stand_in = ActorError(RuntimeError(_words_of(error)), message)
        stand_in.exception_formatted = reported.exception_formatted
        pickled = pickle.dumps(stand_in)
    return pickled


def _words_of(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its own __str__ raised
        return type(error).__name__


# ---- the caller ------------------------------------------------------------------------------------------------------


async def next_message(receiver: Any) -> Any:
    """What comes next on a channel: its ``recv``, but that has Monarch's threads run Python for every message."""
    return receiver._process(await receiver._receiver.recv_task().spawn_handle())  # waits: as long as the caller


@dataclass(eq=False, slots=True)
class _PendingCall:
    endpoint: str
    missing: int
    """Actors that have not answered."""
    to_answer: Callable[[list[Any]], Any]
    """What the caller gets for the results by rank."""
    answer: asyncio.Future[Any]
    results: dict[int, Any] = field(default_factory=dict)

    def add(self, rank: int, succeeded: bool, content: bytes) -> None:
        if self.answer.done():
            return
        try:
            result = pickle.loads(content)
        except Exception as error:  # it is this call's, and no other's
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


class _Inbox:
    """The lasting port of one event loop, and the calls that will be answered there."""

    def __init__(self) -> None:
        self.port, self._receiver = Channel[list[Answer]].open()
        self.name = uuid.uuid4().hex
        self._pending: dict[int, _PendingCall] = {}
        self._numbers = itertools.count()
        self.reading = asyncio.get_running_loop().create_task(self._read())

    def expect(
        self, endpoint: str, actors: int, to_answer: Callable[[list[Any]], Any] = list
    ) -> tuple[int, _PendingCall]:
        """A number for a call; it is forgotten once the call is answered or given up."""
        number = next(self._numbers)
        pending = _PendingCall(endpoint, actors, to_answer, asyncio.get_running_loop().create_future())
        self._pending[number] = pending
        pending.answer.add_done_callback(lambda answer: self._forget(number, answer))
        return number, pending

    def fail(self, number: int, error: Exception) -> None:
        """Call ``number`` will not be answered."""
        if number in self._pending:
            self._pending[number].fail(error)

    def _forget(self, number: int, answer: asyncio.Future[Any]) -> None:
        del self._pending[number]
        if not answer.cancelled():
            answer.exception()  # nobody may wait for it any more, and asyncio would log it

    async def _read(self) -> None:
        try:
            while True:
                answers: list[Answer] = await next_message(self._receiver)  # waits: as long as the loop runs
                for number, rank, succeeded, content in answers:
                    if number in self._pending:  # else its caller has given up
                        self._pending[number].add(rank, succeeded, content)
        except asyncio.CancelledError:  # the loop ends: this task would keep it, and so its entry there
            _inboxes.pop(asyncio.get_running_loop(), None)
            raise
        except Exception as error:
            for pending in list(self._pending.values()):
                pending.fail(error)


_inboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Inbox] = weakref.WeakKeyDictionary()


class _Line:
    """The caller's end of what one event loop and the actors behind one handle send each other.

    Args:
        handle: of the actors.
        lines: of that handle, by event loop; this one is no longer among them when its loop ends.
    """

    def __init__(self, handle: Any, lines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Line]) -> None:
        loop, self._lines = asyncio.get_running_loop(), lines
        self._inbox = _inboxes.get(loop) or _inboxes.setdefault(loop, _Inbox())
        self._answer_calls, self.actors = handle.answer_calls, len(handle._ndslice)
        self._outbox: list[Call] = []
        self._pending: set[_PendingCall] = set()
        self._is_open = self._is_lost = False
        number, opened = self._inbox.expect("attend", self.actors)
        opened.answer.add_done_callback(self._opened)
        self._attending = loop.create_task(self._attend(handle.attend, number, opened))

    @property
    def ended(self) -> bool:
        """It takes no more calls."""
        return self._is_lost or self._inbox.reading.done()

    def call(
        self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any], to_answer: Callable[[list[Any]], Any]
    ) -> asyncio.Future[Any]:
        """Call all actors. Raises what pickling the arguments raises."""
        arguments = pickle.dumps((args, kwargs), pickle.HIGHEST_PROTOCOL)
        number, pending = self._inbox.expect(endpoint, self.actors, to_answer)
        self._pending.add(pending)
        pending.answer.add_done_callback(lambda _: self._pending.discard(pending))
        if self._is_open and not self._outbox:
            asyncio.get_running_loop().call_soon(self._send)
        self._outbox.append((number, endpoint, arguments))
        return pending.answer

    def _opened(self, opened: asyncio.Future[Any]) -> None:
        self._is_open = not opened.cancelled() and opened.exception() is None
        if self._is_open:
            self._send()

    def _send(self) -> None:
        """Send what is to be sent. An error is that of these calls: the event loop would only log it."""
        calls, self._outbox = self._outbox, []
        if not calls or self._is_lost:
            return
        try:
            self._answer_calls.broadcast(self._inbox.name, calls)
        except Exception as error:
            for number, _, _ in calls:
                self._inbox.fail(number, error)

    async def _attend(self, attend: Any, number: int, opened: _PendingCall) -> None:
        name = wait_registry.registered_name()
        try:
            await attend.call(self._inbox.name, name, number, self._inbox.port)  # waits: as long as the actors live
            self._lose([opened, *self._pending], RuntimeError(f"another process that is {name} is answered instead"))
        except asyncio.CancelledError:  # the loop ends
            self._lines.pop(asyncio.get_running_loop(), None)
            raise
        except Exception as error:
            self._lose([opened, *self._pending], error)

    def _lose(self, unanswered: list[_PendingCall], error: Exception) -> None:
        self._is_lost = True
        for pending in unanswered:
            pending.fail(_named(error, pending.endpoint))


def _named(error: Exception, endpoint: str) -> Exception:
    """The loss of an actor as a call of ``endpoint`` would have reported it."""
    if not isinstance(error, SupervisionError):
        return error
    return SupervisionError(str(error).replace(".attend() failed", f".{endpoint}() failed", 1))


class LastingEndpoint:
    """An endpoint of a handle: Monarch's, but for :meth:`call` and :meth:`call_one`.

    Without a running event loop, and for actors that are lost, these are Monarch's, too: they then say what it says.
    """

    def __init__(self, handle: Any, name: str, monarchs: Any) -> None:
        self._handle, self._name, self._monarchs = handle, name, monarchs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._monarchs, name)

    def call_one(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Ask the one actor of a mesh of one, at once."""
        line = self._line()
        if line is None or line.actors != 1:
            return _begun(self._monarchs.call_one(*args, **kwargs))
        return line.call(self._name, args, kwargs, operator.itemgetter(0))

    def call(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Ask every actor of the mesh, at once."""
        line = self._line()
        if line is None:
            return _begun(self._monarchs.call(*args, **kwargs))
        return line.call(self._name, args, kwargs, functools.partial(ValueMesh, self._handle._shape))

    def _line(self) -> _Line | None:
        """The line of the running event loop to the actors, if there is one."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return None
        lines = vars(self._handle).setdefault("_lines", weakref.WeakKeyDictionary())
        line: _Line = lines.get(loop) or lines.setdefault(loop, _Line(self._handle, lines))
        return None if line.ended else line


def _begun(call: Any) -> Awaitable[Any]:
    """A call of Monarch; on an event loop a task that awaits it, which a caller's frame may have: see :func:`begun`."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return cast(Awaitable[Any], call)
    task = begun(call)
    task.add_done_callback(retrieve)
    return task


def _endpoint(handle: Any, name: Any, method: Any, propagator: Any) -> Any:
    """Replaces Monarch's ``ActorMesh._endpoint``, which makes the endpoints of a handle."""
    made = _monarchs_endpoint(handle, name, method, propagator)
    lasting = hasattr(method, LASTING) and issubclass(handle._class, AnswersCalls)
    return LastingEndpoint(handle, name.name, made) if lasting else made


_monarchs_endpoint = ActorMesh._endpoint
ActorMesh._endpoint = _endpoint


# -- the base class of a run's actors ---------------------------------------------------------------------------------

if TYPE_CHECKING:

    class Actor:
        """Stands for Monarch's, which has no types: a base class of type ``Any`` would hide unknown endpoints."""

else:
    from monarch.actor import Actor


class ResilientActor(AnswersCalls, Actor):
    """An actor that survives the loss of the actors that it calls and answers."""

    def _handle_undeliverable_message(self, message: Any) -> bool:
        """True: a message to a lost process is no failure of its sender, which is Monarch's default."""
        return True
