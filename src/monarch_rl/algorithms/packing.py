"""How a batch is divided: into micro-batches of each trainer rank, and within them into sequences padded together."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

KEYS_PER_TOKEN = 4
"""Keys that a micro-batch may gather, as a multiple of its token budget. Each episode's queries read the keys and
values of its whole prefix, so one behind a long shared prefix gathers far more keys than it computes. Without this
bound a micro-batch of many short answers to one long prompt would have no bound on its memory. What four times as many
keys and values add to what a layer keeps for the backward pass depends on how many heads have keys of their own: 6 to
15 % in models with grouped queries, a quarter where each head has its own (Llama-2-7B), half where keys of 128 heads
are made of a latent vector (DeepSeek-V3): ``python benchmarks/key_memory.py``."""

SLOWER = 0.05
"""Share by which the slowest rank may be slower than by another plan that computes more in all. A choice: between 0 and
0.1 it matters only where a rank has one or two groups, and there by 4 % (``python benchmarks/slower.py``)."""


class SharingGroup(NamedTuple):
    """The lengths of a group's episodes, and what they share: ``PrefixTree`` of ``episode/prefixes.py``."""

    lengths: Sequence[int]
    """Tokens of each episode. Its inputs are one fewer: the last token is only ever a target."""
    order: Sequence[int]
    """All episodes, so that any two share the least that neighbours between them share."""
    shared: Sequence[int]
    """Inputs that each episode, in this order, shares with the one before it; 0 for the first."""

    def inputs(self, place: int) -> int:
        """Of the episode at a place of ``order``; also the keys that its queries read, shared ones included."""
        return max(self.lengths[self.order[place]] - 1, 0)

    def computed(self, places: Sequence[int]) -> int:
        """Inputs that a micro-batch computes of some episodes, by ascending places in ``order``."""
        inputs = sum(map(self.inputs, places))
        for before, place in zip(places[:-1], places[1:], strict=True):
            inputs -= self.shared[place] if place == before + 1 else min(self.shared[before + 1 : place + 1])
        return inputs


def separate(lengths: Sequence[int]) -> list[SharingGroup]:
    """Episodes that share nothing, each a group of its own."""
    return [SharingGroup([tokens], [0], [0]) for tokens in lengths]


@dataclass(slots=True)
class _Piece:
    """Neighbours of one group that go into the same micro-batch."""

    group: int
    places: list[int]
    computed: int
    keys: int


@dataclass(slots=True)
class _Bin:
    """A micro-batch that is being filled."""

    places: dict[int, list[int]] = field(default_factory=dict)
    """By group, ascending."""
    computed: int = 0
    keys: int = 0

    def add(self, piece: _Piece, group: SharingGroup) -> None:
        here = self.places.get(piece.group)
        if here is None:
            self.places[piece.group] = piece.places
            self.computed += piece.computed
        else:  # pieces of one group that meet share again
            together = sorted(here + piece.places)
            self.places[piece.group] = together
            self.computed += group.computed(together) - group.computed(here)
        self.keys += piece.keys


_Rounds = list[list[_Bin]]
"""Micro-batches that run at the same time, one of each rank, from the largest."""


def plan_microbatches(
    groups: Sequence[SharingGroup], token_budget: int, dp_size: int
) -> list[list[list[tuple[int, int]]]]:
    """Spread episodes over micro-batches: few, within the budget, balanced between ranks, with little computed twice.

    A micro-batch computes what episodes of a group share once; if they are in different ones, each computes it. So
    whole groups should stay together, but small pieces are easier to balance. Several plans are made, of whole groups,
    of their halves, quarters, ... and of single episodes. The one of the largest pieces is taken by which the slowest
    rank computes at most ``SLOWER`` more than by any other: it computes least twice. In each plan a piece is a run of
    neighbours in the group's tree, cut further where the budget asks for it.
    Pieces are placed from the largest to the smallest, each into the micro-batch that computes least so far (LPT;
    Graham, 1969), in few micro-batches. The first plan that is within ``SLOWER`` of what no plan can undercut is taken.

    What holds of every plan, in inputs computed:

    1. A micro-batch computes at most ``token_budget`` inputs and gathers at most ``KEYS_PER_TOKEN`` times as many keys.
    2. Any two micro-batches differ by at most the largest piece: when the larger one got its last piece, it was no
       larger than the other, and none ever becomes smaller. Micro-batches of similar size run at the same time on all
       ranks, so the waits of a rank, summed over all of its micro-batches, are at most the largest piece, too.

    And of the chosen one: the slowest rank computes, with its waits, at most 1 + ``SLOWER`` times the longest episode
    and a rank's share of what separate episodes would compute. For the ranks of the plan of single episodes compute no
    more than that in all, and by 2 none has more than their mean and the longest episode. That plan is made unless
    another one keeps this bound.

    Args:
        groups: what is to be placed.
        token_budget: tokens that one micro-batch may compute.
        dp_size: trainer ranks; all of them run the same number of micro-batches, because their collectives need it.

    Returns:
        ``plan[rank][k]``: the k-th micro-batch of that rank: ``(group, episode)``, by their indices in ``groups`` and
        in ``lengths``, ascending. A micro-batch is empty only if there are fewer pieces than micro-batches.

    Raises:
        ValueError: an episode is longer than the budget, or the budget or ``dp_size`` is not positive.
    """
    longest = max((tokens for group in groups for tokens in group.lengths), default=0)
    _check(longest, token_budget, dp_size)
    rounds = _best(groups, longest, token_budget, dp_size)
    return [[_episodes(groups, at_once[rank]) for at_once in rounds] for rank in range(dp_size)]


