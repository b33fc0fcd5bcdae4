"""One torch.distributed world over a process mesh."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from monarch.actor import Actor, context

from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint
from monarch_rl.runtime.network import free_port, host_address

if TYPE_CHECKING:
    from monarch.actor import ProcMesh

ENVIRONMENT = "torch_distributed_env"
"""Name of the actor that sets the variables."""
SET_UP_DEADLINE_S = 300.0
"""Seconds for a call to freshly spawned processes, which may import first, ten CPU-seconds' worth."""


class _Environment(Actor):
    """Sets the environment variables that ``init_process_group("env://")`` reads."""

    @concurrent_endpoint
    async def meeting_point(self) -> tuple[str, int]:
        return host_address(), free_port()

    @concurrent_endpoint
    async def enter(self, address: str, port: int) -> None:
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
    the launch reach (127.0.0.1 on one machine, whatever its host name resolves to). Ranks count host by host.

    LOCAL_RANK is the index of a process's device among its visible ones: 0 on CUDA, where ``Cluster.spawn`` shows each
    process its own device only, and the rank within the host on a CPU.

    Raises :class:`~monarch_rl.runtime.deadlines.DeadlineExceeded`.
    """
    actors = mesh.spawn(ENVIRONMENT, _Environment)
    first = actors.slice(**dict.fromkeys(mesh.extent.labels, 0))
    what = f"the processes of mesh {mesh.extent} to start"
    address, port = await within(SET_UP_DEADLINE_S, first.meeting_point.call_one(), what, on="Monarch")
    await within(SET_UP_DEADLINE_S, actors.enter.call(address, port), what, on="Monarch")
