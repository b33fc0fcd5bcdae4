"""Persistent calls: Monarch calls without a port for each, over the caller's persistent channel to the actors.

A process that calls others throughout a run would grow with every step if each call were Monarch's
(``runtime/persistent_channel.py``).

    caller                               actor
    attend(channel, port) ------------->              once
    answer_calls(channel, [(number, (endpoint, arguments)), ...]) ---->
           <---- port: channel, [(number, rank, succeeded, result), ...]

Arguments and results are pickled here, by plain pickle, for three reasons: arguments that cannot be unpickled would end
the actor if Monarch unpickled them; an answer that cannot be unpickled would have no number; and Monarch's own pickler
calls Python for every object.
"""

from __future__ import annotations

import asyncio
import functools
import operator
import pickle
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch._src.actor.actor_mesh import ActorMesh
from monarch.actor import ActorError, ValueMesh, context
from monarch.actor import concurrent_endpoint as monarch_concurrent_endpoint
from monarch.actor import endpoint as monarch_endpoint

from monarch_rl.runtime.deadlines import begun, retrieve
from monarch_rl.runtime.persistent_channel import AnswerSender, Callers, PersistentChannel

PERSISTENT = "_monarch_rl_lasting"
"""Attribute that marks the methods of persistent endpoints; its value is the plain method."""
Call = tuple[int, tuple[str, bytes]]
"""Number of the call; name of the endpoint and pickled arguments."""
Answer = tuple[int, int, bool, bytes]
"""Number of the call, rank of the actor, whether it succeeded, pickled result or error."""


# -- the actor's side -------------------------------------------------------------------------------------------------


class AnswersCalls:
    """Base class of actors that answer persistent calls."""

    @monarch_concurrent_endpoint(instrument=False)  # type: ignore[untyped-decorator,unused-ignore]
    async def attend(self, channel: str, port: Any) -> None:
        """Answer the calls of ``channel``; see :meth:`Callers.attend`. Unfinished calls are cancelled at its end."""
        await _callers(self).attend(channel, port)  # waits: for the actor's whole life

    @monarch_endpoint(instrument=False)  # type: ignore[untyped-decorator,unused-ignore]
    async def answer_calls(self, channel: str, calls: list[Call]) -> None:
        """Start to answer calls, which run concurrently."""
        sender = _callers(self).sender(channel)
        if sender is None:  # it has ended, and with it the calls
            return
        for number, (name, arguments) in calls:
            sender.start(_answer(self, sender, number, name, arguments))


def _callers(actor: AnswersCalls) -> Callers[Answer]:
    """The actor's channels. Actors need not call ``super().__init__()``, so the first use creates them."""
    callers: Callers[Answer] | None = vars(actor).get("_callers")
    if callers is None:
        callers = vars(actor)["_callers"] = Callers(serialize=list, cancel=True)
    return callers


async def _answer(actor: AnswersCalls, sender: AnswerSender[Answer], number: int, name: str, arguments: bytes) -> None:
    rank = context().message_rank.rank
    try:
        args, kwargs = pickle.loads(arguments)
        method = getattr(getattr(type(actor), name)._method, PERSISTENT)
        result = await method(actor, *args, **kwargs)  # waits: the caller enforces the deadline
        answer = number, rank, True, pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # reported to the caller, as in a Monarch call
        answer = number, rank, False, _pickled_error(error, name)
        if isinstance(error, asyncio.CancelledError):
            sender.add(answer)
            raise
    sender.add(answer)


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


@dataclass(eq=False, slots=True)
class _PendingCall:
    endpoint: str
    missing: int
    """Number of actors that have not answered."""
    to_answer: Callable[[list[Any]], Any]
    """Turns the results, in rank order, into the caller's result."""
    answer: asyncio.Future[Any]
    results: dict[int, Any] = field(default_factory=dict)

    def receive(self, answer: Answer) -> None:
        _, rank, succeeded, content = answer
        try:
            result = pickle.loads(content)
            if not succeeded:
                self.answer.set_exception(result)
                return
            self.results[rank] = result
            self.missing -= 1
            if not self.missing:
                self.answer.set_result(self.to_answer([self.results[rank] for rank in sorted(self.results)]))
        except Exception as error:  # only this call fails
            self.answer.set_exception(error)

    def lose(self, error: BaseException) -> None:
        self.answer.set_exception(_named(error, self.endpoint))


def _named(error: BaseException, endpoint: str) -> BaseException:
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
        self._actors = len(handle._ndslice)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._monarchs, name)

    def call_one(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Call the only actor of a mesh of one. The call is sent even if the result is not awaited."""
        channel = self._channel()
        if channel is None or self._actors != 1:
            return _begun(self._monarchs.call_one(*args, **kwargs))
        return self._call(channel, args, kwargs, operator.itemgetter(0))

    def call(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Call every actor of the mesh. The call is sent even if the result is not awaited."""
        channel = self._channel()
        if channel is None:
            return _begun(self._monarchs.call(*args, **kwargs))
        return self._call(channel, args, kwargs, functools.partial(ValueMesh, self._handle._shape))

    def _call(
        self,
        channel: PersistentChannel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        to_answer: Callable[[list[Any]], Any],
    ) -> asyncio.Future[Any]:
        """Call all actors. Raises if the arguments cannot be pickled."""
        arguments = pickle.dumps((args, kwargs), pickle.HIGHEST_PROTOCOL)
        answer = asyncio.get_running_loop().create_future()
        channel.ask((self._name, arguments), _PendingCall(self._name, self._actors, to_answer, answer))
        return answer

    def _channel(self) -> PersistentChannel | None:
        """The running event loop's channel to the actors; None without a loop, or if the channel has ended."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return None
        channels: dict[asyncio.AbstractEventLoop, PersistentChannel] = vars(self._handle).setdefault("_channels", {})
        channel = channels.get(loop)
        if channel is None:
            handle = self._handle
            channel = channels[loop] = PersistentChannel(handle.attend.call, handle.answer_calls.broadcast)
            # A lost channel stays, so that Monarch's own calls report the loss. It goes when its loop ends.
            channel.attending.add_done_callback(lambda task: channels.pop(loop, None) if task.cancelled() else None)
        return None if channel.closed else channel


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
