"""What a play becomes: a sequence for each seat of each branch, with the reward that its coroutine returned for it.

What a coroutine returns is read by one rule. It is a list with a value for each branch, or a mapping of branches to
values; of a single branch it may be the value alone. The value of a branch that has seats is a mapping of all of these
to rewards, or one reward for all. Everywhere else it is a reward: a number, named parts, an :class:`Outcome`.
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
"""Of each branch that becomes sequences, by seat."""


def outcomes_of(returned: Any, branches: Branches) -> Outcomes:
    """What a coroutine returned.

    Args:
        returned: mappings of branches have :class:`Branch` as keys here.

    Raises:
        TypeError, ValueError: it is something else than rewards of these branches and seats.
    """
    values = _values(returned, branches)
    return [_of_seats(value, branch) for branch, value in zip(branches.leaves, values, strict=True)]


def rewards_so_far(branches: Branches) -> Outcomes:
    """What an episode is worth that a full context has ended. Forks that it did not come to are none: to train what
    they begin with by a reward that nobody gave them would say that it was bad."""
    branches.drop_empty()
    return [{name: as_outcome(line.reward_so_far) for name, line in leaf.seats.items()} for leaf in branches.leaves]


def _values(returned: Any, branches: Branches) -> list[Any]:
    """One for each leaf."""
    leaves = branches.leaves
    if isinstance(returned, Mapping) and returned and all(isinstance(key, Branch) for key in returned):
        if set(map(id, returned)) != set(map(id, leaves)):
            raise ValueError(f"values of {len(returned)} branches were returned, and there are {len(leaves)}: {LEAVES}")
        return [returned[leaf] for leaf in leaves]
    if len(leaves) == 1 and not (isinstance(returned, list | tuple) and len(returned) == 1):
        return [returned]
    if not isinstance(returned, list | tuple | np.ndarray):
        raise TypeError(f"one value was returned for {len(leaves)} branches: return a list with the value of each")
    if len(returned) != len(leaves):
        raise ValueError(f"{len(returned)} values were returned for {len(leaves)} branches: {LEAVES}")
    return list(returned)


LEAVES = "give each fork one, in order, and before them what was forked, if it drew a turn that no fork of it has"


def _of_seats(value: Any, branch: Branch) -> dict[str, Outcome]:
    seats = branch.seats
    if list(seats) == [""] or not isinstance(value, Mapping):
        return dict.fromkeys(seats, as_outcome(value))
    missing = [name for name, line in seats.items() if line.turns and name not in value]
    unknown = [name for name in value if name not in branch.lines]
    if missing or unknown:
        raise ValueError(
            f"rewards of the seats {', '.join(map(str, value))} were returned, and the seats are {', '.join(seats)}: "
            "give each a reward (named parts go into it), or one number for all"
        )
    return {name: as_outcome(value[name]) for name in seats if name in value}


def sequences(branches: Branches, outcomes: Outcomes, truncated: bool) -> list[Episode]:
    """The sequences of a play: the seats of its first branch, of the next, ... A turn that several have is trained in
    the first of them, and is context in the others; one that others have the beginning of is cut in two. A line without
    a turn is none.

    Args:
        truncated: whether the sampler cuts tokens off.
    """
    episodes: list[Episode] = []
    lines = [line for leaf in branches.leaves for line in leaf.seats.values()]
    cut = any(line.spans for line in lines)
    pieces = TurnSplits(spans for line in lines for spans in line.all_spans) if cut else None
    trained_in: dict[int, int] = {}
    """By the turn: the place of its sequence."""
    for leaf, by_seat in zip(branches.leaves, outcomes, strict=True):
        for name, line in leaf.seats.items():
            if line.turns:
                turns = line.turns if pieces is None else pieces.of(line.all_spans)
                episodes.append(_sequence(line, turns, name, by_seat[name], trained_in, truncated))
                for turn in turns:
                    trained_in.setdefault(id(turn), len(episodes) - 1)
    return episodes


def _sequence(
    line: Line, played: list[Turn], seat: str, outcome: Outcome, trained_in: Mapping[int, int], truncated: bool
) -> Episode:
    shared = [turn for turn in played if id(turn) in trained_in]
    turns = [untrained(turn, truncated) for turn in shared] + played[len(shared) :]
    fork = Fork(trained_in[id(shared[-1])], len(shared)) if shared else None
    routes = np.concatenate(line.expert_routes) if line.expert_routes else None
    reason = "context" if line.full else line.finish_reasons[-1]
    said = as_rows(line.conversation.messages)
    return Episode(
        turns,
        outcome.reward,
        reason,
        outcome.info,
        routes,
        outcome.parts,
        seat=seat,
        fork=fork,
        messages=said,
        answer=line.answers[-1],
    )


def untrained(turn: Turn, truncated: bool) -> Turn:
    """The same of which no token is trained."""
    n = len(turn.token_ids)
    return replace(
        turn,
        logprobs=np.zeros(n, np.float32),
        policy_versions=np.full(n, NO_VERSION, np.int32),
        trainable=np.zeros(n, bool),
        sampling_masks=SamplingMasks.none(n) if truncated else None,
        columns={},
    )
