"""A launch: the Monarch hosts of a run, the process meshes on them, and their clean shutdown.

The same recipe runs under plain python (one host, this machine) and under torchrun (one host per node). A host is a
process of its own (``runtime/host.py``). It owns all processes of the run on its machine, and they end with it, whether
the run ends, fails, is interrupted, or its controller is killed.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from monarch.actor import Actor, context

from monarch_rl import runtime
from monarch_rl.errors import DeadlineExceeded, SettingsError, TooFewDevices
from monarch_rl.runtime import actor_process, killed, monitor, wait_registry
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, within
from monarch_rl.runtime.devices import Devices, devices, launched_by_torchrun, visible_devices
from monarch_rl.runtime.endpoint import concurrent_endpoint, members
from monarch_rl.runtime.forking import fork_client
from monarch_rl.runtime.forking.fork_server import Preload
from monarch_rl.runtime.forking.preloading import ForkServer
from monarch_rl.runtime.host import HostProcess
from monarch_rl.runtime.host_start import THREAD_COUNTS, start_host
from monarch_rl.runtime.machine import own_id
from monarch_rl.runtime.monitor import ProcessMonitor
from monarch_rl.runtime.network import free_port, host_address, nccl_environment
from monarch_rl.runtime.process import die_with_parent
from monarch_rl.runtime.scratch import folder_of_process
from monarch_rl.runtime.signals import Interrupts, interrupts
from monarch_rl.runtime.torchrun import Controller, Follower, Node, Rank
from monarch_rl.runtime.wait_registry import CONTROLLER

if TYPE_CHECKING:
    from monarch.actor import HostMesh, MeshFailure, ProcMesh


# -- torch.distributed's environment variables on a process mesh ------------------------------------------------------

ENVIRONMENT = "torch_distributed_env"
"""Name of the actor that sets the variables."""
SET_UP_DEADLINE_S = 300.0
"""Seconds for a call to newly spawned processes, whose imports may take ten CPU-seconds first."""


class _TorchDistributedEnv(Actor):
    """Sets the environment variables that ``init_process_group("env://")`` reads."""

    @concurrent_endpoint
    async def rendezvous_endpoint(self) -> tuple[str, int]:
        return host_address(), free_port()

    @concurrent_endpoint
    async def set_variables(self, address: str, port: int) -> None:
        point = context().actor_instance.rank
        world = point.extent.nelements
        local_world = point.extent.sizes[-1]
        local_rank = point.rank % local_world
        os.environ.update(
            RANK=str(point.rank),
            WORLD_SIZE=str(world),
            LOCAL_RANK="0" if os.environ.get("CUDA_VISIBLE_DEVICES") else str(local_rank),
            LOCAL_WORLD_SIZE=str(local_world),
            GROUP_RANK=str(point.rank // local_world),
            GROUP_WORLD_SIZE=str(world // local_world),
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
        )


async def init_torch_distributed_env(mesh: ProcMesh) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on in all processes of ``mesh``.

    The ranks then call ``init_process_group``. Their store is on rank 0's host, at an address that the other hosts of
    the launch can reach (127.0.0.1 on one machine, whatever its host name resolves to). Ranks are numbered host by
    host.

    LOCAL_RANK is the index of the process's device among its visible ones: 0 on CUDA, where ``Cluster.spawn`` shows
    each process only its own device, and the rank within the host on a CPU.

    Raises :class:`~monarch_rl.runtime.deadlines.DeadlineExceeded`.
    """
    actors = mesh.spawn(ENVIRONMENT, _TorchDistributedEnv)
    first = actors.slice(**dict.fromkeys(mesh.extent.labels, 0))
    what = f"the processes of mesh {mesh.extent} to start"
    address, port = await within(SET_UP_DEADLINE_S, first.rendezvous_endpoint.call_one(), what, on="Monarch")
    await within(SET_UP_DEADLINE_S, actors.set_variables.call(address, port), what, on="Monarch")


