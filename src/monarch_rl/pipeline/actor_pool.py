"""The processes of one kind that can be replaced one by one: generator replicas, rollout workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ProcMesh

from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import DeadlineExceeded, within

logger = logging.getLogger("monarch_rl")

T = TypeVar("T")


@dataclass(frozen=True)
class ActorFactory:
    """How a process of a crew comes and goes."""

    cluster: Cluster
    spawn: Callable[[int], tuple[ProcMesh, Any]]
    """By index: a process mesh, and a handle of the one actor in it."""
    set_up: Callable[[int, Any], Awaitable[None]]
    """By index and handle: all that the actor needs before it can be used; with a deadline."""


class ActorPool:
    """The processes of one kind, each in a mesh of its own, by index.

    Args:
        kind: as in messages: ``"generator"``.
        mesh: what their meshes are called, followed by an index.
        handles: of processes that are there already.
        way: how others come; None if they cannot.
    """

    def __init__(
        self, kind: str, mesh: str, handles: Mapping[int, Any] | None = None, way: ActorFactory | None = None
    ) -> None:
        self.kind, self.mesh = kind, mesh
        self.handles: dict[int, Any] = dict(handles or {})
        """Of those that are there and set up, by index."""
        self.latest: dict[int, Any] = dict(self.handles)
        """The last handle of each, also of those that are lost."""
        self.changed = asyncio.Event()
        """Set when one has come."""
        self._way = way
        self._meshes: dict[int, ProcMesh] = {}

    def name(self, index: int) -> str:
        """As the process calls itself: ``"generator 1"``."""
        return f"{self.kind} {index}"

    @property
    def replaceable(self) -> bool:
        """Whether others can be started."""
        return self._way is not None

    async def start(self, index: int) -> Any:
        """Start process ``index``; returns its handle once it is set up. Raises what setting it up raises."""
        if self._way is None:
            raise RuntimeError(f"{self.name(index)} cannot be started: nobody has said how")
        mesh, handle = self._way.spawn(index)
        self._meshes[index] = mesh
        await self._way.set_up(index, handle)  # waits: it has deadlines of its own
        await self._way.cluster.locate(mesh)  # waits: as above
        self.handles[index] = self.latest[index] = handle
        self.changed.set()
        return handle

    async def start_all(self, count: int) -> None:
        """Start processes 0 to ``count - 1`` at once."""
        await asyncio.gather(*(self.start(index) for index in range(count)))  # waits: as start
        self.handles = dict(sorted(self.handles.items()))

    async def stop(self, index: int) -> None:
        """End what is left of process ``index``, if it was started from here."""
        self.handles.pop(index, None)
        mesh = self._meshes.pop(index, None)
        if mesh is not None and self._way is not None:
            await self._way.cluster.kill(mesh)  # waits: it has a deadline

    async def ask(
        self,
        seconds: float,
        what: str,
        call: Callable[[int, Any], Awaitable[T]],
        asked: Mapping[int, Any] | None = None,
    ) -> dict[int, T]:
        """Answers to ``call(index, handle)`` by index, each within ``seconds``.

        One that is lost, or does not answer in time, is left out with a warning: what becomes of it is not decided
        here. What an actor raises is raised.

        Args:
            what: completes the sentence that begins with a name: ``"to take note of the replicas"``.
            asked: handles by index; by default all that are there.
        """
        asked = dict(self.handles if asked is None else asked)

        async def one(index: int, handle: Any) -> T:
            return await within(seconds, call(index, handle), f"{self.name(index)} {what}", on=self.name(index))

        answers = await asyncio.gather(*(one(*each) for each in asked.items()), return_exceptions=True)
        found: dict[int, T] = {}
        for index, answer in zip(asked, answers, strict=True):
            if not isinstance(answer, BaseException):
                found[index] = answer
            elif isinstance(answer, SupervisionError | DeadlineExceeded):
                logger.warning("no answer of %s, asked %s: %s", self.name(index), what, last_line(answer))
            else:
                raise answer
        return found


def last_line(error: BaseException) -> str:
    """The last line of an error that came from another process says what happened there."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
