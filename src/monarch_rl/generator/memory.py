"""Memory of a machine without an accelerator: what there is, what is free, and what this process has taken.

In a container the cgroup's limit counts, of version 2 or 1 (the kernel's ``admin-guide/cgroup-v2.rst`` and
``cgroup-v1/memory.rst``).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

CGROUP = Path("/sys/fs/cgroup")


class _Files(NamedTuple):
    """Where a version of cgroups says what a container may have, what it has, and how much of that is cached files."""

    limit: str
    used: str
    statistics: str
    cached: tuple[str, ...]
    """Keys of ``statistics``: pages of files, which the kernel gives up before it refuses memory. Shared memory is in
    none of them."""


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
    """Bytes that all processes of this machine, or of this container, may have together."""
    limits = [limit for files in _VERSIONS if (limit := _number(cgroup / files.limit)) is not None]
    return min([int(psutil.virtual_memory().total), *limits])


def free_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that are free now, or can be made free without swapping: cached files count as free."""
    free = [int(psutil.virtual_memory().available)]
    for files in _VERSIONS:
        limit, used = _number(cgroup / files.limit), _number(cgroup / files.used)
        if limit is not None and used is not None:
            free.append(max(0, limit - max(0, used - _cached(cgroup / files.statistics, files.cached))))
    return min(free)


def own_memory() -> int:
    """Bytes of this process that are no file's: what it has allocated and used."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


def _number(path: Path) -> int | None:
    """The number in a file; None if there is none: no such file, or no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _cached(statistics: Path, keys: tuple[str, ...]) -> int:
    """Bytes of cached files, by ``memory.stat``; 0 if it cannot be read."""
    try:
        lines = [line.split() for line in statistics.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(line[1]) for line in lines if len(line) == 2 and line[0] in keys)
