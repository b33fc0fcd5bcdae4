"""The conversations of one play: those of its seats, in each of its branches.

A *branch* is one way in which a play went: a line for each seat. A *line* is a conversation and the turns that it
consists of. A fork goes on from what there was until then; these turns are the same objects in both, which is how a
shared turn is known; after a fork in the middle of a turn, spans say what of it is shared (:class:`TurnSplits`). A
branch that has nothing but what its forks took over is their common beginning. Every other one is a leaf, of which
each line becomes a sequence (``sequences.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from monarch_rl.episode.episode import Turn
from monarch_rl.episode.group_bound import GroupBound
from monarch_rl.episode.sampling import SamplingMasks
from monarch_rl.model.conversation import Conversation
from monarch_rl.tasks.task import GroupFull


@dataclass(eq=False, slots=True)
class Line:
    """One seat's conversation in one branch."""

    conversation: Conversation
    reward_so_far: float
    """The episode sets it by :meth:`set_reward`."""
    number: int = 0
    """Lines of the play that were begun before it."""
    turns: list[Turn] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    """Of each turn."""
    spans: dict[int, Spans] = field(default_factory=dict)
    """By its place, of a turn that has its beginning from another one: where its tokens were drawn."""
    begun: bool = False
    """Whether the last turn is the beginning of one, which the next one goes on with."""
    answers: list[str] = field(default_factory=list)
    """The text of each turn."""
    expert_routes: list[np.ndarray] = field(default_factory=list)
    """What each turn added, where routes are kept."""
    context: list[int] = field(default_factory=list)
    """What the policy was given since its last turn."""
    full: bool = False
    """Whether the context has ended a turn, or left no room for one."""
    began_at: int | None = None
    """The version that drew its first token."""
    drawing: int = 0
    """Tokens that the turn under way may draw; 0 without one."""
    has_outcome: bool = False
    """Whether, since it was begun, the episode said what it is worth so far, or there was no room for its turn."""

    @property
    def tokens(self) -> int:
        """Those that it has, and those that it may have after the turn under way. What a full one was given last, for
        which there was no room, will be in no sequence."""
        return self.length(len(self.turns)) if self.full else len(self.conversation.ids) + self.drawing

    def set_reward(self, reward_so_far: float) -> None:
        """Set what it is worth if a full context ends the episode."""
        self.reward_so_far, self.has_outcome = reward_so_far, True

    def fill(self) -> None:
        """There is no room for its turn."""
        self.full = self.has_outcome = True

    def length(self, turns: int) -> int:
        """Tokens that it had after its first turns."""
        return sum(len(turn.token_ids) for turn in self.turns[:turns])

    @property
    def shared_logprobs(self) -> np.ndarray:
        """float32, of the tokens that the next turn has begun with."""
        n = len(self.conversation.begun)
        return self.turns[-1].logprobs[-n:] if n else np.zeros(0, np.float32)

    def drawn(self, turn: int) -> int:
        """Tokens that were drawn of a turn, 0 for the first."""
        return len(self.conversation.drawn(self.length(turn + 1)))

    def spans_of(self, place: int) -> Spans:
        """Where the tokens of a turn were drawn."""
        return self.spans.get(place) or [Span(self.turns[place], 0, len(self.turns[place].token_ids))]

    @property
    def all_spans(self) -> list[Spans]:
        """Those of all turns."""
        return [self.spans_of(place) for place in range(len(self.turns))]

    def fork(self, number: int, turns: int | None, tokens: int | None = None) -> Line:
        """One that goes on from here; or from what it was after its first ``turns`` turns, or after the first
        ``tokens`` drawn tokens of the last of these."""
        if turns is None:
            fork = Line(self.conversation.fork(), self.reward_so_far, number, list(self.turns))
            fork.context, fork.full, fork.begun = list(self.context), self.full, self.begun
        else:
            conversation = self.conversation.fork(self.length(turns), tokens)
            fork = Line(conversation, self.reward_so_far, number, self.turns[:turns])
        shared = len(fork.turns)
        fork.finish_reasons = self.finish_reasons[:shared]
        fork.answers = self.answers[:shared]
        fork.spans = {place: spans for place, spans in self.spans.items() if place < shared}
        fork.began_at = self.began_at
        fork.expert_routes = self.expert_routes[:shared]
        if tokens is not None:
            fork._begin(self.spans_of(shared - 1), self.drawn(shared - 1) - tokens)
        return fork

    def _begin(self, spans: Spans, left_out: int) -> None:
        """Keep all but so many tokens of the last turn, which is still to be drawn to its end."""
        last = len(self.turns) - 1
        n = len(self.turns[last].token_ids) - left_out
        self.turns[last], self.spans[last] = cut(self.turns[last], 0, n), beginning(spans, n)
        self.finish_reasons[last], self.answers[last], self.begun = "length", "", True
        if self.expert_routes:
            self.expert_routes[last] = self.expert_routes[last][:-left_out]

    def go_on(self, turn: Turn) -> Turn:
        """The beginning of a turn, and what was drawn after it, as one; the last turn is taken back."""
        begun, last = self.turns.pop(), len(self.turns)
        whole, n = joined(begun, turn), len(begun.token_ids)
        self.spans[last] = [*self.spans[last], Span(whole, n, len(whole.token_ids))]
        self.finish_reasons.pop()
        self.answers.pop()
        self.begun = False
        if self.expert_routes:
            self.expert_routes[last:] = [np.concatenate(self.expert_routes[last:])]
        return whole


