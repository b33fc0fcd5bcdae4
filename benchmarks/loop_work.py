"""Computations of actors on their event loops, timed at realistic sizes: `python benchmarks/loop_work.py`.

While an event loop computes, it answers no calls. Work of more than about 20 ms belongs on a thread.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tyro

from monarch_rl.buffer.groups import Batch
from monarch_rl.buffer.shards import ShardPlan, cut
from monarch_rl.episode.episode import Episode, Group, Turn
from monarch_rl.episode.sampling import Completion
from monarch_rl.episode.serialization import SerializedGroup, serialize_group
from monarch_rl.model.chat import ChatTemplate

LIMIT_MS = 20.0


@dataclass(frozen=True)
class Settings:
    """Sizes of a batch."""

    model: str = ".cache/tiny-qwen3"
    """Folder of the tokenizer."""
    groups: int = 32
    """Groups of a batch."""
    episodes: int = 16
    """Episodes of a group."""
    tokens: int = 1024
    """Sampled tokens of an episode."""
    rounds: int = 9
    """Rounds of each computation; the fastest counts, because other programs may use the machine."""


def make_group(s: Settings, number: int) -> Group:
    """Return a group of random tokens."""
    rng = np.random.default_rng(number)

    def episode() -> Episode:
        completion = Completion(
            rng.integers(0, 32, s.tokens).astype(np.int32),
            rng.normal(size=s.tokens).astype(np.float32),
            np.zeros(s.tokens, np.int32),
            "stop",
        )
        return Episode([Turn.from_completion([1] * 200, completion)], 1.0, "stop")

    return Group(number, number, [episode() for _ in range(s.episodes)])


def best_ms(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        before = time.perf_counter()
        work()
        times.append(time.perf_counter() - before)
    return min(times) * 1e3


def main(s: Settings) -> None:
    groups = [make_group(s, number) for number in range(s.groups)]
    data = serialize_group(groups[0])
    template = ChatTemplate(s.model)
    sampled = groups[0].episodes[0].turns[0].token_ids.tolist()
    budget = 4 * (s.tokens + 200)
    packed = [SerializedGroup.read(serialize_group(group)) for group in groups]
    batch = Batch(0, packed, None, np.asarray([sum(group.trainable for group in packed)]))
    shard = cut(batch, ShardPlan(2, budget))[0]
    work: dict[str, Callable[[], object]] = {
        "rollout worker: tokens of one answer to text": lambda: template.plain(sampled),
        "rollout worker: 8 answers to text (on a thread)": lambda: [template.plain(sampled) for _ in range(8)],
        "rollout worker: a group to bytes": lambda: serialize_group(groups[0]),
        "buffer: a group read": lambda: SerializedGroup.read(data),
        "buffer: a batch cut into two shards": lambda: cut(batch, ShardPlan(2, budget)),
        "buffer, trainer: a shard to a pickle and back": lambda: pickle.loads(pickle.dumps(shard)),
    }
    print(f"{s.groups} groups x {s.episodes} episodes x {s.tokens} tokens; {len(data) / 1e6:.2f} MB a group")
    shares = {name: best_ms(call, s.rounds) / LIMIT_MS for name, call in work.items()}
    for name, share in shares.items():
        print(f"{name:50s} {share:6.2f} of {LIMIT_MS:g} ms")
    print(json.dumps({name: round(share, 3) for name, share in shares.items()}))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
