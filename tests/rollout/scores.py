"""Scores, most of which misbehave. It imports no other helpers, since each scoring process imports this module."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from monarch_rl.errors import SandboxFailed
from monarch_rl.rollout.scoring import TOGETHER_S
from monarch_rl.tasks.reasoning_gym import extract_answer
from monarch_rl.tasks.task import Outcome


def touchy_score(text: str) -> float:
    """0 raises, 1 hangs, 2 ends its process, 3 raises SystemExit; other digits are their own score."""
    match extract_answer(text):
        case "0":
            raise KeyError("no such answer")
        case "1":
            time.sleep(600)
        case "2":
            os._exit(9)
        case "3":
            raise SystemExit(1)
    return float(text)


def slow_score(text: str) -> float:
    """Takes longer than the scores of a group may take together."""
    time.sleep(2 * TOGETHER_S)
    return float(text)


def pops(row: dict[str, str]) -> float:
    """Changes its row."""
    return float(row.pop("answer"))


def leaves_quietly(text: str) -> float:
    """As code of an answer does that wants to skip its tests."""
    os._exit(0)


def needs_sandbox(text: str) -> float:
    raise SandboxFailed("no namespaces")


def is_killed(text: str) -> float:
    """As by the kernel, when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def crashes(text: str) -> float:
    """Crash as a C library may."""
    return float(ctypes.string_at(0)[0])


def hangs_in_c(text: str) -> float:
    """Hang where no Python signal handler runs: SIGTERM alone does not end it."""
    ctypes.CDLL(None).sleep(600)
    return 0.0


def prints(text: str) -> float:
    """Print through Python, through the file descriptor, and by a subprocess."""
    print(f"python prints {text}")
    os.write(2, b"the descriptor prints something\n")
    subprocess.run(["echo", "a program prints something"], check=True, timeout=600)
    return 1.0


def prints_much(size: int) -> float:
    for _ in range(size // 1000):
        print("x" * 999)
    return 1.0


def raises_much(size: int) -> float:
    raise ValueError("y" * size)


def waits_for(file: str) -> float:
    while not Path(file).exists():
        time.sleep(0.01)
    return 1.0


def hangs_once(folder: str) -> float:
    """The first time, leave the process id as the name of a file, and hang."""
    if not any(Path(folder).iterdir()):
        (Path(folder) / str(os.getpid())).touch()
        time.sleep(600)
    return 3.0


def forks(value: float) -> float:
    """Both copies return."""
    return value + (os.fork() == 0)


def recurses(depth: int) -> float:
    return recurses(depth + 1)


def in_many_parts(parts: int) -> dict[str, float]:
    return {f"part {number}": 1.0 for number in range(parts)}


def answer(value: float) -> float:
    return value


def in_parts() -> Outcome:
    """NumPy numbers, which JSON does not support."""
    reward: Any = np.float32(0.5)
    return Outcome(reward, {"format": reward / 2, "answer": True})


def own_process_id() -> float:
    return float(os.getpid())


def heavy_modules() -> float:
    """Number of heavy libraries that a scoring process has loaded."""
    import sys

    return float(sum(name in sys.modules for name in ("torch", "transformers", "sglang")))


def not_a_number() -> Any:
    return "much"


def fail_to_start() -> None:
    raise RuntimeError("no data here")


def stops_its_worker(begun: str) -> float:
    """The first time, stop its worker, and then be late. Writes a line to a file when it begins."""
    with open(begun, "a+") as file:
        file.write("begun\n")
        file.seek(0)
        times = len(file.readlines())
    if times == 1:
        os.killpg(os.getpgid(os.getppid()), signal.SIGSTOP)
        time.sleep(600)
    return 5.0
