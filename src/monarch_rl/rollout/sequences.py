"""The sequences of a rollout: one per seat and branch, with the reward that the episode's coroutine returned for it.

Rules for the return value: it is a list with one value per branch, or a mapping of branches to values; for a single
branch the value may be returned directly. The value of a branch with seats is a mapping of all seats to rewards, or one
reward for all of them. Otherwise it is a reward: a number, named parts, or an :class:`Outcome`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from monarch_rl.episode.episode import NO_VERSION, Episode, Fork, Turn
from monarch_rl.episode.sampling import SamplingMasks
from monarch_rl.rollout.branches import Branch, Branches, Line, TurnSplits
from monarch_rl.rollout.transcripts import as_rows
from monarch_rl.tasks.task import Outcome, as_outcome

Outcomes = list[dict[str, Outcome]]
"""For each branch that becomes sequences: the outcome per seat."""


def outcomes_of(returned: Any, branches: Branches) -> Outcomes:
    """Outcomes of a coroutine's return value.

    Args:
        returned: return value; in mappings of branches the keys are :class:`Branch` objects.

    Raises:
        TypeError, ValueError: it does not consist of rewards of these branches and seats.
    """
    values = _values(returned, branches)
    return [_of_seats(value, branch) for branch, value in zip(branches.leaves, values, strict=True)]


def rewards_so_far(branches: Branches) -> Outcomes:
    """Outcomes of an episode that a full context ended.

    Forks that were not used yet are removed: nobody set a reward for them, and training their prefix with a default
    reward would treat it as bad.
    """
    branches.drop_empty()
    return [{name: as_outcome(line.reward_so_far) for name, line in leaf.seats.items()} for leaf in branches.leaves]


def _values(returned: Any, branches: Branches) -> list[Any]:
    """One value per leaf."""
    leaves = branches.leaves
    if isinstance(returned, Mapping) and returned and all(isinstance(key, Branch) for key in returned):
        if set(map(id, returned)) != set(map(id, leaves)):
            raise ValueError(
                f"the values of {len(returned)} branches were returned, which are not the {len(leaves)} branches of "
                f"the episode: {LEAVES}"
            )
        return [returned[leaf] for leaf in leaves]
    if len(leaves) == 1 and not (isinstance(returned, list | tuple) and len(returned) == 1):
        return [returned]
    if not isinstance(returned, list | tuple | np.ndarray):
        raise TypeError(f"one value was returned for {len(leaves)} branches: return a list with one value per branch")
    if len(returned) != len(leaves):
        raise ValueError(f"{len(returned)} values were returned for {len(leaves)} branches: {LEAVES}")
    return list(returned)


LEAVES = (
    "return one value per fork, in order; a forked policy has a value, before those of its forks, only if it generated "
    "a turn that none of its forks shares"
)


def _of_seats(value: Any, branch: Branch) -> dict[str, Outcome]:
    seats = branch.seats
    if list(seats) == [""] or not isinstance(value, Mapping):
        return dict.fromkeys(seats, as_outcome(value))
    missing = [name for name, line in seats.items() if line.turns and name not in value]
    unknown = [name for name in value if name not in branch.lines]
    if missing or unknown:
        raise ValueError(
            f"rewards were returned for the seats {', '.join(map(str, value))}, but the seats are {', '.join(seats)}: "
            "return one reward per seat (named parts belong inside it), or one number for all seats"
        )
    return {name: as_outcome(value[name]) for name in seats if name in value}


def sequences(branches: Branches, outcomes: Outcomes, truncated: bool) -> list[Episode]:
    """The sequences of a rollout: the seats of its first branch, then of the next branch, and so on.

    A turn that several lines share is trained in the first of them and is context in the others. A turn of which other
    lines share the beginning is split. A line without a turn is not a sequence: its seat may be played by an opponent.
    Only if no line has a turn, because the episode ended before the policy's, the lines with an outcome are sequences
    without tokens, which count in evaluations and are not trained.

    Args:
        truncated: whether sampling is truncated (top-k, top-p or min-p).
    """
    episodes, without_turn = list[Episode](), list[Episode]()
    lines = [
        (name, line, by_seat)
        for leaf, by_seat in zip(branches.leaves, outcomes, strict=True)
        for name, line in leaf.seats.items()
    ]
    has_spans = any(line.spans for _, line, _ in lines)
    splits = TurnSplits(spans for _, line, _ in lines for spans in line.all_spans) if has_spans else None
    trained_in: dict[int, int] = {}
    """Index of the sequence that trains a turn, by the id of the turn."""
    for name, line, by_seat in lines:
        if line.turns:
            turns = line.turns if splits is None else splits.of(line.all_spans)
            episodes.append(_sequence(line, turns, name, by_seat[name], trained_in, truncated))
            for turn in turns:
                trained_in.setdefault(id(turn), len(episodes) - 1)
        elif name in by_seat:
            of, messages = by_seat[name], as_rows(line.conversation.messages)
            reason = line.full or "stop"
            without_turn.append(Episode([], of.reward, reason, of.info, parts=of.parts, seat=name, messages=messages))
    return episodes or without_turn


def _sequence(
    line: Line, turns: list[Turn], seat: str, outcome: Outcome, trained_in: Mapping[int, int], truncated: bool
) -> Episode:
    shared = [turn for turn in turns if id(turn) in trained_in]
    turns = [untrained(turn, truncated) for turn in shared] + turns[len(shared) :]
    fork = Fork(trained_in[id(shared[-1])], len(shared)) if shared else None
    routes = np.concatenate(line.expert_routes) if line.expert_routes else None
    reason = line.full or line.finish_reasons[-1]
    messages = as_rows(line.conversation.messages)
    return Episode(
        turns,
        outcome.reward,
        reason,
        outcome.info,
        routes,
        outcome.parts,
        seat=seat,
        fork=fork,
        messages=messages,
        answer=line.answers[-1],
    )


def untrained(turn: Turn, truncated: bool) -> Turn:
    """The same turn without trained tokens."""
    n = len(turn.token_ids)
    return replace(
        turn,
        logprobs=np.zeros(n, np.float32),
        policy_versions=np.full(n, NO_VERSION, np.int32),
        trainable=np.zeros(n, bool),
        sampling_masks=SamplingMasks.none(n) if truncated else None,
        columns={},
    )
