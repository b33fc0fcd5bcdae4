"""Ports for processes that bind them later."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from monarch_rl.runtime.network import BELOW_EPHEMERAL, held_port


def test_a_held_port_is_exclusive_and_released() -> None:
    with held_port() as first:
        pass
    assert first in BELOW_EPHEMERAL
    ports = range(first, first + 1)
    with held_port(ports) as held, pytest.raises(RuntimeError, match="are in use"), held_port(ports):
        raise AssertionError(f"{held} was given twice")
    with socket.create_server(("", first)), pytest.raises(RuntimeError, match="are in use"), held_port(ports):
        raise AssertionError(f"{first} is in use")
    with held_port(ports) as again:
        assert again == first


def test_held_ports_are_free_and_differ() -> None:
    ports = range(23_000, 23_040)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("", stack.enter_context(held_port(ports)))))
        given = [stack.enter_context(held_port(ports)) for _ in range(20)]
        assert len({listener.getsockname()[1], *given}) == 21
        for port in given:
            stack.enter_context(socket.create_server(("", port)))
