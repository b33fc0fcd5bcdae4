"""Synthetic batches, the same in every process."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np

from monarch_rl.buffer.groups import Batch
from monarch_rl.buffer.shards import ShardPlan, cut
from monarch_rl.episode.episode import Episode, Group, Turn
from monarch_rl.episode.serialization import SerializedGroup, serialize_group
from monarch_rl.episode.shard import PackedShard

VOCABULARY, STEPS, LR, WEIGHT_DECAY, MAX_NEW_TOKENS = 101, 4, 1e-3, 0.1, 20


def batch(step: int, groups: int = 3, size: int = 4) -> list[Group]:
    """Groups of episodes of different lengths, with log-probs near those of a random model. Each episode shares a
    prefix with the one before it in its group, sometimes beyond the prompt."""
    rng = np.random.default_rng(step)

    def episode() -> Episode:
        prompt, sampled = rng.integers(2, 9), rng.integers(1, MAX_NEW_TOKENS)
        n = prompt + sampled
        trainable = np.arange(n) >= prompt
        logprobs = np.where(trainable, -np.log(VOCABULARY) + rng.normal(0, 0.3, n), 0)
        turn = Turn(
            token_ids=rng.integers(0, VOCABULARY, n).astype(np.int32),
            logprobs=logprobs.astype(np.float32),
            policy_versions=np.where(trainable, step, -1).astype(np.int32),
            trainable=trainable,
        )
        return Episode([turn], float(rng.integers(0, 2)), "stop")

    made = [Group(g, g, [episode() for _ in range(size)]) for g in range(groups)]
    for group in made:
        for before, after in pairwise(episode.turns[0].token_ids for episode in group.episodes):
            shared = min(len(before), len(after), 4) - 1
            after[:shared] = before[:shared]
    return made


ROWS = 6
"""Supervised rows per step."""
SHARE = 0.3
"""Share of the rows in the loss."""


def rows() -> list[dict[str, list[int]]]:
    """Supervised rows for all steps, as ids."""
    rng = np.random.default_rng(99)

    def ids(most: int) -> list[int]:
        return [int(token) for token in rng.integers(0, VOCABULARY, rng.integers(1, most))]

    return [{"prompt": ids(9), "answer": ids(14)} for _ in range(STEPS * ROWS)]


def rows_of(step: int) -> list[dict[str, list[int]]]:
    """The rows of a step, in the order in which they are taken."""
    order = list(range(STEPS * ROWS))
    random.Random("supervised 0").shuffle(order)
    return [rows()[place] for place in order[step * ROWS : (step + 1) * ROWS]]


def single(step: int) -> list[Group]:
    """One episode: fewer than there are trainer ranks."""
    return batch(step, groups=1, size=1)


def shard(
    groups: list[Group],
    version: int,
    rank: int,
    ranks: int,
    tokens_per_microbatch: int,
    columns: tuple[str, ...] = (),
    minibatches: int = 1,
) -> PackedShard:
    """The shard of the batch that one trainer rank would get from the buffer. ``columns``: columns of all episodes."""
    packed = [SerializedGroup.read(serialize_group(group)) for group in groups]
    trainable = sum(group.trainable for group in packed)
    whole = Batch(version, packed, None, np.asarray([trainable]))
    return cut(whole, ShardPlan(ranks, tokens_per_microbatch, columns, minibatches))[rank]
