"""Which episode goes into which micro-batch of which trainer rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def plan_microbatches(lengths: Sequence[int], token_budget: int, dp_size: int) -> list[list[list[int]]]:
    """Spread episodes over micro-batches: few, within the budget, and balanced between ranks.

    Episodes lie one after the other in their micro-batch, without padding, so the only waste is the wait of a rank
    with fewer tokens for a rank with more. Episodes are placed from the longest to the shortest, each into the
    micro-batch with the fewest tokens (LPT; Graham, 1969), with as few micro-batches as hold them all.

    Any two micro-batches differ by at most the longest episode (when the larger one got its last episode, it was no
    larger than the other). Micro-batches of similar size run at the same time on all ranks, so the waits of a rank,
    summed over all of its micro-batches, are at most the longest episode too.

    Args:
        lengths: tokens of each episode.
        token_budget: tokens that one micro-batch may have.
        dp_size: trainer ranks; all of them run the same number of micro-batches, because their collectives need it.

    Returns:
        ``plan[rank][k]``: the indices into ``lengths`` of the k-th micro-batch of that rank, ascending. A
        micro-batch is empty only if there are fewer episodes than micro-batches.

    Raises:
        ValueError: an episode is longer than the budget, or the budget or ``dp_size`` is not positive.
    """
    if token_budget < 1 or dp_size < 1:
        raise ValueError(f"token_budget ({token_budget}) and dp_size ({dp_size}) must be positive")
    if lengths and max(lengths) > token_budget:
        raise ValueError(
            f"an episode of {max(lengths)} tokens does not fit the token budget of {token_budget}: "
            f"raise the budget to at least that"
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rounds = max(1, -(-sum(lengths) // (token_budget * dp_size)))
    while True:
        bins: list[list[int]] = [[] for _ in range(rounds * dp_size)]
        tokens = [0] * len(bins)
        emptiest = [(0, b) for b in range(len(bins))]
        for i in order:
            target = emptiest[0][1]
            bins[target].append(i)
            tokens[target] += lengths[i]
            heapq.heapreplace(emptiest, (tokens[target], target))
        if max(tokens) <= token_budget:
            by_size = sorted(range(len(bins)), key=lambda b: (-tokens[b], b))
            return [[sorted(bins[b]) for b in by_size[rank::dp_size]] for rank in range(dp_size)]
        rounds += 1
