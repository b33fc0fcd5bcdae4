"""Packing: which episodes go into which micro-batch of which trainer rank, and which sequences are padded together.

It knows only lengths. ``trainer/batch.py`` builds the tensors of a micro-batch from the episodes that are chosen here.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

KEYS_PER_TOKEN = 4
"""Keys that a micro-batch may gather, as a multiple of its tokens. Each episode's queries read the keys and
values of its whole prefix, so an episode with a long shared prefix gathers far more keys than it computes. Without this
bound the memory of a micro-batch of many short answers to one long prompt would be unbounded. How much four times as
many keys and values add to what a layer saves for the backward pass depends on the number of key heads: 6 to 15 % with
grouped-query attention, a quarter if each head has its own keys (Llama-2-7B), half if the keys of 128 heads are
computed from a latent vector (DeepSeek-V3): ``python benchmarks/key_memory.py``."""

SLOWER = 0.05
"""Share by which the slowest rank may be slower than in another plan that computes more in total. A choice: values
between 0 and 0.1 differ only if a rank has one or two groups, and then by 4 % (``python benchmarks/slower.py``)."""


class SharingGroup(NamedTuple):
    """The lengths of a group's episodes, and their shared prefixes: ``PrefixTree`` of ``episode/prefixes.py``."""

    lengths: Sequence[int]
    """Tokens of each episode. It has one input fewer: the last token is only ever a target."""
    order: Sequence[int]
    """All episodes, in an order in which any two share the minimum of what the neighbours between them share."""
    shared: Sequence[int]
    """Inputs that each episode, in this order, shares with the one before it; 0 for the first."""

    def inputs(self, place: int) -> int:
        """Inputs of the episode at a place of ``order``. Also the number of keys that its queries read, shared ones
        included."""
        return max(self.lengths[self.order[place]] - 1, 0)

    def computed(self, places: Sequence[int]) -> int:
        """Inputs that a micro-batch of some episodes, given by ascending places in ``order``, computes."""
        inputs = sum(map(self.inputs, places))
        for before, place in zip(places[:-1], places[1:], strict=True):
            inputs -= self.shared[place] if place == before + 1 else min(self.shared[before + 1 : place + 1])
        return inputs


def separate(lengths: Sequence[int]) -> list[SharingGroup]:
    """Groups of one episode each, which share nothing."""
    return [SharingGroup([tokens], [0], [0]) for tokens in lengths]


@dataclass(slots=True)
class _Piece:
    """Neighbouring episodes of one group that go into the same micro-batch."""

    group: int
    places: list[int]
    computed: int
    keys: int


@dataclass(slots=True)
class _Bin:
    """A micro-batch that is being filled."""

    places: dict[int, list[int]] = field(default_factory=dict)
    """Places of episodes by group, ascending."""
    computed: int = 0
    keys: int = 0

    def add(self, piece: _Piece, group: SharingGroup) -> None:
        here = self.places.get(piece.group)
        if here is None:
            self.places[piece.group] = piece.places
            self.computed += piece.computed
        else:  # pieces of one group in the same micro-batch share prefixes
            together = sorted(here + piece.places)
            self.places[piece.group] = together
            self.computed += group.computed(together) - group.computed(here)
        self.keys += piece.keys


_Rounds = list[list[_Bin]]
"""Rounds of micro-batches that run at the same time, one per rank, the largest first."""


