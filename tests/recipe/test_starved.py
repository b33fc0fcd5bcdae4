"""A run that is stopped as a whole, or gets almost no CPU time, continues; one that loses its host ends at once.

All tests share a run under torchrun on one machine; the last one ends it.

By hand, 100 steps with more hogs:

    STARVED_STEPS=100 STARVED_HOGS=4 python -m pytest tests/recipe/test_starved.py
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from monarch_rl.runtime.starvation import look
from tests import patience
from tests.recipe.running import (
    POLL_S,
    RUN_S,
    keep_environment,
    process_named,
    random_model,
    recipe,
    steps_logged,
    wait_for_line,
)
from tests.runtime.hogs import hogs
from tests.runtime.launched import TORCHRUN, Launched, launching

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

STEPS = int(os.environ.get("STARVED_STEPS", "2"))
"""Steps that the run makes while hogs take the cores."""
HOGS = int(os.environ.get("STARVED_HOGS", "2"))
"""Busy processes per core, with the test's own priority."""
SESSION_NICE = 12
"""Nice value of each of the two sessions of the run, which leaves it 7 % of a core beside one session at nice 0; the
run's monitors alone take 3 %. With ``sched_autogroup_enabled`` the kernel first divides cores among sessions, and a
process's nice value counts only within its session: at nice 19 the run would still get a fair share beside hogs of
another session. Therefore its sessions get a nice value, too."""
STALL_S = 5.0
"""A third of the default, so that stopping the run for a third of a minute suffices."""
STOPPED_S = 4 * STALL_S
STARVED_STEP_S = 600.0
"""Deadline of a step by the clock of ``tests/patience.py``. A step takes a CPU-second, which is about 60 s for a run at
nice 19, which gets 1.4 % of two cores beside two hogs on each."""


def latest_step(run: Launched) -> int:
    return int(re.findall(r"^step (\d+)/", run.output(), re.MULTILINE)[-1])


def wait_for_steps(run: Launched, more: int) -> None:
    """Wait until the run has printed ``more`` steps, with a deadline for a machine without free cores."""
    step = latest_step(run) + more

    def printed() -> bool:
        assert run.process.poll() is None, f"ended with {run.process.poll()}\n{run.output()}"
        return latest_step(run) >= step

    patience.wait_until(printed, lambda: f"step {step}\n{run.output()}", more * STARVED_STEP_S, POLL_S)


def pids(run: Launched) -> list[int]:
    return [process.pid for process in run.processes()]


def signal_all(run: Launched, number: signal.Signals) -> None:
    for pid in pids(run):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def give_way(run: Launched) -> None:
    """Set every thread of a run to nice 19, and its sessions to ``SESSION_NICE`` if the kernel has autogroups."""
    for pid in pids(run):
        with suppress(OSError):
            Path(f"/proc/{pid}/autogroup").write_text(str(SESSION_NICE))
        with suppress(FileNotFoundError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, int(task.name), 19)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[Launched]:
    """A run without replacements. Of all its deadlines, a slow machine would miss those of the watch first."""
    model = random_model(folder / "tiny")
    settings = ["--steps=50000", f"--stall-s={STALL_S}", "--recovery.restarts=0", "--generator.replicas=1"]
    settings += ["--weights.transport=collective", "--groups-per-step=2"]
    with pytest.MonkeyPatch.context() as patch, launching(folder) as start:
        keep_environment(patch)
        run = start([*TORCHRUN, "--nproc-per-node=4", *recipe(model, folder / "runs", *settings)])
        wait_for_line(run, r"^step 1/")
        yield run


def host_of(run: Launched) -> psutil.Process:
    """Return the host process of the only machine."""
    (host,) = [process for process, command in run.processes().items() if "-m monarch_rl.runtime.host " in command]
    return host


def check_undisturbed(run: Launched, folder: Path, steps: int) -> None:
    """Check that the run makes these steps, and that neither the watch nor another process reports a fault."""
    wait_for_steps(run, steps)
    output = run.output()
    assert not list(folder.glob("runs/*/stall-*.txt")), output
    assert not re.search(r"warm restart failed|the run cannot continue|is not restarted|mesh \S+ failed", output), (
        output
    )
    assert steps_logged(folder / "runs")[-1].get("recovery/lost", 0) == 0


def test_on_one_machine_everything_listens_on_loopback(run: Launched) -> None:
    """Except for torchrun, whose store is not part of this project."""
    open_to_all = []
    for process, command in run.processes().items():
        try:
            connections = process.net_connections("inet")
        except psutil.NoSuchProcess:
            continue
        for connection in connections:
            loopback = ip_address(connection.laddr.ip).is_loopback
            if connection.status == psutil.CONN_LISTEN and not loopback and process.pid != run.process.pid:
                open_to_all.append((process.pid, command, connection.laddr))
    assert not open_to_all


def test_processes_are_forked_with_their_imports_done(run: Launched) -> None:
    """Otherwise each start would take ten more CPU-seconds. A process waits even for imports that take long."""
    stages = {"buffer-0": "torch", "trainer-0": "trainer", "generator0-0": "engine", "rollout0-0": "rollout"}
    stages["sglang::scheduler"] = "engine"
    parents = {name: process_named(run, name).parent() for name in stages}
    titles = {name: " ".join(parent.cmdline()) if parent else "" for name, parent in parents.items()}
    assert {name: title.rpartition("fork server, ")[2].strip() for name, title in titles.items()} == stages


def test_no_process_has_a_named_file_of_sglang_in_shared_memory(run: Launched) -> None:
    """A killed process would leave it behind, and every engine ends by a kill."""
    mapped: dict[int, str] = {}
    for pid in pids(run):
        with suppress(OSError):  # it has ended meanwhile
            mapped[pid] = Path(f"/proc/{pid}/maps").read_text()
    assert any(process_named(run, "sglang::scheduler").pid == pid for pid in mapped)
    names = [re.findall(r"/dev/shm/(sgl\S+)( \(deleted\))?$", text, re.MULTILINE) for text in mapped.values()]
    assert all(deleted for found in names for _, deleted in found), names


def test_a_run_continues_after_all_its_processes_were_stopped(run: Launched, folder: Path) -> None:
    signal_all(run, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    signal_all(run, signal.SIGCONT)
    check_undisturbed(run, folder, 5)


def test_a_run_continues_while_hogs_take_the_cores(run: Launched, folder: Path) -> None:
    give_way(run)
    with hogs(HOGS * (os.cpu_count() or 1)):
        before = look(pids(run))
        check_undisturbed(run, folder, STEPS)
        after = look(before.processes)
    # Times of ended threads and processes are lost.
    pairs = [(before.processes[pid], after.processes[pid]) for pid in before.processes]
    ran_s = sum(max(0.0, now.ran_s - then.ran_s) for then, now in pairs)
    queued_s = sum(max(0.0, now.queued_s - then.queued_s) for then, now in pairs)
    assert queued_s > ran_s, (
        f"the run was not starved: it ran for {ran_s:.1f} s and waited for a core for {queued_s:.1f} s"
    )


def test_a_lost_host_is_named_at_once(run: Launched) -> None:
    wait_for_steps(run, 1)
    host = host_of(run)
    host.kill()
    assert run.wait(RUN_S) == 1, run.output()  # at nice 19: how soon it ends otherwise is tested in test_launch.py
    named = rf"HostLost: the host process {host.pid} of this machine was killed by SIGKILL"
    assert re.search(named, run.output()), run.output()
    assert "interrupted:" not in run.output(), run.output()
    assert "Stalled" not in run.output(), run.output()
    run.assert_gone(RUN_S)
