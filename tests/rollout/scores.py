"""Scores, most of which misbehave. Without the imports of other helpers: each scoring process has this module's."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from monarch_rl.tasks.reasoning_gym import extract_answer
from monarch_rl.tasks.task import Outcome


def touchy_score(text: str) -> float:
    """0 raises, 1 hangs, 2 ends its process, 3 ends it in Python's way; other digits are their own score."""
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


def crashes(text: str) -> float:
    """As a library in C may."""
    return float(ctypes.string_at(0)[0])


def hangs_in_c(text: str) -> float:
    """No handler in Python runs while it does: SIGTERM alone does not end it."""
    ctypes.CDLL(None).sleep(600)
    return 0.0


def prints(text: str) -> float:
    """Through Python, through the file descriptor, and by a program of its own."""
    print(f"python says {text}")
    os.write(2, b"the descriptor says something\n")
    subprocess.run(["echo", "a program says something"], check=True, timeout=600)
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
    """Leaves its process id as a file's name and hangs, the first time."""
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
    """Numbers of NumPy, which JSON does not know."""
    reward: Any = np.float32(0.5)
    return Outcome(reward, {"format": reward / 2, "answer": True})


def own_process_id() -> float:
    return float(os.getpid())


def heavy_modules() -> float:
    """How many of the heavy libraries a scoring process has loaded."""
    import sys

    return float(sum(name in sys.modules for name in ("torch", "transformers", "sglang")))


def not_a_number() -> Any:
    return "much"


def fail_to_start() -> None:
    raise RuntimeError("no data here")


def stops_its_worker(begun: str) -> float:
    """Stops all processes of its group and is then late, the first time. Writes a line to a file when it begins."""
    with open(begun, "a+") as file:
        file.write("begun\n")
        file.seek(0)
        times = len(file.readlines())
    if times == 1:
        os.killpg(0, signal.SIGSTOP)
        time.sleep(600)
    return 5.0
