"""Checks what works on this machine's GPU. On a new machine it takes about half an hour.

    python tools/gpu_check.py                                 all parts
    python tools/gpu_check.py --parts trainer,weights         two parts that do not need SGLang
    python tools/gpu_check.py --parts trainer --device cpu    on a CPU, with tiny models

trainer    attention against a reference implementation, forward and backward; the LM head in TF32; updates, including a
           mixture of experts; float32 and bfloat16
weights    checksums and updates identical to a CPU's; memory shared between processes; a transfer during training; the
           cost of a commit of 18,867 tensors in the engine
members    a trainer rank and replicas, each on its own GPU (at least two): transfers during training; a replica killed
           during a transfer
engine     SGLang starts with the project's arguments, generates, and leaves enough memory free
commits    each token matches the version that it is labelled with, while versions change under load
parity     engine and trainer agree on log-probs, with and without the LM head in float32, and for a mixture of experts
           with the engine's routes replayed
train      the default recipe: trainer rank and replica share a GPU; with two GPUs, also with one each; and with LoRA
speed      tokens/s compared with SGLang alone; a trainer's step compared with torchtitan alone

All parts but the first three need SGLang; without it, speed measures only the trainer.
Models have random weights and are created on the fly. Each part runs in its own process, which is killed after
``--part-deadline-s``, or 1200 s later if it starts engines: the first start on a machine compiles for minutes. Output
of the parts goes to stderr. On stdout there is one line of JSON per part: verdict (passed, failed or skipped),
problems, measurements, device and versions. The exit code is 1 if a part failed.
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
"""Seconds for SGLang to compile its kernels and start: the engines' own deadline on a GPU."""


@dataclass(frozen=True)
class Settings:
    """Settings of the check (see the top of this file)."""

    parts: str = ",".join(PARTS)
    """Comma-separated names of the parts, in the order in which they run."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` uses the GPU if there is one."""
    part_deadline_s: float = 300.0
    """Seconds after which a part is killed and counts as failed. Parts with engines have 1200 s more, because each may
    be the first to start an engine on this machine."""
    output: Path | None = None
    """File to which the lines of JSON are appended as well."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.names if name not in PARTS]:
            raise ValueError(f"unknown part: parts contains {', '.join(unknown)}, but the parts are {', '.join(PARTS)}")
        if self.part_deadline_s <= 0:
            raise ValueError(f"part-deadline-s must be positive, got {self.part_deadline_s}")

    def deadline_s(self, name: str) -> float:
        """Deadline of a part in seconds."""
        return self.part_deadline_s + (0 if name in WITHOUT_ENGINES else FIRST_START_S)

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.parts.split(",") if name.strip()]


def run_part(name: str, device: str, deadline_s: float) -> dict[str, Any]:
    """Run one part in its own process; returns its results and duration."""
    started = time.monotonic()
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    # As for a host's processes: for the tools (ninja) of a virtual environment that is not activated.
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
            stdout=2,  # stderr: stdout is only for the lines of JSON
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
        found["problems"].append(f"the part was killed after {deadline_s:g} s (--part-deadline-s)")
    elif code:
        found["verdict"] = "failed"
        found["problems"].append(f"the part's process ended with exit code {code}")
    return {"part": name, "verdict": found.pop("verdict"), "seconds": round(time.monotonic() - started, 1), **found}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the remaining processes of a part."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(30)


def main(s: Settings) -> int:
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
