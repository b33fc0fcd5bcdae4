"""Memory of a machine without an accelerator: its limit, what is free, and what this process uses.

In a container the limit of the cgroup applies, of version 2 or 1 (the kernel's ``admin-guide/cgroup-v2.rst`` and
``cgroup-v1/memory.rst``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

CGROUP = Path("/sys/fs/cgroup")


class _Files(NamedTuple):
    """Files in which one cgroup version reports a container's memory limit, its use, and the share of file cache."""

    limit: str
    used: str
    statistics: str
    cached: tuple[str, ...]
    """Keys of ``statistics`` for file cache, which the kernel evicts before it refuses memory. They do not include
    shared memory."""


_VERSIONS = (
    _Files("memory.max", "memory.current", "memory.stat", ("active_file", "inactive_file")),
    _Files(
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        ("total_active_file", "total_inactive_file"),
    ),
)


def memory_limit(cgroup: Path = CGROUP) -> int:
    """Bytes that all processes of this machine or container may use together."""
    limits = [limit for files in _VERSIONS if (limit := _number(cgroup / files.limit)) is not None]
    return min([int(psutil.virtual_memory().total), *limits])


def free_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that are free, or can be freed without swapping: file cache counts as free."""
    free = [int(psutil.virtual_memory().available)]
    for files in _VERSIONS:
        limit, used = _number(cgroup / files.limit), _number(cgroup / files.used)
        if limit is not None and used is not None:
            free.append(max(0, limit - max(0, used - _cached(cgroup / files.statistics, files.cached))))
    return min(free)


def check_free(needed: Mapping[str, int], free_bytes: int, engines: int = 1) -> None:
    """Check that a machine without GPUs has enough free memory to start engines.

    Args:
        needed: bytes of an engine by purpose.
        free_bytes: free memory of the machine before the engines start.
        engines: number of engines that start on this machine at once. They are checked together, because each alone
            would find the same memory free.

    Raises:
        RuntimeError: it has not; states the needed bytes by purpose.
    """
    total = sum(needed.values())
    if engines * total > free_bytes:
        parts = ", ".join(f"{nbytes / 2**30:.2f} for {what}" for what, nbytes in needed.items() if nbytes)
        together = f", {engines} of them {engines * total / 2**30:.2f} GiB" if engines > 1 else ""
        raise RuntimeError(
            f"an engine needs {total / 2**30:.2f} GiB of memory ({parts}){together}, but {free_bytes / 2**30:.2f} GiB "
            "of this machine are free: end other programs that use memory, or use a smaller KV cache, or fewer "
            "generator.replicas"
        )


def own_memory() -> int:
    """Bytes of anonymous memory that this process has allocated and touched."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


def _number(path: Path) -> int | None:
    """The number in a file; None if the file is missing or holds no number, which means no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _cached(statistics: Path, keys: tuple[str, ...]) -> int:
    """Bytes of file cache according to ``memory.stat``; 0 if it cannot be read."""
    try:
        lines = [line.split() for line in statistics.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(line[1]) for line in lines if len(line) == 2 and line[0] in keys)
