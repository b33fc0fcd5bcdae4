"""The tree of conversations of one rollout: one conversation per seat, in each branch.

A *branch* is one course of the rollout and has a :class:`Line` per seat. A line is one conversation with its turns. A
fork starts with the history of its origin: both hold the same Turn objects, which is how shared turns are recognised.
After a fork within a turn, spans record which tokens are shared (:class:`TurnSplits`). A branch whose turns were all
taken over by its forks is only their common prefix. Every other branch is a leaf, and each of its lines becomes a
sequence (``sequences.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from monarch_rl.episode.episode import Turn
from monarch_rl.episode.group_bound import GroupBound
from monarch_rl.episode.sampling import SamplingMasks
from monarch_rl.errors import GroupFull
from monarch_rl.model.conversation import Conversation


@dataclass(eq=False, slots=True)
class Line:
    """One seat's conversation in one branch."""

    conversation: Conversation
    reward_so_far: float
    """Reward if a full context ends the episode; set through :meth:`set_reward`."""
    number: int = 0
    """Index of the line in the rollout, in order of creation."""
    turns: list[Turn] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    """Finish reason per turn."""
    spans: dict[int, Spans] = field(default_factory=dict)
    """Spans of each turn that continues a part of another turn, by turn index."""
    begun: bool = False
    """Whether the last turn is only the beginning of a turn, which the next completion continues."""
    answers: list[str] = field(default_factory=list)
    """Text per turn."""
    expert_routes: list[np.ndarray] = field(default_factory=list)
    """Rows that each turn added, if expert routes are kept."""
    context: list[int] = field(default_factory=list)
    """Tokens given to the policy since its last turn."""
    full: str = ""
    """Why it cannot have another turn: ``context``: a token limit ended a turn, or left no room for one; ``turns``:
    ``rollout.max_turns``; empty if it can."""
    first_version: int | None = None
    """Policy version that sampled the first token."""
    pending_tokens: int = 0
    """Maximum number of tokens of the turn being generated; 0 if there is none."""
    has_outcome: bool = False
    """Whether, since this line was created, the episode set its reward so far or there was no room for its turn."""

    @property
    def tokens(self) -> int:
        """Maximum number of tokens after the turn being generated. The last context of a full line is not counted:
        there was no room for a turn after it, so no sequence contains it."""
        return self.length(len(self.turns)) if self.full else len(self.conversation.ids) + self.pending_tokens

    def set_reward(self, reward_so_far: float) -> None:
        """Set the reward for the case that a full context ends the episode."""
        self.reward_so_far, self.has_outcome = reward_so_far, True

    def mark_full(self, why: str) -> None:
        """Record that there is no room for its next turn."""
        self.full, self.has_outcome = why, True

    def length(self, turns: int) -> int:
        """Number of tokens of the first ``turns`` turns."""
        return sum(len(turn.token_ids) for turn in self.turns[:turns])

    @property
    def shared_logprobs(self) -> np.ndarray:
        """float32: log-probs of the sampled tokens with which the next turn begins."""
        n = len(self.conversation.begun)
        return self.turns[-1].logprobs[-n:] if n else np.zeros(0, np.float32)

    def turn_length(self, turn: int) -> int:
        """Number of sampled tokens of a turn; turns count from 0."""
        return len(self.conversation.sampled(self.length(turn + 1)))

    def spans_of(self, turn: int) -> Spans:
        """The spans of a turn."""
        return self.spans.get(turn) or [Span(self.turns[turn], 0, len(self.turns[turn].token_ids))]

    @property
    def all_spans(self) -> list[Spans]:
        """The spans of each turn."""
        return [self.spans_of(turn) for turn in range(len(self.turns))]

    def fork(self, number: int, turns: int | None, tokens: int | None = None) -> Line:
        """A line that continues from the current state, from the end of the first ``turns`` turns, or from the first
        ``tokens`` sampled tokens of the last of these turns."""
        if turns is None:
            fork = Line(self.conversation.fork(), self.reward_so_far, number, list(self.turns))
            fork.context, fork.full, fork.begun = list(self.context), self.full, self.begun
        else:
            conversation = self.conversation.fork(self.length(turns), tokens)
            fork = Line(conversation, self.reward_so_far, number, self.turns[:turns])
        shared = len(fork.turns)
        fork.finish_reasons = self.finish_reasons[:shared]
        fork.answers = self.answers[:shared]
        fork.spans = {turn: spans for turn, spans in self.spans.items() if turn < shared}
        fork.first_version = self.first_version
        fork.expert_routes = self.expert_routes[:shared]
        if tokens is not None:
            fork._shorten_last_turn(self.spans_of(shared - 1), self.turn_length(shared - 1) - tokens)
        return fork

    def _shorten_last_turn(self, spans: Spans, left_out: int) -> None:
        """Remove the last ``left_out`` tokens of the last turn, which the next completion then continues."""
        last = len(self.turns) - 1
        n = len(self.turns[last].token_ids) - left_out
        self.turns[last], self.spans[last] = slice_turn(self.turns[last], 0, n), first_spans(spans, n)
        self.finish_reasons[last], self.answers[last], self.begun = "length", "", True
        if self.expert_routes:
            self.expert_routes[last] = self.expert_routes[last][:-left_out]

    def complete_partial_turn(self, turn: Turn) -> Turn:
        """Merge the unfinished last turn, which is removed from the line, with the completion that continues it."""
        begun, last = self.turns.pop(), len(self.turns)
        whole, n = merge_turns(begun, turn), len(begun.token_ids)
        self.spans[last] = [*self.spans[last], Span(whole, n, len(whole.token_ids))]
        self.finish_reasons.pop()
        self.answers.pop()
        self.begun = False
        if self.expert_routes:
            self.expert_routes[last:] = [np.concatenate(self.expert_routes[last:])]
        return whole


