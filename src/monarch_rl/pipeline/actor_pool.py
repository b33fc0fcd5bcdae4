"""Pools of processes that can be replaced one by one: generator replicas, frozen engines, rollout workers.

Also the call that finds out whether a process is alive, which is how a lost one is told from one that failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ProcMesh

from monarch_rl.errors import DeadlineExceeded
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint

logger = logging.getLogger("monarch_rl")

A = TypeVar("A")
"""The actor's class."""
T = TypeVar("T")

ANSWER_DEADLINE_S = 20.0
"""Seconds within which a live process answers, on a machine with all cores busy."""


@dataclass(frozen=True)
class ActorFactory(Generic[A]):
    """Starts the processes of a pool."""

    cluster: Cluster
    spawn: Callable[[int], tuple[ProcMesh, A]]
    """Spawns the process of an index; returns its mesh, and a handle of the mesh's only actor."""
    set_up: Callable[[int, A], Awaitable[None]]
    """Sets up the actor of an index so that it can be used; has its own deadline."""


class ActorPool(Generic[A]):
    """The processes of one kind by index, each in a mesh of its own.

    Args:
        kind: name of the kind in messages, such as ``"generator"``.
        mesh: prefix of the mesh names; the index follows.
        handles: handles of processes that are already running, by index.
        factory: starts processes; None if none can be started.
    """

    def __init__(
        self, kind: str, mesh: str, handles: Mapping[int, A] | None = None, factory: ActorFactory[A] | None = None
    ) -> None:
        self.kind, self.mesh = kind, mesh
        self.handles: dict[int, A] = dict(handles or {})
        """Processes that are alive and set up, by index."""
        self.latest: dict[int, A] = dict(self.handles)
        """The newest handle of each index, even if its process is lost."""
        self.changed = asyncio.Event()
        """Set when a process has started."""
        self.factory = factory
        self._meshes: dict[int, ProcMesh] = {}

    def name(self, index: int) -> str:
        """The name of process ``index`` in messages, such as ``"generator 1"``."""
        return f"{self.kind} {index}"

    @property
    def lost(self) -> list[int]:
        """Indices whose process is lost."""
        return sorted(self.latest.keys() - self.handles.keys())

    @property
    def replaceable(self) -> bool:
        """Whether lost processes can be replaced."""
        return self.factory is not None

    async def start(self, index: int) -> A:
        """Start process ``index``; returns its handle once it is set up. Raises any error of its set-up."""
        factory = self.factory
        if factory is None:
            raise RuntimeError(f"{self.name(index)} cannot be started: its pool has no factory")
        mesh, handle = factory.spawn(index)
        self._meshes[index] = mesh
        await factory.set_up(index, handle)  # waits: it has deadlines of its own
        await factory.cluster.locate(mesh)  # waits: as above
        self.handles[index] = self.latest[index] = handle
        self.changed.set()
        return handle

    async def start_all(self, count: int, join: Callable[[int, A], Awaitable[object]] | None = None) -> None:
        """Start processes 0 to ``count - 1`` concurrently.

        Args:
            join: prepares a surviving process for use after a warm restart, by index and handle; has its own deadline.
                A process for which it raises is stopped and replaced. None if no process survives.

        Raises the error of a start that fails. With ``join``, raises only if no process is running in the end, and
        warns otherwise.
        """
        if join is None:
            await asyncio.gather(*(self.start(index) for index in range(count)))  # waits: as start
        else:
            joining = [self._join_or_start(index, join) for index in range(count)]
            failed = [error for error in await asyncio.gather(*joining) if error is not None]  # waits: as start
            if failed and not self.handles:
                raise failed[0]
        self.handles = dict(sorted(self.handles.items()))

    async def _join_or_start(self, index: int, join: Callable[[int, A], Awaitable[object]]) -> Exception | None:
        """Prepare the surviving process ``index``, or start a new one; returns the error if neither succeeds."""
        if index in self.handles:
            try:
                await join(index, self.handles[index])  # waits: it has a deadline
                return None
            except Exception as error:  # whatever it is, a new process may not have it
                logger.warning("%s cannot be reused and is replaced: %s", self.name(index), last_line(error))
        await self.stop(index)  # waits: it has a deadline
        try:
            await self.start(index)  # waits: as above
        except Exception as error:  # for example, its machine is gone
            logger.warning("%s did not restart; the run continues without it: %s", self.name(index), last_line(error))
            await self.stop(index)  # waits: as above
            return error
        return None

    async def stop(self, index: int) -> None:
        """Kill process ``index``, if this pool started it and it is still running."""
        self.handles.pop(index, None)
        mesh = self._meshes.pop(index, None)
        if mesh is not None and self.factory is not None:
            await self.factory.cluster.kill(mesh)  # waits: it has a deadline

    async def stop_all(self) -> None:
        """Kill all processes that this pool started and that are still running."""
        await asyncio.gather(*(self.stop(index) for index in list(self._meshes)))  # waits: as stop

    async def ask(
        self,
        seconds: float,
        what: str,
        call: Callable[[int, A], Awaitable[T]],
        asked: Mapping[int, A] | None = None,
    ) -> dict[int, T]:
        """Call ``call(index, handle)`` for each process; returns the answers by index.

        A process that is lost or does not answer in time is left out with a warning; handling its loss is up to
        :class:`~monarch_rl.pipeline.recovery.Recovery`. Errors raised by an actor are raised.

        Args:
            seconds: deadline of each call.
            what: completes the sentence "<process> ...", such as ``"to return its stats"``.
            asked: handles to call, by index; default: all processes that are alive.
        """
        asked = dict(self.handles if asked is None else asked)

        async def ask_one(index: int, handle: A) -> T:
            return await within(seconds, call(index, handle), f"{self.name(index)} {what}", on=self.name(index))

        results = await asyncio.gather(*(ask_one(*item) for item in asked.items()), return_exceptions=True)
        answers: dict[int, T] = {}
        for index, result in zip(asked, results, strict=True):
            if not isinstance(result, BaseException):
                answers[index] = result
            elif isinstance(result, SupervisionError | DeadlineExceeded):
                logger.warning("%s did not answer a request %s: %s", self.name(index), what, last_line(result))
            else:
                raise result
        return answers


def last_line(error: BaseException) -> str:
    """The last line of an error's text; for an error from another process, this line states the actual cause."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


# -- whether a process is alive ---------------------------------------------------------------------------------------


class Pingable(Protocol):
    """An actor that can report whether it is alive."""

    @concurrent_endpoint
    async def ready(self) -> None:
        """Raise the actor's error, if it cannot work."""


async def ping(name: str, actor: Pingable) -> None:
    """Raise if an actor does not answer within ``ANSWER_DEADLINE_S``."""
    await within(ANSWER_DEADLINE_S, actor.ready.call_one(), f"{name} to report that it is alive", on=name)


async def ping_failure(name: str, actor: Pingable) -> str | None:
    """Why an actor does not answer within ``ANSWER_DEADLINE_S``; None if it answers."""
    try:
        await ping(name, actor)
    except Exception as error:
        return f"{name} does not answer: {last_line(error)}"
    return None
