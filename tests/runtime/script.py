"""A small run, started by the tests under python and torchrun: ``script.py MODE FOLDER``.

``work`` all-reduces over a mesh of all devices (at most 2 per host) and writes the environments of the processes to
FOLDER/report.
``wait`` and ``raise`` start processes, and processes below those, write FOLDER/ready, and then sleep or raise.
``stuck`` is ``wait``, but ignores its cancellation.
With ``-forked`` after the mode, the hosts' fork servers start the processes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path

from members import Member

from monarch_rl.runtime.cluster import Cluster, init_torch_distributed_env, launch_cluster
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.forking.fork_server import Preload

DEADLINE_S = 300.0
PRELOAD = Preload("numbers", ("numpy",))
"""Imported quickly: on a crowded machine processes would not wait for more (``fork_client.STAND_IN_ANSWER_S``)."""


async def work(cluster: Cluster, folder: Path) -> None:
    trainer = cluster.spawn(
        "trainer", cluster.num_hosts * min(2, cluster.devices_per_host), first_device=0, preload=PRELOAD.name
    )
    buffer = cluster.spawn("buffer", 1, env={"ROLE": "buffer"}, preload=PRELOAD.name)
    report = {}
    for name, mesh in (("trainer", trainer), ("buffer", buffer)):
        await init_torch_distributed_env(mesh)
        members = mesh.spawn("members", Member)
        seen = await within(DEADLINE_S, members.see.call(), f"the processes of {name}")
        sums = await within(DEADLINE_S, members.all_reduce.call(), f"the all-reduce of {name}")
        report[name] = {
            "extent": dict(zip(mesh.extent.labels, mesh.extent.sizes, strict=True)),
            "environments": list(seen.values()),
            "sums": list(sums.values()),
        }
    (folder / "report").write_text(json.dumps(report))


async def linger(cluster: Cluster, folder: Path, mode: str) -> None:
    members = cluster.spawn("members", 2, first_device=0, preload=PRELOAD.name).spawn("members", Member)
    await within(DEADLINE_S, members.start_child.call(), "the children")
    (folder / "ready").write_text(str(os.getpid()))
    if mode == "raise":
        raise RuntimeError("this run fails")
    try:
        await asyncio.sleep(600)
    finally:
        if mode == "stuck":
            (folder / "stuck").write_text("for good")
            await asyncio.sleep(600)
        await asyncio.sleep(0.01)
        (folder / "tidied").touch()


def main() -> None:
    logging.basicConfig(level="INFO")
    (mode, _, forked), folder = sys.argv[1].partition("-"), Path(sys.argv[2])
    sys.path.append(str(folder))
    with launch_cluster([PRELOAD] if forked else []) as cluster:
        if cluster is not None:
            asyncio.run(work(cluster, folder) if mode == "work" else linger(cluster, folder, mode))


if __name__ == "__main__":
    main()
