"""Does a run go on when every kind of replaceable process is killed, stopped, ended and made to fail?

    python benchmarks/chaos.py
    python benchmarks/chaos.py --seed 3 --steps 200

A real run of recipes/grpo.py on the tiny model, with two replicas and two rollout workers. One fault after the other is
injected; order, victims and pauses follow from the seed. Then the run goes on to its end. Checked: it ends well, the
lag bound holds at every step, every batch is full, every admitted group is accounted for, every lost process came back,
and no process is left. Prints a table (docs/failures.md) and, last, the figures as one line of JSON.
"""

from __future__ import annotations

import json
import os
import random
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
from processes import name_of
from reporting import run_benchmark

ROOT = Path(__file__).parents[1]
RECIPE = Path(__file__).with_name("chaos_recipe.py")
RUN_S = 1200.0
"""Seconds for the whole run."""
FAULT_S = 180.0
"""Seconds from a fault until the process is back, on cores that are shared."""
GONE_S = 15.0
"""Seconds after the end of the run by which its last process has ended."""


@dataclass(frozen=True)
class Settings:
    """Faults during a run (see the top of this file)."""

    seed: int = 0
    """Seed of order, victims and pauses."""
    steps: int = 300
    """Steps of the run: enough to last until all faults have happened."""
    pause_s: float = 2.0
    """Longest pause between a return and the next fault."""


@dataclass(frozen=True)
class Fault:
    """A fault of a process."""

    kind: str
    """Kind of the process."""
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


OWNERS = {"generator": "generator actor", "engine": "generator actor", "scorer": "rollout worker"}
"""The actor to which a process of a kind belongs, as ``processes.name_of`` calls it."""
SIGNALLED = ("generator", "engine", "rollout worker", "scorer")
FAULTS = [Fault(kind, what) for kind in SIGNALLED for what in ("SIGKILL", "SIGSTOP")]
FAULTS += [Fault("rollout worker", what) for what in ("exception", "os._exit")]


