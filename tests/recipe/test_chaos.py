"""Every kind of process is killed, stopped, terminated and made to fail in a run, one after the other."""

from __future__ import annotations

import json
import sys

import pytest

from tests import patience
from tests.recipe.running import ROOT

RUN_S = 3000.0
"""Deadline by the clock of ``tests/patience.py``; the run takes about 350 CPU-seconds."""


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.timeout(2 * RUN_S)
def test_a_run_survives_every_fault() -> None:
    """The driver checks the lag bound, the account of groups, replayed steps, recoveries and leftovers:
    see benchmarks/chaos.py."""
    script = ROOT / "benchmarks" / "chaos.py"
    command = [sys.executable, str(script), "--stall-s=8", "--stuck-s=4"]
    done = patience.run(command, seconds=RUN_S, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["steps"] >= 30 and len(result["faults"]) == 19
    assert result["losses"] == 15, "workers replace their scoring processes, and nothing else may be lost"
    survivors = [fault["stayed"] for fault in result["faults"] if "the others stayed" in fault["happened"]]
    assert len(survivors) == 6, "engines and workers survive the loss of a trainer rank or the buffer"
    assert min(survivors) >= 6, "the processes of two generators, two engines and two workers"
    assert result["largest_lag"] <= 2
    assert result["groups_logged"] >= result["steps"] and result["made_again"] >= 1
