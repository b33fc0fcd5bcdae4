"""The actor that tests of the runtime spawn on a mesh."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

from monarch.actor import Actor

from monarch_rl.runtime.cluster import host_address
from monarch_rl.runtime.endpoint import concurrent_endpoint


class Member(Actor):
    """Returns the environment of its process, computes with the others, starts a child process, or dies."""

    @concurrent_endpoint
    async def see(self) -> dict[str, str]:
        title, parent = (Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0") for pid in ("self", os.getppid()))
        forked = parent.startswith("monarch_rl::fork server")
        return {**os.environ, "host_address": host_address(), "title": title, "forked": str(forked)}

    @concurrent_endpoint
    async def all_reduce(self) -> float:
        import torch
        import torch.distributed as dist

        await asyncio.to_thread(dist.init_process_group, "gloo")
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return float(total.item())

    @concurrent_endpoint
    async def start_child(self) -> int:
        # The worst kind: in its own session, and indifferent to the death of its parent.
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    @concurrent_endpoint
    async def die(self) -> None:
        os._exit(3)
