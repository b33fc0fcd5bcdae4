"""Memory limit and use of a container, from synthetic files of both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from monarch_rl.runtime.machine_memory import free_memory, memory_limit

MIB = 2**20
FILES = {
    "v2": ("memory.max", "memory.current", "memory.stat", ""),
    "v1": ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
}


@pytest.fixture(params=FILES)
def container(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, ...]:
    """A cgroup with a limit of 64 MiB that uses 50, of which 40 are cached files and 6 shared memory: its root, then
    the files of limit, use and statistics."""
    limit, used, statistics, prefix = FILES[request.param]
    files = tuple(tmp_path / name for name in (limit, used, statistics))
    files[0].parent.mkdir(exist_ok=True)
    files[0].write_text(f"{64 * MIB}\n")
    files[1].write_text(f"{50 * MIB}\n")
    counts = {"active_file": 30 * MIB, "inactive_file": 10 * MIB, "inactive_anon": 10 * MIB, "shmem": 6 * MIB}
    files[2].write_text("".join(f"{prefix}{key} {count}\n" for key, count in counts.items()))
    return tmp_path, *files


def test_cached_files_of_a_container_count_as_free(container: tuple[Path, ...]) -> None:
    root, limit, _, statistics = container
    assert memory_limit(root) == 64 * MIB
    assert free_memory(root) == (64 - (50 - 40)) * MIB
    statistics.unlink()
    assert free_memory(root) == (64 - 50) * MIB
    limit.write_text(f"{20 * MIB}")
    assert (memory_limit(root), free_memory(root)) == (20 * MIB, 0)


@pytest.mark.parametrize("word", ["max", str(2**63 - 4096)], ids=["v2's", "v1's"])
def test_a_container_without_a_limit_may_use_the_whole_machine(container: tuple[Path, ...], word: str) -> None:
    root, limit, *_ = container
    limit.write_text(word)
    assert memory_limit(root) == memory_limit(root / "nowhere") == psutil.virtual_memory().total
    assert free_memory(root) > 64 * MIB
