"""Made-up batches, the same in every process."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from monarch_rl.algorithms.packing import SharingGroup, plan_microbatches
from monarch_rl.episode.episode import BatchShard, Episode, Group, Turn
from monarch_rl.episode.prefixes import prefix_tree

VOCABULARY, STEPS, LR, WEIGHT_DECAY, MAX_NEW_TOKENS = 101, 4, 1e-3, 0.1, 20


def batch(step: int, groups: int = 3, size: int = 4) -> list[Group]:
    """Groups of episodes of different lengths with log-probs some way off those of a random model. Each begins like the
    one before it in its group, some beyond the prompt."""
    rng = np.random.default_rng(step)

    def episode() -> Episode:
        prompt, drawn = rng.integers(2, 9), rng.integers(1, MAX_NEW_TOKENS)
        n = prompt + drawn
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


def single(step: int) -> list[Group]:
    """One episode: fewer than there are trainer ranks."""
    return batch(step, groups=1, size=1)


def shard(groups: list[Group], version: int, rank: int, ranks: int, token_budget: int) -> BatchShard:
    """What one trainer rank would take of them from the buffer."""
    sharing = [
        SharingGroup([episode.num_tokens for episode in group.episodes], *prefix_tree(group.episodes))
        for group in groups
    ]
    plan = plan_microbatches(sharing, token_budget, ranks)[rank]
    trainable = sum(episode.num_trainable for group in groups for episode in group.episodes)
    return BatchShard(
        version=version,
        rewards=[group.rewards for group in groups],
        microbatches=[[(g, e, groups[g].episodes[e]) for g, e in microbatch] for microbatch in plan],
        trainable_tokens=trainable,
        lag_counts=np.asarray([trainable]),
    )
