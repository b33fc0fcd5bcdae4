"""Faults of episode code that would harm its worker: each is reported and bounded."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.rollout.run_tools import HUNG_THREADS
from tests import patience
from tests.rollout import faulty
from tests.rollout.test_play import line_of

pytestmark = [pytest.mark.slow, pytest.mark.core]  # one program runs all faults
ROOT = Path(__file__).parents[2]


@dataclass
class Faulty:
    """Results of workers in a process of their own, by fault, and the output of that process."""

    results: dict[str, dict[str, Any]]
    output: str
    errors: str


@pytest.fixture(scope="module")
def faults(model: str) -> Faulty:
    done = patience.run(
        [sys.executable, "-m", "tests.rollout.faulty", model],
        seconds=300,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *output, line = done.stdout.strip().splitlines()
    return Faulty(json.loads(line), "\n".join(output), done.stderr)


def test_a_forked_copy_of_the_worker_ends_when_it_leaves_the_episode(faults: Faulty) -> None:
    result, errors = faults.results["forks"], faults.errors
    assert (result["submitted"], result["failed"], result["ended"]) == (faulty.GROUPS, {}, "")
    place = f"{faulty.__file__}:{line_of(faulty.forks, 'os.fork')}"
    assert errors.count("os.fork()") == errors.count(f"called os.fork() at {place}") == 1


def test_output_of_episodes_is_bounded_and_truncation_is_reported(faults: Faulty) -> None:
    result, output = faults.results["prints"], faults.output
    assert (result["submitted"], result["failed"]) == (faulty.GROUPS, {})
    assert 2**15 < len(output) < 2**19
    assert "rollout worker 0 has printed more than 64 KiB" in output


def test_leaked_files_end_the_worker_before_it_runs_out_of_descriptors(faults: Faulty) -> None:
    result = faults.results["leaks"]
    assert 10 < result["submitted"] < faulty.GROUPS and not result["failed"]
    assert result["ended"].startswith("FilesLeaked: ") and " of 256 files" in result["ended"]
    assert f"most often {faulty.OPENED} (" in result["ended"]


def test_tools_that_never_return_end_the_worker_and_are_named(faults: Faulty) -> None:
    result = faults.results["calls_tools_that_hang"]
    assert HUNG_THREADS // faulty.SIZE - 2 <= result["submitted"] < faulty.GROUPS and not result["failed"]
    assert result["ended"].startswith("ToolsHang: ") and "search (" in result["ended"]


def test_an_episode_without_descriptors_is_reported_before_its_worker_ends(faults: Faulty) -> None:
    result = faults.results["leaks_at_once"]
    assert result["failed"] and set(result["failed"]) == {"episode raised OSError"}
    (failure,) = result["failures"]
    line = line_of(faulty.leaks_at_once, "LEFT_OPEN")
    assert failure["place"] == f"{faulty.__file__}:{line}" and "Too many open files" in failure["report"]
    assert result["ended"].startswith("FilesLeaked: ")


def test_episodes_cancelled_at_the_end_of_the_run_close_their_resources(faults: Faulty) -> None:
    result = faults.results["stays"]
    assert (result["submitted"], result["ended"]) == (faulty.GROUPS - 1, "")
    assert result["closed"] == faulty.SIZE


def test_an_episode_that_blocks_the_workers_loop_is_named_with_its_line(faults: Faulty) -> None:
    result = faults.results["blocks"]
    assert result["blocked_at"] == [[f"{faulty.__file__}:{line_of(faulty.blocks, 'seen.wait')}", 0]]
    assert (result["submitted"], result["failed"], result["ended"]) == (faulty.GROUPS, {}, "")


def test_code_that_blocks_the_workers_loop_is_ended_at_the_deadline_and_fails_only_its_episode(faults: Faulty) -> None:
    result = faults.results["never_ends"]
    assert (result["submitted"], result["ended"]) == (faulty.GROUPS - 2, ""), "a group of two has no other episode"
    assert result["failed"] == {f"the episode's own code took over {faulty.DEADLINE_S:g} s": 2}
    first, second = sorted(result["failures"], key=lambda failure: int(failure["place"].rpartition(":")[2]))
    assert first["place"].rpartition(":")[0] == second["place"].rpartition(":")[0] == faulty.__file__
    line = line_of(faulty.never_ends, "while True:  # without an exception")
    assert first["place"].rpartition(":")[2] in (str(line), str(line + 1))
    assert second["place"] != first["place"]
    assert all("in never_ends" in failure["report"] for failure in (first, second))
    assert all("asyncio.to_thread" in failure["report"] for failure in (first, second))