@dataclass(eq=False, slots=True)
class Branch:
    """One course of the rollout."""

    lines: dict[str, Line]
    """Line of each seat, by name; "" is the policy itself."""
    turns: int = 0
    """Turns of all seats so far."""
    forked_at: int = -1
    """Number of turns shared with the fork that took over the most; -1 without a fork."""
    origin: Branch | None = None
    """Branch that this one was forked from."""
    inherited_turns: int = 0
    """Number of turns that the fork started with."""

    @property
    def is_empty(self) -> bool:
        """Whether it is a fork without a turn or an outcome of its own."""
        has_outcome = any(line.has_outcome for line in self.lines.values())
        return self.origin is not None and self.turns == self.inherited_turns and not has_outcome

    @property
    def is_leaf(self) -> bool:
        """Whether it has turns that no fork shares, or no forks."""
        return self.turns > self.forked_at

    @property
    def is_generating(self) -> bool:
        """Whether a turn is being generated, which makes the branch a leaf."""
        return any(line.pending_tokens for line in self.lines.values())

    @property
    def seats(self) -> dict[str, Line]:
        """Lines that were requested by name, have turns or are generating one; if there are none, the policy's own
        line."""
        used = {name: line for name, line in self.lines.items() if name or line.turns or line.pending_tokens}
        return used or self.lines


class Branches:
    """All branches of one rollout.

    Args:
        line: the policy's own line.
        share: bound on the sequences and tokens of the rollout.
    """

    def __init__(self, line: Line, share: GroupBound) -> None:
        self.all = [Branch({"": line})]
        """Branches in order of creation."""
        self.share = share
        self._lines = 1

    @property
    def leaves(self) -> list[Branch]:
        """Branches that become sequences."""
        return [branch for branch in self.all if branch.is_leaf]

    @property
    def spans(self) -> Iterable[Span]:
        """Spans of all turns, each once."""
        lines = (line for branch in self.all for line in branch.lines.values())
        spans = (span for line in lines for of_turn in line.all_spans for span in of_turn)
        longest = {(id(span.turn), span.start): span for span in sorted(spans, key=lambda span: span.end)}
        return longest.values()

    def seat(self, branch: Branch, name: str) -> Line:
        """The line of a seat, created on first use. Raises GroupFull."""
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
        """A branch that continues from the state of ``branch`` now, after its first ``turns`` turns, or within the last
        of these.

        Raises:
            GroupFull: there is no room for another branch.
            RuntimeError: a turn is being generated.
            ValueError: there is no such turn or token, or there are several seats.
        """
        if tokens is not None and turns is None:
            turns = branch.turns
        if branch.is_generating:
            raise RuntimeError("a turn is being generated: await policy.reply(...) before policy.fork()")
        if turns is not None and (len(branch.seats) > 1 or not 1 <= turns <= branch.turns):
            raise ValueError(
                f"fork(turns={turns}): turns must be 1 to {branch.turns}, the turns so far, and the branch must have "
                f"one seat; it has {len(branch.seats)}"
            )
        if tokens is not None and turns is not None:
            (seat,) = branch.seats.values()
            sampled = seat.turn_length(turns - 1)
            if not 1 <= tokens < sampled:
                raise ValueError(
                    f"fork(tokens={tokens}) of a turn of {sampled} sampled tokens: give 1 to {sampled - 1}"
                )
        lines = {
            name: line.fork(self._lines + place, turns, tokens) if line.turns else line.fork(self._lines + place, None)
            for place, (name, line) in enumerate(branch.lines.items())
        }
        shared = branch.turns if turns is None else turns - (tokens is not None)
        fork = Branch(lines, shared, origin=branch, inherited_turns=shared)
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
        """Remove forks that were not used before the episode ended."""
        for branch in reversed(self.all):  # forks come after their origin
            if branch.is_empty and branch.forked_at < 0:
                self.all.remove(branch)
                shared = [fork.inherited_turns for fork in self.all if fork.origin is branch.origin]
                branch.origin.forked_at = max(shared, default=-1)  # type: ignore[union-attr]

    def room(self, line: Line) -> int | None:
        """Number of tokens by which the sequences may still grow if ``line`` generates a turn; None means no limit.

        Raises:
            GroupFull: the turn would turn ``line`` into a further sequence for which there is no room: a forked branch
                next to its forks, or the policy's own line next to its seats.
        """
        if self.share.is_unbounded:
            return None
        before, line.pending_tokens = len(self._sequences()), 1  # counts the line as a sequence in any case
        try:
            if len(self._sequences()) > before:
                self._check("the policy's own turns next to its forks or seats")
            most = self.share.max_tokens
            return None if most is None else most + line.pending_tokens - sum(line.tokens for line in self._sequences())
        finally:
            line.pending_tokens = 0

    def _sequences(self) -> list[Line]:
        """Lines that are sequences once every pending turn has been generated."""
        growing = (branch for branch in self.all if branch.is_leaf or branch.is_generating)
        return [line for branch in growing for line in branch.seats.values()]

    def _check(self, what: str) -> None:
        """Raise GroupFull if the rollout, including ``what``, exceeds its bound."""
        sequences = self._sequences()
        excess = self.share.excess(len(sequences), sum(line.tokens for line in sequences))
        if excess is not None:
            raise GroupFull(
                f"no room for {what}: the episode would have {excess}, which is its share of the limits of a group "
                "(RolloutSettings.max_sequences, max_tokens)"
            )