# -- the cluster ------------------------------------------------------------------------------------------------------

__all__ = [
    "Cluster",
    "Devices",
    "TooFewDevices",
    "devices",
    "free_port",
    "host_address",
    "init_torch_distributed_env",
    "launch_cluster",
    "launched_by_torchrun",
]

T = TypeVar("T")

logger = logging.getLogger("monarch_rl")

START_DEADLINE_S = 60.0
"""Seconds for the controller to reach all hosts; normally about one."""
STOP_DEADLINE_S = 15.0
"""Seconds for the actors of all meshes to clean up and end, and the same again for the hosts. Normally about one; after
the deadline Monarch kills them."""
FAULT_DEADLINE_S = 3.5
"""Seconds within which Monarch notices the loss of a process: it checks every two seconds."""
KILL_DEADLINE_S = 5.0
"""Seconds for a process to end itself on request; normally a moment."""
MONITOR = "process_monitor"
"""Name of the :class:`ProcessMonitor` actor in every process."""
UNREPORTED_MESH_PREFIXES = ("logger-", f"{MONITOR}-", f"{ENVIRONMENT}-")
"""Name prefixes of meshes whose loss is not reported: the run's own mesh in the same processes is lost with them."""
HOST_DEADLINE_S = 8.0
"""Seconds for a host process to kill its remaining descendants and end."""


@dataclass(eq=False)
class _Mesh:
    name: str
    mesh: ProcMesh
    monitors: list[ProcessMonitor]
    """By rank."""
    processes: list[tuple[str, int]] = field(default_factory=list)
    """Machine and pid of each process; empty until :meth:`Cluster.locate`."""


