"""Addresses and ports of this machine, and what NCCL is told of its network."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

HOST_ADDRESS_VARIABLE = "MONARCH_RL_HOST_ADDRESS"
"""Set by ``runtime/host.py`` for all processes of one host. Not for users."""

LOOPBACK = "127.0.0.1"
"""Where processes meet that are all on one machine."""
BELOW_EPHEMERAL = range(22_000, 29_000)
"""Ports that neither Linux nor torchrun assigns by default."""

MUST_AGREE = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""What SGLang sets in an engine's process where the user has not (``_set_envs_and_config``). Trainer ranks would have
NCCL's defaults, 1 and automatic, and a group whose members differ in them fails at its first message, or hangs."""
NO_DUMP = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""Else an error in any NCCL group of a process, also in one for weights whose loss the run survives, asks the monitor
of the process's first group for a dump of all, after which that ends the process (torch's ``ProcessGroupNCCL.cpp``)."""
ORDERED = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""One algorithm and protocol, so that sums have one order; else NCCL chooses by the topology that it finds. Rings are
what all of its collectives have."""
OF_A_MACHINE = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_TOPO_FILE", "NCCL_HOSTID")
"""Variables that name the devices of a machine, which each has for itself."""


def host_address() -> str:
    """The IP address at which the other hosts of this launch reach this one; 127.0.0.1 on a single machine."""
    return os.environ.get(HOST_ADDRESS_VARIABLE, LOOPBACK)


def loopback_interface() -> str:
    """The name of the interface that has :data:`LOOPBACK`."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == LOOPBACK for address in addresses):
            return name
    raise RuntimeError(f"this machine has no interface with {LOOPBACK}")


def free_port() -> int:
    """A TCP port that is free now. Another process may take it before the caller does, so bind it soon."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@contextmanager
def held_port(ports: range = BELOW_EPHEMERAL) -> Iterator[int]:
    """A free TCP port, for a process that binds it later. During the block no other caller of this function on this
    machine gets the port. Raises RuntimeError if all ``ports`` are taken."""
    for port in random.sample(ports, len(ports)):
        with socket.socket(socket.AF_UNIX) as claim, socket.socket() as probe:
            try:
                claim.bind(f"\0monarch_rl-port-{port}")  # in Linux's abstract namespace: released when its process ends
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
    """Set :data:`ORDERED` where the user has not. In the controller before meshes are spawned: engines are members of
    groups with trainer ranks, and members that choose for themselves would not understand each other."""
    for name, value in ORDERED.items():
        os.environ.setdefault(name, value)


def nccl_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """NCCL's variables for every process of a run: the controller's, those that must agree, and :data:`NO_DUMP`."""
    own = {name: value for name, value in environment.items() if name.startswith("NCCL_") and name not in OF_A_MACHINE}
    return MUST_AGREE | own | NO_DUMP