def plan_microbatches(
    groups: Sequence[SharingGroup], tokens_per_microbatch: int, dp_size: int
) -> list[list[list[tuple[int, int]]]]:
    """Distribute episodes over few micro-batches, within the limit, balanced between ranks, with little computed
    twice.

    A micro-batch computes a prefix that its episodes share once, but each micro-batch with such an episode computes it.
    So whole groups should stay together, but small pieces are easier to balance. Several plans are made, with pieces of
    whole groups, halves, quarters, ..., and single episodes. Chosen is the plan of the largest pieces, which computes
    least twice, whose slowest rank computes at most ``SLOWER`` more than in any other plan. Planning stops at the first
    plan that is within ``SLOWER`` of a lower bound for all plans.

    In each plan a piece is a span of neighbours in the group's prefix tree, split further if it exceeds the limit.
    Pieces are placed in few micro-batches, from the largest to the smallest, each into the micro-batch
    that computes least so far (LPT; Graham, 1969).

    Every plan satisfies, in inputs computed:

    1. A micro-batch computes at most ``tokens_per_microbatch`` inputs and gathers at most ``KEYS_PER_TOKEN`` times as
       many keys.
    2. Any two micro-batches differ by at most the largest piece: when the larger one got its last piece, it was no
       larger than the other, and none ever becomes smaller. Micro-batches of similar size run at the same time on all
       ranks, so the waits of a rank, summed over all of its micro-batches, are at most the largest piece, too.

    In the chosen plan the slowest rank computes, including its waits, at most 1 + ``SLOWER`` times the sum of the
    longest episode and a rank's share of what separate episodes would compute. Proof: the plan of single episodes
    computes no more than separate episodes in total, and by 2 none of its ranks has more than the mean plus the longest
    episode. That plan is made unless another one satisfies this bound.

    Args:
        groups: groups of episodes to place.
        tokens_per_microbatch: most tokens that one micro-batch may compute.
        dp_size: trainer ranks. All of them run the same number of micro-batches, because their collectives need it.

    Returns:
        ``plan[rank][k]``: the k-th micro-batch of a rank as ``(group, episode)`` pairs, indices into ``groups`` and
        ``lengths``, ascending. A micro-batch is empty only if there are fewer pieces than micro-batches.

    Raises:
        ValueError: an episode is longer than ``tokens_per_microbatch``, or that or ``dp_size`` is not positive.
    """
    longest = max((tokens for group in groups for tokens in group.lengths), default=0)
    _check(longest, tokens_per_microbatch, dp_size)
    rounds = _best(groups, longest, tokens_per_microbatch, dp_size)
    return [[_episodes(groups, at_once[rank]) for at_once in rounds] for rank in range(dp_size)]


def _check(longest: int, tokens_per_microbatch: int, dp_size: int) -> None:
    if tokens_per_microbatch < 1 or dp_size < 1:
        raise ValueError(f"tokens_per_microbatch ({tokens_per_microbatch}) and dp_size ({dp_size}) must be positive")
    if longest > tokens_per_microbatch:
        raise ValueError(
            f"an episode of {longest} tokens is longer than trainer.tokens-per-microbatch {tokens_per_microbatch}: "
            f"raise it to at least {longest}"
        )


def _best(groups: Sequence[SharingGroup], longest: int, tokens_per_microbatch: int, dp_size: int) -> _Rounds:
    """The chosen plan, as described in :func:`plan_microbatches`."""
    min_computed = sum(group.computed(range(len(group.order))) for group in groups)
    separately = sum(group.inputs(place) for group in groups for place in range(len(group.order)))
    bound = separately / dp_size + longest
    plans: list[tuple[int, _Rounds]] = []
    fastest = sys.maxsize
    """Inputs that the slowest rank computes, waits included, in the fastest plan so far."""
    for parts in _parts(groups):
        # Once a plan satisfies the bound, plans that could only be slower are abandoned.
        abandon_at = fastest if fastest <= bound else sys.maxsize
        rounds = _plan(groups, parts, tokens_per_microbatch, dp_size, min_computed, abandon_at)
        if rounds is None:
            continue
        slowest = sum(at_once[0].computed for at_once in rounds)
        plans.append((slowest, rounds))
        fastest = min(fastest, slowest)
        if slowest * dp_size <= (1 + SLOWER) * min_computed:  # no plan can be much faster
            return rounds
    return next(rounds for slowest, rounds in plans if slowest <= (1 + SLOWER) * fastest)


def _parts(groups: Sequence[SharingGroup]) -> Iterator[int]:
    """Numbers of pieces to try per group: 1, 2, 4, ..., and the size of the largest group."""
    largest, parts = max((len(group.order) for group in groups), default=1), 1
    while parts < largest:
        yield parts
        parts *= 2
    yield largest


