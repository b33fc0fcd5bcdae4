"""No process is left behind: Ctrl-C, a crash, and a crash while the engine starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.generator.helpers import RUN_S, gone
from tests.patience import exit_code, wait_until

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("spawned")]


@contextmanager
def holding(folder: Path) -> Iterator[subprocess.Popen[str]]:
    program = Path(__file__).with_name("hold_engine.py")
    process = subprocess.Popen([sys.executable, str(program), str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        exit_code(process)


def family(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def test_ctrl_c_ends_every_process(models: dict[str, Path]) -> None:
    with holding(models["qwen3"]) as process:
        assert process.stdout is not None
        first = process.stdout.readline().split()
        assert first[0] == "ready"
        below = family(process.pid)
        assert {int(pid) for pid in first[1:]} <= set(below)
        os.kill(process.pid, signal.SIGINT)
        exit_code(process)
        wait_until(lambda: all(map(gone, below)), f"the end of {below}")


def test_a_crash_while_the_engine_starts_ends_every_process(models: dict[str, Path]) -> None:
    """SGLang itself ties its processes to this one only after its imports."""
    with holding(models["qwen3"]) as process:
        # The resource tracker and the scheduler, both from multiprocessing.
        wait_until(lambda: any("spawn_main" in _command(p) for p in family(process.pid)), "a scheduler", RUN_S)
        below = family(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        exit_code(process)
        wait_until(lambda: all(map(gone, below)), f"the end of {below}")


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return ""
