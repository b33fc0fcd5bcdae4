"""Transport ``rdma`` against one raw read of the same number of bytes from the same processes, alternately.

    python benchmarks/transfer_rdma.py

For each number of senders and receivers: the median over rounds of raw time / transfer time, and of the transfer's
rate. With `short` runs, 2 senders own halves of matrices of at most 1.8 MB, which go through landing buffers.
"""

from __future__ import annotations

import monarch_rl.runtime  # isort: skip  # noqa: F401  before monarch: its settings count only if it is imported first

import asyncio
import json
import pickle
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from monarch.actor import Actor
from monarch.rdma import RDMABuffer

from monarch_rl.runtime.cluster import Cluster, launch_cluster
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint
from monarch_rl.weights.manifest import Manifest, make_manifest
from monarch_rl.weights.rdma import RdmaReceiver, RdmaSender
from monarch_rl.weights.transport import TransferSettings

CPU = torch.device("cpu")
CASES = (("long", 1, 1), ("long", 2, 1), ("long", 1, 2), ("short", 2, 1))
"""Runs, senders, receivers."""
SHAPES = {"long": (8192, 2048), "short": (1536, 576)}
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Settings:
    """Rate of transport rdma (see the top of this file)."""

    mb: int = 256
    """MB of a version."""
    rounds: int = 15
    """Timed transfers, and raw reads."""
    bucket_mib: int = 64
    """Largest size of one read, in MiB."""


def make_version(mb: int, runs: str, senders: int) -> Manifest:
    """Return the manifest of bfloat16 matrices of one shape, split by rows."""
    rows, width = SHAPES[runs]
    tensors = [(f"t{i}", SHAPES[runs], torch.bfloat16) for i in range(mb * 10**6 // (2 * rows * width))]
    share = rows // senders * width
    return make_manifest(tensors, [[(name, r * share, share) for name, _, _ in tensors] for r in range(senders)])


class Sending(Actor):
    """Owns memory for the transport, and the same amount for raw reads."""

    @concurrent_endpoint
    async def open(self, manifest: Manifest, rank: int, settings: TransferSettings) -> tuple[bytes, bytes]:
        self.sender = RdmaSender(manifest, rank, settings, "127.0.0.1", CPU)
        for view in self.sender.views(0):
            view.fill_(rank + 1)
        address = await self.sender.open()
        await self.sender.send(1, 0)
        self.raw = RDMABuffer(torch.ones(manifest.nbytes // len(manifest.shards), dtype=torch.uint8))
        return address, pickle.dumps(self.raw)

    @concurrent_endpoint
    async def close(self) -> None:
        await self.sender.close()
        await self.raw.drop()


class Receiving(Actor):
    @concurrent_endpoint
    async def connect(self, manifest: Manifest, settings: TransferSettings, opened: list[tuple[bytes, bytes]]) -> None:
        torch.set_num_threads(1)
        self.receiver = RdmaReceiver(manifest, settings, CPU)
        await self.receiver.connect([address for address, _ in opened], 0, 1)
        self.raw: list[RDMABuffer] = [pickle.loads(raw) for _, raw in opened]
        self.memory = [torch.zeros(raw.size(), dtype=torch.uint8) for raw in self.raw]

    @concurrent_endpoint
    async def read_raw(self) -> None:
        async def read(buffer: RDMABuffer, memory: torch.Tensor) -> None:
            await buffer.read_into(memory)

        await asyncio.gather(*map(read, self.raw, self.memory))

    @concurrent_endpoint
    async def receive(self) -> None:
        await self.receiver.receive(1, 0)


async def measure(s: Settings, senders: list[Any], receivers: Any, runs: str) -> dict[str, float]:
    manifest = make_version(s.mb, runs, len(senders))
    settings = TransferSettings(bucket_mib=s.bucket_mib)
    opened = [await sender.open.call_one(manifest, rank, settings) for rank, sender in enumerate(senders)]
    await receivers.connect.call(manifest, settings, opened)

    async def seconds(endpoint: Any) -> float:
        started = time.perf_counter()
        await within(DEADLINE_S, endpoint.call(), "a read")
        return time.perf_counter() - started

    await seconds(receivers.read_raw), await seconds(receivers.receive)  # the first ones connect
    pairs = [(await seconds(receivers.read_raw), await seconds(receivers.receive)) for _ in range(s.rounds)]
    for sender in senders:
        await sender.close.call_one()
    return {
        "over_raw": round(statistics.median(raw / transfer for raw, transfer in pairs), 3),
        "gb_per_s": round(manifest.nbytes / 1e9 / statistics.median(transfer for _, transfer in pairs), 3),
    }


async def run(cluster: Cluster, s: Settings) -> None:
    senders = [cluster.spawn(f"sender{rank}", 1).spawn("sender", Sending) for rank in range(2)]
    receivers = cluster.spawn("receivers", 2).spawn("receivers", Receiving)
    results = {}
    for runs, sending, receiving in CASES:
        chosen = receivers if receiving == 2 else receivers.slice(gpus=0)
        name = f"{runs}_{sending}_to_{receiving}"
        results[name] = await measure(s, senders[:sending], chosen, runs)
        print(name, results[name], flush=True)
    print(json.dumps({"benchmark": "transfer_rdma", "mb": s.mb, "bucket_mib": s.bucket_mib, **results}))


def main(s: Settings) -> None:
    with launch_cluster() as cluster:
        if cluster is not None:
            asyncio.run(run(cluster, s))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
