"""The fork server of this machine, seen from the controller: which modules it has, and from when on."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass

from monarch_rl.runtime.deadlines import DeadlineExceeded, within
from monarch_rl.runtime.forking.fork_client import ANSWER_S, address_of

logger = logging.getLogger("monarch_rl")


@dataclass(frozen=True)
class ForkServer:
    """A fork server (``runtime/forking/fork_server.py``) that the launch has started."""

    name: str = ""
    """What ``fork_client.ADDRESS_VARIABLE`` is in the processes that ask it."""
    preloads: frozenset[str] = frozenset()
    """Names of what it imports; empty where there is no server."""

    async def imported(self, preload: str) -> None:
        """Wait until it has the modules of ``preload``, if that is one of its own; for ``ANSWER_S`` at most.

        A process that is spawned before may be started without the server, and imports them itself: Monarch does not
        wait for it as long as imports can take on a crowded machine. Only the controller's machine is asked; the others
        import at the same time.
        """
        if preload not in self.preloads:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.setblocking(False)
            try:
                connection.connect(address_of(self.name, preload))
                connection.send(b"imported?")  # no request, so it is answered by the connection's end
                answer = asyncio.get_running_loop().sock_recv(connection, 1)
                await within(ANSWER_S, answer, f"the fork server to import {preload}", on="the fork server")
            except (DeadlineExceeded, OSError) as error:  # then a process is started without it
                logger.warning("processes import %s themselves: %s", preload, error)
