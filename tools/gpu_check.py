"""What works on this machine's GPU: the first half hour on a new one, as one command.

    python tools/gpu_check.py                                 all parts
    python tools/gpu_check.py --parts trainer,weights         those that need no SGLang
    python tools/gpu_check.py --parts trainer --device cpu    on a CPU, with tiny models

trainer    attention against a plain one, forward and backward; the LM head in TF32; updates, also of a mixture of
           experts; float32 and bfloat16
weights    checksums and updates like a CPU's; memory shared between processes; a transfer beside training; what a
           commit of 18,867 tensors does in the engine
members    a trainer rank and replicas, each with a GPU of its own (two at least): transfers beside training; a replica
           that is killed in a transfer
engine     SGLang starts with the project's arguments, draws, and leaves memory
commits    each token fits the version that it carries, while versions change under load
parity     engine and trainer agree on log-probs, with and without the LM head in float32, and for a mixture of experts
           with the engine's routes replayed
train      the main job, by the recipe: trainer rank and replica share a GPU; where there are two, also with one each;
           once more with LoRA
speed      tokens/s against SGLang alone; a trainer's step against torchtitan alone

All but the first three need SGLang; without it speed measures the trainer alone.
Models have random weights and are made on the spot. Each part runs in a process of its own, which is killed after
``--part-deadline-s``, and 1200 s more if it starts engines: the first start on a machine compiles, and takes minutes.
What a part prints goes to stderr. On stdout there is one line of JSON a part: verdict (passed, failed or skipped),
problems, figures, device and versions. The exit code is 1 if a part failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

ROOT = Path(__file__).parents[1]
WITHOUT_ENGINES = ("trainer", "weights", "members")
PARTS = (*WITHOUT_ENGINES, "engine", "commits", "parity", "train", "speed")
FIRST_START_S = 1200.0
"""Seconds for SGLang to compile its kernels and start: the engines' own limit on a GPU."""


@dataclass(frozen=True)
class Settings:
    """What works on this machine's GPU (see the top of this file)."""

    parts: str = ",".join(PARTS)
    """Names with commas between them, in the order in which they are to run."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` is the GPU if there is one."""
    part_deadline_s: float = 300.0
    """Seconds after which a part is killed, and counts as failed; one with engines has 1200 more to start them, because
    any may be the first one on this machine."""
    output: Path | None = None
    """A file to which the lines are added, too."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.names if name not in PARTS]:
            raise ValueError(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
        if self.part_deadline_s <= 0:
            raise ValueError(f"part-deadline-s must be positive, got {self.part_deadline_s}")

    def deadline_s(self, name: str) -> float:
        """Seconds that a part may take."""
        return self.part_deadline_s + (0 if name in WITHOUT_ENGINES else FIRST_START_S)

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.parts.split(",") if name.strip()]


def run_part(name: str, device: str, deadline_s: float) -> dict[str, Any]:
    """Run one part in a process of its own; what it found, and how long it took."""
    started = time.monotonic()
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    # As for a host's processes: the tools of a virtual environment that is not activated (ninja) are found.
    tools = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), os.environ.get("PATH")]))
    environment = os.environ | {"PYTHONPATH": path, "PATH": tools}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix=f"gpu_check_{name}_") as scratch:
        result = Path(scratch) / "result.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "tools.gpu_parts.child", name, device, scratch, str(result)],
            cwd=ROOT,
            env=environment | {"TMPDIR": scratch},  # engines leave files there
            stdout=2,  # stderr: stdout has nothing but the lines of JSON
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
        found: dict[str, Any] = {"verdict": "failed", "problems": []}
        if result.is_file():
            found = json.loads(result.read_text())
    if code is None:
        found["verdict"] = "failed"
        found["problems"].append(f"it was killed after {deadline_s:g} s")
    elif code:
        found["verdict"] = "failed"
        found["problems"].append(f"its process ended with {code}")
    return {"part": name, "verdict": found.pop("verdict"), "seconds": round(time.monotonic() - started, 1), **found}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the part's processes."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(30)


def main(s: Settings) -> int:
    """The exit code."""
    failed = False
    for name in s.names:
        found = run_part(name, s.device, s.deadline_s(name))
        line = json.dumps(found)
        print(line, flush=True)
        if s.output is not None:
            with s.output.open("a") as file:
                file.write(line + "\n")
        failed = failed or found["verdict"] == "failed"
    return int(failed)


if __name__ == "__main__":
    try:
        settings = tyro.cli(Settings, description=__doc__)
    except ValueError as error:
        sys.exit(f"error: {error}")
    sys.exit(main(settings))
