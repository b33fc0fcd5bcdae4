"""This machine: its id, what it consists of, and the output of its programs."""

from __future__ import annotations

import logging
import os
import platform
import socket
import subprocess
from typing import Any

from monarch_rl.runtime.machine_memory import memory_limit

logger = logging.getLogger("monarch_rl")

PROGRAM_S = 20.0
"""Deadline of git and nvidia-smi, in seconds. The run does not wait for them."""


def own_id() -> str:
    """An ID of this machine and PID namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return os.uname().nodename


def describe() -> dict[str, Any]:
    """This machine: its name, the cores that this process may use, memory in GiB, operating system, GPUs and the
    version of their driver."""
    gpus, driver = _gpus()
    return {
        "name": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_limit() / 2**30, 1),
        "os": platform.platform(),
        "gpus": gpus,
        "driver": driver,
    }


def _gpus() -> tuple[list[str], str | None]:
    """Name and memory of each GPU of this machine, and the driver's version."""
    query = "--query-gpu=name,memory.total,driver_version"
    rows = (program_output(["nvidia-smi", query, "--format=csv,noheader"]) or "").splitlines()
    fields = [[field.strip() for field in row.split(",")] for row in rows]
    found = [row for row in fields if len(row) == 3]
    return [f"{name}, {memory}" for name, memory, _ in found], found[0][2] if found else None


def program_output(program: list[str]) -> str | None:
    """What a program prints; None if it does not exist, fails, or takes too long."""
    try:
        done = subprocess.run(
            program,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROGRAM_S,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},  # do not interfere with a git command of the user
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("%s: %s", program[0], error)
        return None
    return done.stdout