class Run:
    """The run, seen from outside: its processes, and what it writes."""

    def __init__(self, s: Settings, scratch: Path) -> None:
        self._scratch, self._mark = scratch, uuid.uuid4().hex
        self.log = scratch / "log"
        sizes = ["--groups-per-step=8", "--held-out=16", "--rollout.workers=2", "--rollout.concurrent-groups=16"]
        flags = [f"--steps={s.steps}", f"--output={scratch}/runs", "--recovery.restarts=10", *sizes]
        # SGLang's processes change their title, which by default destroys the environment that they are found by.
        environment = {**os.environ, "MONARCH_RL_CHAOS": self._mark, "SPT_NOENV": "1", "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(RECIPE), str(scratch), *flags],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """All processes of the run that are running now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("MONARCH_RL_CHAOS") == self._mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def victim(self, kind: str, index: int) -> psutil.Process:
        """The process of this kind and index; among a worker's scoring processes, the first."""
        processes = self.processes()
        owner = f"{OWNERS.get(kind, kind)} {index}"
        (actor,) = [process for process in processes if _name(process) == owner]
        if kind not in ("engine", "scorer"):
            return actor
        group = os.getpgid(actor.pid)  # what an actor starts is in its process group
        return next(p for p in processes if _name(p) == kind and os.getpgid(p.pid) == group)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file of the run's folder."""
        texts = [path.read_text() for path in self._scratch.glob(f"runs/*/{name}")]
        return [json.loads(line) for text in texts for line in text.splitlines()]

    def said(self) -> str:
        """The end of what the run has printed."""
        return "\n".join(self.log.read_text().splitlines()[-100:])

    def steps(self) -> list[dict[str, Any]]:
        return [row for row in self.rows("metrics.jsonl") if "time/step_s" in row]

    def until(self, condition: Callable[[], Any], what: str, seconds: float = FAULT_S) -> Any:
        """Wait until ``condition`` returns something, and return it. Raises if the run ends or the time is over."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended before {what}:\n{self.said()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {seconds:g} s\n{self.said()}")
            time.sleep(0.1)
        return found

    def until_next_step(self) -> None:
        shown = len(self.steps())
        self.until(lambda: len(self.steps()) > shown, "another step")

    def end(self) -> None:
        """Kill all processes that are left."""
        for process in self.processes():
            process.kill()


def _name(process: psutil.Process) -> str:
    try:
        return name_of(process.name(), process.cmdline(), process.environ())
    except psutil.NoSuchProcess:
        return ""


def strike(run: Run, fault: Fault, index: int, scratch: Path) -> dict[str, Any]:
    """Inject ``fault``; return after how many seconds it was noticed, and after how many the process was back."""
    victim = run.until(lambda: _found(lambda: run.victim(fault.kind, index)), f"a {fault.kind}")
    struck = time.time()
    if fault.what.startswith("SIG"):
        victim.send_signal(signal.Signals[fault.what])
    else:
        (scratch / f"{fault.what}-{index}").touch()
    if fault.kind == "scorer":
        run.until(lambda: _found(lambda: run.victim("scorer", index).pid != victim.pid), "another scorer")
        seconds = time.time() - struck
        return {"noticed_s": seconds, "back_s": seconds, "happened": "another scoring process"}
    name = f"{'rollout worker' if fault.kind == 'rollout worker' else 'generator'} {index}"

    def told(key: str) -> Any:
        found = [row["time"] for row in run.rows("losses.jsonl") if row["who"] == name and key in row]
        return next((when for when in found if when > struck), None)

    noticed = run.until(lambda: told("cause"), f"{name} to be missed")
    back = run.until(lambda: told("back_after_s"), f"{name} to be back")
    happened = "another replica, verified" if "generator" in name else "another worker; its groups started again"
    return {"noticed_s": noticed - struck, "back_s": back - struck, "happened": happened}


def _found(look: Callable[[], Any]) -> Any:
    """The result of the search, or None while there is none."""
    try:
        return look()
    except (StopIteration, ValueError, psutil.NoSuchProcess):
        return None


def check(run: Run, s: Settings) -> dict[str, float]:
    """Return the figures of the run. Raises if it did not end as it should."""
    if run.process.wait(RUN_S) != 0:
        raise RuntimeError(f"exit code {run.process.returncode}:\n{run.said()}")
    deadline = time.monotonic() + GONE_S
    while left := run.processes():
        if time.monotonic() > deadline:
            raise RuntimeError(f"left behind: {left}")
        time.sleep(0.1)
    steps = run.steps()
    wrong = [row for row in steps if row["lag/max"] > 2 or row["buffer/trained"] != 8 * row["step"]]
    for row in steps:
        dropped = sum(count for name, count in row.items() if name.startswith("dropped/") and "episode" not in name)
        if row["buffer/admitted"] != row["buffer/trained"] + row["buffer/playing"] + row["buffer/complete"] + dropped:
            wrong.append(row)
    if wrong or [row["step"] for row in steps] != list(range(1, s.steps + 1)):
        raise RuntimeError(f"{len(steps)} steps, of which wrong: {wrong}")
    last = steps[-1]
    if last["recovery/lost"] != last["recovery/returned"]:
        raise RuntimeError(f"{last['recovery/lost']} losses, {last['recovery/returned']} returns")
    return {"steps": len(steps), "largest_lag": max(row["lag/max"] for row in steps), "losses": last["recovery/lost"]}


def main(s: Settings) -> None:
    rng = random.Random(s.seed)
    faults = rng.sample(FAULTS, len(FAULTS))
    make_model = [sys.executable, "tools/make_tiny_model.py"]  # if it is not there
    subprocess.run(make_model, cwd=ROOT, check=True, timeout=RUN_S)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        run = Run(s, scratch)
        try:
            rows = []
            run.until(run.steps, "the first step", RUN_S)
            for fault in faults:
                run.until_next_step()
                time.sleep(rng.uniform(0.0, s.pause_s))
                (scratch / "slow").touch()  # a fast machine makes many steps until a stopped process is missed
                struck = strike(run, fault, rng.randrange(2), scratch)
                (scratch / "slow").unlink()
                rows.append({"fault": str(fault)} | struck)
                noticed, back = struck["noticed_s"], struck["back_s"]
                print(f"{fault}: noticed after {noticed:.1f} s, back after {back:.1f} s", flush=True)
            figures = check(run, s)
        finally:
            run.end()
    print("\n| fault | what happened | noticed after s | back after s |\n|---|---|---|---|")
    for row in sorted(rows, key=lambda row: str(row["fault"])):
        print(f"| {row['fault']} | {row['happened']} | {row['noticed_s']:.1f} | {row['back_s']:.1f} |")
    print(json.dumps({"seed": s.seed} | figures | {"faults": rows}))


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
