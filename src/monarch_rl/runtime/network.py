"""Addresses and ports of this machine, the stores of torch.distributed, and NCCL's environment variables."""

from __future__ import annotations

import errno
import importlib
import inspect
import os
import random
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

HOST_ADDRESS_VARIABLE = "MONARCH_RL_HOST_ADDRESS"
"""Set by ``runtime/host.py`` for all processes of one host. Not for users."""

LOOPBACK = "127.0.0.1"
"""Address for processes that are all on one machine."""
BELOW_EPHEMERAL = range(22_000, 29_000)
"""Ports that neither Linux nor torchrun assigns by default."""

MUST_AGREE = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""The values that SGLang sets in an engine's process unless the user did (``_set_envs_and_config``). Trainer ranks
would have NCCL's defaults, 1 and automatic, and a group whose members differ in them fails at its first message, or
hangs."""
NO_DUMP = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""Without it, an error in any NCCL group of a process, even in a weight group whose loss the run survives, makes the
monitor of the process's first group dump all groups and then end the process (torch's ``ProcessGroupNCCL.cpp``)."""
ORDERED = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""A fixed algorithm and protocol, so that sums have a fixed order; otherwise NCCL chooses by the topology it finds.
Ring is the algorithm that all of NCCL's collectives have."""
OF_A_MACHINE = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_TOPO_FILE", "NCCL_HOSTID")
"""Variables that describe one machine's devices, so each machine keeps its own values."""


def host_address() -> str:
    """The IP address of this host for the other hosts of the launch; 127.0.0.1 on a single machine."""
    return os.environ.get(HOST_ADDRESS_VARIABLE, LOOPBACK)


def loopback_interface() -> str:
    """The name of the network interface with the address :data:`LOOPBACK`."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == LOOPBACK for address in addresses):
            return name
    raise RuntimeError(f"no network interface of this machine has the address {LOOPBACK}: enable its loopback device")


def free_port() -> int:
    """A TCP port that is free now. Bind it soon: another process may take it first."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@contextmanager
def held_port(ports: range = BELOW_EPHEMERAL) -> Iterator[int]:
    """A free TCP port, for a process that binds it later. Within the block, no other caller of this function on this
    machine gets the same port. Raises RuntimeError if all ``ports`` are taken."""
    for port in random.sample(ports, len(ports)):
        with socket.socket(socket.AF_UNIX) as claim, socket.socket() as probe:
            try:
                claim.bind(f"\0monarch_rl-port-{port}")  # in Linux's abstract namespace: released when the process ends
                probe.bind(("", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            probe.close()
            yield port
            return
    raise RuntimeError(f"all TCP ports from {ports[0]} to {ports[-1]} of this machine are in use")


def fix_nccl_order() -> None:
    """Set the variables of :data:`ORDERED` that the user has not set. Call it in the controller before meshes are
    spawned: engines and trainer ranks are members of the same groups, whose members must use the same algorithm."""
    for name, value in ORDERED.items():
        os.environ.setdefault(name, value)


def nccl_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """NCCL's variables for every process of a run: the controller's, :data:`MUST_AGREE` as defaults, and
    :data:`NO_DUMP`."""
    own = {name: value for name, value in environment.items() if name.startswith("NCCL_") and name not in OF_A_MACHINE}
    return MUST_AGREE | own | NO_DUMP


# -- stores of torch.distributed, served at one address of this machine only ------------------------------------------
# torch's own store listens on all interfaces, even if all of its processes are on one machine: anyone who can reach the
# machine could write to it.


def serve_store(address: str, port: int = 0, *, timeout: timedelta, size: int | None = None) -> Any:
    """Serve a ``torch.distributed.TCPStore`` at ``address`` (127.0.0.1 on a single machine, see ``host_address``).

    Args:
        address: IP address or host name of this machine.
        port: TCP port; for 0 the operating system chooses a free one, without a race.
        timeout: timeout of each call.
        size: number of processes that use the store, if known.

    Raises OSError if the address is not this machine's or the port is taken.
    """
    import torch.distributed as dist

    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(socket.SOMAXCONN)
        # The store closes its descriptor, even if its construction fails.
        descriptor = listener.detach()
        port = _port_of(descriptor)
        return dist.TCPStore(
            address, port, size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor
        )


def join_world(backend: str, timeout: timedelta) -> None:
    """``init_process_group`` from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, with a store of :func:`serve_store`.

    Args:
        backend: backend of the world's collectives.
        timeout: timeout of a collective.
    """
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore("world", rendezvous_store(address, port, rank, size, timeout))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def world_store() -> Any:
    """The store of the world that this process has joined, for waits other than collectives."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def serve_own_address_only() -> None:
    """Make torch use :func:`serve_store` for all stores that it creates in this process from a URL or the environment.

    For libraries that call ``init_process_group`` themselves. Warns, and keeps torch's own stores, if this version of
    torch creates them differently from torch 2.13.
    """
    import torch

    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # torch has a function of this name, too
    names = ["hostname", "port", "rank", "world_size", "timeout"]
    own = getattr(rendezvous, "_create_c10d_store", None)
    try:
        taken = list(inspect.signature(own).bind(*names, True).arguments) if own is not None else []
    except TypeError:  # it takes other arguments
        taken = []
    if taken[: len(names)] != names:
        warnings.warn(
            f"torch {torch.__version__} creates the stores of its process groups differently from torch 2.13: in this "
            "process they listen on all of the machine's addresses, not on one. Keep the machine in a private network",
            stacklevel=2,
        )
        return

    def meet(hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *_: Any, **_more: Any) -> Any:
        return rendezvous_store(hostname, port, rank, world_size, timeout)

    rendezvous._create_c10d_store = meet


def rendezvous_store(address: str, port: int, rank: int, size: int, timeout: timedelta) -> Any:
    """Connect to the store of a world. Rank 0 also serves it, unless torchrun does."""
    import torch.distributed as dist

    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return serve_store(address, port, timeout=timeout, size=size)
    return dist.TCPStore(address, port, size, is_master=False, timeout=timeout, wait_for_workers=False)


def _port_of(descriptor: int) -> int:
    with socket.socket(fileno=descriptor) as listener:
        port = int(listener.getsockname()[1])
        listener.detach()
    return port
