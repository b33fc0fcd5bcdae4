"""Tests a long run with faults of every kind: whether it survives, whether memory grows, and whether anything is left.

    python benchmarks/soak.py                          two hours
    python benchmarks/soak.py --minutes 20 --pause-s 15

A run of recipes/grpo.py on the tiny model under its supervisor, with two replicas, two rollout workers, checkpoints and
evaluations during training. One fault after another is injected: those of chaos.py, in another order in every round.
Then the run ends. Checks that its exit code is 0; every step is logged once, no token is above the lag bound, every
batch is full, every admitted group is accounted for; no group was trained twice; no process, no listening socket, no
temporary file and no file in /dev/shm is left.

Prints every fault, and by role MiB of a process's own memory (Anonymous in /proc/PID/smaps_rollup), descriptors and
threads at the start, in the middle and at the end of the longest-lived process, with its growth per 1,000 steps (the
slope over the second half of its life). If a process survived resumes, its growth is also divided into growth per 1,000
steps and per resume (least squares; the standard errors assume independent looks). The last line is JSON.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from chaos import FAULTS, RESTORED, ROOT, RUN_S, Fault, Run, check, check_replayed, check_rollouts, strike
from processes import Look, above_goal, growth, look_at, shared_files, shared_inodes
from reporting import run_benchmark, short

LEAST_LOOKS = 8
"""Looks at a process that its growth needs."""
LEAST_RESUMES = 4
"""Resumes in the second half of a life that separate growth per step from growth per resume."""
MOST_FAILED = 0.05
"""Share of the rounds of looks that may fail."""


@dataclass(frozen=True)
class Settings:
    """A long run with faults (see the top of this file)."""

    minutes: float = 120.0
    """Minutes from the first step to the last fault."""
    pause_s: float = 60.0
    """Longest pause in seconds between a recovery and the next fault."""
    look_s: float = 10.0
    """Interval in seconds of the looks at all processes."""
    seed: int = 0
    """Seed of order, victims and pauses."""


@dataclass(frozen=True)
class LookBetween(Look):
    """A look with the number of resumes until then."""

    resumes: int


@dataclass
class Watcher:
    """Looks at all processes of the run, on its own thread."""

    run: Run
    look_s: float
    failed: list[str] = field(default_factory=list)
    """Errors of failed rounds of looks, which met a file that was being written."""
    lives: dict[tuple[str, int], list[LookBetween]] = field(default_factory=lambda: defaultdict(list))
    """Looks by role and pid."""
    shared: set[int] = field(default_factory=set)
    """Inodes of the files in /dev/shm that processes of the run have mapped."""
    ended: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        while not self.ended.wait(self.look_s):
            try:
                steps, resumes = self.run.steps(), len(self.run.rows("resumes.jsonl"))
                for process, name in self.run.named():
                    self._look(process, name, steps[-1]["step"] if steps else 0, resumes)
            except (OSError, ValueError, KeyError) as error:
                self.failed.append(repr(error))

    def _look(self, process: psutil.Process, name: str, step: int, resumes: int) -> None:
        self.shared |= shared_inodes(process.pid)
        if (look := look_at(process.pid, step)) is not None:
            between = LookBetween(**vars(look), resumes=resumes)
            self.lives[re.sub(r" \d+$", "", name), process.pid].append(between)

    def longest(self) -> dict[str, list[LookBetween]]:
        """Return, by role, the looks at the process that lived for the most steps."""
        found: dict[str, list[LookBetween]] = {}
        for (role, _), looks in self.lives.items():
            span = looks[-1].step - looks[0].step
            if len(looks) >= LEAST_LOOKS and (role not in found or span > found[role][-1].step - found[role][0].step):
                found[role] = looks
        return dict(sorted(found.items()))


def growth_apart(looks: Sequence[LookBetween]) -> dict[str, list[float]] | None:
    """Return MiB per 1,000 steps and per resume, each with its standard error, by least squares over the second half of
    the looks; None if there were too few resumes to separate them."""
    half = looks[len(looks) // 2 :]
    if half[-1].resumes - half[0].resumes < LEAST_RESUMES:
        return None
    regressors = np.array([[look.step / 1000, look.resumes, 1.0] for look in half])
    mib = np.array([look.mib for look in half])
    slopes, _, rank, _ = np.linalg.lstsq(regressors, mib, rcond=None)
    if rank < 3:
        return None
    variance = (
        np.sum((mib - regressors @ slopes) ** 2) / (len(half) - 3) * np.linalg.inv(regressors.T @ regressors).diagonal()
    )
    by_1000_steps, by_resume, _ = np.stack([slopes, np.sqrt(variance)], axis=1).tolist()
    return {"by_1000_steps": by_1000_steps, "by_resume": by_resume}


def inject(run: Run, s: Settings) -> list[dict[str, Any]]:
    """Inject one fault after the other until the time is over."""
    rng, struck, waiting = random.Random(s.seed), list[dict[str, Any]](), list[Fault]()
    until = time.monotonic() + 60 * s.minutes
    while time.monotonic() < until:
        waiting = waiting or rng.sample(FAULTS, len(FAULTS))
        fault = waiting.pop()
        run.until_next_step()
        if fault.kind in RESTORED:
            run.until_next_checkpoint()
        time.sleep(rng.uniform(0.0, s.pause_s))
        row = strike(run, fault, rng.randrange(2))
        struck.append({"fault": str(fault), "step": run.steps()[-1]["step"]} | row)
        print(f"{fault}: noticed after {row['noticed_s']:.1f} s, back after {row['back_s']:.1f} s", flush=True)
    return struck


def report(struck: list[dict[str, Any]], watcher: Watcher) -> dict[str, Any]:
    """Print a table of faults and one of processes; returns the growth of the processes."""
    print("\n| fault | times | noticed after s, median | back after s, median | longest |\n|---|---|---|---|---|")
    by_fault: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in struck:
        by_fault[row["fault"]].append(row)
    for name, rows in sorted(by_fault.items()):
        noticed, back = ([row[key] for row in rows] for key in ("noticed_s", "back_s"))
        medians = f"{statistics.median(noticed):.1f} | {statistics.median(back):.1f} | {max(back):.1f}"
        print(f"| {name} | {len(rows)} | {medians} |")
    print(f"\n{'process':20s} {'steps':>6s} {'MiB: start':>10s} {'middle':>7s} {'end':>7s} {'by 1,000 steps':>14s}")
    longest = watcher.longest()
    for role, looks in longest.items():
        three = looks[0], looks[len(looks) // 2], looks[-1]
        memory = f"{three[0].mib:10.1f} {three[1].mib:7.1f} {three[2].mib:7.1f} {growth(looks):14.2f}"
        counts = "/".join(str(look.descriptors) for look in three), "/".join(str(look.threads) for look in three)
        print(f"{role:20s} {looks[-1].step - looks[0].step:6d} {memory}  descriptors {counts[0]}, threads {counts[1]}")
    apart = {role: found for role, looks in longest.items() if (found := growth_apart(looks)) is not None}
    for role, found in apart.items():
        parts = (f"{mib:.2f} +- {error:.2f} MiB {what.replace('_', ' ')}" for what, (mib, error) in found.items())
        print(f"{role}: {', '.join(parts)}")
    slopes = {role: growth(looks) for role, looks in longest.items()}
    print(above_goal(slopes))
    lives = {role: looks[-1].step - looks[0].step for role, looks in longest.items()}
    numbers = {"mib_by_1000_steps": slopes, "mib_apart": apart, "longest_life_steps": lives}
    return numbers | {"failed_looks": len(watcher.failed)}


def main(s: Settings) -> None:
    make_model = [sys.executable, "tools/make_tiny_model.py"]  # does nothing if the model exists
    subprocess.run(make_model, cwd=ROOT, check=True, timeout=RUN_S)
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--checkpoint.every-steps=20", "--evaluate-every=25", "--evaluation.share=0.2", "--journal.mib=16"]
        flags += ["--rollout.logged-groups=8"]  # all groups of a step, to find one that is trained twice
        run = Run(Path(folder), *flags)
        watcher = Watcher(run, s.look_s)
        watching = threading.Thread(target=watcher.watch, daemon=True)
        watching.start()
        try:
            run.until(run.steps, "the first step", RUN_S)
            started = time.monotonic()
            struck = inject(run, s)
            run.until_next_step()
            minutes = (time.monotonic() - started) / 60
            watched = watching.is_alive()
            watcher.ended.set()
            watching.join(60)
            run.finish()
        finally:
            watcher.ended.set()
            run.end()
        steps, resumes = run.steps(), len(run.rows("resumes.jsonl"))
        check(run)
        groups, again = check_rollouts(run), check_replayed(run)
        evaluations = sum("held_out/accuracy" in row for row in run.rows("metrics.jsonl"))
        if left := shared_files(watcher.shared):
            raise RuntimeError(f"left in shared memory: {left}")
        rounds = 60 * minutes / s.look_s
        if not watched or len(watcher.failed) > MOST_FAILED * rounds:
            raise RuntimeError(f"too many looks at processes failed: {watcher.failed[-3:]}")
        print(f"{minutes:.0f} minutes, {len(steps)} steps, {len(struck)} faults, {resumes} resumes, ", end="")
        print(f"{again} steps made again bit for bit, ", end="")
        print(f"{evaluations} evaluations; each of {groups} groups that were logged was trained once; nothing is left")
        result = {"benchmark": "soak", "minutes": minutes, "steps": len(steps), "resumes": resumes} | report(
            struck, watcher
        )
    more = {"made_again": again, "evaluations": evaluations, "faults": struck}
    print(json.dumps(short(result | more)))


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
