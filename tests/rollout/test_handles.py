"""A worker's protocols match the actors that it calls."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from monarch_rl.buffer.actor import Buffer
from monarch_rl.rollout.handles import BufferHandle

ENDPOINTS = [name for name in vars(BufferHandle) if hasattr(vars(BufferHandle)[name], "_method")]


def as_handle(buffer: Buffer) -> BufferHandle:
    """For mypy: the buffer has the endpoints that a worker calls."""
    return buffer


def test_the_endpoints_are_found() -> None:
    assert set(ENDPOINTS) == {"admit_many", "reserve", "submit", "submit_if_room", "drop", "note_failure"}


@pytest.mark.parametrize("name", ENDPOINTS)
def test_the_buffer_has_the_endpoints_that_a_worker_calls(name: str) -> None:
    def types(actor: type) -> tuple[list[Any], Any]:
        signature = inspect.signature(inspect.getattr_static(actor, name)._method)
        return [parameter.annotation for parameter in signature.parameters.values()], signature.return_annotation

    assert types(BufferHandle) == types(Buffer)
