"""Typed actor endpoints: Monarch's ``concurrent_endpoint`` with types for mypy.

Monarch has no type information. With this module, an actor's handle is typed as the actor's own class: "go to
definition" on ``trainer.update`` leads to the endpoint, and mypy reports wrong arguments of
``trainer.update.call(...)``. Packages that must not import an actor's class type its handle as a ``Protocol`` with
:class:`Endpoint` members.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, ItemsView, ValuesView
from itertools import product
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from monarch.actor import concurrent_endpoint as monarch_endpoint
from monarch.actor import endpoint as monarch_serial_endpoint

from monarch_rl.runtime.persistent_calls import PERSISTENT

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Answers(Protocol[R_co]):
    """The answers of the actors of a mesh, by their point in it: Monarch's ``ValueMesh``."""

    def values(self) -> ValuesView[R_co]:
        """The answers, by rank."""
        ...

    def items(self) -> ItemsView[Any, R_co]:
        """(point in the mesh, answer) pairs."""
        ...


class Endpoint(Protocol[P, R_co]):
    """An endpoint of a handle."""

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R_co]:
        """Call the only actor of a mesh of one."""
        ...

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[Answers[R_co]]:
        """Call every actor of the mesh."""
        ...


class OneWayEndpoint(Protocol[P]):
    """An endpoint of a handle that sends no answers."""

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Send a message to every actor of the mesh."""
        ...


class EndpointMethod(Generic[P, R]):
    """Type of a method decorated with :func:`concurrent_endpoint`, for type checkers."""

    def __get__(self, instance: Any, owner: Any) -> Endpoint[P, R]:
        raise NotImplementedError("Monarch replaces this descriptor with its own")


class OneWayEndpointMethod(Generic[P]):
    """Type of a method decorated with :func:`one_way_endpoint`, for type checkers."""

    def __get__(self, instance: Any, owner: Any) -> OneWayEndpoint[P]:
        raise NotImplementedError("Monarch replaces this descriptor with its own")


def concurrent_endpoint(method: Callable[Concatenate[Any, P], Awaitable[R]]) -> EndpointMethod[P, R]:
    """Make a coroutine method an endpoint. Calls run concurrently: one that waits never blocks another.

    Disables the tracing span in which Monarch would wrap each call, because it costs CPU time and is not used.
    """
    return cast(EndpointMethod[P, R], monarch_endpoint(method, instrument=False))


def persistent_endpoint(method: Callable[Concatenate[Any, P], Awaitable[R]]) -> EndpointMethod[P, R]:
    """A :func:`concurrent_endpoint` with persistent calls, for endpoints that are called throughout a run: its calls
    leave no port behind (``runtime/persistent_calls.py``).

    Its actor must be an :class:`~monarch_rl.runtime.persistent_calls.AnswersCalls`. Plain pickle must be able to pickle
    arguments and results: values of types that are defined at the top of a module, and no handles.
    """
    made = monarch_endpoint(method, instrument=False)
    setattr(made._method, PERSISTENT, method)
    return cast(EndpointMethod[P, R], made)


def one_way_endpoint(method: Callable[Concatenate[Any, P], Awaitable[None]]) -> OneWayEndpointMethod[P]:
    """Make a coroutine method an endpoint that sends no answer. It must not wait, because later messages wait for it,
    and must not raise, because that ends its actor; for the same reason, unpickling its arguments must not raise."""
    return cast(OneWayEndpointMethod[P], monarch_serial_endpoint(method, instrument=False))


# -- the single actors of an actor mesh -------------------------------------------------------------------------------

T = TypeVar("T")


def members(mesh: T) -> list[T]:
    """The mesh's actors by rank, each as a mesh of one. ``mesh`` is a handle, typed as its actor's class."""
    monarch_mesh = cast(Any, mesh)
    labels, sizes = monarch_mesh.extent.labels, monarch_mesh.extent.sizes
    places = product(*(range(size) for size in sizes))
    return [monarch_mesh.slice(**dict(zip(labels, place, strict=True))) for place in places]
