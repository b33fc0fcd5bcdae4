"""A fork server for tests that start many processes: each has its imports behind it, as in a run."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from monarch_rl.runtime.fork_server import Preload, start_server

END_S = 60.0
"""Seconds for the server to end: at once if all that it has forked have ended."""


@contextmanager
def forking(preloads: Sequence[Preload]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server during the block, and its name: the value of ``fork_client.ADDRESS_VARIABLE`` for those that ask it."""
    if torch.accelerator.is_available():  # as in launch_cluster()
        preloads = [preload for preload in preloads if not preload.asks_for_accelerators]
    name = f"monarch_rl-tests-{uuid.uuid4().hex}"
    server = start_server(name, preloads)
    try:
        yield name, server
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(END_S)