@dataclass(eq=False, slots=True)
class Branch:
    """One way in which a play went."""

    lines: dict[str, Line]
    """By the name of the seat; "" is the policy's own."""
    turns: int = 0
    """Drawn so far, by all seats."""
    forked_at: int = -1
    """How many of them the longest of its forks took over; -1 without a fork."""
    origin: Branch | None = None
    """What it was forked from."""
    taken_over: int = 0
    """The turns that it began with."""

    @property
    def is_empty(self) -> bool:
        """Whether it is a fork that has not come to anything of its own."""
        has_outcome = any(line.has_outcome for line in self.lines.values())
        return self.origin is not None and self.turns == self.taken_over and not has_outcome

    @property
    def is_leaf(self) -> bool:
        """Whether it has turns that its forks have not, or no forks."""
        return self.turns > self.forked_at

    @property
    def is_drawing(self) -> bool:
        """Whether a turn is under way, after which it is a leaf."""
        return any(line.drawing for line in self.lines.values())

    @property
    def seats(self) -> dict[str, Line]:
        """The lines that were asked for, have turns or draw one; the policy's own, if there are no others."""
        used = {name: line for name, line in self.lines.items() if name or line.turns or line.drawing}
        return used or self.lines


class Branches:
    """All branches of one play.

    Args:
        line: the policy's own.
        share: what the play may become.
    """

    def __init__(self, line: Line, share: GroupBound) -> None:
        self.all = [Branch({"": line})]
        """In the order in which they were begun."""
        self.share = share
        self._lines = 1

    @property
    def leaves(self) -> list[Branch]:
        """Those that become sequences."""
        return [branch for branch in self.all if branch.is_leaf]

    @property
    def spans(self) -> Iterable[Span]:
        """Of all turns, each once."""
        lines = (line for branch in self.all for line in branch.lines.values())
        spans = (span for line in lines for of_turn in line.all_spans for span in of_turn)
        longest = {(id(span.turn), span.start): span for span in sorted(spans, key=lambda span: span.end)}
        return longest.values()

    def seat(self, branch: Branch, name: str) -> Line:
        """The line of a seat, begun if there is none. Raises GroupFull."""
        if name not in branch.lines:
            before, own = branch.lines, branch.lines[""]
            branch.lines = before | {
                name: Line(Conversation(own.conversation.template), own.reward_so_far, self._lines)
            }
            try:
                self._check(f"seat {name!r}")
            except GroupFull:
                branch.lines = before
                raise
            self._lines += 1
        return branch.lines[name]

    def fork(self, branch: Branch, turns: int | None = None, tokens: int | None = None) -> Branch:
        """A branch that goes on from ``branch``; or from what it was after its first ``turns`` turns, or in the middle
        of the last of these.

        Raises:
            GroupFull: there is no room for it.
            RuntimeError: a turn is under way.
            ValueError: there is no such turn or token, or there are several seats.
        """
        if tokens is not None and turns is None:
            turns = branch.turns
        if branch.is_drawing:
            raise RuntimeError("a turn is under way: await policy.reply(...) before policy.fork()")
        if turns is not None and (len(branch.seats) > 1 or not 1 <= turns <= branch.turns):
            raise ValueError(
                f"fork(turns={turns}) of a play of {len(branch.seats)} seats and {branch.turns} turns: give one of its "
                "turns, where it has one seat"
            )
        if tokens is not None and turns is not None:
            (seat,) = branch.seats.values()
            drawn = seat.drawn(turns - 1)
            if not 1 <= tokens < drawn:
                raise ValueError(f"fork(tokens={tokens}) of a turn of {drawn} tokens: give 1 to {drawn - 1}")
        lines = {
            name: line.fork(self._lines + place, turns, tokens) if line.turns else line.fork(self._lines + place, None)
            for place, (name, line) in enumerate(branch.lines.items())
        }
        shared = branch.turns if turns is None else turns - (tokens is not None)
        fork = Branch(lines, shared, origin=branch, taken_over=shared)
        forked_at, branch.forked_at = branch.forked_at, max(branch.forked_at, fork.turns)
        self.all.append(fork)
        try:
            self._check("another branch")
        except GroupFull:
            self.all.pop()
            branch.forked_at = forked_at
            raise
        self._lines += len(lines)
        return fork

    def drop_empty(self) -> None:
        """Take back forks that were made and not played, before which the episode has ended."""
        for branch in reversed(self.all):  # forks stand behind what they were forked from
            if branch.is_empty and branch.forked_at < 0:
                self.all.remove(branch)
                shared = [fork.taken_over for fork in self.all if fork.origin is branch.origin]
                branch.origin.forked_at = max(shared, default=-1)  # type: ignore[union-attr]

    def room(self, line: Line) -> int | None:
        """Tokens that the sequences may still grow by if ``line`` draws; None is any number.

        Raises GroupFull if it would become a sequence for which there is no room: what was forked, beside its forks, or
        the policy's own line, beside its seats.
        """
        if self.share.is_unbounded:
            return None
        before, line.drawing = len(self._sequences()), 1  # then it is a sequence, whatever it was
        try:
            if len(self._sequences()) > before:
                self._check("the policy's own turns, beside its forks or seats")
            most = self.share.max_tokens
            return None if most is None else most + line.drawing - sum(line.tokens for line in self._sequences())
        finally:
            line.drawing = 0

    def _sequences(self) -> list[Line]:
        """Those that there are once every turn under way is drawn."""
        growing = (branch for branch in self.all if branch.is_leaf or branch.is_drawing)
        return [line for branch in growing for line in branch.seats.values()]

    def _check(self, what: str) -> None:
        """Raise GroupFull if the play would become too much, with ``what`` in it."""
        sequences = self._sequences()
        excess = self.share.excess(len(sequences), sum(line.tokens for line in sequences))
        if excess is not None:
            raise GroupFull(
                f"no room for {what}: the episode would have {excess}, its share of what a group may have "
                "(--rollout.max-sequences, --rollout.max-tokens)"
            )


# -- turn splits: what turns have in common where a branch began in the middle of one ---------------------------------
# A turn that goes on from the beginning of another one holds all its tokens. Its *spans* say which of them were drawn
# in which turn. In the sequences that a play becomes, turns are cut at the bounds of all spans, and equal *pieces*
# are one turn: so what is shared is whole turns again, which is what a :class:`~monarch_rl.episode.episode.Fork`
# counts.


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
    kept = [turn.sampling_masks for turn in (begun, rest) if turn.sampling_masks is not None]
    return Turn(
        np.concatenate([begun.token_ids, rest.token_ids]),
        np.concatenate([begun.logprobs, rest.logprobs]),
        np.concatenate([begun.policy_versions, rest.policy_versions]),
        np.concatenate([begun.trainable, rest.trainable]),
        SamplingMasks.join(kept) if kept else None,
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
        None if turn.sampling_masks is None else turn.sampling_masks[start:end],
        turn.reward if end == len(turn.token_ids) else None,
    )


class TurnSplits:
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
