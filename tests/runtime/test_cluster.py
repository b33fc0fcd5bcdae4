from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from monarch_rl import runtime
from monarch_rl.runtime.cluster import (
    Cluster,
    Devices,
    TooFewDevices,
    _as_controller,
    init_torch_distributed_env,
    launch_cluster,
)
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.network import fix_nccl_order, nccl_environment
from tests.patience import run as run_program
from tests.patience import wait_until
from tests.runtime.members import Member

DEADLINE_S = 300.0
PAUSE_S = 25.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with launch_cluster() as launched:
        assert launched is not None
        yield launched


def test_deadlines_of_attaching_and_ending_exclude_pauses_of_the_controller() -> None:
    """A pause within the first half of the deadline, which only a heartbeat reveals."""

    async def stand_still() -> None:
        asyncio.get_running_loop().call_later(0.2, time.sleep, 1.7)
        await within(4.0, asyncio.sleep(4.5), "something that takes 2.8 s, and the pause")

    asyncio.run(_as_controller(stand_still()))


def test_all_reduce_over_a_mesh(cluster: Cluster) -> None:
    async def run() -> list[float]:
        mesh = cluster.spawn("trainer", 2, first_device=0)
        assert dict(zip(mesh.extent.labels, mesh.extent.sizes, strict=True)) == {"hosts": 1, "gpus": 2}
        await init_torch_distributed_env(mesh)
        members = mesh.spawn("members", Member)
        return list((await within(DEADLINE_S, members.all_reduce.call(), "the all-reduce")).values())

    assert asyncio.run(run()) == [3.0, 3.0]


