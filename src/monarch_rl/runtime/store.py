"""The stores at which processes of torch.distributed meet, at one address of this machine only.

torch's own store listens on all interfaces, also where all of its processes are on one machine: anybody who reaches the
machine could write to it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import socket
import warnings
from datetime import timedelta
from typing import Any


def serve_store(address: str, port: int = 0, *, timeout: timedelta, size: int | None = None) -> Any:
    """Serve a ``torch.distributed.TCPStore`` at ``address`` (127.0.0.1 on a single machine, see ``host_address``).

    Args:
        address: of this machine, by number or by name.
        port: with 0 the operating system chooses a free one, without a race.
        timeout: of each call.
        size: processes that meet there, if that is known.

    Raises OSError if the address is not this machine's or the port is taken.
    """
    import torch.distributed as dist

    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(socket.SOMAXCONN)
        # The store closes its descriptor, also if it cannot be made.
        descriptor = listener.detach()
        port = _port_of(descriptor)
        return dist.TCPStore(
            address, port, size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor
        )


def join_world(backend: str, timeout: timedelta) -> None:
    """``init_process_group`` by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, with a store of :func:`serve_store`.

    Args:
        backend: of the world's collectives.
        timeout: of a collective.
    """
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore("world", meeting_store(address, port, rank, size, timeout))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def world_store() -> Any:
    """The store of the world that this process has joined: for waits that are no collectives."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def serve_own_address_only() -> None:
    """Have all stores that torch makes in this process for a URL or the environment be of :func:`serve_store`.

    For libraries that join a world by themselves. Warns, and leaves torch's own stores, if this torch calls for them in
    another way than torch 2.13 does.
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
            f"torch {torch.__version__} makes the stores of its process groups in a way that is not known here: "
            "those of this process listen on all of the machine's addresses, not on one. Keep it in a private network",
            stacklevel=2,
        )
        return

    def meet(hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *_: Any, **_more: Any) -> Any:
        return meeting_store(hostname, port, rank, world_size, timeout)

    rendezvous._create_c10d_store = meet


def meeting_store(address: str, port: int, rank: int, size: int, timeout: timedelta) -> Any:
    """The store of a world: rank 0 serves it, unless torchrun does."""
    import torch.distributed as dist

    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return serve_store(address, port, timeout=timeout, size=size)
    return dist.TCPStore(address, port, size, is_master=False, timeout=timeout, wait_for_workers=False)


def _port_of(descriptor: int) -> int:
    with socket.socket(fileno=descriptor) as listener:
        port = int(listener.getsockname()[1])
        listener.detach()
    return port
