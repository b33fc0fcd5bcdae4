"""Prints how many tokens pivot resampling samples, compared with whole episodes (``tasks/pivot.py``).

    python benchmarks/pivot.py

In virtual time, with a stand-in for the engine that generates turns of random lengths. In each episode one random turn
decides and the others change nothing: so the pivot is known, and the share of episodes in which it is found is printed.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import tyro

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.model.messages import Message, ParsedReply
from monarch_rl.rollout.play import EpisodeRunner
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.tasks.pivot import Resampled, resampled
from monarch_rl.tasks.task import Policy, Task


class RandomTurns:
    """Generates 20 to 200 tokens per turn; the first one is 0 or 1."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        ids = np.zeros(self._rng.randint(20, 200), np.int32)
        ids[0] = self._rng.randint(0, 1)
        return Completion(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop")


class Template:
    """A stand-in for a chat template, in which each message is one id."""

    stop_token_ids = ()
    system = ""

    def token_texts(self) -> list[str]:
        return []

    def decode(self, ids: list[int]) -> str:
        return ""

    def opening(self, messages: list[Message], tools: None) -> list[int]:
        return [2]

    def between(self, messages: list[Message], tools: None, end: int | None, thinking: bool) -> list[int]:
        return [2]

    def cut_while_thinking(self, sampled: list[int], tools: None) -> bool:
        return False

    def read(self, ids: list[int], tools: None, stop: tuple[str, ...]) -> ParsedReply:
        return ParsedReply("", "")


def run_episode(turns: int, width: int, probes: int, rng: random.Random) -> tuple[Resampled, bool]:
    """Run an episode; returns it, and whether its pivot is the decisive turn."""
    decisive, found = rng.randrange(turns), list[Resampled]()

    async def to_the_end(policy: Any) -> float:
        while policy.turns < turns:
            await policy.reply("go on")
        turn = policy._line.turns[decisive]
        return float(turn.token_ids[turn.trainable][0])

    async def episode(item: Any, policy: Policy) -> Any:
        found.append(await resampled(policy, to_the_end, width=width, probes=probes))
        return found[-1].values

    generator: Any = RandomTurns(rng)
    template: Any = Template()
    runner = EpisodeRunner(generator, template, RolloutSettings(max_new_tokens=200))
    run_virtual(runner.play(Task(int, episode), 0, "", Sampling(200), 0))
    return found[0], found[0].turn == decisive


def main(episodes: int = 50, width: int = 4, seed: int = 0) -> None:
    """Print a row for each number of turns and of probes.

    Args:
        episodes: episodes per row, counting those whose first branches differ.
        width: number of first branches, and of further ones at the pivot.
        seed: seed of all random numbers.
    """
    rng = random.Random(seed)
    print("turns  probes  branches  drawn tokens  whole episodes  saved  pivot found")
    for turns in (4, 8, 16):
        for probes in (1, 2, 4):
            results: list[tuple[Resampled, bool]] = []
            while len(results) < episodes:
                result, right = run_episode(turns, width, probes, rng)
                if result.turn is not None:
                    results.append((result, right))
            sampled, whole = sum(one.sampled_tokens for one, _ in results), sum(one.whole for one, _ in results)
            branches = sum(len(one.values) for one, _ in results) / episodes
            found = sum(right for _, right in results) / episodes
            print(
                f"{turns:5}  {probes:6}  {branches:8.1f}  {sampled / episodes:12,.0f}  {whole / episodes:14,.0f}  "
                f"{1 - sampled / whole:5.0%}  {found:11.0%}"
            )


if __name__ == "__main__":
    tyro.cli(main)
