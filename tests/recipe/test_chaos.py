"""Every kind of process is killed, stopped, ended and made to fail in a run, one after the other."""

from __future__ import annotations

import json
import sys

import pytest

from tests import patience
from tests.recipe.running import ROOT

RUN_S = 3000.0
"""By the clock of ``tests/patience.py``: some 350 CPU-seconds."""


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.timeout(2 * RUN_S)
def test_a_run_survives_every_fault() -> None:
    """The driver raises if the bound, the account of groups, steps that are made again, a return or what is left is not
    as it should be: see benchmarks/chaos.py."""
    script = ROOT / "benchmarks" / "chaos.py"
    command = [sys.executable, str(script), "--stall-s=8", "--stuck-s=4"]
    done = patience.run(command, seconds=RUN_S, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["steps"] >= 30 and len(figures["faults"]) == 19
    assert figures["losses"] == 15, "a scoring process is its worker's to replace, and nothing else may be lost"
    stayed = [fault["stayed"] for fault in figures["faults"] if "the others stayed" in fault["happened"]]
    assert len(stayed) == 6, "engines and workers stay where a trainer rank or the buffer is lost"
    assert min(stayed) >= 6, "the processes of two generators, two engines and two workers"
    assert figures["largest_lag"] <= 2
    assert figures["groups_logged"] >= figures["steps"] and figures["made_again"] >= 1