def test_a_process_gets_its_environment(cluster: Cluster) -> None:
    async def run() -> dict[str, str]:
        members = cluster.spawn("buffer", 1, env={"MKL_NUM_THREADS": "3", "OWN": "value"}).spawn("members", Member)
        return await within(DEADLINE_S, members.see.call_one(), "the environment")

    seen = asyncio.run(run())
    assert seen["CUDA_VISIBLE_DEVICES"] == ""
    assert seen["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
    assert (seen["MKL_NUM_THREADS"], seen["OWN"]) == ("3", "value")
    assert seen["host_address"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("processes", "first_device", "devices_per_process", "seen"),
    [(2, 0, 1, ["4", "5"]), (1, 3, 1, ["7"]), (2, 0, 2, ["4,5", "6,7"]), (1, None, 1, [""])],
)
def test_each_process_sees_its_own_gpus(
    cluster: Cluster, processes: int, first_device: int | None, devices_per_process: int, seen: list[str]
) -> None:
    """The variables need no GPU: these are the ones of a machine with GPUs 4 to 7."""
    gpus = Cluster(cluster.hosts, Devices("cuda", 1, 4), _device_names=(("4", "5", "6", "7"),))

    async def run() -> list[dict[str, str]]:
        mesh = gpus.spawn("gpus", processes, first_device=first_device, devices_per_process=devices_per_process)
        await init_torch_distributed_env(mesh)
        members = mesh.spawn("members", Member)
        environments = list((await within(DEADLINE_S, members.see.call(), "the environments")).values())
        await within(DEADLINE_S, mesh.stop(), "the mesh to stop")
        return environments

    environments = asyncio.run(run())
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == seen
    assert [environment["RANK"] for environment in environments] == [str(rank) for rank in range(processes)]
    assert {environment["LOCAL_RANK"] for environment in environments} == {"0"}, "the only device it sees is number 0"


def test_all_gpu_meshes_have_the_same_nccl_variables(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that SGLang would set only in its own processes, those of the user except machine-specific ones, and
    those that fix the order of sums."""
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("NCCL_PROTO", "LL128")
    monkeypatch.setenv("NCCL_ALGO", "")  # so that the original value is restored afterwards
    monkeypatch.delenv("NCCL_ALGO")
    fix_nccl_order()
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    gpus = Cluster(cluster.hosts, Devices("cuda", 1, 4), _device_names=(("4", "5", "6", "7"),))

    async def run() -> list[dict[str, str]]:
        meshes = [gpus.spawn("trainer", 2, first_device=0), gpus.spawn("generator0", 1, first_device=2)]
        members = [mesh.spawn("members", Member) for mesh in meshes]
        found = [await within(DEADLINE_S, each.see.call(), "the environments") for each in members]
        for mesh in meshes:
            await within(DEADLINE_S, mesh.stop(), "the mesh to stop")
        return [environment for values in found for environment in values.values()]

    environments = asyncio.run(run())
    assert {found.get("TORCH_NCCL_DUMP_ON_TIMEOUT") for found in environments} == {"0"}, "an error ends no process"
    seen = [{k: v for k, v in found.items() if k.startswith("NCCL_")} for found in environments]
    assert len(seen) == 3 and seen[0] == seen[1] == seen[2]
    assert seen[0].items() >= {"NCCL_DEBUG": "WARN", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}.items()
    assert (seen[0]["NCCL_ALGO"], seen[0]["NCCL_PROTO"]) == ("Ring", "LL128"), "variables of the user take precedence"
    assert seen[0].get("NCCL_SOCKET_IFNAME") != "eth7", "each machine has its own"


def test_nccl_variables_of_the_user_take_precedence() -> None:
    assert nccl_environment({"NCCL_CUMEM_ENABLE": "1", "PATH": "x"}) == {
        "NCCL_CUMEM_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }


def test_a_mesh_that_does_not_fit_is_refused(cluster: Cluster) -> None:
    with pytest.raises(TooFewDevices, match="trainer"):
        cluster.spawn("trainer", 2, first_device=cluster.devices.total - 1)
    two_hosts = Cluster(cluster.hosts, Devices("cuda", 2, 4))
    with pytest.raises(ValueError, match="hosts of 4 devices"):
        two_hosts.spawn("trainer", 4, first_device=2)
    with pytest.raises(ValueError, match="hosts of 4 devices"):
        two_hosts.spawn("trainer", 6, first_device=0)


def test_an_unknown_mesh_is_refused_by_name(cluster: Cluster) -> None:
    other = Cluster(cluster.hosts, cluster.devices)
    with pytest.raises(ValueError, match="no live mesh named 'critic'; live meshes: none"):
        other.named("critic")
    for use in (other.locate, other.kill):
        with pytest.raises(ValueError, match="not spawned by this cluster, or was already killed"):
            asyncio.run(use(cluster.hosts))  # type: ignore[arg-type]


def test_a_lost_process_is_a_fault_and_does_not_end_the_controller(cluster: Cluster) -> None:
    async def run() -> None:
        members = cluster.spawn("short", 1).spawn("members", Member)
        with pytest.raises(RuntimeError, match="code 3"):
            await within(DEADLINE_S, members.die.call_one(), "the end of a process")

    assert not runtime.MONARCH_CAME_FIRST, "it polls at its default of 10 s"
    before = len(cluster.faults)
    asyncio.run(run())
    wait_until(lambda: len(cluster.faults) > before, "a call of the fault hook")


def test_a_host_that_was_paused_is_not_lost(cluster: Cluster) -> None:
    """As when a machine is suspended, or a virtual machine migrates: longer than Monarch's defaults allow."""

    async def run() -> None:
        members = cluster.spawn("patient", 1).spawn("patient", Member)
        await within(DEADLINE_S, members.see.call_one(), "the process")
        processes = psutil.Process().children(recursive=True)
        (host,) = [process for process in processes if "monarch_rl.runtime.host" in process.cmdline()]
        host.suspend()
        try:
            asked = asyncio.ensure_future(members.see.call_one())
            await asyncio.sleep(PAUSE_S)  # the tested pause
        finally:
            host.resume()
        await within(DEADLINE_S, asked, "the answer to a call made during the pause")

    asyncio.run(run())
    # Earlier tests have lost processes, which Monarch may report during the pause.
    assert not [fault.report() for fault in cluster.faults if fault.mesh_name.startswith("patient")]


AFTERWARDS = """
import asyncio
from monarch.actor import this_host
from monarch_rl.runtime.cluster import launch_cluster
from tests.runtime.members import Member

with launch_cluster() as cluster:
    pass

async def see():
    return await this_host().spawn_procs(per_host={"gpus": 1}).spawn("member", Member).see.call_one()

print("seen", len(asyncio.run(see())))
"""


@pytest.mark.heavy
def test_monarch_serves_a_process_whose_launch_has_ended(temporary: Path) -> None:
    """Its client is created once per process, and its folder of sockets must outlive the launch that created it."""
    done = run_program([sys.executable, "-c", AFTERWARDS], seconds=DEADLINE_S)
    assert done.returncode == 0 and "seen" in done.stdout, done.stderr
    assert not list(temporary.glob("monarch_rl-*")), "no folder is left"


def test_launch_is_refused_in_an_event_loop() -> None:
    async def run() -> None:
        with launch_cluster():
            pass

    with pytest.raises(RuntimeError, match="asyncio"):
        asyncio.run(run())
