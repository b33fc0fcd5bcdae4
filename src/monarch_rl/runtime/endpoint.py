"""Typed actor endpoints: what Monarch's ``concurrent_endpoint`` does, with the types that mypy needs.

Monarch ships no type information. With these, the handle of an actor is typed as the actor's own class: "go to
definition" on ``trainer.update`` ends at the endpoint, and a wrong argument of ``trainer.update.call(...)`` is an error
of mypy. Rooms that must not import an actor's class type its handle by a ``Protocol`` of :class:`Endpoint` members.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, ItemsView, ValuesView
from itertools import product
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from monarch.actor import concurrent_endpoint as monarch_endpoint
from monarch.actor import endpoint as monarch_serial_endpoint

from monarch_rl.runtime.lasting_calls import LASTING

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


class OneWayEndpoint(Protocol[P]):
    """An endpoint that answers nobody, as the holder of a handle sees it."""

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Tell every actor of the mesh."""
        ...


class EndpointMethod(Generic[P, R]):
    """What :func:`concurrent_endpoint` makes of a method, as type checkers see it."""

    def __get__(self, instance: Any, owner: Any) -> Endpoint[P, R]:
        raise NotImplementedError("Monarch puts its own descriptor here")


class OneWayEndpointMethod(Generic[P]):
    """What :func:`one_way_endpoint` makes of a method, as type checkers see it."""

    def __get__(self, instance: Any, owner: Any) -> OneWayEndpoint[P]:
        raise NotImplementedError("Monarch puts its own descriptor here")


def concurrent_endpoint(method: Callable[Concatenate[Any, P], Awaitable[R]]) -> EndpointMethod[P, R]:
    """Make a coroutine method an endpoint. Calls run side by side: one that waits never blocks another.

    Without the span in which Monarch would wrap each call for its tracing: it costs CPU time, and nobody reads it.
    """
    return cast(EndpointMethod[P, R], monarch_endpoint(method, instrument=False))


def lasting_endpoint(method: Callable[Concatenate[Any, P], Awaitable[R]]) -> EndpointMethod[P, R]:
    """A :func:`concurrent_endpoint` that is called for as long as a run lasts: its calls leave no port behind
    (``runtime/lasting_calls.py``).

    Its actor must be :class:`~monarch_rl.runtime.lasting_calls.AnswersCalls`. Arguments and results must be what plain
    pickle takes: values, of types that a module has, and no handles.
    """
    made = monarch_endpoint(method, instrument=False)
    setattr(made._method, LASTING, method)
    return cast(EndpointMethod[P, R], made)


def one_way_endpoint(method: Callable[Concatenate[Any, P], Awaitable[None]]) -> OneWayEndpointMethod[P]:
    """Make a coroutine method an endpoint whose caller hears nothing. It is not to wait, as messages after it wait for
    it, and not to raise, as that ends its actor; nor may reading its arguments raise."""
    return cast(OneWayEndpointMethod[P], monarch_serial_endpoint(method, instrument=False))


# -- the actors of an actor mesh, one by one --------------------------------------------------------------------------

T = TypeVar("T")


def members(mesh: T) -> list[T]:
    """The mesh's actors by rank, each as a mesh of one. ``mesh``: a handle, typed as its actor's class."""
    monarch_mesh = cast(Any, mesh)
    labels, sizes = monarch_mesh.extent.labels, monarch_mesh.extent.sizes
    places = product(*(range(size) for size in sizes))
    return [monarch_mesh.slice(**dict(zip(labels, place, strict=True))) for place in places]
