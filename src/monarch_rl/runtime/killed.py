"""What to do about a process that was killed by SIGKILL: often memory was short."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

REPORTS = ("Killed(sig=9)", "exit code -9")
"""How Monarch and the engine report it."""
_FLAGS = {
    "trainer": "--trainer.tokens-per-microbatch or --trainer.logprob-chunk (docs/memory.md)",
    "generator": "--generator.max-total-tokens",
    "rollout": "--rollout.scorer-processes or --rollout.workers",
    "buffer": "buffer.max_mib in the recipe",
}
"""What lowers the memory of a process, by the beginning of its name."""


def oom_kills(counters: Path = Path("/proc/vmstat")) -> int | None:
    """Number of processes that the kernel of this machine has killed because memory was short; None if unknown."""
    with suppress(OSError):
        for line in counters.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


_AT_START = oom_kills()


def advice(name: str, report: str, counters: Path = Path("/proc/vmstat")) -> str:
    """What to do about the loss of process or mesh ``name``; empty if ``report`` names another cause than SIGKILL."""
    if not any(killed in report for killed in REPORTS):
        return ""
    kills, flags = oom_kills(counters), next((flags for kind, flags in _FLAGS.items() if name.startswith(kind)), "")
    counted = ""
    if kills is not None and _AT_START is not None:
        counted = f" (its kills on this machine since the start: {kills - _AT_START})"
    lower = f": then lower {flags}" if flags else ""
    return f"; SIGKILL comes from a program, or from the kernel when memory is short{counted}{lower}"
