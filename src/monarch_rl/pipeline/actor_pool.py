"""The processes of one kind that can be replaced one by one: generator replicas, rollout workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ProcMesh

from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import DeadlineExceeded, within

logger = logging.getLogger("monarch_rl")

A = TypeVar("A")
"""The actor's class."""
T = TypeVar("T")


@dataclass(frozen=True)
class ActorFactory(Generic[A]):
    """How a process of a pool is started and ended."""

    cluster: Cluster
    spawn: Callable[[int], tuple[ProcMesh, A]]
    """By index: a process mesh, and a handle of the one actor in it."""
    set_up: Callable[[int, A], Awaitable[None]]
    """By index and handle: all that the actor needs before it can be used; with a deadline."""


class ActorPool(Generic[A]):
    """The processes of one kind, each in a mesh of its own, by index.

    Args:
        kind: what messages call them: ``"generator"``.
        mesh: what their meshes are called, followed by an index.
        handles: of processes that are there already.
        factory: starts others; None if none can be started.
    """

    def __init__(
        self, kind: str, mesh: str, handles: Mapping[int, A] | None = None, factory: ActorFactory[A] | None = None
    ) -> None:
        self.kind, self.mesh = kind, mesh
        self.handles: dict[int, A] = dict(handles or {})
        """The processes that are there and set up, by index."""
        self.latest: dict[int, A] = dict(self.handles)
        """The newest handle of each index, also if that process is lost."""
        self.changed = asyncio.Event()
        """Set when a process was started."""
        self.factory = factory
        self._meshes: dict[int, ProcMesh] = {}

    def name(self, index: int) -> str:
        """What process ``index`` calls itself: ``"generator 1"``."""
        return f"{self.kind} {index}"

    @property
    def lost(self) -> list[int]:
        """The indices at which no process is there any more."""
        return sorted(self.latest.keys() - self.handles.keys())

    @property
    def replaceable(self) -> bool:
        """Whether others can be started."""
        return self.factory is not None

    async def start(self, index: int) -> A:
        """Start process ``index``; returns its handle once it is set up. Raises what setting it up raises."""
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
        """Start processes 0 to ``count - 1`` at once.

        Args:
            join: makes those that are there already fit for use, by index and handle; with a deadline. One for which it
                raises is ended, and another one started in its place. None where there are none.

        Raises what starting one raises; with ``join`` only if none is there in the end, and else warns.
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
        """What kept a process from being started, if anything did."""
        if index in self.handles:
            try:
                await join(index, self.handles[index])  # waits: it has a deadline
                return None
            except Exception as error:  # whatever it is, another process may do better
                logger.warning("%s is not kept: %s", self.name(index), last_line(error))
        await self.stop(index)  # waits: it has a deadline
        try:
            await self.start(index)  # waits: as above
        except Exception as error:  # such as that of a machine that is no more
            logger.warning("%s does not start again, others go on without it: %s", self.name(index), last_line(error))
            await self.stop(index)  # waits: as above
            return error
        return None

    async def stop(self, index: int) -> None:
        """End process ``index``, if this pool started it and it still runs."""
        self.handles.pop(index, None)
        mesh = self._meshes.pop(index, None)
        if mesh is not None and self.factory is not None:
            await self.factory.cluster.kill(mesh)  # waits: it has a deadline

    async def stop_all(self) -> None:
        """End all processes that this pool started and that still run."""
        await asyncio.gather(*(self.stop(index) for index in list(self._meshes)))  # waits: as stop

    async def ask(
        self,
        seconds: float,
        what: str,
        call: Callable[[int, A], Awaitable[T]],
        asked: Mapping[int, A] | None = None,
    ) -> dict[int, T]:
        """Answers to ``call(index, handle)`` by index, each within ``seconds``.

        A process that is lost, or does not answer in time, is left out with a warning: others decide what becomes of
        it. What an actor raises is raised.

        Args:
            what: completes the sentence that begins with a name: ``"to take note of the replicas"``.
            asked: handles by index; by default all that are there.
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
                logger.warning("no answer of %s, asked %s: %s", self.name(index), what, last_line(result))
            else:
                raise result
        return answers


def last_line(error: BaseException) -> str:
    """The last line of an error's text. Of an error that came from another process, it says what happened there."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
