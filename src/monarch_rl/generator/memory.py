"""Memory of a machine without an accelerator: what there is, what is free, and what this process has taken."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def memory_limit() -> int:
    """Bytes that all processes of this machine, or of this container, may have together."""
    total = int(psutil.virtual_memory().total)
    limit = _cgroup("memory.max")
    return total if limit is None else min(total, limit)


def free_memory() -> int:
    """Bytes that are free now, or can be made free without swapping."""
    available = int(psutil.virtual_memory().available)
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    return available if limit is None or used is None else min(available, max(0, limit - used))


def own_memory() -> int:
    """Bytes of this process that are no file's: what it has allocated and used."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


def _cgroup(name: str) -> int | None:
    """A number of this container's; None if it has no limit."""
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
