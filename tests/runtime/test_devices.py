from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from monarch_rl.errors import TooFewDevices
from monarch_rl.runtime import devices as module
from monarch_rl.runtime.devices import Devices, devices, launched_by_torchrun, smallest_memory
from monarch_rl.runtime.torchrun import Rank, without_torchrun

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "visible_devices", lambda: [])


def test_plain_python_on_a_cpu(no_gpu: None) -> None:
    assert not launched_by_torchrun()
    assert devices() == Devices("cpu", 1, 4 * (os.cpu_count() or 1))


def test_torchrun_on_a_cpu(torchrun: None, no_gpu: None) -> None:
    assert launched_by_torchrun()
    assert devices() == Devices("cpu", 2, 2)


def test_gpus_are_counted_whatever_nproc_per_node_is(torchrun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "visible_devices", lambda: ["4", "5", "6", "7"])
    assert devices() == Devices("cuda", 2, 4)


def test_enough_devices_pass() -> None:
    Devices("cuda", 2, 4).check(8)


@pytest.mark.parametrize(
    ("offered", "advice"),
    [
        (Devices("cuda", 1, 8), "torchrun --nnodes=2"),
        (Devices("cpu", 1, 8), "torchrun --nproc-per-node=12"),
    ],
)
def test_too_few_devices_are_refused_with_advice(offered: Devices, advice: str) -> None:
    with pytest.raises(TooFewDevices) as caught:
        offered.check(12, "8 trainer ranks + 4 generator replicas")
    message = str(caught.value)
    assert "12 ranks" in message and "8 trainer ranks + 4 generator replicas" in message
    assert "8" in message and advice in message


def test_too_few_devices_under_torchrun(torchrun: None) -> None:
    with pytest.raises(TooFewDevices, match="--nproc-per-node=3"):
        Devices("cpu", 2, 2).check(5)


def test_the_rank_is_read_from_torchruns_variables(torchrun: None) -> None:
    place = Rank.from_environment()
    assert (place.rank, place.local_rank, place.node, place.nodes) == (3, 1, 1, 2)


def test_no_torchrun_variable_reaches_a_mesh() -> None:
    assert without_torchrun({**TORCHRUN, "HOME": "/home/someone", "RANKED": "1"}) == {
        "HOME": "/home/someone",
        "RANKED": "1",
    }


def test_memory_is_planned_for_the_smallest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert smallest_memory() == devices().memory == 0 or torch.cuda.is_available()
    gpus = [SimpleNamespace(total_memory=nbytes) for nbytes in (80, 24, 40)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices() == Devices("cuda", 1, 3, memory=24)
