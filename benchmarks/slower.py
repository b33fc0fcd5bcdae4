"""What ``SLOWER`` of ``algorithms/packing.py`` decides: what plans compute, and their slowest rank, by its value.

    python benchmarks/slower.py

Random groups in the shapes of several jobs. "computed": inputs of all ranks as a multiple of what has to be computed at
least, which is what is shared once. "slowest": the same of the slowest rank, its waits included, times the ranks. Means
over seeds. The last line is JSON.
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
    """Groups of a step, and the ranks that train them. Lengths are drawn uniformly."""

    groups: int
    size: int
    prompts: tuple[int, int]
    answers: tuple[int, int]
    budget: int
    ranks: int

    def draw(self, seed: int) -> list[SharingGroup]:
        draw, found = np.random.default_rng(seed), []
        for prompt in draw.integers(*self.prompts, self.groups).tolist():
            lengths = (prompt + draw.integers(*self.answers, self.size)).tolist()
            found.append(SharingGroup(lengths, range(self.size), [0] + [prompt] * (self.size - 1)))
        return found

    def plan(self, seed: int) -> tuple[float, float]:
        """What a plan computes, and its slowest rank."""
        groups = self.draw(seed)
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
    """What SLOWER decides (see the top of this file)."""

    seeds: int = 20


def main(s: Settings) -> None:
    print(f"{'computed / slowest':30}" + "".join(f"{value:>16g}" for value in VALUES))
    figures: dict[str, list[list[float]]] = {}
    for name, job in JOBS.items():
        figures[name] = []
        for packing.SLOWER in VALUES:
            means = np.mean([job.plan(seed) for seed in range(s.seeds)], 0)
            figures[name].append([round(float(value), 3) for value in means])
        print(f"{name:30}" + "".join(f"{computed:8.3f} /{slowest:6.3f}" for computed, slowest in figures[name]))
    print(json.dumps({"benchmark": "slower", "values": VALUES, "computed_and_slowest": figures}))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
