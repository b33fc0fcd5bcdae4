"""Programs that end as recipes do: which are restarted, how often, and how signals are handled."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.patience import exit_code, output_of, wait_until
from tests.patience import run as run_program

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
if how == "comes up late" and count == 2 or how == "never comes up again" and count >= 2:
    os.kill(os.getpid(), signal.SIGKILL)  # before it has reported its run folder
supervisor.note(run, goes_on=True, cause="")
if how == "twice":
    supervisor.note(run, restarts=1)
if how != "early":
    (run / "checkpoints" / f"step-{count if how == 'advances' else 1}").mkdir(parents=True, exist_ok=True)
if how == "waits":
    (run / "waits").touch()
    time.sleep(600)
if how == "mistake":
    supervisor.note(run, goes_on=False, cause="a mistake")
    sys.exit(1)
if how in ("fails", "twice", "mistake later"):
    supervisor.note(run, goes_on=how != "mistake later" or count == 1, cause=f"loss {count}")
    sys.exit(1)
if how == "stopped" and count == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
if how == "saves":
    from monarch_rl.runtime import signals
    signals.SAME_S = float(sys.argv[3])
    with signals.interrupts() as interrupting:
        interrupting.grace_s = 600
        try:
            (run / "waits").touch()
            time.sleep(600)
        finally:
            (run / "saving").touch()
            while not (run / "signalled").exists():
                time.sleep(0.05)
            (run / "saved").touch()
if how in ("comes up late", "never comes up again") and count == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if how == "killed" and count < 3 or how == "advances" and count < 6 or how == "early":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def supervised(run: Path, how: str, *more: str, flags: Sequence[str] = ("--restarts", "2")) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "monarch_rl.runtime.supervisor", *flags, "-c", PROGRAM, str(run), how, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(file: Path, program: subprocess.Popen[str]) -> None:
    def there() -> bool:
        ended = program.poll() is not None
        assert file.exists() or not ended, "it ended early"
        return file.exists()

    wait_until(there, str(file))


@pytest.mark.parametrize(
    ("how", "code", "attempts", "message"),
    [
        ("killed", 0, 3, "SIGKILL"),
        ("advances", 0, 6, "1 of 2"),
        ("fails", 1, 3, "loss 1"),
        ("mistake", 1, 1, ""),
        ("mistake later", 1, 2, "loss 1"),
        ("early", 137, 1, ""),
        ("comes up late", 0, 3, "2 of 2"),
        ("never comes up again", 137, 3, "SIGKILL"),
        ("ends", 0, 1, ""),
    ],
)
def test_a_run_is_restarted_as_often_as_allowed(
    tmp_path: Path, how: str, code: int, attempts: int, message: str
) -> None:
    """More often with a newer checkpoint each time; not before the first one, nor after an error of the recipe. A
    restart that fails early counts, and the message names the first loss."""
    run = tmp_path / "run"
    program = supervised(run, how)
    output, _ = output_of(program)
    started = (run / "attempts").read_text().splitlines()
    assert (program.returncode, len(started)) == (code, attempts), output
    assert message in output and started == ["None", *[str(run)] * (attempts - 1)]


@pytest.mark.parametrize("who", ["the supervisor", "its recipe"])
def test_a_closed_terminal_does_not_end_a_supervised_run(tmp_path: Path, who: str) -> None:
    """A SIGHUP that is not ignored would be the first signal, and the exit code."""
    run = tmp_path / "run"
    program = supervised(run, "waits")
    wait_for(run / "waits", program)
    (recipe,) = psutil.Process(program.pid).children()
    (program if who == "the supervisor" else recipe).send_signal(signal.SIGHUP)
    program.send_signal(signal.SIGTERM)
    output_of(program)
    assert program.returncode == 143


@pytest.mark.parametrize(("handler", "says"), [("SIG_IGN", False), ("SIG_DFL", True)])
def test_a_closed_terminal_does_not_end_a_recipe_which_reports_it_unless_it_is_ignored(
    handler: str, says: bool
) -> None:
    code = f"""
import os, signal
signal.signal(signal.SIGHUP, signal.{handler})
from monarch_rl.runtime.signals import interrupts
with interrupts():
    os.kill(os.getpid(), signal.SIGHUP)
    print("continued")
"""
    done = run_program([sys.executable, "-c", code])
    assert done.stdout.strip() == "continued", done.stderr
    assert ("SIGHUP" in done.stderr) == says


def test_a_supervisor_without_a_console_restarts_its_recipe(tmp_path: Path) -> None:
    """What reads its output has ended, so every line that it prints is an error."""
    run = tmp_path / "run"
    program = supervised(run, "killed")
    assert program.stdout is not None
    program.stdout.close()
    assert exit_code(program, lambda: "the supervisor's end", 600) == 0
    assert len((run / "attempts").read_text().splitlines()) == 3


def test_a_signal_is_passed_on_and_ends_the_supervisor(tmp_path: Path) -> None:
    run = tmp_path / "run"
    program = supervised(run, "waits")
    wait_for(run / "waits", program)
    program.send_signal(signal.SIGTERM)
    output_of(program)
    assert program.returncode == 143 and len((run / "attempts").read_text().splitlines()) == 1


@pytest.mark.parametrize(("same_s", "saves"), [("600", True), ("0", False)])
def test_a_signal_to_all_processes_of_a_job_counts_once(tmp_path: Path, same_s: str, saves: bool) -> None:
    """The recipe gets the signal directly and from its supervisor, and saves; a later one ends it at once."""
    run = tmp_path / "run"
    program = supervised(run, "saves", same_s)
    wait_for(run / "waits", program)
    (recipe,) = psutil.Process(program.pid).children()
    recipe.send_signal(signal.SIGTERM)
    wait_for(run / "saving", program)
    program.send_signal(signal.SIGTERM)
    if saves:
        recipe.send_signal(signal.SIGTERM)
        (run / "signalled").touch()
    output, _ = output_of(program)
    assert program.returncode == 143, output
    assert (run / "saved").exists() == saves


@pytest.mark.parametrize(("flags", "attempts"), [(("--restarts", "2"), 3), ((), 2)])
def test_the_recipe_sets_the_number_of_restarts_unless_a_flag_does(
    tmp_path: Path, flags: Sequence[str], attempts: int
) -> None:
    run = tmp_path / "run"
    output, _ = output_of(supervised(run, "twice", flags=flags))
    assert len((run / "attempts").read_text().splitlines()) == attempts, output
    assert f"1 of {attempts - 1}" in output


def test_a_controller_that_stays_stopped_is_killed_and_the_run_resumes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    program = supervised(run, "stopped", flags=("--stopped-s", "2"))
    output, _ = output_of(program)
    assert program.returncode == 0 and len((run / "attempts").read_text().splitlines()) == 2, output
    assert "--stopped-s" in output


@pytest.mark.parametrize("flags", [("--help",), ("-h",), ("--restarts", "2", "--help")])
def test_help_before_the_recipe_is_that_of_the_supervisor(flags: Sequence[str]) -> None:
    done = run_program([sys.executable, "-m", "monarch_rl.runtime.supervisor", *flags])
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m monarch_rl.runtime.supervisor [--restarts")
    assert "--stopped-s S" in done.stdout.partition("\n")[2]
