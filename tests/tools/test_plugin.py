"""The pytest plugin of these tests: the CPU time it counts, the tests it marks, and the engines it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import patience
from tests.patience import wait_until
from tests.plugin import uses
from tests.process_tree import ProcessTree

ROOT = Path(__file__).parents[2]
SPIN = "import time\nwhile time.process_time() < 1: pass"
"""Uses a CPU-second, with the start of the interpreter."""
STARTED = "import subprocess, sys, time; started_s = time.process_time()"
"""Records the CPU-seconds of starting the interpreter, which a process needs in addition."""


@pytest.fixture
def tree() -> Iterator[ProcessTree]:
    tree = ProcessTree()
    tree.start()
    yield tree
    tree.stop()


def test_a_child_that_has_ended_is_counted(tree: ProcessTree) -> None:
    before, own = tree.cpu_s(), time.process_time()
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    assert 0.95 <= tree.cpu_s() - before - (time.process_time() - own) < 1.5, "twice would be 2"


def test_an_orphan_is_counted_also_when_it_has_ended(tree: ProcessTree, tmp_path: Path) -> None:
    """A grandchild outlives its parent, so that this process does not wait for it."""
    seen = tmp_path / "seen"
    orphan = f"{STARTED}\n{SPIN}\nimport os, pathlib\nprint(os.getpid(), started_s, flush=True)\n"
    orphan += f"while not pathlib.Path({str(seen)!r}).exists(): time.sleep(0.1)"
    parent = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {orphan!r}])\nsys.stdin.read()"
    before, own = tree.cpu_s(), time.process_time()
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        pid, started_s = process.stdout.readline().split()
        tree.cpu_s()  # from now on the tree contains the orphan
        process.stdin.close()
        process.wait()
        for _ in range(2):
            assert 0.95 <= tree.cpu_s() - before - (time.process_time() - own) < 1.5 + 2 * float(started_s)
            seen.touch()
            wait_until(lambda: not psutil.pid_exists(int(pid)), "the orphan's end")


CHAIN = f"""
{STARTED}
if int(sys.argv[2]) > 0:
    subprocess.run([sys.executable, "-S", "-c", sys.argv[1], sys.argv[1], str(int(sys.argv[2]) - 1)])
else:
    {SPIN.replace(chr(10), chr(10) + "    ")}
    print(started_s, flush=True)
    sys.stdin.read()
"""
"""A process with a chain of others below it; the last one uses a CPU-second and ends with its standard input."""


@pytest.mark.parametrize("killed", [False, True])
def test_a_chain_of_processes_that_ends_between_two_looks_is_counted_once(killed: bool) -> None:
    """Root, stage and worker. If the root waits for them, their CPU time counts as waited for; if the root was killed,
    this process does not wait for the other two."""
    tree = ProcessTree()  # looks only when asked
    before, own = tree.cpu_s(), time.process_time()
    command = [sys.executable, "-S", "-c", CHAIN, CHAIN, "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as root:
        assert root.stdin is not None and root.stdout is not None
        started_s = float(root.stdout.readline())
        pids = [process.pid for process in psutil.Process(root.pid).children(recursive=True)]
        assert len(pids) == 2
        tree.cpu_s()
        if killed:
            root.kill()
            root.wait()
        tree.cpu_s()
        root.stdin.close()
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the end of the chain")
    assert 0.95 <= tree.cpu_s() - before - (time.process_time() - own) < 1.5 + 3 * started_s, "twice would be 1 more"


def this_host() -> None:
    """Has the name of a function of Monarch."""


class Starting:
    def __init__(self) -> None:
        this_host()


def starts() -> None:
    def later() -> None:
        from monarch.actor import this_host

        this_host()

    later()


def starts_by_others() -> Starting:
    return Starting()


class Shared:
    def get(self) -> None:
        this_host()


SHARED = Shared()


def uses_an_object() -> Shared:
    return SHARED


def turns_in_a_circle(again: bool) -> None:
    if again:
        turns_in_a_circle(False)


@pytest.mark.parametrize(
    ("code", "expected"),
    [(Starting, True), (starts, True), (starts_by_others, True), (uses_an_object, True), (turns_in_a_circle, False)],
)
def test_a_test_is_heavy_if_its_code_starts_a_mesh(code: object, expected: bool) -> None:
    assert uses(code, {}) is expected


LIKE_AN_ENGINE = """
import subprocess, time
import pytest

running = []

def start():
    process = subprocess.Popen(["bash", "-c", "exec -a sglang::scheduler sleep 600"])
    running.append(process)
    while not open(f"/proc/{process.pid}/cmdline").read().startswith("sglang"):
        time.sleep(0.01)

@pytest.fixture(autouse=True)
def ended():
    yield
    while running:
        running[-1].kill()
        running.pop().wait()

@pytest.fixture
def started(ended):
    start()

def test_that_starts_one(): start()
def test_whose_fixture_starts_one(started): pass
def test_that_starts_none(): subprocess.run(["true"], check=True)
def test_that_names_one():
    running.append(subprocess.Popen(["bash", "-c", "read # monarch_rl.runtime.host"], stdin=subprocess.PIPE))

@pytest.mark.heavy
def test_that_may(): start()
def test_after_it(): start()
"""


@pytest.mark.heavy  # it starts a process with the name of an engine
def test_a_quick_test_that_starts_an_engine_fails_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(LIKE_AN_ENGINE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = heavy: starts one\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.plugin", f"--plan={tmp_path}", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}

    def run(*more: str) -> str:
        return patience.run([*command, *more], cwd=tmp_path, env=environment).stdout

    quick = run("-m", "not heavy")
    assert "3 failed, 2 passed, 1 deselected" in quick, quick
    assert "has started an engine of SGLang, but is not marked as heavy" in quick
    assert "FAILED test_it.py::test_that_starts_one" in quick and "::test_whose_fixture_starts_one" in quick
    assert "2 failed, 4 passed" in run(), "after a heavy test, any test may have left the engine"
    assert len(json.loads((tmp_path / "costs-alone.json").read_text())) == 6
    tiers = json.loads((tmp_path / "tiers-alone.json").read_text())
    assert tiers["test_it.py::test_that_may"] == "rest" and list(tiers.values()).count("quick") == 5
