"""What turns have in common where a branch began in the middle of one.

A turn that goes on from the beginning of another one holds all its tokens. Its *spans* say which of them were drawn in
which turn. In the sequences that a play becomes, turns are cut at the bounds of all spans, and equal *pieces* are one
turn: so what is shared is whole turns again, which is what a :class:`~monarch_rl.episode.episode.Fork` counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from monarch_rl.episode.episode import Turn
from monarch_rl.episode.sampling import KeptSets


class Span(NamedTuple):
    """Tokens of a turn, which stand at the same places in each turn that has them."""

    turn: Turn
    """In which they were drawn."""
    start: int
    end: int


Spans = list[Span]
"""Of all tokens of a turn, in order."""


def beginning(spans: Spans, tokens: int) -> Spans:
    """The spans of the first tokens of a turn."""
    return [span._replace(end=min(span.end, tokens)) for span in spans if span.start < tokens]


def joined(begun: Turn, rest: Turn) -> Turn:
    """One turn of both."""
    kept = [turn.kept_sets for turn in (begun, rest) if turn.kept_sets is not None]
    return Turn(
        np.concatenate([begun.token_ids, rest.token_ids]),
        np.concatenate([begun.logprobs, rest.logprobs]),
        np.concatenate([begun.policy_versions, rest.policy_versions]),
        np.concatenate([begun.trainable, rest.trainable]),
        KeptSets.join(kept) if kept else None,
    )


def cut(turn: Turn, start: int, end: int) -> Turn:
    """Some of its tokens as a turn, which has its reward if it has its end."""
    if (start, end) == (0, len(turn.token_ids)):
        return turn
    return Turn(
        turn.token_ids[start:end],
        turn.logprobs[start:end],
        turn.policy_versions[start:end],
        turn.trainable[start:end],
        None if turn.kept_sets is None else turn.kept_sets[start:end],
        turn.reward if end == len(turn.token_ids) else None,
    )


class Pieces:
    """Cuts the turns of a play.

    Args:
        turns: the spans of each.
    """

    def __init__(self, turns: Iterable[Spans]) -> None:
        self._bounds: dict[int, set[int]] = {}
        """Places at which a turn is cut, by its id."""
        for spans in turns:
            for span in spans:
                self._bounds.setdefault(id(span.turn), set()).update((span.start, span.end))
        self._made: dict[tuple[int, int, int], Turn] = {}

    def of(self, turns: Sequence[Spans]) -> list[Turn]:
        """The pieces of some turns, in order. Those of equal tokens are the same object."""
        return [piece for spans in turns for span in spans for piece in self._of_span(span)]

    def _of_span(self, span: Span) -> list[Turn]:
        bounds = sorted(bound for bound in self._bounds[id(span.turn)] if span.start <= bound <= span.end)
        return [self._piece(span.turn, start, end) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]

    def _piece(self, turn: Turn, start: int, end: int) -> Turn:
        key = id(turn), start, end
        if key not in self._made:
            self._made[key] = cut(turn, start, end)
        return self._made[key]
