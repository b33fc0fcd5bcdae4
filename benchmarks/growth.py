"""Tests for memory leaks: runs the main job for many steps and prints the growth of each process per 1,000 steps.

    python benchmarks/growth.py
    python benchmarks/growth.py --steps 600 --looks 20 --generator.replicas 1

Prints, by role, MiB of a process's own memory at the start, in the middle and at the end, its growth per 1,000 steps
(the slope over the second half), its file descriptors and threads, and for processes with actors the objects of
Python's garbage collector, asyncio tasks, and keys in torch's store; then the files in /dev/shm that processes of the
run have mapped. A process's own memory is Anonymous in /proc/PID/smaps_rollup: neither files nor shared memory; a page
that a forked process shares with its parent counts from the start. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from monarch.actor import Actor
from processes import SHARED_MEMORY, Look, ProcessTree, above_goal, growth, look_at, shared_files, shared_inodes
from reporting import short

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import grpo  # noqa: E402

from monarch_rl.pipeline.run import Run, launch  # noqa: E402
from monarch_rl.runtime import wait_registry  # noqa: E402
from monarch_rl.runtime.cluster import Cluster  # noqa: E402
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, within  # noqa: E402
from monarch_rl.runtime.endpoint import (
    concurrent_endpoint,  # noqa: E402
    members,  # noqa: E402
)
from monarch_rl.settings.cli import cli  # noqa: E402
from monarch_rl.trainer.settings import TrainerSettings  # noqa: E402


@dataclass(frozen=True)
class Settings(grpo.Settings):
    """Growth of each process of a long run (see the top of this file)."""

    steps: int = 3000
    """Optimiser steps of the run."""
    groups_per_step: int = 4
    """Groups per step; small steps show growth per step as well as large ones."""
    looks: int = 60
    """Times that all processes are measured, evenly spread."""
    trainer: TrainerSettings = field(default_factory=lambda: replace(grpo.Settings().trainer, lr=1e-5))


@dataclass(frozen=True)
class Counted(Look):
    """A look with counts that only the process itself can make."""

    objects: int | None = None
    """Objects of Python's garbage collector; None in a process without actors."""
    tasks: int | None = None
    """Tasks of the event loops of its actors."""
    store_keys: int | None = None
    """Keys in the store of its torch.distributed process group."""


COUNTS = ("descriptors", "threads", "objects", "tasks", "store_keys")


def own_counts() -> tuple[int, dict[str, Any]]:
    """Return this process's id, and the counts that only it can make."""
    import torch.distributed as dist

    gc.collect()
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    tasks = sum(len(asyncio.all_tasks(loop)) for loop in wait_registry.loops())
    keys = None if store is None else store.num_keys()
    return os.getpid(), {"objects": len(gc.get_objects()), "tasks": tasks, "store_keys": keys}


class Counter(Actor):
    """An actor in the process of each other actor, which counts there."""

    @concurrent_endpoint
    async def counts(self) -> tuple[int, dict[str, Any]]:
        return own_counts()


class Growth:
    """All measurements so far.

    Args:
        cluster: its processes are measured, and all that descends from this one.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._tree = ProcessTree(os.getpid())
        spawned = [mesh.mesh.spawn("counter", Counter) for mesh in cluster._meshes]
        self._counters: list[Counter] = [counter for counters in spawned for counter in members(counters)]
        self.looks: dict[tuple[str, int], list[Counted]] = {}
        """Looks by role and pid."""
        self.shared_files: list[int] = []
        """Files in /dev/shm at each look."""
        self._shared: set[int] = set()
        """Inodes of the files there that processes of the run have mapped."""
        self.seconds: list[float] = []

    async def look(self, step: int) -> None:
        """Measure all processes of the run."""
        calls = [counter.counts.call_one() for counter in self._counters]
        counted = [await within(CALL_DEADLINE_S, call, "the counts of a process", on="Monarch") for call in calls]
        counts = dict([own_counts(), *counted])
        self._tree.look()
        for process, name in self._tree.running():
            looked = look_at(process.pid, step)
            self._shared |= shared_inodes(process.pid)
            if looked is not None:
                counted = Counted(**vars(looked), **counts.get(process.pid, {}))
                self.looks.setdefault((name, process.pid), []).append(counted)
        self.shared_files.append(len(shared_files(self._shared)))
        self.seconds.append(time.monotonic())

    def by_role(self) -> dict[str, list[Counted]]:
        """Return the processes that lived from the first look to the last; of several with one role, the one that grew
        most, with their number after its name."""
        longest = max(len(looks) for looks in self.looks.values())
        roles: dict[str, list[list[Counted]]] = {}
        for (role, _), looks in self.looks.items():
            if len(looks) == longest:
                roles.setdefault(role, []).append(looks)
        return {
            role if len(candidates) == 1 else f"{role} (most of {len(candidates)})": max(candidates, key=growth)
            for role, candidates in sorted(roles.items())
        }


async def train(run: Run, s: Settings) -> None:
    """Run the recipe's loop without evaluations, and look at all processes."""
    await run.start(advantage=s.trainer.loss.advantage, objective=s.objective)
    assert isinstance(run._cluster, Cluster)
    growing = Growth(run._cluster)
    every = max(1, s.steps // s.looks)
    async for step in run.steps(s.steps):
        await run.step()
        if step % every == 0:
            await growing.look(step)
    report(growing, s)


def report(growing: Growth, s: Settings) -> None:
    """Print the table, then everything as one line of JSON."""
    print(f"{s.steps} steps in {growing.seconds[-1] - growing.seconds[0]:.0f} s")
    memory = f"{'MiB: start':>10s} {'middle':>7s} {'end':>7s} {'by 1,000 steps':>14s}"
    print(f"{'process':38s} {memory}  {'  '.join(f'{name:>17s}' for name in COUNTS)}")
    by_role = growing.by_role()
    for role, looks in by_role.items():
        three = looks[0], looks[len(looks) // 2], looks[-1]
        memory = "    " + " ".join(f"{look.mib:7.1f}" for look in three) + f" {growth(looks):14.2f}"
        counts = ["/".join(str(getattr(look, name) or "-") for look in three) for name in COUNTS]
        print(f"{role:38s} {memory[1:]}  {'  '.join(f'{count:>17s}' for count in counts)}")
    files = growing.shared_files
    print(f"files in {SHARED_MEMORY}: {files[0]} / {files[len(files) // 2]} / {files[-1]}")
    slopes = {role: growth(looks) for role, looks in by_role.items()}
    print(above_goal(slopes))
    result: dict[str, Any] = {
        "benchmark": "growth",
        "steps": s.steps,
        "mib_by_1000_steps": slopes,
        "mib": {role: [look.mib for look in looks] for role, looks in by_role.items()},
        "shared_files": files,
    }
    for name in COUNTS:
        result[name] = {role: [getattr(look, name) for look in looks] for role, looks in by_role.items()}
    print(json.dumps(short(result)))


if __name__ == "__main__":
    launch(train, cli(Settings, description=__doc__), grpo.task)
