"""Part ``members``: a trainer rank and replicas, each on its own device: transfers during training, a lost replica.

Without SGLang. NCCL allows one member per device, so this part needs two GPUs; on a CPU the group uses gloo.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from monarch_rl.errors import TransferError
from monarch_rl.runtime.network import nccl_environment
from monarch_rl.runtime.streams import finish_current
from monarch_rl.weights.area import attach
from monarch_rl.weights.broadcast_group import BroadcastGroup
from monarch_rl.weights.manifest import Manifest, make_manifest
from monarch_rl.weights.transport import Sender, TransferSettings, make_receiver, make_sender
from tools.gpu_parts.common import Bench, Findings, Skipped
from tools.gpu_parts.weights import SPAWN_S, send_beside_training

DEADLINE_S = 120.0
"""Seconds for a transfer: far more than any takes, so that a transfer that only the deadline ends is noticed."""


def run(bench: Bench, found: Findings) -> None:
    """See the top of this file."""
    devices = torch.cuda.device_count() if bench.on_gpu else 3
    if devices < 2:
        raise Skipped("this machine has one GPU, but NCCL allows one member per device: two are needed")
    if bench.on_gpu:
        os.environ.update(nccl_environment(os.environ))
    asyncio.run(_run(bench, found, min(devices - 1, 2)))


def version_plan(on_gpu: bool) -> Manifest:
    """Manifest of 1 GiB on GPUs, with a tensor that has its own broadcasts and one that goes into a bucket."""
    large = (1 << 29) if on_gpu else 1 << 21
    shapes = [("small", (1000,), torch.int16), ("large", (large,), torch.int16)]
    return make_manifest(shapes, [[("small", 0, 1000), ("large", 0, large)]])


class Replica:
    """A receiving end in its own process."""

    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self.process = context.Process(target=_replica, args=(there, device), daemon=True)
        self.process.start()
        there.close()

    async def do(self, *command: Any) -> Any:
        """Send a command to the process and wait for the answer. Raises EOFError if the process ends."""
        self._pipe.send(command)
        return await asyncio.to_thread(self._answer)

    def notify(self, *command: Any) -> None:
        """Send a command that has no answer."""
        self._pipe.send(command)

    def _answer(self) -> Any:
        if not self._pipe.poll(SPAWN_S):
            raise RuntimeError(f"a replica's process did not answer within {SPAWN_S:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join(SPAWN_S)


def _replica(pipe: Connection, device: str) -> None:
    asyncio.run(_obey(pipe, torch.device(device)))


async def _obey(pipe: Connection, device: torch.device) -> None:
    """Execute the commands ``connect``, ``receive``, ``abort`` (no answer), and ``die``, which kills the process at the
    first broadcast of the next transfer."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    receiver = make_receiver(version_plan(device.type == "cuda"), TransferSettings(deadline_s=DEADLINE_S), device)

    async def obey(name: str, *arguments: Any) -> None:
        answer: Any = None
        try:
            if name == "connect":
                await receiver.connect(*arguments)
            elif name == "receive":
                await receiver.receive(*arguments)
                area = attach(receiver.area(arguments[1]))
                answer = int(area.min()), int(area.max())
            else:
                BroadcastGroup.broadcast = _die  # type: ignore[method-assign, assignment]
        except TransferError as error:
            answer = error
        pipe.send(answer)

    obeying: set[asyncio.Task[None]] = set()
    while True:
        command = await asyncio.to_thread(pipe.recv)
        if command[0] == "abort":
            receiver.abort(command[1])
        else:
            obeying.add(asyncio.ensure_future(obey(*command)))


def _die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


