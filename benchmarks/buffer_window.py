"""Gain by a window: steps per second by window, in virtual time, with long-tailed answers.

    python benchmarks/buffer_window.py

Runs the buffer's own core. A group takes as long as its longest episode (lognormal lengths, sigma 1: the longest of 8
takes about three times the mean). The trainer is as fast as the places would complete groups if they never waited for a
slot. A window costs slots and saves waits. Each line has, by window in batches, the steps relative to those of a
trainer that never waits, mean of five seeds. `greedy` drops late groups and costs no slot: it shows the cost of order.
The last line is JSON.
"""

from __future__ import annotations

import json

import numpy as np
from virtual_time import drive

from monarch_rl.buffer.core import BufferCore
from monarch_rl.buffer.settings import BufferSettings

GROUPS, SIZE, STEPS, SEEDS = 32, 8, 120, 5
SHARES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Windows, in batches."""


def times(seed: int, size: int, sigma: float) -> np.ndarray:
    """Return the seconds of each group, those of its longest episode; a mean episode takes 1."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(-(sigma**2) / 2, sigma, (STEPS * GROUPS * 3, size))
    return lengths.max(axis=1)


def rate(settings: BufferSettings, places: int, sigma: float, seed: int) -> float:
    seconds = times(seed, SIZE, sigma)
    step_s = float(seconds.mean()) * GROUPS / places
    core = BufferCore(GROUPS, settings)
    outcome = drive(core, lambda group: float(seconds[group]), places, step_s, step_s / 10, STEPS)
    return STEPS * step_s / outcome.seconds


def main() -> None:
    results = {}
    for lag in (1, 2, 4):
        shares = [share for share in SHARES if share <= lag]
        windows = {str(share): BufferSettings(lag, window=int(share * GROUPS)) for share in shares}
        choices = windows | {"default": BufferSettings(lag), "greedy": BufferSettings(lag, late="drop")}
        for places in (1, 2):
            for sigma in (0.5, 1.0, 1.5):
                found = {
                    name: round(float(np.mean([rate(s, places * GROUPS, sigma, seed) for seed in range(SEEDS)])), 3)
                    for name, s in choices.items()
                }
                print(f"lag {lag}, {places} batches played at once, sigma {sigma}: {found}", flush=True)
                results[f"lag{lag}_places{places}_sigma{sigma}"] = found
    print(json.dumps(results))


if __name__ == "__main__":
    main()
