"""From a torchrun job to one Monarch host per node.

Global rank 0 is the controller. It listens on a TCP port, which the other ranks learn from torchrun's own store.
Each rank holds one connection to it for as long as the run lasts: the ranks that start a host (local rank 0 of each
node) say there where it is, and all learn from it how the run ended. A controller that is killed closes its
connections, so nobody has to poll for it.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from monarch_rl.runtime.deadlines import DeadlineExceeded
from monarch_rl.runtime.devices import visible_devices
from monarch_rl.runtime.host import HostProcess

logger = logging.getLogger("monarch_rl")

MEETING_S = 300.0
"""Seconds for all ranks to meet: the nodes of one job may start minutes apart."""
_CHECK_S = 1.0
_KEY = "monarch_rl/controller_port"
_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rank:
    """A process's place in the torchrun job."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int

    @classmethod
    def from_environment(cls) -> Rank:
        """Read the variables that torchrun sets."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        place = cls(*(int(os.environ[name]) for name in names))
        if place.world_size % place.local_world_size:
            raise ValueError("all nodes of a launch need the same --nproc-per-node")
        return place

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return self.world_size // self.local_world_size


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without what torchrun put there.

    A process of a mesh that saw TORCHELASTIC_USE_AGENT_STORE would wait for a store that its own mesh never serves.
    """
    return {
        name: value
        for name, value in environment.items()
        if name not in _VARIABLES and not name.startswith("TORCHELASTIC_")
    }


@dataclass(frozen=True, slots=True)
class Node:
    """What one node of the job gives to the run."""

    address: str
    """Its Monarch host."""
    devices: tuple[str, ...]
    """Its CUDA devices, as entries for CUDA_VISIBLE_DEVICES."""


@dataclass(slots=True)
class Peer:
    """One end of the connection between the controller and another rank. Messages are lines of JSON."""

    connection: socket.socket
    _pending: bytes = field(default=b"", init=False)

    def __post_init__(self) -> None:
        # A machine that loses power closes no connection: let the kernel notice within 10 + 3 * 5 seconds.
        for level, option, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        ):
            self.connection.setsockopt(level, option, value)

    @property
    def own_ip(self) -> str:
        """The address at which the other end reaches this machine."""
        return str(self.connection.getsockname()[0])

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float, what: str) -> dict[str, Any]:
        """The next message. Raises :class:`DeadlineExceeded`, and ConnectionError when the other end is gone."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._pending:
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                chunk = self.connection.recv(65536)
            except TimeoutError:
                raise DeadlineExceeded(f"waited {seconds:g} s for {what}", what, seconds) from None
            if not chunk:
                raise ConnectionError(f"the other end closed while this one waited for {what}")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


class Controller:
    """Global rank 0's side of the meeting."""

    def __init__(self, place: Rank) -> None:
        self._place = place
        self._server = socket.create_server(("", 0), backlog=place.world_size)
        self._peers: dict[int, Peer] = {}
        _store(place).set(_KEY, str(self._server.getsockname()[1]))

    def meet(self, start_host: Callable[[str | None], HostProcess]) -> tuple[str | None, HostProcess, list[Node]]:
        """Wait for all ranks and start this node's host.

        Returns the address at which the other nodes reach this one (None if there are none), this node's host
        process, and all nodes in order. Raises :class:`DeadlineExceeded` naming the ranks that did not come.
        """
        nodes: dict[int, Node] = {}
        ip: str | None = None
        deadline = time.monotonic() + MEETING_S
        while len(self._peers) < self._place.world_size - 1:
            missing = sorted(set(range(1, self._place.world_size)) - self._peers.keys())
            what = f"torchrun ranks {missing} to call in"
            self._server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                peer = Peer(self._server.accept()[0])  # waits: until the socket's timeout, set above
            except TimeoutError:
                raise DeadlineExceeded(f"waited {MEETING_S:g} s for {what}", what, MEETING_S) from None
            hello = peer.receive(MEETING_S, what)
            self._peers[hello["rank"]] = peer
            if "address" in hello:
                nodes[hello["node"]] = Node(hello["address"], tuple(hello["devices"]))
                ip = peer.own_ip
        self._server.close()
        host = start_host(ip)
        nodes[0] = Node(host.address, tuple(visible_devices()))
        return ip, host, [nodes[index] for index in range(self._place.nodes)]

    def dismiss(self) -> None:
        """Tell all ranks that the run went well. If this is never called, they fail when this process ends."""
        for rank, peer in self._peers.items():
            try:
                peer.send({"end": "done"})
            except OSError as error:
                logger.warning("rank %d was gone before the end: %s", rank, error)

    def close(self) -> None:
        """Close all connections. Ranks that were not dismissed fail now."""
        for peer in self._peers.values():
            peer.connection.close()


class Follower:
    """The side of a rank that is not the controller."""

    def __init__(self, place: Rank) -> None:
        self._place = place
        port = int(_store(place).get(_KEY))
        connection = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=MEETING_S)
        self._peer = Peer(connection)
        self._host: HostProcess | None = None

    def join(self, start_host: Callable[[str | None], HostProcess]) -> None:
        """Call in; local rank 0 starts its node's host first."""
        hello: dict[str, Any] = {"rank": self._place.rank, "node": self._place.node}
        if self._place.local_rank == 0:
            self._host = start_host(self._peer.own_ip)
            hello |= {"address": self._host.address, "devices": visible_devices()}
        self._peer.send(hello)

    def wait(self) -> bool:
        """Wait, as long as the controller lives, for the end of the run; whether it went well."""
        while True:
            try:
                return self._peer.receive(_CHECK_S, "the end of the run")["end"] == "done"
            except DeadlineExceeded:
                if self._host is not None and self._host.lost():
                    logger.error("the Monarch host of node %d was lost", self._place.node)
                    return False
            except ConnectionError as error:
                logger.error("rank %d stops: the controller (rank 0) failed or was lost: %s", self._place.rank, error)
                return False

    def close(self, seconds: float) -> None:
        """End this node's host, if this rank started it, and all processes below it."""
        if self._host is not None:
            self._host.end(seconds)


def _store(place: Rank) -> Any:
    """torchrun's own store, under a prefix of this attempt (torchrun may restart the ranks)."""
    import torch.distributed as dist

    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        place.world_size,
        is_master=place.rank == 0 and not agent_serves,
        timeout=timedelta(seconds=MEETING_S),
        wait_for_workers=False,
    )
    return dist.PrefixStore(f"monarch_rl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