def _check(longest: int, token_budget: int, dp_size: int) -> None:
    if token_budget < 1 or dp_size < 1:
        raise ValueError(f"token_budget ({token_budget}) and dp_size ({dp_size}) must be positive")
    if longest > token_budget:
        raise ValueError(
            f"an episode of {longest} tokens does not fit the token budget of {token_budget}: "
            f"raise the budget to at least that"
        )


def _best(groups: Sequence[SharingGroup], longest: int, token_budget: int, dp_size: int) -> _Rounds:
    """The plan that is chosen, as :func:`plan_microbatches` says."""
    shared_once = sum(group.computed(range(len(group.order))) for group in groups)
    separately = sum(group.inputs(place) for group in groups for place in range(len(group.order)))
    bound = separately / dp_size + longest
    plans: list[tuple[int, _Rounds]] = []
    least = sys.maxsize
    for parts in _parts(groups):
        # A plan that could only be worse is not finished, if there is one already that keeps the bound.
        rounds = _place(groups, parts, token_budget, dp_size, shared_once, least if least <= bound else sys.maxsize)
        if rounds is None:
            continue
        slowest = sum(at_once[0].computed for at_once in rounds)
        plans.append((slowest, rounds))
        least = min(least, slowest)
        if slowest * dp_size <= (1 + SLOWER) * shared_once:  # no plan can be much better
            return rounds
    return next(rounds for slowest, rounds in plans if slowest <= (1 + SLOWER) * least)


def _parts(groups: Sequence[SharingGroup]) -> Iterator[int]:
    """Into how many pieces to cut each group: 1, 2, 4, ..., and as many as it has episodes."""
    largest, parts = max((len(group.order) for group in groups), default=1), 1
    while parts < largest:
        yield parts
        parts *= 2
    yield largest


def _place(
    groups: Sequence[SharingGroup], parts: int, token_budget: int, dp_size: int, shared_once: int, least: int
) -> _Rounds | None:
    """A plan of groups cut into about ``parts`` pieces: rounds of ``dp_size`` micro-batches, each from the largest.

    None if its slowest rank would compute ``least`` or more: the ranks' mean is that much already.
    """
    key_budget = KEYS_PER_TOKEN * token_budget
    pieces = [piece for index, group in enumerate(groups) for piece in _cut(group, index, parts, token_budget)]
    pieces.sort(key=lambda piece: -piece.computed)
    keys = sum(piece.keys for piece in pieces)
    computed = shared_once
    rounds = max(1, -(-keys // (key_budget * dp_size)))
    while True:
        rounds = max(rounds, -(-computed // (token_budget * dp_size)))
        bins = [_Bin() for _ in range(rounds * dp_size)]
        emptiest = [(0, b) for b in range(len(bins))]
        for piece in pieces:
            target = emptiest[0][1]
            bins[target].add(piece, groups[piece.group])
            heapq.heapreplace(emptiest, (bins[target].computed, target))
        computed = sum(filled.computed for filled in bins)
        if computed >= least * dp_size:
            return None
        if all(filled.computed <= token_budget and filled.keys <= key_budget for filled in bins):
            bins.sort(key=lambda filled: -filled.computed)
            return [bins[start : start + dp_size] for start in range(0, len(bins), dp_size)]
        rounds += 1  # the more there are, the fewer pieces of a group meet, and the more is computed


def _cut(group: SharingGroup, index: int, parts: int, token_budget: int) -> list[_Piece]:
    """A group in runs of neighbours of about equal size, each within both budgets."""
    places, key_budget = range(len(group.order)), KEYS_PER_TOKEN * token_budget
    size = token_budget if parts == 1 else min(token_budget, -(-group.computed(places) // parts))
    pieces: list[_Piece] = []
    for place in places:
        keys = group.inputs(place)
        if pieces and parts < len(places):
            piece, own = pieces[-1], keys - group.shared[place]
            if piece.computed + own <= size and piece.keys + keys <= key_budget:
                piece.places.append(place)
                piece.computed += own
                piece.keys += keys
                continue
        pieces.append(_Piece(index, [place], keys, keys))
    return pieces


def _episodes(groups: Sequence[SharingGroup], of_bin: _Bin) -> list[tuple[int, int]]:
    return sorted((index, groups[index].order[place]) for index, places in of_bin.places.items() for place in places)


# -- which sequences are padded to each other, so that one call attends to them all -----------------------------------


class Padding(NamedTuple):
    """How much of a call may be computed in vain."""

    waste: float
    """Padded pairs of query and key for each real one."""
    free_pairs: int
    """Further pairs, which cost about as much as a call of its own."""

    def allows(self, padded: int, real: int) -> bool:
        """Whether a call may compute ``padded`` pairs, of which ``real`` count."""
        return padded <= (1 + self.waste) * real + self.free_pairs


def runs_of_similar_size(sizes: Sequence[tuple[int, int]], padding: Padding) -> list[range]:
    """Divide sequences among few calls in which little is padding.

    Args:
        sizes: ``(queries, keys)`` of each sequence, by falling keys.
        padding: what a call may compute in vain when all of its sequences have the most queries and keys among them.

    Returns:
        The calls: places in ``sizes`` that follow each other.
    """
    runs: list[range] = []
    most_queries = most_keys = real = 0
    for place, (queries, keys) in enumerate(sizes):
        pairs = queries * keys
        if runs and padding.allows((len(runs[-1]) + 1) * max(most_queries, queries) * most_keys, real + pairs):
            runs[-1] = range(runs[-1].start, place + 1)
            most_queries, real = max(most_queries, queries), real + pairs
        else:
            runs.append(range(place, place + 1))
            most_queries, most_keys, real = queries, keys, pairs
    return runs
