"""The controller's view of this machine's fork server: which modules it imports, and when they are imported."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass

from monarch_rl.errors import DeadlineExceeded
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.forking.fork_client import ANSWER_S, address_of

logger = logging.getLogger("monarch_rl")


@dataclass(frozen=True)
class ForkServer:
    """A fork server (``runtime/forking/fork_server.py``) that the launch has started."""

    name: str = ""
    """Value of ``fork_client.ADDRESS_VARIABLE`` in its client processes."""
    preloads: frozenset[str] = frozenset()
    """Names of its preloads; empty if there is no server."""

    async def imported(self, preload: str) -> None:
        """Wait until the server has imported the modules of ``preload``, at most ``ANSWER_S``; returns at once if it
        has no such preload.

        A process spawned earlier may be started without the server and import the modules itself, and Monarch does not
        wait as long as imports can take on a busy machine. Only the controller's machine is asked; the others import at
        the same time.
        """
        if preload not in self.preloads:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.setblocking(False)
            try:
                connection.connect(address_of(self.name, preload))
                connection.send(b"imported?")  # not a valid request, so the server answers by closing the connection
                answer = asyncio.get_running_loop().sock_recv(connection, 1)
                await within(ANSWER_S, answer, f"the fork server to import {preload}", on="the fork server")
            except (DeadlineExceeded, OSError) as error:  # processes are then started without the server
                logger.warning("processes import %s themselves: %s", preload, error)
