"""Effect of ``SLOWER`` in ``algorithms/packing.py``: tokens computed by plans, and by their slowest rank.

    python benchmarks/slower.py

Random groups in the shapes of several jobs. "computed": inputs of all ranks relative to the minimum, in which shared
tokens are computed once. "slowest": the same for the slowest rank, including its waits, times the number of ranks.
Means over seeds. The last line is JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import tyro

from monarch_rl.algorithms import packing
from monarch_rl.algorithms.packing import SharingGroup, plan_microbatches

VALUES = (0.0, 0.02, 0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Job:
    """Groups of a step, and the ranks that train them. Lengths are uniform."""

    groups: int
    size: int
    prompts: tuple[int, int]
    answers: tuple[int, int]
    budget: int
    ranks: int

    def sample(self, seed: int) -> list[SharingGroup]:
        rng, found = np.random.default_rng(seed), []
        for prompt in rng.integers(*self.prompts, self.groups).tolist():
            lengths = (prompt + rng.integers(*self.answers, self.size)).tolist()
            found.append(SharingGroup(lengths, range(self.size), [0] + [prompt] * (self.size - 1)))
        return found

    def plan(self, seed: int) -> tuple[float, float]:
        """Return the relative tokens of a plan, and of its slowest rank."""
        groups = self.sample(seed)
        at_least = sum(group.computed(range(self.size)) for group in groups)
        plan = plan_microbatches(groups, self.budget, self.ranks)
        ranks = [[_computed(groups, microbatch) for microbatch in rank] for rank in plan]
        slowest = sum(max(at_once) for at_once in zip(*ranks, strict=True))
        return sum(map(sum, ranks)) / at_least, slowest * self.ranks / at_least


def _computed(groups: list[SharingGroup], microbatch: list[tuple[int, int]]) -> int:
    members: dict[int, list[int]] = {}
    for group, episode in microbatch:  # in these groups, an episode's place in the order is its index
        members.setdefault(group, []).append(episode)
    return sum(groups[group].computed(places) for group, places in members.items())


JOBS = {
    "main job": Job(32, 8, (7, 10), (3, 9), 16_384, 2),
    "few groups, short answers": Job(4, 8, (80, 140), (2, 8), 4096, 2),
    "few groups, long answers": Job(3, 8, (80, 140), (50, 200), 16_384, 2),
    "8 ranks, a group for each": Job(8, 16, (100, 300), (200, 2000), 16_384, 8),
    "8 ranks, 8 groups for each": Job(64, 16, (100, 300), (200, 2000), 16_384, 8),
}


@dataclass(frozen=True)
class Settings:
    """Effect of SLOWER (see the top of this file)."""

    seeds: int = 20


def main(s: Settings) -> None:
    print(f"{'computed / slowest':30}" + "".join(f"{value:>16g}" for value in VALUES))
    results: dict[str, list[list[float]]] = {}
    for name, job in JOBS.items():
        results[name] = []
        for packing.SLOWER in VALUES:
            means = np.mean([job.plan(seed) for seed in range(s.seeds)], 0)
            results[name].append([round(float(value), 3) for value in means])
        print(f"{name:30}" + "".join(f"{computed:8.3f} /{slowest:6.3f}" for computed, slowest in results[name]))
    print(json.dumps({"benchmark": "slower", "values": VALUES, "computed_and_slowest": results}))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
