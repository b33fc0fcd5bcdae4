"""Rendezvous of a torchrun job, with one Monarch host per node.

Global rank 0 is the controller. It listens on a TCP port, which the other ranks request through torchrun's own store.
Each rank keeps one connection to it for the whole run: the ranks that start a host (local rank 0 of each node) send its
address, and all ranks receive how the run ended. If the controller is killed its connections close, so no rank has to
poll it.

torchrun may restart the ranks with the same store, which still contains the entries of earlier ranks, and gives them no
attempt number that all ranks share: TORCHELASTIC_RESTART_COUNT is counted by each agent, and starts at 0 on a new
machine. So each rank asks under a new random key, which only a live controller can answer.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from monarch_rl.errors import DeadlineExceeded, SettingsError
from monarch_rl.runtime.devices import visible_devices
from monarch_rl.runtime.host import HostProcess
from monarch_rl.runtime.network import LOOPBACK, rendezvous_store

logger = logging.getLogger("monarch_rl")

RENDEZVOUS_S = 3600.0
"""Seconds for all ranks to connect. torchrun starts them together, but each node first downloads the model if it does
not have it: an hour is enough for 60 GB at 17 MB/s. If a rank fails instead, torchrun ends the others on its machine at
once."""
_CHECK_S = 1.0
"""Seconds between two checks of a follower whether its own host is alive."""
_ANSWER_S = 0.1
"""Seconds between two checks of the controller for requests of ranks."""
_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rank:
    """A process's rank in the torchrun job."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int

    @classmethod
    def from_environment(cls) -> Rank:
        """Read the variables that torchrun sets."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        rank = cls(*(int(os.environ[name]) for name in names))
        if rank.world_size % rank.local_world_size:
            raise SettingsError(
                f"WORLD_SIZE {rank.world_size} is not a multiple of LOCAL_WORLD_SIZE {rank.local_world_size}: start "
                "all nodes of the launch with the same --nproc-per-node"
            )
        return rank

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.world_size // self.local_world_size


def without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without torchrun's variables.

    With TORCHELASTIC_USE_AGENT_STORE set, a mesh process would wait for a store that its mesh never serves.
    """
    return {
        name: value
        for name, value in environment.items()
        if name not in _VARIABLES and not name.startswith("TORCHELASTIC_")
    }


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the job."""

    address: str
    """Address of its Monarch host."""
    devices: tuple[str, ...]
    """Its CUDA devices, as entries of CUDA_VISIBLE_DEVICES."""


@dataclass(slots=True)
class Peer:
    """One end of the connection between the controller and another rank. Messages are lines of JSON."""

    connection: socket.socket
    _pending: bytes = field(default=b"", init=False)

    def __post_init__(self) -> None:
        # A machine that loses power does not close its connections: the kernel notices after 10 + 3 * 5 seconds.
        for level, option, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        ):
            self.connection.setsockopt(level, option, value)

    @property
    def own_ip(self) -> str:
        """The address at which the other end can reach this machine."""
        return str(self.connection.getsockname()[0])

    def send(self, message: Mapping[str, Any]) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float, what: str) -> dict[str, Any]:
        """Return the next message.

        Args:
            seconds: deadline.
            what: description of what is awaited, for errors.

        Raises :class:`DeadlineExceeded`, or ConnectionError if the other end closed the connection.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._pending:
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                chunk = self.connection.recv(65536)
            except TimeoutError:
                raise DeadlineExceeded(f"waited {seconds:g} s for {what}", what, seconds) from None
            if not chunk:
                raise ConnectionError(f"the connection was closed while this process waited for {what}")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