# -- turn splits: shared parts of turns, where a branch was forked within a turn --------------------------------------
# A turn that continues the beginning of another turn holds all tokens of both. Its *spans* record in which turn each
# token was sampled. In the sequences of a rollout, turns are split at the bounds of all spans, and equal splits are one
# Turn object. Shared tokens are therefore whole turns again, as :class:`~monarch_rl.episode.episode.Fork` counts them.


class Span(NamedTuple):
    """Consecutive tokens of a turn; they have the same positions in every turn that contains them."""

    turn: Turn
    """Turn in which the tokens were sampled."""
    start: int
    end: int


Spans = list[Span]
"""Spans that cover all tokens of a turn, in order."""


def first_spans(spans: Spans, tokens: int) -> Spans:
    """Spans of the first ``tokens`` tokens of a turn."""
    return [span._replace(end=min(span.end, tokens)) for span in spans if span.start < tokens]


def merge_turns(begun: Turn, rest: Turn) -> Turn:
    """Concatenate the beginning and the rest of a turn."""
    masks = [turn.sampling_masks for turn in (begun, rest) if turn.sampling_masks is not None]
    return Turn(
        np.concatenate([begun.token_ids, rest.token_ids]),
        np.concatenate([begun.logprobs, rest.logprobs]),
        np.concatenate([begun.policy_versions, rest.policy_versions]),
        np.concatenate([begun.trainable, rest.trainable]),
        SamplingMasks.join(masks) if masks else None,
        seconds=begun.seconds + rest.seconds,
        replica=rest.replica,
    )


def slice_turn(turn: Turn, start: int, end: int) -> Turn:
    """Tokens ``start`` to ``end`` as a turn. It keeps reward and seconds only if it includes the last token."""
    if (start, end) == (0, len(turn.token_ids)):
        return turn
    return Turn(
        turn.token_ids[start:end],
        turn.logprobs[start:end],
        turn.policy_versions[start:end],
        turn.trainable[start:end],
        None if turn.sampling_masks is None else turn.sampling_masks[start:end],
        turn.reward if end == len(turn.token_ids) else None,
        seconds=turn.seconds if end == len(turn.token_ids) else 0.0,
        replica=turn.replica,
    )


class TurnSplits:
    """Splits the turns of a rollout at the bounds of their spans.

    Args:
        turns: spans of each turn.
    """

    def __init__(self, turns: Iterable[Spans]) -> None:
        self._bounds: dict[int, set[int]] = {}
        """Token positions at which a turn is split, by the id of the turn."""
        for spans in turns:
            for span in spans:
                self._bounds.setdefault(id(span.turn), set()).update((span.start, span.end))
        self._made: dict[tuple[int, int, int], Turn] = {}

    def of(self, turns: Sequence[Spans]) -> list[Turn]:
        """Splits of some turns, in order. Splits with the same tokens are the same object."""
        return [split for spans in turns for span in spans for split in self._of_span(span)]

    def _of_span(self, span: Span) -> list[Turn]:
        bounds = sorted(bound for bound in self._bounds[id(span.turn)] if span.start <= bound <= span.end)
        return [self._split(span.turn, start, end) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]

    def _split(self, turn: Turn, start: int, end: int) -> Turn:
        key = id(turn), start, end
        if key not in self._made:
            self._made[key] = slice_turn(turn, start, end)
        return self._made[key]
