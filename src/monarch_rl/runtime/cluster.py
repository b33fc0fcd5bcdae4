"""A launch: the Monarch hosts a run has, the process meshes it spawns on them, and their clean end.

The same recipe runs under plain python (one host, this machine) and under torchrun (one host per node). Either way
a host is a process of its own (``runtime/host.py``) that owns all processes of the run on its machine and ends
them with itself, whether the run ends, fails, is interrupted, or its controller is killed.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch_rl import runtime
from monarch_rl.runtime import lookout
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, DeadlineExceeded, within
from monarch_rl.runtime.devices import Devices, TooFewDevices, devices, launched_by_torchrun, visible_devices
from monarch_rl.runtime.distributed import init_torch_distributed_env
from monarch_rl.runtime.host import HostProcess
from monarch_rl.runtime.lifetime import die_with_parent
from monarch_rl.runtime.lookout import Lookout
from monarch_rl.runtime.meshes import members
from monarch_rl.runtime.network import free_port, host_address
from monarch_rl.runtime.signals import interrupts
from monarch_rl.runtime.torchrun import Controller, Follower, Node, Rank, clean

if TYPE_CHECKING:
    from monarch.actor import HostMesh, MeshFailure, ProcMesh

__all__ = [
    "Cluster",
    "Devices",
    "TooFewDevices",
    "devices",
    "free_port",
    "host_address",
    "init_torch_distributed_env",
    "launch",
    "launched_by_torchrun",
]

logger = logging.getLogger("monarch_rl")

START_DEADLINE_S = 60.0
"""Seconds for the controller to reach all hosts; about one is normal."""
STOP_DEADLINE_S = 15.0
"""Seconds for the actors of all meshes to clean up and end, and again for the hosts; five is normal for processes
with torch in them, after which Monarch kills them."""
FAULT_DEADLINE_S = 2.5
"""Seconds after which the loss of a process has been noticed: it is looked for every second."""
STATE_DEADLINE_S = 20.0
"""Seconds of silence after which a host, or a process asked for its state, counts as lost."""
KILL_DEADLINE_S = 5.0
"""Seconds for a process to end itself when it is told to; a moment is normal."""
LOOKOUT = "lookout"
"""The actor beside every other one."""
HOST_DEADLINE_S = 8.0
"""Seconds for a host process to kill what is left below it and end."""


@dataclass(eq=False)
class _Mesh:
    name: str
    mesh: ProcMesh
    lookouts: list[Any]
    places: list[tuple[str, int]] = field(default_factory=list)
    """Machine and pid of each process, once they are known."""


@dataclass
class Cluster:
    """The hosts of a launch. Only the controller has one."""

    hosts: HostMesh
    """One Monarch host per machine, dimension ``hosts``."""
    devices: Devices
    """The slots of the launch."""
    faults: list[MeshFailure] = field(default_factory=list)
    """Failures of actors or processes that nobody above them handled, oldest first."""
    lookouts: list[tuple[str, list[Any]]] = field(default_factory=list)
    """Of every mesh spawned: its name, and a handle of each process's lookout, by rank."""
    _device_names: tuple[tuple[str, ...], ...] = ()
    _meshes: list[_Mesh] = field(default_factory=list)
    """Those that are to be stopped at the end."""
    _ending: bool = False

    @property
    def num_hosts(self) -> int:
        """Machines."""
        return self.devices.num_hosts

    @property
    def devices_per_host(self) -> int:
        """Device slots of each machine."""
        return self.devices.per_host

    def spawn(
        self,
        name: str,
        processes: int,
        *,
        first_device: int | None = None,
        devices_per_process: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> ProcMesh:
        """Spawn a mesh of ``processes`` processes, dimensions ``{"hosts": h, "gpus": g}``.

        ``first_device`` is the first of the ``processes * devices_per_process`` device slots the mesh takes, counted
        host by host; the mesh lies within one host or fills whole hosts. Each process sees its own devices only
        (CUDA_VISIBLE_DEVICES). Without ``first_device`` the mesh is a CPU role on the first host and sees no device.
        On a CPU, processes run one OpenMP thread unless OMP_NUM_THREADS says otherwise. ``env`` is set last.

        Raises :class:`TooFewDevices` and ValueError. The mesh is stopped when the launch ends.
        """
        from monarch.actor import default_bootstrap_cmd

        first_host, num_hosts = 0, 1
        if first_device is not None:
            first_host, num_hosts = self._place(name, first_device, processes, devices_per_process)
        per_host = processes // num_hosts
        common = dict(env or {})
        if self.devices.kind == "cpu":
            common = {k: os.environ.get(k, "1") for k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} | common

        def bootstrap(point: Any) -> Any:
            host = first_host + point.rank // per_host
            visible: tuple[str, ...] = ()
            if first_device is not None and self.devices.kind == "cuda":
                start = first_device % self.devices_per_host + point.rank % per_host * devices_per_process
                visible = self._device_names[host][start : start + devices_per_process]
            return default_bootstrap_cmd().with_env({"CUDA_VISIBLE_DEVICES": ",".join(visible)} | common)

        chosen = self.hosts.slice(hosts=slice(first_host, first_host + num_hosts))
        mesh = chosen.spawn_procs(per_host={"gpus": per_host}, name=name, bootstrap_command=bootstrap)
        lookouts = members(mesh.spawn(LOOKOUT, Lookout))
        self._meshes.append(_Mesh(name, mesh, lookouts))
        self.lookouts.append((name, lookouts))
        return mesh

    async def introduce(self, mesh: ProcMesh) -> None:
        """Learn where the processes of a mesh are, so that :meth:`kill` can end those that do not answer."""
        (known,) = [spawned for spawned in self._meshes if spawned.mesh is mesh]
        what = f"{known.name} to say how it is"
        looks = [within(CALL_DEADLINE_S, one.look.call_one(), what, on="Monarch") for one in known.lookouts]
        known.places = [(seen.machine, seen.pid) for seen in await asyncio.gather(*looks)]

    async def kill(self, mesh: ProcMesh) -> None:
        """End the processes of a mesh at once, before the end of the run. What has ended already stays as it is.

        Not in order: Monarch ends actors along with the one that they call when that was stopped in order, and leaves
        them alone when it was killed. A process that does not answer is killed from outside if it was introduced; else
        the watch does it, or its host at the end.
        """
        (ended,) = [spawned for spawned in self._meshes if spawned.mesh is mesh]
        self._meshes.remove(ended)
        self.faults.clear()  # they are of what is replaced; those to come may end the run
        what = f"{ended.name} to end"
        deaths = [within(KILL_DEADLINE_S, one.die.call_one(), what, on="Monarch") for one in ended.lookouts]
        answers = await asyncio.gather(*deaths, return_exceptions=True)  # its own end keeps it from answering
        for (machine, pid), answer in zip(ended.places, answers, strict=False):
            if isinstance(answer, DeadlineExceeded):
                await self._kill_from_outside(machine, pid)

    async def _kill_from_outside(self, machine: str, pid: int) -> None:
        """End a process that does not answer, by another one of its machine."""
        if machine == lookout.machine():
            lookout.kill(pid)
            return
        others = [other for spawned in self._meshes for other in spawned.lookouts]
        looks = [
            within(KILL_DEADLINE_S, other.look.call_one(), "a look at processes", on="Monarch") for other in others
        ]
        for other, seen in zip(others, await asyncio.gather(*looks, return_exceptions=True), strict=True):
            if not isinstance(seen, BaseException) and seen.machine == machine:
                await _settled(other.kill.call_one(pid), f"process {pid} to be ended")
                return
        logger.warning("nobody on its machine answers who could end process %d", pid)

    def _place(self, name: str, first_device: int, processes: int, devices_per_process: int) -> tuple[int, int]:
        """The first host and the number of hosts of a mesh that takes slots from ``first_device``."""
        slots = processes * devices_per_process
        self.devices.check(first_device + slots, f"{name} takes slots {first_device} to {first_device + slots - 1}")
        first_host, offset = divmod(first_device, self.devices_per_host)
        if offset + slots <= self.devices_per_host:
            return first_host, 1
        if offset or slots % self.devices_per_host or self.devices_per_host % devices_per_process:
            raise ValueError(
                f"{name}: slots {first_device} to {first_device + slots - 1} neither lie within one host nor fill "
                f"whole hosts of {self.devices_per_host} slots; choose a number of ranks that does"
            )
        return first_host, slots // self.devices_per_host

    def _fault(self, failure: MeshFailure) -> None:
        """Monarch's last word on a failure that no supervisor took. Returning keeps the controller alive."""
        # Each process has a hidden mesh for its logs, and a lookout, which fail along with the ones that matter.
        if self._ending or failure.mesh_name.startswith(("logger-", f"{LOOKOUT}-")):
            logger.debug("mesh %s failed: %s", failure.mesh_name, failure.report())
            return
        self.faults.append(failure)
        logger.error("mesh %s failed: %s", failure.mesh_name, failure.report())

    def _hear_of_faults(self) -> None:
        """Give Monarch the time to name a lost process: whoever was connected to it may have failed before."""
        deadline = time.monotonic() + FAULT_DEADLINE_S
        while not self.faults and time.monotonic() < deadline:
            time.sleep(0.05)

    async def _end(self) -> None:
        """Stop all meshes, then the hosts. What does not stop in time is named here, and killed with its host."""
        self._ending = True
        stops = [
            _settled(spawned.mesh.stop("the run ends"), f"mesh {spawned.name} to stop") for spawned in self._meshes
        ]
        await asyncio.gather(*stops)
        await _settled(self.hosts.shutdown(), "the hosts to shut down")


async def _settled(stop: Awaitable[Any], what: str) -> None:
    try:
        await within(STOP_DEADLINE_S, stop, what, on="Monarch")
    except Exception as error:  # a mesh that failed cannot always be stopped; at the end the host kills what is left
        logger.warning("not ended in order: %s", error)


@contextmanager
def launch() -> Iterator[Cluster | None]:
    """Bring up the hosts of this launch, and at the end of the block take everything down.

    Gives the controller its :class:`Cluster`. Under torchrun global rank 0 is the controller; the other ranks get
    None once the controller's block has ended well, and leave with exit code 1 if it failed or died::

        with launch() as cluster:
            if cluster is not None:
                asyncio.run(train(cluster))

    Within the controller's block, the first SIGINT or SIGTERM raises KeyboardInterrupt; the second kills at once.
    """
    _refuse_running_loop()
    if runtime.MONARCH_CAME_FIRST:
        logger.warning("monarch was imported before monarch_rl: a dead process is noticed after up to 10 s, not 1 s")
    if not launched_by_torchrun():
        with interrupts():
            host = _start_host(None)
            with _attached(host, [Node(host.address, tuple(visible_devices()))]) as cluster:
                yield cluster
        return
    place = Rank.from_environment()
    die_with_parent(signal.SIGTERM)  # the torchrun agent, which does not see to it itself
    if place.rank != 0:
        with interrupts(raise_in_main=False):
            _follow(Follower(place))
        yield None
        return
    with interrupts():
        controller = Controller(place)
        # If the run fails, the followers learn it from the end of this process, after its traceback was printed.
        atexit.register(controller.close)
        ip, host, nodes = controller.meet(_start_host)
        if ip is not None:
            from monarch.actor import enable_transport

            enable_transport(f"tcp://{ip}:0")
        with _attached(host, nodes) as cluster:
            yield cluster
        controller.dismiss()


def _follow(follower: Follower) -> None:
    try:
        follower.join(_start_host)
        well = follower.wait()  # waits: as long as the controller lives, which is asked every few seconds
    finally:
        follower.close(HOST_DEADLINE_S)
    if not well:
        raise SystemExit(1)


@contextmanager
def _attached(host: HostProcess, nodes: Sequence[Node]) -> Iterator[Cluster]:
    """The cluster of running hosts; ``host`` is the one that this process started."""
    try:
        cluster = _attach(nodes)
        try:
            yield cluster
        except Exception:
            cluster._hear_of_faults()
            raise
        finally:
            asyncio.run(cluster._end())
    finally:
        host.end(HOST_DEADLINE_S)


def configure_monarch() -> None:
    """Set Monarch's own time-outs and sizes for this process and all that it spawns, before the first actor.

    A process killed while it is asked for its state never answers, so its loss is noticed only after
    ``STATE_DEADLINE_S``; otherwise within a second.
    """
    from monarch.config import configure

    # A machine that swaps or starts many processes may be silent for long; Monarch's own are 30 s for an actor and
    # 60 s for a host. A message that is not acknowledged in time ends the run.
    silence = f"{STATE_DEADLINE_S:g}s"
    configure(get_proc_state_max_idle=silence, get_actor_state_max_idle=silence, message_delivery_timeout="120s")
    # RDMABuffer over TCP (weights/rdma.py). Frames of 4 MiB are four times faster than Monarch's 64. One connection is
    # as fast as several, whose reads write to memory even after they timed out.
    configure(rdma_max_chunk_size_mb=4, rdma_tcp_fallback_parallelism=1)


def _attach(nodes: Sequence[Node]) -> Cluster:
    import monarch.actor

    configure_monarch()
    counts = {len(node.devices) for node in nodes}
    if len(counts) > 1:
        raise ValueError(f"all hosts of a launch need the same number of GPUs; these have {sorted(counts)}")
    workers = [node.address for node in nodes]
    hosts = monarch.actor.attach_to_workers(ca="trust_all_connections", workers=workers, name="hosts")
    cluster = Cluster(hosts, devices(), _device_names=tuple(node.devices for node in nodes))
    monarch.actor.unhandled_fault_hook = cluster._fault  # the default interrupts the main thread
    asyncio.run(within(START_DEADLINE_S, hosts.initialized, f"the hosts at {workers} to come up", on="Monarch"))
    return cluster


def _start_host(ip: str | None) -> HostProcess:
    """Start this machine's host, with this process's environment, less torchrun, plus what Python needs."""
    environment = clean(os.environ)
    # The tools of a virtual environment that is not activated (ninja), and modules beside the script.
    environment["PATH"] = _prepend(Path(sys.executable).parent, environment.get("PATH"))
    if sys.path[0] and Path(sys.path[0]).is_dir():
        environment["PYTHONPATH"] = _prepend(Path(sys.path[0]).resolve(), environment.get("PYTHONPATH"))
    return HostProcess(ip, environment)


def _prepend(folder: Path, search_path: str | None) -> str:
    folders = search_path.split(os.pathsep) if search_path else []
    return os.pathsep.join([str(folder), *(other for other in folders if other != str(folder))])


def _refuse_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError("launch() blocks: use it outside asyncio, and run the event loop inside its block")
