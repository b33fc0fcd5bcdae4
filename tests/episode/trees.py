"""Random groups of episodes that share prefixes, and an independent count of their shared inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from monarch_rl.episode.episode import Episode, Turn
from monarch_rl.episode.sampling import SamplingMasks

VOCABULARY, LAYERS, EXPERTS, K = 50, 2, 4, 2


def tree_of(lengths: Sequence[int], forks: Sequence[tuple[int, int]], seed: int, **parts: Any) -> list[Episode]:
    """One episode for each length; each follows an earlier one (``forks``: which, and for how many tokens) and then
    diverges. As from an engine, routes and sampling masks of shared tokens are equal, too."""
    rng = np.random.default_rng(seed)
    episodes: list[Episode] = []
    for length, (parent, shared) in zip(lengths, forks, strict=True):
        episodes.append(_episode(rng, length, **parts))
        if len(episodes) > 1:
            _follow(episodes[-1], episodes[parent % (len(episodes) - 1)], shared)
    return episodes


def _episode(
    rng: np.random.Generator, n: int, routes: bool = False, kept: bool = False, experts: int = EXPERTS
) -> Episode:
    trainable = rng.random(n) < 0.7
    trainable[0] = False
    ids = rng.integers(0, VOCABULARY, n).astype(np.int32)
    sampling_masks = None
    if kept:
        sets = [
            rng.permutation(np.unique([token, *rng.integers(0, VOCABULARY, 4)])) if sampled else np.zeros(0)
            for token, sampled in zip(ids, trainable, strict=True)
        ]
        counts = np.asarray([len(of_token) for of_token in sets], np.int32)
        sampling_masks = SamplingMasks(counts, np.concatenate(sets).astype(np.int32))
    versions, logprobs = np.where(trainable, 0, -1).astype(np.int32), np.where(trainable, rng.normal(-2, 1, n), 0)
    turn = Turn(ids, logprobs.astype(np.float32), versions, trainable, sampling_masks)
    episode = Episode([turn], float(rng.integers(0, 2)), "stop")
    if routes:
        episode.expert_routes = rng.random((n - 1, LAYERS, experts)).argsort(-1)[..., :K].astype(np.uint8)
    return episode


def _follow(episode: Episode, parent: Episode, shared: int) -> None:
    """Copy the first tokens of another episode, sampled or not: each episode may have sampled them itself."""
    (own,), (theirs,) = episode.turns, parent.turns
    shared = min(shared, len(own.token_ids), len(theirs.token_ids))
    own.token_ids[:shared] = theirs.token_ids[:shared]
    if episode.expert_routes is not None and parent.expert_routes is not None:
        routes = min(shared, len(episode.expert_routes), len(parent.expert_routes))
        episode.expert_routes[:routes] = parent.expert_routes[:routes]
    if own.sampling_masks is not None and theirs.sampling_masks is not None:
        own.trainable[:shared] = theirs.trainable[:shared]
        own.logprobs[:shared] = np.where(own.trainable, own.logprobs, 0)[:shared]
        own.policy_versions[:shared] = theirs.policy_versions[:shared]
        own.sampling_masks = SamplingMasks.join([theirs.sampling_masks[:shared], own.sampling_masks[shared:]])


@st.composite
def trees(draw: st.DrawFn, most: int = 7, longest: int = 24, **parts: Any) -> list[Episode]:
    """A group of 1 to ``most`` episodes of 2 to ``longest`` tokens."""
    lengths = draw(st.lists(st.integers(2, longest), min_size=1, max_size=most))
    forks = [(draw(st.integers(0, most)), draw(st.integers(0, longest))) for _ in lengths]
    return tree_of(lengths, forks, draw(st.integers(0, 2**16)), **parts)


def inputs_of(episode: Episode) -> list[Any]:
    """The data that determine how each input is computed, besides the inputs before it."""
    ids = episode.token_ids[:-1].tolist()
    if episode.expert_routes is None:
        return ids
    return list(zip(ids, map(bytes, episode.expert_routes), strict=True))


def distinct_inputs(episodes: Sequence[Episode]) -> int:
    """Number of inputs that differ, or whose preceding inputs differ."""
    lists = [inputs_of(episode) for episode in episodes]
    return len({tuple(inputs[: n + 1]) for inputs in lists for n in range(len(inputs))})
