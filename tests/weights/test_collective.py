"""Real process groups between real processes: two senders, two receivers."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from monarch_rl.weights.collective import CollectiveReceiver, CollectiveSender
from monarch_rl.weights.manifest import Manifest, make_manifest, shard_bytes
from monarch_rl.weights.transport import TransferError, TransferSettings

CPU = torch.device("cpu")
TENSORS = [("wide", (1000, 700), torch.float32), ("odd", (7, 3), torch.float32), ("norm", (5,), torch.float32)]
SETTINGS = TransferSettings(bucket_mib=1, deadline_s=20)
JOIN_S = 30


def manifest() -> Manifest:
    """`wide` is cut in two, `odd` unevenly, and `norm` is the second sender's alone."""
    return make_manifest(
        TENSORS, [[("wide", 0, 350_000), ("odd", 0, 12)], [("wide", 350_000, 350_000), ("odd", 12, 9), ("norm", 0, 5)]]
    )


def values(version: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return [torch.randn(shape, generator=generator) for _, shape, _ in TENSORS]


def send(rank: int, pipe: Connection, settings: TransferSettings, versions: list[int]) -> None:
    torch.set_num_threads(1)
    plan = manifest()
    sender = CollectiveSender(plan, rank, settings, "127.0.0.1")
    pipe.send(sender.address)
    sender.connect(2, CPU)
    for version in versions:
        whole = values(version)
        runs = [whole[s.tensor].flatten()[s.start : s.start + s.numel] for s in plan.shards[rank]]
        snapshot = torch.cat(runs).view(torch.uint8)
        assert snapshot.numel() == shard_bytes(plan, rank)
        sender.send(version, snapshot)
    pipe.recv()  # stay until the receivers have read everything


def receive(
    index: int, addresses: list[str], pipe: Connection, settings: TransferSettings, versions: list[int]
) -> None:
    torch.set_num_threads(1)
    plan = manifest()
    receiver = CollectiveReceiver(plan, index, addresses, settings)
    staging = torch.zeros(plan.nbytes, dtype=torch.uint8)
    started = time.monotonic()
    try:
        receiver.connect(2, CPU)
        for version in versions:
            receiver.receive(version, staging)
            equal = [
                torch.equal(spec.view(staging), value)
                for spec, value in zip(plan.tensors, values(version), strict=True)
            ]
            pipe.send(all(equal))
    except (TransferError, RuntimeError) as error:
        pipe.send((str(error), time.monotonic() - started))


class Processes:
    """Starts the four processes, and ends them whatever happens."""

    def __init__(self, sent: list[int], expected: list[int], settings: TransferSettings = SETTINGS) -> None:
        context = multiprocessing.get_context("spawn")
        self.senders: list[Connection] = []
        self.receivers: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(2):
            here, there = context.Pipe()
            self.processes.append(context.Process(target=send, args=(rank, there, settings, sent), daemon=True))
            self.processes[-1].start()
            self.senders.append(here)
        addresses = [self.answer(pipe) for pipe in self.senders]
        for index in range(2):
            here, there = context.Pipe()
            arguments = (index, addresses, there, settings, expected)
            self.processes.append(context.Process(target=receive, args=arguments, daemon=True))
            self.processes[-1].start()
            self.receivers.append(here)

    @staticmethod
    def answer(pipe: Connection) -> Any:
        assert pipe.poll(JOIN_S), "a process did not answer"
        return pipe.recv()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join(JOIN_S)


def test_versions_arrive_whole_at_every_receiver() -> None:
    with Processes([1, 2, 3], [1, 2, 3]) as running:
        for pipe in running.receivers:
            assert [running.answer(pipe) for _ in range(3)] == [True] * 3


def test_another_version_than_expected_is_refused() -> None:
    with Processes([5], [4]) as running:
        for index, pipe in enumerate(running.receivers):
            message, _ = running.answer(pipe)
            assert f"generator rank {index} could not receive version 4 from trainer rank 0" in message
            assert "sent [version, bytes] [5, " in message


def test_a_killed_sender_is_an_error_within_the_deadline() -> None:
    with Processes([1], [1, 2], TransferSettings(bucket_mib=1, deadline_s=5)) as running:
        for pipe in running.receivers:
            assert running.answer(pipe) is True
        running.processes[1].kill()
        running.senders[0].send("end")
        for pipe in running.receivers:
            message, seconds = running.answer(pipe)
            assert "could not receive version 2 from trainer rank" in message
            assert seconds < 15


@pytest.mark.parametrize("setting", ["bucket_mib", "deadline_s"])
def test_settings_must_be_positive(setting: str) -> None:
    with pytest.raises(ValueError, match=setting):
        TransferSettings(**{setting: 0})  # type: ignore[arg-type]
