"""Rates of the machine for the same bytes, without code of this project: the references of weights.py."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from monarch.actor import Actor

from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint
from monarch_rl.runtime.network import free_port
from monarch_rl.weights.area import Area

ROUNDS = 5
TIMEOUT_S = 300


def measure(cluster: Cluster, nbytes: int) -> dict[str, float]:
    """Return GB/s of one thread: a copy, a copy into shared memory, a gloo broadcast between two processes, and a read
    of one actor's ``RDMABuffer`` by another, with the launch's configuration of Monarch."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target, area = torch.zeros_like(source), Area(nbytes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {
        "memcpy_gb_per_s": _rate(nbytes, lambda: target.copy_(source)),
        "shared_memory_gb_per_s": _rate(nbytes, lambda: area.buffer.copy_(source)),
        "gloo_gb_per_s": _gloo(nbytes),
        "rdma_gb_per_s": nbytes / asyncio.run(_rdma(cluster, nbytes)) / 1e9,
    }
    torch.set_num_threads(threads)
    return found


def _rate(nbytes: int, work: Callable[[], object]) -> float:
    """Return the median without the first round, in which pages are touched."""
    seconds = []
    for _ in range(1 + ROUNDS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return nbytes / statistics.median(seconds[1:]) / 1e9


def _gloo(nbytes: int) -> float:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    port = free_port()
    processes = [context.Process(target=_broadcast, args=(rank, port, nbytes, there)) for rank in range(2)]
    for process in processes:
        process.start()
    if not here.poll(TIMEOUT_S):
        raise TimeoutError(f"no raw gloo broadcast within {TIMEOUT_S} s")
    seconds: list[float] = here.recv()
    for process in processes:
        process.join(TIMEOUT_S)
    return nbytes / statistics.median(seconds[1:]) / 1e9


def _broadcast(rank: int, port: int, nbytes: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    tensor = torch.full((nbytes,), 1 - rank, dtype=torch.uint8)
    seconds = []
    for _ in range(1 + ROUNDS):
        dist.barrier()
        started = time.perf_counter()
        dist.broadcast(tensor, 0)
        seconds.append(time.perf_counter() - started)
    if rank == 1:
        pipe.send(seconds)
    dist.destroy_process_group()


class Memory(Actor):
    """Owns memory that others read, or reads others'."""

    @concurrent_endpoint
    async def own(self, nbytes: int) -> Any:
        from monarch.rdma import RDMABuffer

        self._data = torch.ones(nbytes, dtype=torch.uint8)
        return RDMABuffer(self._data)

    @concurrent_endpoint
    async def read(self, buffer: Any, nbytes: int) -> float:
        """Median seconds."""
        target, seconds = torch.zeros(nbytes, dtype=torch.uint8), []
        for _ in range(1 + ROUNDS):
            started = time.perf_counter()
            await buffer.read_into(target, timeout=TIMEOUT_S)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[1:])


async def _rdma(cluster: Cluster, nbytes: int) -> float:
    owner, reader = (cluster.spawn(name, 1).spawn(name, Memory) for name in ("owner", "reader"))
    buffer = await within(TIMEOUT_S, owner.own.call_one(nbytes), "the owner of the memory")
    return await within(2 * TIMEOUT_S, reader.read.call_one(buffer, nbytes), "a raw read")
