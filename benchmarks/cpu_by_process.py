"""The CPU time of each process of a run of `recipes/grpo.py` in its steady state, and while its workers wait for slots.

    python benchmarks/cpu_by_process.py
    python benchmarks/cpu_by_process.py --steps 80 --generator.replicas 1

First, after --warm-up steps, --steps steps are measured: CPU milliseconds per step of every process and of its threads,
by name; for a rollout worker per episode, for a generator actor per request. Then the trainer stops. When the buffer is
full and all workers wait for slots, the CPU time of --idle-s seconds is measured, as a share of one core. CPU time
needs no quiet machine, although other work makes it somewhat longer.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from processes import ProcessTree

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import grpo  # noqa: E402

from monarch_rl.pipeline.run import Run, launch  # noqa: E402
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, within  # noqa: E402
from monarch_rl.settings.cli import cli  # noqa: E402

TICKS = os.sysconf("SC_CLK_TCK")
IDLE_DEADLINE_S = 60.0
"""Seconds for the buffer to fill once the trainer has stopped."""


@dataclass(frozen=True)
class Settings(grpo.Settings):
    """CPU time by process (see the top of this file)."""

    steps: int = 40
    """Measured steps."""
    warm_up: int = 10
    """Steps before them, which are not measured."""
    idle_s: float = 60.0
    """Measured seconds in which all workers wait."""


@dataclass(frozen=True)
class Snapshot:
    """CPU time and work of all processes so far."""

    seconds: dict[tuple[str, str], float]
    """CPU seconds by names of process and thread."""
    episodes: int = 0
    """Episodes run by all workers."""
    requests: int = 0
    """Requests answered by all replicas."""

    def since(self, before: Snapshot) -> Snapshot:
        seconds = {key: value - before.seconds.get(key, 0.0) for key, value in self.seconds.items()}
        return Snapshot(seconds, self.episodes - before.episodes, self.requests - before.requests)

    def by_process(self) -> dict[str, float]:
        """Seconds by process, the busiest first."""
        totals: defaultdict[str, float] = defaultdict(float)
        for (process, _), seconds in self.seconds.items():
            totals[process] += seconds
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def threads(self, process: str) -> list[tuple[str, float]]:
        """Seconds by thread, the busiest first."""
        by_thread = {thread: seconds for (name, thread), seconds in self.seconds.items() if name == process}
        return sorted(by_thread.items(), key=lambda item: -item[1])


def cpu_seconds(tree: ProcessTree) -> dict[tuple[str, str], float]:
    """Return the CPU time of all processes so far, by names of process and thread."""
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    tree.look()
    for process, name in tree.running():
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            fields = (task / "stat").read_text()
            thread, rest = fields[fields.index("(") + 1 : fields.rindex(")")], fields[fields.rindex(")") + 2 :].split()
            seconds[name, thread] += (int(rest[11]) + int(rest[12])) / TICKS
    return seconds


async def take_snapshot(run: Run, tree: ProcessTree) -> Snapshot:
    """Return the CPU time of all processes so far, and the work that they have done."""
    seconds = cpu_seconds(tree)
    actors = run.actors
    calls = [worker.stats.call_one() for worker in actors.workers.handles.values()]
    worker_stats = [
        await within(CALL_DEADLINE_S, call, "the stats of a worker", on="rollout workers") for call in calls
    ]
    calls_of_replicas = [replica.stats.call_one() for replica in actors.generators.handles.values()]
    answered = [await within(CALL_DEADLINE_S, call, "the stats", on="generators") for call in calls_of_replicas]
    requests = sum(stats["finished_requests"] for stats in answered)
    return Snapshot(seconds, sum(stats.episodes for stats in worker_stats), requests)


async def wait_until_idle(run: Run) -> None:
    """Wait until no group is running, because all slots are taken."""
    async with asyncio.timeout(IDLE_DEADLINE_S):
        while (await run.counts()).playing:
            await asyncio.sleep(0.5)
    await asyncio.sleep(1.0)


async def train(run: Run, s: Settings) -> None:
    """Run the recipe's loop, and take snapshots of all processes at its beginning, its end and afterwards."""
    await run.start(advantage=s.trainer.loss.advantage, objective=s.objective)
    async for step in run.steps(s.warm_up + s.steps + 1):
        if step == s.warm_up + 1:
            tree = ProcessTree(os.getpid())
            first = await take_snapshot(run, tree)
        if step == s.warm_up + s.steps + 1:
            last = await take_snapshot(run, tree)
            await run.publisher.wait_until_served()
            await wait_until_idle(run)
            idle_before = Snapshot(cpu_seconds(tree))  # without asking actors, because answering would be work
            await asyncio.sleep(s.idle_s)
            idle = Snapshot(cpu_seconds(tree)).since(idle_before)
        await run.step()
    report(last.since(first), idle, s)


def report(steady: Snapshot, idle: Snapshot, s: Settings) -> None:
    """Print both tables, then everything as one line of JSON."""
    totals = steady.by_process()
    print(f"{s.steps} steps, {steady.episodes} episodes, {steady.requests} requests. CPU-ms a step:")
    for process, seconds in totals.items():
        threads = ", ".join(f"{thread} {1e3 * part / s.steps:.1f}" for thread, part in steady.threads(process)[:4])
        print(f"  {process:36s} {1e3 * seconds / s.steps:7.1f}   {threads}")
    idle_totals = idle.by_process()
    print(f"All workers wait: share of a core, over {s.idle_s:g} s:")
    for process, seconds in idle_totals.items():
        threads = ", ".join(f"{thread} {part / s.idle_s:.2%}" for thread, part in idle.threads(process)[:4])
        print(f"  {process:36s} {seconds / s.idle_s:7.2%}   {threads}")
    workers = sum(totals[name] for name in totals if name.startswith("rollout worker"))
    actors = sum(totals[name] for name in totals if name.startswith("generator actor"))
    result = {
        "benchmark": "cpu_by_process",
        "steps": s.steps,
        "cpu_s_per_step": sum(totals.values()) / s.steps,
        "rollout_worker_ms_per_episode": 1e3 * workers / steady.episodes,
        "generator_actor_ms_per_request": 1e3 * actors / steady.requests,
        "controller_host_buffer_s_per_step": sum(totals[name] for name in ("controller", "host", "buffer")) / s.steps,
        "idle_share_of_core": sum(idle_totals.values()) / s.idle_s,
        "cpu_ms_per_step": {name: round(1e3 * seconds / s.steps, 2) for name, seconds in totals.items()},
        "idle_share": {name: round(seconds / s.idle_s, 4) for name, seconds in idle_totals.items()},
    }
    print(json.dumps({key: round(value, 5) if isinstance(value, float) else value for key, value in result.items()}))


if __name__ == "__main__":
    launch(train, cli(Settings, description=__doc__), grpo.task)