class Controller:
    """Global rank 0's side of the rendezvous."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._server = socket.create_server((LOOPBACK if rank.nodes == 1 else "", 0), backlog=rank.world_size)
        self._port = str(self._server.getsockname()[1])
        self._peers: dict[int, Peer] = {}
        self._store = _store(rank)
        self._answered: set[bytes] = set()

    def wait_for_ranks(
        self, start_host: Callable[[str | None], HostProcess]
    ) -> tuple[str | None, HostProcess, list[Node]]:
        """Wait for all ranks and start this node's host.

        Returns the address at which the other nodes can reach this one (None if there are no others), this node's host
        process, and all nodes in order. Raises :class:`DeadlineExceeded`, which names the missing ranks.
        """
        nodes: dict[int, Node] = {}
        ip: str | None = None
        deadline = time.monotonic() + RENDEZVOUS_S
        self._server.settimeout(_ANSWER_S)
        while missing := sorted(set(range(1, self._rank.world_size)) - self._peers.keys()):
            what = f"torchrun ranks {missing} to connect"
            self._answer(missing)
            try:
                peer = Peer(self._server.accept()[0])  # waits: until the socket's timeout, set above
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"waited {RENDEZVOUS_S:g} s for {what}", what, RENDEZVOUS_S) from None
                continue
            self._peers[peer.receive(RENDEZVOUS_S, what)["rank"]] = peer
        self._server.close()
        for rank, peer in self._peers.items():
            hello = peer.receive(RENDEZVOUS_S, f"torchrun rank {rank} to start its host")
            if "address" in hello:
                nodes[hello["node"]] = Node(hello["address"], tuple(hello["devices"]))
                ip = peer.own_ip
        host = start_host(ip)
        nodes[0] = Node(host.address, tuple(visible_devices()))
        return ip, host, [nodes[index] for index in range(self._rank.nodes)]

    def _answer(self, missing: Sequence[int]) -> None:
        """Answer the requests of ranks with the port on which this process listens."""
        for rank in missing:
            if self._store.check([f"rank {rank}"]):
                name = self._store.get(f"rank {rank}")
                if name not in self._answered:
                    self._store.set(name.decode(), self._port)
                    self._answered.add(name)

    def report_success(self) -> None:
        """Notify all ranks that the run succeeded. Without this call they fail when this process ends."""
        for rank, peer in self._peers.items():
            try:
                peer.send({"end": "done"})
            except OSError as error:
                logger.warning("rank %d ended before the run did: %s", rank, error)

    def close(self) -> None:
        """Close all connections. Ranks that have not received ``done`` fail."""
        for peer in self._peers.values():
            peer.connection.close()


class Follower:
    """Every other rank's side of the rendezvous."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        store, name = _store(rank), uuid.uuid4().hex
        store.set(f"rank {rank.rank}", name)
        port = int(store.get(name))  # waits: until the store's timeout
        address = LOOPBACK if rank.nodes == 1 else os.environ["MASTER_ADDR"]
        connection = socket.create_connection((address, port), timeout=RENDEZVOUS_S)
        self._peer = Peer(connection)
        self._peer.send({"rank": rank.rank})
        self._host: HostProcess | None = None

    def join(self, start_host: Callable[[str | None], HostProcess]) -> None:
        """Report to the controller; local rank 0 first starts its node's host."""
        hello: dict[str, Any] = {"node": self._rank.node}
        if self._rank.local_rank == 0:
            self._host = start_host(self._peer.own_ip)
            hello |= {"address": self._host.address, "devices": visible_devices()}
        self._peer.send(hello)

    def wait(self) -> bool:
        """Wait for the end of the run, of the controller, or of this node's host; returns whether the run succeeded."""
        while True:
            try:
                return self._peer.receive(_CHECK_S, "the end of the run")["end"] == "done"
            except DeadlineExceeded:
                lost = self._host.lost() if self._host is not None else None
                if lost is not None:
                    logger.error("rank %d stops: %s", self._rank.rank, lost)
                    return False
            except ConnectionError as error:
                logger.error("rank %d stops: the controller (rank 0) failed or was lost: %s", self._rank.rank, error)
                return False

    def close(self, seconds: float) -> None:
        """End this node's host and all its descendants, if this rank started it."""
        if self._host is not None:
            self._host.end(seconds)


def _store(rank: Rank) -> Any:
    """torchrun's own store."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = rendezvous_store(address, port, rank.rank, rank.world_size, timedelta(seconds=RENDEZVOUS_S))
    return dist.PrefixStore("monarch_rl", store)