def _plan(
    groups: Sequence[SharingGroup],
    parts: int,
    tokens_per_microbatch: int,
    dp_size: int,
    min_computed: int,
    abandon_at: int,
) -> _Rounds | None:
    """A plan of groups split into about ``parts`` pieces each, in few rounds: more are tried until the pieces fit.

    Args:
        min_computed: inputs that every plan computes at least: all of them, each shared prefix once.
        abandon_at: inputs per rank at which the plan is abandoned, because another one is faster.

    Returns:
        Rounds of ``dp_size`` micro-batches, the largest first; None if the plan was abandoned.
    """
    keys_per_microbatch = KEYS_PER_TOKEN * tokens_per_microbatch
    pieces = [
        piece for index, group in enumerate(groups) for piece in _split(group, index, parts, tokens_per_microbatch)
    ]
    pieces.sort(key=lambda piece: -piece.computed)
    keys = sum(piece.keys for piece in pieces)
    rounds = max(
        1,
        _divide_up(min_computed, tokens_per_microbatch * dp_size),
        _divide_up(keys, keys_per_microbatch * dp_size),
    )
    while True:
        bins = _place(pieces, groups, rounds * dp_size)
        computed = sum(filled.computed for filled in bins)
        if computed >= abandon_at * dp_size:  # the slowest rank computes at least the mean over the ranks
            return None
        if all(filled.computed <= tokens_per_microbatch and filled.keys <= keys_per_microbatch for filled in bins):
            bins.sort(key=lambda filled: -filled.computed)
            return [bins[start : start + dp_size] for start in range(0, len(bins), dp_size)]
        # With more micro-batches, fewer pieces of a group are usually in the same one, so more is computed.
        rounds = max(rounds + 1, _divide_up(computed, tokens_per_microbatch * dp_size))


def _place(pieces: Sequence[_Piece], groups: Sequence[SharingGroup], num_bins: int) -> list[_Bin]:
    """Put each piece, given from the largest to the smallest, into the micro-batch that computes least so far.

    Micro-batches are balanced only by the inputs that they compute, to which the time of all layers but attention is
    proportional. Keys are only bounded, for the sake of memory: what attention to them costs is left out, because it
    differs between models and kernels. :func:`_plan` checks both limits afterwards.
    """
    bins = [_Bin() for _ in range(num_bins)]
    by_computed = [(0, index) for index in range(num_bins)]
    """A heap of ``(inputs computed, index of the micro-batch)``."""
    for piece in pieces:
        target = by_computed[0][1]
        bins[target].add(piece, groups[piece.group])
        heapq.heapreplace(by_computed, (bins[target].computed, target))
    return bins


def _divide_up(total: int, size: int) -> int:
    return -(-total // size)


def _split(group: SharingGroup, index: int, parts: int, tokens_per_microbatch: int) -> list[_Piece]:
    """Split a group into spans of neighbours of about equal size, each within both limits."""
    places, keys_per_microbatch = range(len(group.order)), KEYS_PER_TOKEN * tokens_per_microbatch
    size = tokens_per_microbatch
    if parts > 1:
        size = min(size, _divide_up(group.computed(places), parts))
    pieces: list[_Piece] = []
    for place in places:
        keys = group.inputs(place)
        if pieces and parts < len(places):
            piece, own = pieces[-1], keys - group.shared[place]
            if piece.computed + own <= size and piece.keys + keys <= keys_per_microbatch:
                piece.places.append(place)
                piece.computed += own
                piece.keys += keys
                continue
        pieces.append(_Piece(index, [place], keys, keys))
    return pieces


def _episodes(groups: Sequence[SharingGroup], of_bin: _Bin) -> list[tuple[int, int]]:
    return sorted((index, groups[index].order[place]) for index, places in of_bin.places.items() for place in places)


# -- which sequences to pad to a common size and compute in one attention call ----------------------------------------


class Padding(NamedTuple):
    """How much of a call may be padding."""

    waste: float
    """Padding pairs of query and key per real pair."""
    free_pairs: int
    """Further padding pairs: as many as cost about as much as a separate call."""

    def allows(self, padded: int, real: int) -> bool:
        """Whether a call may compute ``padded`` pairs in total, of which ``real`` are needed."""
        return padded <= (1 + self.waste) * real + self.free_pairs


def spans_of_similar_size(sizes: Sequence[tuple[int, int]], padding: Padding) -> list[range]:
    """Divide sequences among few calls with little padding.

    Args:
        sizes: ``(queries, keys)`` of each sequence, by descending keys.
        padding: how much of a call may be padding if all of its sequences are padded to its most queries and keys.

    Returns:
        The calls, as consecutive ranges of indices into ``sizes``.
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
