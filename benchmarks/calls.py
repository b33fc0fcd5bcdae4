"""Cost of a call to an actor in another process: Monarch's own, and over a persistent channel.

    python benchmarks/calls.py

For each, one call after the other and --together concurrently: CPU microseconds, and bytes of anonymous memory that a
call leaks, at the caller and at the actor. CPU time needs no quiet machine, although other work makes it longer. Memory
is that of the whole process, in pages, so that differences of a few bytes mean nothing.
"""

from __future__ import annotations

import monarch_rl  # isort: skip  # noqa: F401  its settings for Monarch count only if it is imported first

import asyncio
import json
import os
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from monarch_rl.runtime.endpoint import concurrent_endpoint, persistent_endpoint
from monarch_rl.runtime.persistent_calls import ResilientActor


@dataclass(frozen=True)
class Settings:
    """Cost of a call (see the top of this file)."""

    calls: int = 4000
    """Measured calls of each kind, after half as many that warm up."""
    together: int = 10
    """Calls in one turn of the event loop, in the second row of each kind."""


def used() -> tuple[float, int]:
    """Return the CPU seconds and bytes of anonymous memory of this process."""
    anonymous = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return time.process_time(), 1024 * int(anonymous[1]) if anonymous else 0


class Asked(ResilientActor):
    """Answers calls of both kinds."""

    @concurrent_endpoint
    async def monarchs(self) -> int:
        return os.getpid()

    @persistent_endpoint
    async def lasting(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def used(self) -> tuple[float, int]:
        return used()


async def measure(actor: Any, call: Callable[[], Awaitable[int]], s: Settings, together: int) -> dict[str, float]:
    """Return the cost of a call at both ends."""

    async def awaited() -> int:
        return await call()

    async def calls(count: int) -> None:
        for _ in range(count // together):
            await asyncio.gather(*(awaited() for _ in range(together)))

    await calls(s.calls // 2)
    before = *used(), *await actor.used.call_one()
    await calls(s.calls)
    after = *used(), *await actor.used.call_one()
    caller_s, caller_bytes, actor_s, actor_bytes = (b - a for a, b in zip(before, after, strict=True))
    return {
        "caller_us": round(1e6 * caller_s / s.calls, 1),
        "actor_us": round(1e6 * actor_s / s.calls, 1),
        "caller_bytes": round(caller_bytes / s.calls),
        "actor_bytes": round(actor_bytes / s.calls),
    }


async def main(s: Settings) -> None:
    """Print a line per kind, then everything as one line of JSON."""
    from monarch.actor import this_host

    processes = this_host().spawn_procs(per_host={"gpus": 1})
    actor: Any = processes.spawn("asked", Asked)
    results = {}
    for together in (1, s.together):
        for kind in ("monarchs", "lasting"):
            results[f"{kind}_{together}"] = row = await measure(actor, getattr(actor, kind).call_one, s, together)
            print(f"{kind:9s} {together:3d} at once: " + ", ".join(f"{name} {value}" for name, value in row.items()))
    print(json.dumps({"benchmark": "calls", **results}))
    await processes.stop()


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(Settings)))