@dataclass
class Cluster:
    """The hosts of a launch. Only the controller has one."""

    hosts: HostMesh
    """One Monarch host per machine, dimension ``hosts``."""
    devices: Devices
    """The devices of the launch."""
    faults: list[MeshFailure] = field(default_factory=list)
    """Failures of actors or processes that no supervisor handled, oldest first."""
    monitors: list[tuple[str, list[ProcessMonitor]]] = field(default_factory=list)
    """Name and monitors (by rank) of every spawned mesh that was not killed. The watch's thread reads this list, so it
    is replaced and never shortened in place."""
    interrupts: Interrupts = field(default_factory=Interrupts)
    """How the launch handles signals."""
    _device_names: tuple[tuple[str, ...], ...] = ()
    """CUDA_VISIBLE_DEVICES entries of each host."""
    fork_server: ForkServer = field(default_factory=ForkServer)
    """This machine's fork server; those of the other machines import the same modules."""
    _meshes: list[_Mesh] = field(default_factory=list)
    """The meshes to stop at the end."""
    _ending: bool = False

    @property
    def num_hosts(self) -> int:
        """Number of machines."""
        return self.devices.num_hosts

    @property
    def devices_per_host(self) -> int:
        """Number of devices per machine."""
        return self.devices.per_host

    def spawn(
        self,
        name: str,
        processes: int,
        *,
        first_device: int | None = None,
        devices_per_process: int = 1,
        env: Mapping[str, str] | None = None,
        preload: str = "",
    ) -> ProcMesh:
        """Spawn a mesh of ``processes`` processes, dimensions ``{"hosts": h, "gpus": g}``.

        ``first_device`` is the number of the first of the ``processes * devices_per_process`` devices that the mesh
        takes, counted host by host; the mesh lies within one host or fills whole hosts. Each process sees only its own
        devices (CUDA_VISIBLE_DEVICES). Without ``first_device`` the mesh is a CPU role on the first host and sees no
        device. On a CPU, processes run one OpenMP thread unless OMP_NUM_THREADS is set; on GPUs all meshes have the
        same NCCL variables. ``env`` overrides all of these.

        ``preload`` names one of the launch's preloads: the processes start with its modules imported, if the fork
        server has them by then (``fork_server.imported``).

        Raises :class:`TooFewDevices` and ValueError. The mesh is stopped when the launch ends.
        """
        first_host, num_hosts = 0, 1
        if first_device is not None:
            first_host, num_hosts = self._hosts_of(name, first_device, processes, devices_per_process)
        per_host = processes // num_hosts
        threads = {name: os.environ.get(name, "1") for name in THREAD_COUNTS}
        common = {**(threads if self.devices.kind == "cpu" else nccl_environment(os.environ)), **(env or {})}

        def bootstrap(point: Any) -> Any:
            host = first_host + point.rank // per_host
            visible: tuple[str, ...] = ()
            if first_device is not None and self.devices.kind == "cuda":
                start = first_device % self.devices_per_host + point.rank % per_host * devices_per_process
                visible = self._device_names[host][start : start + devices_per_process]
            return self._command(preload).with_env({"CUDA_VISIBLE_DEVICES": ",".join(visible)} | common)

        hosts = self.hosts.slice(hosts=slice(first_host, first_host + num_hosts))
        mesh = hosts.spawn_procs(per_host={"gpus": per_host}, name=name, bootstrap_command=bootstrap)
        monitors: list[ProcessMonitor] = members(mesh.spawn(MONITOR, ProcessMonitor))
        self._meshes.append(_Mesh(name, mesh, monitors))
        self.monitors.append((name, monitors))
        return mesh

    def _command(self, preload: str) -> Any:
        """Monarch's command for a new process, through the host's fork server if that has ``preload``."""
        from monarch.actor import default_bootstrap_cmd

        command = default_bootstrap_cmd()
        if preload in self.fork_server.preloads:
            command.args = ["-IS", fork_client.__file__, preload, actor_process.__name__]
        else:
            command.args = ["-m", actor_process.__name__]
        return command

    def named(self, name: str) -> ProcMesh:
        """The last spawned mesh of this name that was not killed. Raises ValueError if there is none."""
        for spawned in reversed(self._meshes):
            if spawned.name == name:
                return spawned.mesh
        live = ", ".join(sorted({spawned.name for spawned in self._meshes})) or "none"
        raise ValueError(f"no live mesh named {name!r}; live meshes: {live}")

    def _find(self, mesh: ProcMesh) -> _Mesh:
        for spawned in self._meshes:
            if spawned.mesh is mesh:
                return spawned
        raise ValueError("this mesh was not spawned by this cluster, or was already killed")

    async def locate(self, mesh: ProcMesh) -> None:
        """Ask a mesh's processes for their machine and pid, so that :meth:`kill` can end them if they do not answer.

        Raises ValueError if the mesh is not one of this cluster, or was killed.
        """
        known = self._find(mesh)
        what = f"the machine and pid of {known.name}"
        calls = [within(CALL_DEADLINE_S, each.report.call_one(), what, on="Monarch") for each in known.monitors]
        known.processes = [(report.machine, report.pid) for report in await asyncio.gather(*calls)]

    async def kill(self, mesh: ProcMesh) -> None:
        """End the processes of a mesh at once, before the end of the run. Processes that have ended are skipped.

        They are killed, not stopped: stopping an actor makes Monarch end the actors that call it, too; killing it
        leaves them alive. A process that does not answer is killed from another process if :meth:`locate` was called;
        otherwise the watch kills it, or its host at the end.

        Raises ValueError if the mesh is not one of this cluster, or was already killed.
        """
        ended = self._find(mesh)
        self._meshes.remove(ended)
        self.faults.clear()  # they belong to the mesh being replaced; later ones may end the run
        what = f"{ended.name} to end"
        calls = [within(KILL_DEADLINE_S, each.die.call_one(), what, on="Monarch") for each in ended.monitors]
        answers = await asyncio.gather(*calls, return_exceptions=True)  # a process that ends itself cannot answer
        for (machine, pid), answer in zip(ended.processes, answers, strict=False):
            if isinstance(answer, DeadlineExceeded):
                await self._kill_from_outside(machine, pid)
        self.monitors = [entry for entry in self.monitors if entry[1] is not ended.monitors]

    async def _kill_from_outside(self, machine: str, pid: int) -> None:
        """Have another process on the same machine kill a process that does not answer."""
        if machine == own_id():
            monitor.kill(pid)
            return
        monitors = [each for spawned in self._meshes for each in spawned.monitors]
        calls = [within(KILL_DEADLINE_S, each.report.call_one(), "a report", on="Monarch") for each in monitors]
        for each, report in zip(monitors, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if not isinstance(report, BaseException) and report.machine == machine:
                await _stop_or_warn(each.kill.call_one(pid), f"process {pid} to end")
                return
        logger.warning("process %d cannot be killed: no other process of the run on its machine answers", pid)

    def _hosts_of(self, name: str, first_device: int, processes: int, devices_per_process: int) -> tuple[int, int]:
        """The first host and the number of hosts of a mesh whose devices start at ``first_device``."""
        count = processes * devices_per_process
        last_device = first_device + count - 1
        self.devices.check(first_device + count, f"{name} takes devices {first_device} to {last_device}")
        first_host, offset = divmod(first_device, self.devices_per_host)
        if offset + count <= self.devices_per_host:
            return first_host, 1
        if offset or count % self.devices_per_host or self.devices_per_host % devices_per_process:
            raise SettingsError(
                f"{name}: devices {first_device} to {last_device} neither lie within one host nor fill whole hosts of "
                f"{self.devices_per_host} devices. Choose a number of ranks for which they do"
            )
        return first_host, count // self.devices_per_host

    def _on_fault(self, failure: MeshFailure) -> None:
        """Monarch's hook for a failure that no supervisor handled. Returning keeps the controller alive."""
        if self._ending or failure.mesh_name.startswith(UNREPORTED_MESH_PREFIXES):
            logger.debug("mesh %s failed: %s", failure.mesh_name, failure.report())
            return
        self.faults.append(failure)
        name, report = failure.mesh_name, failure.report().rstrip()
        logger.error("mesh %s failed: %s%s", name, report, killed.advice(name, report))

    def _wait_for_fault(self) -> None:
        """Give Monarch time to report a lost process: the actors that call it may fail first."""
        deadline = time.monotonic() + FAULT_DEADLINE_S
        while not self.faults and time.monotonic() < deadline:
            time.sleep(0.05)

    async def _end(self) -> None:
        """Stop all meshes, then the hosts. A mesh that does not stop in time is logged, and killed with its host."""
        self._ending = True
        stops = [
            _stop_or_warn(spawned.mesh.stop("the run ends"), f"mesh {spawned.name} to stop") for spawned in self._meshes
        ]
        await asyncio.gather(*stops)
        await _stop_or_warn(self.hosts.shutdown(), "the hosts to shut down")


async def _stop_or_warn(stop: Awaitable[Any], what: str) -> None:
    try:
        await within(STOP_DEADLINE_S, stop, what, on="Monarch")
    except Exception as error:  # a failed mesh cannot always be stopped; its host kills its processes at the end
        logger.warning("not stopped cleanly: %s", error)


@contextmanager
def launch_cluster(preloads: Sequence[Preload] = (), grace_s: float = 0.0) -> Iterator[Cluster | None]:
    """Start the hosts of this launch, and end everything when the block ends.

    Every host starts to import ``preloads`` at once, for the processes that are spawned with one of them
    (``runtime/forking/fork_server.py``).

    Yields the controller's :class:`Cluster`. Under torchrun the controller is global rank 0. The other ranks get None
    once the controller's block has succeeded, and exit with code 1 if it failed or died::

        with launch_cluster() as cluster:
            if cluster is not None:
                asyncio.run(train(cluster))

    Within the controller's block, the first SIGINT, SIGTERM or SIGUSR1 raises KeyboardInterrupt. The process
    is killed at the second signal, or if the block has not ended ``grace_s`` plus
    :data:`~monarch_rl.runtime.signals.CLEAN_EXIT_S` after the first.
    """
    _refuse_running_loop()
    if visible_devices():
        preloads = [preload for preload in preloads if not preload.asks_for_accelerators]
    start = functools.partial(start_host, preloads=preloads)
    if runtime.MONARCH_CAME_FIRST:
        logger.warning(
            "monarch was imported before monarch_rl: a dead process is noticed after up to 10 s, not 2 s. Import "
            "monarch_rl first"
        )
    if not launched_by_torchrun():
        with interrupts() as interrupting:
            interrupting.grace_s = grace_s
            host = start(None)
            with _attached(host, [Node(host.address, tuple(visible_devices()))], interrupting) as cluster:
                yield cluster
        return
    rank = Rank.from_environment()
    die_with_parent(signal.SIGTERM)  # a torchrun agent that is killed does not end its ranks
    if rank.rank != 0:
        with interrupts(raise_in_main=False) as interrupting:
            interrupting.grace_s = grace_s
            _follow(Follower(rank), start)
        yield None
        return
    with interrupts() as interrupting:
        interrupting.grace_s = grace_s
        controller = Controller(rank)
        # At exit only: so that the followers notice a failed run after this process has printed its traceback.
        atexit.register(controller.close)
        ip, host, nodes = controller.wait_for_ranks(start)
        if ip is not None:
            from monarch.actor import enable_transport

            enable_transport(f"tcp://{ip}:0")
        with _attached(host, nodes, interrupting) as cluster:
            yield cluster
        controller.report_success()


def _follow(follower: Follower, start_host: Callable[[str | None], HostProcess]) -> None:
    try:
        follower.join(start_host)
        succeeded = follower.wait()  # waits: for the controller's whole life; its end closes the connection
    finally:
        follower.close(HOST_DEADLINE_S)
    if not succeeded:
        raise SystemExit(1)


@contextmanager
def _attached(host: HostProcess, nodes: Sequence[Node], interrupting: Interrupts) -> Iterator[Cluster]:
    """Yield the cluster of running hosts; ``host`` is the one that this process started. Raises HostLost if that host
    is lost, in place of the errors that follow from its loss."""
    try:
        host.when_lost(interrupting.end)
        # Monarch's client creates a folder for sockets, needs it while this process lives, and never removes it.
        with folder_of_process().as_temporary_directory():
            cluster = _attach(nodes, host.fork_server, interrupting)
        try:
            yield cluster
        except Exception:
            if not host.lost():
                cluster._wait_for_fault()
            raise
        finally:
            if not host.lost():  # else no process of this machine is left, and other hosts end with the controller
                host.expect_end()
                asyncio.run(_as_controller(cluster._end()))
    except Exception:
        lost = host.lost()
        if lost is not None:
            raise lost from None
        raise
    finally:
        host.end(HOST_DEADLINE_S)


def _attach(nodes: Sequence[Node], fork_server: ForkServer, interrupting: Interrupts) -> Cluster:
    import monarch.actor

    configure_monarch()
    counts = {len(node.devices) for node in nodes}
    if len(counts) > 1:
        raise SettingsError(
            f"all hosts of a launch need the same number of GPUs, but these have {sorted(counts)}: set "
            "CUDA_VISIBLE_DEVICES to equally many on each"
        )
    workers = [node.address for node in nodes]
    hosts = monarch.actor.attach_to_workers(ca="trust_all_connections", workers=workers, name="hosts")
    names = tuple(node.devices for node in nodes)
    cluster = Cluster(hosts, devices(), interrupts=interrupting, _device_names=names, fork_server=fork_server)
    monarch.actor.unhandled_fault_hook = cluster._on_fault  # the default interrupts the main thread
    what = f"the hosts at {workers} to come up"
    asyncio.run(_as_controller(within(START_DEADLINE_S, hosts.initialized, what, on="Monarch")))
    # Exit handlers run last in, first out: this one runs before Monarch's own, which then has nothing left to do.
    atexit.unregister(shut_client_down)
    atexit.register(shut_client_down)
    return cluster


async def _as_controller(awaitable: Awaitable[T]) -> T:
    """Await it with the controller's heartbeat, by which deadlines leave out the pauses of this process."""
    wait_registry.register(CONTROLLER)
    try:
        return await awaitable  # waits: the awaitable has deadlines of its own
    finally:
        wait_registry.unregister(CONTROLLER)


def _refuse_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError("launch_cluster() blocks: use it outside asyncio, and run the event loop within its block")


# -- Monarch's own timeouts and sizes, and the shutdown of its client in this process ---------------------------------

STATE_DEADLINE_S = 120.0
"""Seconds of silence after which Monarch counts a host, or a process asked for its state, as lost. Monarch's timer also
runs while the whole machine is paused (migrating a virtual machine takes a minute), and is the first thing that Monarch
checks afterwards. The watch notices a stopped process earlier, and does not count pauses (``watch.py``)."""
ACTOR_START_DEADLINE_S = 600.0
"""Seconds for an actor to start, and for a message to be acknowledged. Monarch's defaults are 30 s; starting a process
takes two CPU-seconds, which is 200 s on a machine that gives it 1 % of a core."""
SPAWN_DEADLINE_S = 60.0
"""Seconds for a host to report that a process has started. A lost host never does, and the run waits this long for it.
(A process that takes more than 30 s to introduce itself is not noticed, whatever is set here.)"""
CLIENT_FLUSH_S = 0.3
"""Seconds for this process's last messages to leave at its exit; Monarch's own default."""
CLIENT_SHUTDOWN_DEADLINE_S = 5.0
"""Seconds for the client to shut down; normally a moment."""


def configure_monarch() -> None:
    """Set Monarch's own timeouts and sizes for this process and those it spawns, before the first actor.

    Monarch does not detect a starved machine, so these timeouts are longer than a starved machine needs. A start that
    hangs is ended by the deadlines of the processes that wait for it (``deadlines.py``).

    If a process is killed while Monarch asks it for its state, its loss is noticed only after ``STATE_DEADLINE_S``;
    otherwise within two seconds.
    """
    from monarch.config import configure

    # A machine that swaps or starts many processes may be silent for long; Monarch's defaults are 30 s for an actor
    # and 60 s for a host. A message that is not acknowledged in time ends the run.
    silence, start = f"{STATE_DEADLINE_S:g}s", f"{ACTOR_START_DEADLINE_S:g}s"
    configure(get_proc_state_max_idle=silence, get_actor_state_max_idle=silence, message_delivery_timeout=start)
    configure(mesh_proc_spawn_max_idle=f"{SPAWN_DEADLINE_S:g}s", actor_spawn_max_idle=start)
    configure(host_spawn_ready_timeout=start, mesh_attach_config_timeout=start, mesh_orphan_timeout=start)
    # pending_actor_delivery_timeout is for a message to an actor whose process is still starting.
    configure(supervision_watchdog_timeout=start, pending_actor_delivery_timeout=start)
    # RDMABuffer over TCP (weights/rdma.py). Frames of 4 MiB are four times faster than Monarch's default of 64 MiB. One
    # connection is as fast as several; with several, a read keeps writing to memory after it timed out.
    configure(rdma_max_chunk_size_mb=4, rdma_tcp_fallback_parallelism=1)


def shut_client_down() -> None:
    """Shut Monarch's client down. Its own exit handler would wait for a second and then print a traceback, even after a
    successful run."""
    from monarch.actor import shutdown_context

    try:
        shutdown_context(host_timeout=CLIENT_FLUSH_S).get(timeout=CLIENT_SHUTDOWN_DEADLINE_S)
    except Exception as error:  # the run is over: nothing depends on this any more
        logger.warning("Monarch's client did not shut down; the process exits anyway: %r", error)
