"""The share of time in which trainer and generators wait, in a short run of the recipe itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[1] / "recipes" / "grpo.py"
DEADLINE_S = 900.0
STOP_DEADLINE_S = 40.0
HELD_OUT = 16


def measure(model: Path, steps: int, skip: int, extra: list[str]) -> dict[str, Any]:
    """Run ``recipes/grpo.py`` for ``steps`` steps; shares are means over time of all but the first ``skip``.

    The trainer is idle while it waits for a batch, the generators while no request is in an engine or a swap is in
    progress. On a CPU, a busy side may wait for a core; this does not count as idle.

    Args:
        extra: further arguments of the recipe.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, str(RECIPE), "--model", str(model), "--steps", str(steps)]
        command += ["--held-out", str(HELD_OUT), "--output", scratch, *extra]
        log = Path(scratch) / "log"
        _run(command, log)
        (path,) = Path(scratch).glob("*/metrics.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    counted = [line for line in lines if line["step"] > skip and "time/step_s" in line]
    total = sum(line["time/step_s"] for line in counted)

    def mean(name: str) -> float:
        return float(sum(line[name] * line["time/step_s"] for line in counted) / total)

    return {
        "recipe_trainer_idle_share": mean("trainer/idle_share"),
        "recipe_generator_idle_share": mean("generator/idle_share"),
        "recipe_step_s": total / len(counted),
        "recipe_tokens_per_s": mean("tokens_per_second"),
        "recipe_swap_paused_ms": mean("weights/swap_ms"),
        "recipe_lag_mean": mean("lag/mean"),
        "recipe_steps_counted": len(counted),
    }


def _run(command: list[str], log: Path) -> None:
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ))
        try:
            code = process.wait(DEADLINE_S)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # the run ends its own processes
                try:
                    process.wait(STOP_DEADLINE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
    if code:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        raise RuntimeError(f"the recipe failed with exit code {code}: {' '.join(command)}\n{tail}")
