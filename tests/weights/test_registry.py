"""The registry of transports: plans, checks and builder read all about a new transport from its entry."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch

from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.model.lora import FULL_TRAINING
from monarch_rl.model.sizes import trained_model
from monarch_rl.pipeline.memory import (
    NARROW_COMMUNICATOR,
    Sides,
    check_gpu_memory,
    replica_memory,
    snapshot_bytes,
    trainer_memory,
    version_bytes,
)
from monarch_rl.pipeline.settings import check_transport
from monarch_rl.runtime.devices import Devices
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.weights import transport
from monarch_rl.weights.manifest import Manifest, make_manifest
from monarch_rl.weights.transport import (
    TRANSPORTS,
    Receiver,
    Sender,
    TransferSettings,
    Transport,
    TransportName,
    make_receiver,
    make_sender,
    transports_on,
)
from tools.memory import MODELS, device_bytes

CPU = torch.device("cpu")
MIB = 1 << 20
PIGEON = Transport(__name__, "PigeonSender", "PigeonReceiver", received_versions=7, received_buckets=9)
NAME: Any = "pigeon"


class PigeonSender:
    def __init__(
        self, manifest: Manifest, rank: int, settings: TransferSettings, host: str, device: torch.device
    ) -> None:
        self.arguments = manifest.names, rank, settings.bucket_bytes, host


class PigeonReceiver:
    def __init__(self, manifest: Manifest, settings: TransferSettings, device: torch.device) -> None:
        self.arguments = manifest.names, settings.bucket_bytes


@pytest.fixture
def pigeon(monkeypatch: pytest.MonkeyPatch) -> TransferSettings:
    """The two lines of ``weights/transport.py`` that declare another transport; settings that select it."""
    monkeypatch.setitem(TRANSPORTS, NAME, PIGEON)
    monkeypatch.setattr(transport, "TransportName", Literal[("auto", *TRANSPORTS)])  # type: ignore[valid-type]
    TransferSettings()  # caches its fields, which are reset for the test and restored after it
    monkeypatch.delattr(TransferSettings, "_fields")
    return TransferSettings(NAME, bucket_mib=1)


def test_memory_of_replicas_and_trainer_ranks_follows_the_entry(
    pigeon: TransferSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 100 * MIB
    assert version_bytes(size, pigeon) == 7 * size + 9 * MIB
    assert version_bytes(size, replace(pigeon, delta=True)) == 9 * size + 9 * MIB
    assert version_bytes(size, replace(pigeon, transport="auto")) == 7 * size + 9 * MIB
    assert (snapshot_bytes(1, 4, pigeon), snapshot_bytes(1, 4, TransferSettings("auto"))) == (2, 8)
    monkeypatch.setitem(TRANSPORTS, NAME, replace(PIGEON, sends_from_rank_0=True))
    assert snapshot_bytes(1, 4, pigeon) == 8


def test_communicators_are_planned_for_an_entry_with_nccl(
    pigeon: TransferSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, replicas = trained_model(MODELS["Qwen3-8B"], FULL_TRAINING), GeneratorSettings()

    def buffers() -> tuple[int, int]:
        replica = replica_memory(model, replicas, pigeon, on_gpu=True, tokens=1000, senders=3, device_bytes=80 << 30)
        trainer = trainer_memory(model, TrainerSettings(ranks=1), pigeon, on_gpu=True, served=2)
        return replica.get("NCCL buffers", 0), trainer.get("NCCL buffers", 0)

    assert buffers() == (0, 0)
    monkeypatch.setitem(TRANSPORTS, NAME, replace(PIGEON, nccl=True))
    assert buffers() == (3 * NARROW_COMMUNICATOR, NARROW_COMMUNICATOR)


def test_shared_devices_are_refused_by_the_entry(pigeon: TransferSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    two, cpus = Devices("cuda", 2, 8), Devices("cpu", 1, 8)
    for devices, needed in ((two, 8), (two, 16), (cpus, 8)):
        check_transport(pigeon, devices, needed, colocate=True)
    with pytest.raises(ValueError, match="give weights.transport rdma or pigeon$"):
        check_transport(replace(pigeon, transport="shared_memory"), two, 16, colocate=True)
    monkeypatch.setitem(TRANSPORTS, NAME, replace(PIGEON, one_host=True))
    check_transport(pigeon, two, 8, colocate=True)
    with pytest.raises(ValueError, match="transport pigeon works on one host"):
        check_transport(pigeon, two, 9, colocate=True)
    monkeypatch.setitem(TRANSPORTS, NAME, replace(PIGEON, nccl=True))
    check_transport(pigeon, cpus, 8, colocate=True)
    check_transport(pigeon, two, 8, colocate=False)
    with pytest.raises(ValueError, match="transport pigeon cannot be used with colocate: NCCL.* rdma or shared_memory"):
        check_transport(pigeon, two, 8, colocate=True)


def test_an_entry_for_gpus_is_neither_chosen_nor_accepted_on_cpus(
    pigeon: TransferSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, cpus = Devices("cuda", 1, 8), Devices("cpu", 1, 8)
    check_transport(pigeon, cpus, 2, colocate=False)
    assert NAME in transports_on(on_gpu=False)
    monkeypatch.setitem(TRANSPORTS, NAME, replace(PIGEON, gpu_only=True))
    assert NAME in transports_on(on_gpu=True) and NAME not in transports_on(on_gpu=False)
    check_transport(pigeon, gpus, 2, colocate=False)
    check_transport(replace(pigeon, transport="auto"), cpus, 2, colocate=False)
    with pytest.raises(
        ValueError, match=r"weights\.transport pigeon needs GPUs.* give weights.transport collective or"
    ):
        check_transport(pigeon, cpus, 2, colocate=False)


def test_an_entry_of_one_host_is_refused_where_the_ranks_need_two(
    pigeon: TransferSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Devices("cuda", 2, 8)
    check_transport(pigeon, two, 9, colocate=False)
    monkeypatch.setitem(TRANSPORTS, NAME, replace(PIGEON, one_host=True))
    for accepted, needed in ((pigeon, 8), (replace(pigeon, transport="auto"), 9)):
        check_transport(accepted, two, needed, colocate=False)
    with pytest.raises(ValueError, match=r"weights\.transport pigeon works on one host.* 9 dev.* collective or rdma"):
        check_transport(pigeon, two, 9, colocate=False)


def test_a_plan_that_does_not_fit_suggests_a_transport_that_needs_less(pigeon: TransferSettings) -> None:
    sides = Sides(TrainerSettings(ranks=64, activation_checkpoint="full"), GeneratorSettings(), pigeon)
    with pytest.raises(ValueError, match=r"a generator replica needs .* it fits with weights\.transport collective or"):
        check_gpu_memory(MODELS["Qwen3-8B"], sides, Devices("cuda", 1, 8, device_bytes(80)))


@pytest.mark.parametrize("delta", [False, True])
def test_an_entry_also_builds_transports_for_updates(pigeon: TransferSettings, delta: bool) -> None:
    manifest = make_manifest([("norm", (5,), torch.float32)], [[("norm", 0, 5)]])
    settings = replace(pigeon, bucket_mib=64, delta=delta)
    sender: Any = make_sender(manifest, 0, settings, "loft", CPU)
    receiver: Any = make_receiver(manifest, settings, CPU)
    if delta:
        sender, receiver = sender._transport, receiver._transport
    names, bucket = (("update of trainer rank 0",), 4 * MIB) if delta else (("norm",), 64 * MIB)
    assert isinstance(sender, PigeonSender) and sender.arguments == (names, 0, bucket, "loft")
    assert isinstance(receiver, PigeonReceiver) and receiver.arguments == (names, bucket)


def test_choices_of_the_flag_equal_the_registry() -> None:
    assert get_args(TransportName) == ("auto", *TRANSPORTS)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_transport_has_the_methods_of_the_interface_and_a_row_in_each_table(name: TransportName) -> None:
    entry = TRANSPORTS[name]
    module = importlib.import_module(entry.module)
    for protocol, found in ((Sender, entry.sender), (Receiver, entry.receiver)):
        methods = {method for method, value in vars(protocol).items() if callable(value) and method[0] != "_"}
        assert methods <= set(dir(getattr(module, found)))
    assert len(methods) >= 5
    docs = (Path(__file__).parents[2] / "docs/weights.md").read_text()
    assert docs.count(f"\n| `{name}`") >= 2  # its description and its costs


def test_declarations_are_read_without_torch() -> None:
    program = "import sys, monarch_rl.weights.transport; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert (done.stdout, done.stderr) == ("False\n", "")
