"""Tests whether a run survives when every kind of process is killed, stopped, terminated and made to fail.

    python benchmarks/chaos.py
    python benchmarks/chaos.py --seed 3
    python benchmarks/chaos.py --stall-s 8 --stuck-s 4     stopped processes are detected sooner (as in the test)

A real run of recipes/grpo.py on the tiny model, under the supervisor, with two replicas, two rollout workers and a
checkpoint every other step. One fault after the other is injected; order, victims and pauses follow from the seed. Then
the run ends. Checks that its exit code is 0, the lag bound holds at every step, every batch is full, every admitted
group is accounted for and none was trained twice, replayed steps have their previous weights, every lost process was
replaced, and no process, no listening socket and no temporary file is left. Prints a table and, last, the same as one
line of JSON.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from processes import listening_sockets, named_in, sockets_of
from reporting import run_benchmark

from monarch_rl.runtime.process import die_with_parent

ROOT = Path(__file__).parents[1]
RECIPE = Path(__file__).with_name("chaos_recipe.py")
RUN_S = 1200.0
"""Deadline of the whole run in seconds."""
FAULT_S = 600.0
"""Deadline in seconds from a fault until the process is replaced, on shared cores."""
GONE_S = 15.0
"""Deadline in seconds from the end of the run to that of its last process."""


@dataclass(frozen=True)
class Settings:
    """Faults during a run (see the top of this file)."""

    seed: int = 0
    """Seed of order, victims and pauses."""
    stall_s: float = 15.0
    """Setting of the run: seconds after which a blocked process is reported."""
    stuck_s: float | None = None
    """Seconds after a score's deadline until blocked scoring processes are replaced; None is the project's default."""
    pause_s: float = 2.0
    """Longest pause in seconds between a recovery and the next fault."""


@dataclass(frozen=True)
class Fault:
    """A fault of a process."""

    kind: str
    """Kind of the process."""
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


OWNERS = {
    "generator": "generator actor",
    "engine": "generator actor",
    "scorer": "rollout worker",
    "trainer rank": "trainer",
}
"""The actor to which a kind of process belongs, by its name in ``processes.name_of``."""
ALONE = ("buffer", "controller", "host")
"""Kinds with a single process."""
REPLACED = ("generator", "engine", "rollout worker", "scorer")
RESTORED = ("trainer rank", "buffer", "controller", "host")
"""Kinds after whose loss the run resumes from its last checkpoint."""
FAULTS = [Fault(kind, what) for kind in (*REPLACED, "trainer rank", "buffer") for what in ("SIGKILL", "SIGSTOP")]
FAULTS += [Fault(kind, "os._exit") for kind in ("generator", "rollout worker", "trainer rank", "buffer")]
FAULTS += [Fault("rollout worker", "exception"), Fault("controller", "SIGKILL"), Fault("host", "SIGKILL")]


class Run:
    """The run as seen from outside: its processes and files."""

    def __init__(self, scratch: Path, *flags: str, stuck_s: float | None = None) -> None:
        """Start it.

        Args:
            scratch: folder for all files of the run.
            flags: flags of the recipe.
            stuck_s: see :class:`Settings`.
        """
        self.scratch, self._mark = scratch, uuid.uuid4().hex
        self.log, self.temporary = scratch / "log", scratch / "t"
        self.temporary.mkdir()
        sizes = ["--groups-per-step=8", "--held-out=16", "--rollout.workers=2", "--rollout.concurrent-groups=16"]
        sizes += ["--trainer.ranks=2", "--generator.replicas=2"]
        more = ["--steps=1000000", f"--output={scratch}/runs", "--recovery.restarts=1000", *sizes, *flags]
        arguments = [str(scratch), "" if stuck_s is None else str(stuck_s), *more]
        # SGLang's processes change their title, which by default overwrites the environment by which they are found.
        environment = {**os.environ, "MONARCH_RL_CHAOS": self._mark, "SPT_NOENV": "1", "OMP_NUM_THREADS": "1"}
        environment["TMPDIR"] = str(self.temporary)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "monarch_rl.runtime.supervisor", str(RECIPE), *arguments],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),  # noqa: PLW1509 - there are no threads
            )

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the run that are running now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("MONARCH_RL_CHAOS") == self._mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def named(self) -> list[tuple[psutil.Process, str]]:
        """All processes of the run that are running now, with their names."""
        return named_in(self.scratch / "runs", self.processes())

    def victim(self, kind: str, index: int) -> psutil.Process:
        """Return the process of this kind and index; for scoring processes, the first one of a worker."""
        named = self.named()
        (actor,) = [process for process, name in named if name == name_in(OWNERS.get(kind, kind), index)]
        if kind == "scorer":  # each is a process group of its own
            return [process for process, name in named if name == kind][index]
        if kind != "engine":
            return actor
        group = os.getpgid(actor.pid)  # the engine is in its actor's process group
        return next(process for process, name in named if name == kind and os.getpgid(process.pid) == group)

    def may_survive(self) -> set[psutil.Process]:
        """The generators, their engines and the rollout workers, which may survive a lost trainer rank."""
        kinds = ("generator actor", "engine", "rollout worker")
        return {process for process, name in self.named() if name.startswith(kinds)}

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a file in the run's folder."""
        texts = [path.read_text() for path in self.scratch.glob(f"runs/*/{name}")]
        return [json.loads(line) for text in texts for line in text.splitlines()]

    def output(self) -> str:
        """Return the end of the run's output, without most steps."""
        lines = self.log.read_text().splitlines()
        shown = [line for place, line in enumerate(lines) if place >= len(lines) - 20 or not line.startswith("step ")]
        return "\n".join(shown[-1000:])

    def steps(self) -> list[dict[str, Any]]:
        return [row for row in self.rows("metrics.jsonl") if "time/step_s" in row]

    def until(self, condition: Callable[[], Any], what: str, seconds: float = FAULT_S) -> Any:
        """Wait until ``condition`` returns something, and return it. Raises if the run ends or the time is over."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended before {what}:\n{self.output()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {seconds:g} s\n{self.output()}")
            time.sleep(0.1)
        return found

    def until_next_step(self) -> None:
        shown = len(self.steps())
        self.until(lambda: len(self.steps()) > shown, "another step")

    def until_next_checkpoint(self) -> None:
        """Wait for a checkpoint that is newer than the last resume."""
        resumed = next((row["step"] for row in reversed(self.rows("resumes.jsonl"))), 0)

        def newer() -> bool:
            checkpoints = self.scratch.glob("runs/*/checkpoints/step-*")
            return any(int(path.name.removeprefix("step-")) > resumed for path in checkpoints)

        self.until(newer, "a newer checkpoint")

    def finish(self) -> None:
        """Let the run end after its next step, and wait until no process is left. Raises if it fails."""
        sockets = {inode for process in self.processes() for inode in sockets_of(process.pid)} & listening_sockets()
        (self.scratch / "end").touch()
        if self.process.wait(RUN_S) != 0:
            raise RuntimeError(f"exit code {self.process.returncode}:\n{self.output()}")
        deadline = time.monotonic() + GONE_S
        while left := [*self.processes(), *self.temporary.iterdir(), *(sockets & listening_sockets())]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"left behind: {left}")
            time.sleep(0.1)

    def end(self) -> None:
        """Kill all remaining processes."""
        for process in self.processes():
            process.kill()


def name_in(kind: str, index: int) -> str:
    """Return the name of a process of this kind."""
    return kind if kind in ALONE else f"{kind} {index}"


def strike(run: Run, fault: Fault, index: int) -> dict[str, Any]:
    """Inject ``fault``; returns the seconds until it was detected, and until the process was replaced."""
    if fault.kind in REPLACED:
        (run.scratch / "slow").touch()
    try:
        return _strike(run, fault, index)
    finally:
        (run.scratch / "slow").unlink(missing_ok=True)


def _strike(run: Run, fault: Fault, index: int) -> dict[str, Any]:
    victim = run.until(lambda: _found(lambda: run.victim(fault.kind, index)), f"a {fault.kind}")
    before, struck = run.may_survive(), time.time()
    if fault.what.startswith("SIG"):
        victim.send_signal(signal.Signals[fault.what])
    else:
        (run.scratch / f"{fault.what} {name_in(fault.kind, index)}").touch()
    if fault.kind in RESTORED:
        return _restored(run, struck, before)
    if fault.kind == "scorer":
        run.until(lambda: _found(lambda: run.victim("scorer", index).pid != victim.pid), "another scorer")
        seconds = time.time() - struck
        return {"noticed_s": seconds, "back_s": seconds, "happened": "another scoring process"}
    name = f"{'rollout worker' if fault.kind == 'rollout worker' else 'generator'} {index}"

    def reported(key: str) -> Any:
        found = [row["time"] for row in run.rows("failures.jsonl") if row["who"] == name and key in row]
        return next((when for when in found if when > struck), None)

    noticed = run.until(lambda: reported("cause"), f"the loss of {name} to be detected")
    back = run.until(lambda: reported("back_after_s"), f"{name} to be replaced")
    happened = "another replica, verified" if "generator" in name else "another worker; its groups started again"
    return {"noticed_s": noticed - struck, "back_s": back - struck, "happened": happened}


def _restored(run: Run, struck: float, before: set[psutil.Process]) -> dict[str, Any]:
    """Wait until the run has resumed from a checkpoint: the fault is detected when the resume starts, and the run is
    back with its next step.

    Args:
        before: processes of the run that may survive.
    """

    def last(name: str) -> Any:
        return next((row for row in reversed(run.rows(name)) if row["time"] > struck), None)

    resumed = run.until(lambda: last("resumes.jsonl"), "the run to resume from its checkpoint")
    lost = next((row for row in run.rows("failures.jsonl") if row["time"] > struck and "cause" in row), None)
    run.until(lambda: any(row["step"] > resumed["step"] for row in run.steps()), "a step after the checkpoint")
    stayed = len(before & run.may_survive())
    others = "the others stayed" if stayed == len(before) else f"{stayed} of {len(before)} others stayed"
    happened = f"trainer and buffer started again; {others}" if stayed else "all processes started again"
    noticed = (lost or resumed)["time"]
    return {"noticed_s": noticed - struck, "back_s": time.time() - struck, "happened": happened, "stayed": stayed}


def _found(look: Callable[[], Any]) -> Any:
    """Return the result of the search, or None while there is none."""
    try:
        return look()
    except (StopIteration, IndexError, ValueError, ProcessLookupError, psutil.NoSuchProcess):  # it has ended meanwhile
        return None


def check(run: Run) -> dict[str, float]:
    """Check a run that has ended, and return its numbers. Raises RuntimeError if a check fails."""
    steps = run.steps()
    wrong = [row for row in steps if row["lag/max"] > 2 or row["buffer/trained"] != 8 * row["step"]]
    for row in steps:
        dropped = sum(count for name, count in row.items() if name.startswith("dropped/") and "episode" not in name)
        if row["buffer/admitted"] != row["buffer/trained"] + row["buffer/playing"] + row["buffer/complete"] + dropped:
            wrong.append(row)
    if wrong or [row["step"] for row in steps] != list(range(1, len(steps) + 1)):
        raise RuntimeError(f"{len(steps)} steps, of which wrong: {wrong}")
    lost, returned = (sum(key in row for row in run.rows("failures.jsonl")) for key in ("cause", "back_after_s"))
    if lost != returned:
        raise RuntimeError(f"{lost} losses, {returned} returns")
    return {"steps": len(steps), "largest_lag": max(row["lag/max"] for row in steps), "losses": lost}


def check_rollouts(run: Run) -> int:
    """Return the number of logged groups. Raises RuntimeError if a group was trained in two steps."""
    steps_of: dict[int, set[int]] = {}
    for row in run.rows("rollouts/tokens-*.jsonl"):
        steps_of.setdefault(row["group"], set()).add(row["step"])
    if twice := {group: steps for group, steps in steps_of.items() if len(steps) > 1}:
        raise RuntimeError(f"groups that were trained twice: {twice}")
    return len(steps_of)


def check_replayed(run: Run) -> int:
    """Return the number of steps replayed from the journal. Raises RuntimeError if there are none, or weights
    differ."""
    replays = re.findall(
        r"^steps? (\d+)(?: to (\d+))? replayed from the journal; (.*)$", run.log.read_text(), re.MULTILINE
    )
    steps = sum(int(last or first) - int(first) + 1 for first, last, _ in replays)
    if not any("bit for bit" in weights for *_, weights in replays) or any(
        "differ" in weights for *_, weights in replays
    ):
        raise RuntimeError(f"{steps} steps were replayed from the journal: {replays}")
    return steps


def main(s: Settings) -> None:
    rng = random.Random(s.seed)
    faults = rng.sample(FAULTS, len(FAULTS))
    make_model = [sys.executable, "tools/make_tiny_model.py"]  # does nothing if the model exists
    subprocess.run(make_model, cwd=ROOT, check=True, timeout=RUN_S)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        flags = ["--checkpoint.every-steps=2", "--journal.mib=16", f"--stall-s={s.stall_s}"]
        run = Run(scratch, *flags, stuck_s=s.stuck_s)
        try:
            rows = []
            run.until(run.steps, "the first step", RUN_S)
            for fault in faults:
                run.until_next_step()
                if fault.kind in RESTORED:
                    run.until_next_checkpoint()
                time.sleep(rng.uniform(0.0, s.pause_s))
                struck = strike(run, fault, rng.randrange(2))
                rows.append({"fault": str(fault)} | struck)
                noticed, back = struck["noticed_s"], struck["back_s"]
                print(f"{fault}: noticed after {noticed:.1f} s, back after {back:.1f} s", flush=True)
            run.finish()
            numbers = check(run) | {"groups_logged": check_rollouts(run), "made_again": check_replayed(run)}
        finally:
            run.end()
    print("\n| fault | what happened | noticed after s | back after s |\n|---|---|---|---|")
    for row in sorted(rows, key=lambda row: str(row["fault"])):
        print(f"| {row['fault']} | {row['happened']} | {row['noticed_s']:.1f} | {row['back_s']:.1f} |")
    print(json.dumps({"seed": s.seed} | numbers | {"faults": rows}))


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
