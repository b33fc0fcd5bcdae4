"""Made-up batches, the same in every process."""

from __future__ import annotations

import numpy as np

from monarch_rl.algorithms.packing import SharingGroup, plan_microbatches
from monarch_rl.episode.episode import BatchShard, Episode, Group, Turn
from monarch_rl.episode.prefixes import prefix_tree

VOCABULARY, STEPS, LR, WEIGHT_DECAY, MAX_NEW_TOKENS = 101, 4, 1e-3, 0.1, 20


def batch(step: int, groups: int = 3, size: int = 4) -> list[Group]:
    """Groups of episodes of different lengths with log-probs some way off those of a random model. Those of a group
    share their prompt, and all but the first also the first tokens that they drew."""
    rng = np.random.default_rng(step)

    def group(number: int) -> Group:
        prompt = rng.integers(0, VOCABULARY, rng.integers(2, 9))
        begun = np.concatenate([prompt, rng.integers(0, VOCABULARY, rng.integers(1, 4))])
        return Group(number, number, [episode(begun if place else prompt, len(prompt)) for place in range(size)])

    def episode(first: np.ndarray, prompt: int) -> Episode:
        ids = np.concatenate([first, rng.integers(0, VOCABULARY, rng.integers(1, MAX_NEW_TOKENS - 3))])
        n = len(ids)
        trainable = np.arange(n) >= prompt
        logprobs = np.where(trainable, -np.log(VOCABULARY) + rng.normal(0, 0.3, n), 0)
        turn = Turn(
            token_ids=ids.astype(np.int32),
            logprobs=logprobs.astype(np.float32),
            policy_versions=np.where(trainable, step, -1).astype(np.int32),
            trainable=trainable,
        )
        return Episode([turn], float(rng.integers(0, 2)), "stop")

    return [group(number) for number in range(groups)]


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
