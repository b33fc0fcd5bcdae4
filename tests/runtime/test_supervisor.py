"""Programs that end as recipes do: which are started again, how often, and what becomes of signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from monarch_rl.runtime import supervisor
run, how, attempts = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[1]) / "attempts"
supervisor.follow_supervisor()
run.mkdir(exist_ok=True)
with attempts.open("a") as file:
    print(os.environ.get(supervisor.RESUMES), file=file)
count = len(attempts.read_text().splitlines())
supervisor.note(run, goes_on=True, cause="")
if how != "early":
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / "latest").unlink(missing_ok=True)
    (run / "checkpoints" / "latest").symlink_to(f"step-{count if how == 'advances' else 1}")
if how == "waits":
    (run / "waits").touch()
    time.sleep(100)
if how == "mistake":
    supervisor.note(run, goes_on=False, cause="a mistake")
    sys.exit(1)
if how == "fails":
    supervisor.note(run, goes_on=True, cause=f"loss {count}")
    sys.exit(1)
if how == "killed" and count < 3 or how == "advances" and count < 6 or how == "early":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def supervised(run: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "monarch_rl.runtime.supervisor", "--restarts", "2", "-c", PROGRAM]
    return subprocess.Popen([*command, str(run), how], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize(
    ("how", "code", "attempts", "said"),
    [
        ("killed", 0, 3, "the controller ended by SIGKILL"),
        ("advances", 0, 6, "restart 1 of 2"),
        ("fails", 1, 3, "What ended the run first: loss 1"),
        ("mistake", 1, 1, ""),
        ("early", 137, 1, "not started again"),
        ("ends", 0, 1, ""),
    ],
)
def test_a_run_goes_on_as_often_as_it_may(tmp_path: Path, how: str, code: int, attempts: int, said: str) -> None:
    """More often if there was a newer checkpoint each time; not before the first, nor after a mistake."""
    run = tmp_path / "run"
    program = supervised(run, how)
    output, _ = program.communicate(timeout=100)
    started = (run / "attempts").read_text().splitlines()
    assert (program.returncode, len(started)) == (code, attempts), output
    assert said in output and started == ["None", *[str(run)] * (attempts - 1)]


def waiting(run: Path, before: str) -> subprocess.Popen[str]:
    """A supervised program that waits; ``before`` is done in the supervisor first."""
    code = f"import signal, sys\n{before}\nfrom monarch_rl.runtime import supervisor\nsupervisor.main()"
    command = [sys.executable, "-c", code, "-c", PROGRAM, str(run), "waits"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 100
    while not (run / "waits").exists():
        assert program.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return program


@pytest.mark.parametrize(("handler", "code"), [("SIG_IGN", 143), ("SIG_DFL", 129)])
def test_a_terminal_that_closes_ends_no_run_under_nohup(tmp_path: Path, handler: str, code: int) -> None:
    """The program's own handling is that of a recipe; where SIGHUP ends it, it says so."""
    program = waiting(tmp_path / "run", f"signal.signal(signal.SIGHUP, signal.{handler})")
    program.send_signal(signal.SIGHUP)
    if handler == "SIG_IGN":
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(1)
        program.send_signal(signal.SIGTERM)
    program.communicate(timeout=100)
    assert program.returncode == code


@pytest.mark.parametrize(("handler", "said"), [("SIG_IGN", "went on"), ("SIG_DFL", "129")])
def test_a_recipe_saves_at_sighup_unless_it_is_ignored(handler: str, said: str) -> None:
    code = f"""
import os, signal
signal.signal(signal.SIGHUP, signal.{handler})
from monarch_rl.runtime.signals import interrupts
try:
    with interrupts():
        os.kill(os.getpid(), signal.SIGHUP)
        print("went on")
except SystemExit as end:
    print(end.code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == said, done.stderr


def test_a_signal_is_passed_on_and_is_the_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    program = supervised(run, "waits")
    deadline = time.monotonic() + 100
    while not (run / "waits").exists():
        assert program.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    program.send_signal(signal.SIGTERM)
    program.communicate(timeout=100)
    assert program.returncode == 143 and len((run / "attempts").read_text().splitlines()) == 1
