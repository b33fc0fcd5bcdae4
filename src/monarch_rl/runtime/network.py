"""Addresses and ports of this machine."""

from __future__ import annotations

import os
import socket

HOST_ADDRESS_VARIABLE = "MONARCH_RL_HOST_ADDRESS"
"""Set by ``runtime/host.py`` for all processes of one host; not meant to be set by users."""


def host_address() -> str:
    """The IP address at which the other hosts of this launch reach this one; 127.0.0.1 on a single machine."""
    return os.environ.get(HOST_ADDRESS_VARIABLE, "127.0.0.1")


def free_port() -> int:
    """A TCP port nobody listens on now. Another process may take it before the caller does: bind it soon."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
