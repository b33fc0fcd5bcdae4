"""What each test has cost, as it is printed after the tests."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

SHOWN = 10
"""Tests that are listed."""


@dataclass(slots=True)
class Cost:
    """What a test took, with its set-up: a fixture counts for the first test that uses it."""

    seconds: float
    cpu_s: float


def table(by_test: dict[str, Cost]) -> list[str]:
    """The slowest tests, and the sums of each folder. Two processes side by side add up to more than has passed."""
    if not by_test:
        return []
    slowest = sorted(by_test.items(), key=lambda entry: -entry[1].seconds)[:SHOWN]
    folders: defaultdict[str, Cost] = defaultdict(lambda: Cost(0.0, 0.0))
    for name, cost in by_test.items():
        for folder in ("/".join(name.split("/")[:2]), "all"):
            folders[folder].seconds += cost.seconds
            folders[folder].cpu_s += cost.cpu_s
    lines = ["", "   seconds  CPU-seconds  the slowest tests, with the fixtures they are the first to use"]
    lines += [f"{cost.seconds:10.1f} {cost.cpu_s:12.1f}  {name}" for name, cost in slowest]
    lines += ["", "   seconds  CPU-seconds  folder"]
    lines += [f"{cost.seconds:10.1f} {cost.cpu_s:12.1f}  {name}" for name, cost in sorted(folders.items())]
    return lines
