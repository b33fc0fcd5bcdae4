"""Typed actor endpoints: what Monarch's ``concurrent_endpoint`` does, with the types that mypy needs.

Monarch ships no type information. With these, the handle of an actor is typed as the actor's own class: "go to
definition" on ``trainer.update`` ends at the endpoint, and a wrong argument of ``trainer.update.call(...)`` is an error
of mypy. Rooms that must not import an actor's class type its handle by a ``Protocol`` of :class:`Endpoint` members.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, ItemsView, ValuesView
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from monarch.actor import concurrent_endpoint as monarch_endpoint

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Answers(Protocol[R_co]):
    """What the actors of a mesh answered, by their place in it: Monarch's ``ValueMesh``."""

    def values(self) -> ValuesView[R_co]:
        """The answers, by rank."""
        ...

    def items(self) -> ItemsView[Any, R_co]:
        """Place in the mesh, and answer."""
        ...


class Endpoint(Protocol[P, R_co]):
    """An endpoint as the holder of a handle sees it."""

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R_co]:
        """Ask the one actor of a mesh of one."""
        ...

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[Answers[R_co]]:
        """Ask every actor of the mesh."""
        ...


class EndpointMethod(Generic[P, R]):
    """What :func:`concurrent_endpoint` makes of a method, as type checkers see it."""

    def __get__(self, instance: Any, owner: Any) -> Endpoint[P, R]:
        raise NotImplementedError("Monarch puts its own descriptor here")


def concurrent_endpoint(method: Callable[Concatenate[Any, P], Awaitable[R]]) -> EndpointMethod[P, R]:
    """Make a coroutine method an endpoint. Calls run side by side: one that waits never blocks another.

    Without the span in which Monarch would wrap each call for its tracing: it costs CPU time, and nobody reads it.
    """
    return cast(EndpointMethod[P, R], monarch_endpoint(method, instrument=False))