async def _run(bench: Bench, found: Findings, count: int) -> None:
    def replica(position: int) -> Replica:
        return Replica(f"cuda:{1 + position}" if bench.on_gpu else "cpu")

    plan, settings = version_plan(bench.on_gpu), TransferSettings(deadline_s=DEADLINE_S)
    sender = make_sender(plan, 0, settings, "127.0.0.1", bench.device)
    replicas = [replica(position) for position in range(count)]
    try:
        await _meet(sender, replicas)
        await _send(bench, found, sender, replicas, 1)
        await _beside_training(bench, found, sender, replicas)
        await _lost(bench, found, sender, replicas)
        replicas[-1].end()
        replicas[-1] = replica(count - 1)
        await _meet(sender, replicas)
        await _send(bench, found, sender, replicas, 4)
        found.note(replicas=count)
    finally:
        for there in replicas:
            there.end()
        await asyncio.wait_for(sender.close(), DEADLINE_S)


async def _meet(sender: Sender, replicas: list[Replica]) -> None:
    addresses, count = [await sender.open()], len(replicas)
    connecting = [there.do("connect", addresses, position, count) for position, there in enumerate(replicas)]
    await asyncio.wait_for(asyncio.gather(sender.connect(addresses, count), *connecting), 2 * SPAWN_S)


async def _send(bench: Bench, found: Findings, sender: Sender, replicas: list[Replica], version: int) -> float:
    """Send a version whose bytes are its number; returns the sender's seconds."""
    for view in sender.views(version % 2):
        view.fill_(version)
    bench.synchronize()
    receiving = [asyncio.ensure_future(there.do("receive", version, version % 2)) for there in replicas]
    started = time.perf_counter()
    await sender.send(version, version % 2)
    seconds = time.perf_counter() - started
    for answer in await asyncio.gather(*receiving):
        found.require(answer == (version, version), f"bytes of version {version} arrived as {answer}")
    return seconds


async def _beside_training(bench: Bench, found: Findings, sender: Sender, replicas: list[Replica]) -> None:
    """Require that a transfer does not wait for the training stream, nor training for a transfer that waits for its
    replicas."""
    found.note(members_send_ms=1e3 * await _send(bench, found, sender, replicas, 2))
    x = torch.zeros(1000, device=bench.device)
    receiving = [asyncio.ensure_future(there.do("receive", 2, 0)) for there in replicas]
    await send_beside_training(bench, found, sender, 2 * DEADLINE_S, "members_")
    await asyncio.gather(*receiving)
    sending = asyncio.ensure_future(sender.send(2, 0))
    await asyncio.sleep(0.5)  # after which the transfer waits for the replicas
    started = time.perf_counter()
    x.add_(1)
    finish_current(bench.device)
    trained_s = time.perf_counter() - started
    found.require(
        not sending.done() and trained_s < DEADLINE_S / 2,
        f"training took {trained_s:.2f} s during a transfer that waits",
    )
    await asyncio.gather(sending, *(there.do("receive", 2, 0) for there in replicas))


async def _lost(bench: Bench, found: Findings, sender: Sender, replicas: list[Replica]) -> None:
    """Kill a replica during a transfer, and require that the others leave it at once, and that no other process
    ends."""
    *others, victim = replicas
    await victim.do("die")
    receiving = [asyncio.ensure_future(there.do("receive", 3, 1)) for there in replicas]
    sending = asyncio.ensure_future(sender.send(3, 1))
    await asyncio.to_thread(victim.process.join, SPAWN_S)
    started = time.perf_counter()
    sender.abort("a replica is lost")
    for there in others:
        there.notify("abort", "a replica is lost")
    outcomes = await asyncio.gather(sending, *receiving, return_exceptions=True)
    seconds = time.perf_counter() - started
    found.note(members_abort_ms=1e3 * seconds)
    left = [isinstance(outcome, TransferError) and "deadline" not in str(outcome) for outcome in outcomes[:-1]]
    found.require(all(left), f"{seconds:.1f} s after a replica was lost: {outcomes}")
    x = torch.zeros(1000, device=bench.device)
    x.add_(1)
    finish_current(bench.device)
    found.require(all(there.process.is_alive() for there in others), "another replica ended with the lost one")
