"""Branching at the pivot: the turn, or the token, after which an episode's outcome was decided.

async def episode(item, policy):
    policy.read(item["question"])
    return (await resampled(policy, partial(solve, item))).values
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from monarch_rl.errors import ContextFull, GroupFull
from monarch_rl.tasks.task import Policy, Reward, as_outcome


@dataclass(slots=True)
class Resampled:
    """The branches of one episode. ``values`` is the return value for the episode."""

    values: dict[Policy, Reward] = field(default_factory=dict)
    """Value of each branch."""
    turn: int | None = None
    """The pivot: values still differ after this many turns of the followed branch, but not after the next turn. None if
    all values were equal."""
    token: int = 0
    """Position in the next turn: values still differ after this many of its tokens, but not after the next token. 0 is
    before the turn, and is also the value without ``tokens``."""
    sampled_tokens: int = 0
    """Tokens sampled in all branches."""
    whole: int = 0
    """Tokens that the same number of complete episodes would have sampled."""

    @property
    def saved(self) -> int:
        """Tokens that branches share and that were therefore sampled only once."""
        return self.whole - self.sampled_tokens


async def resampled(
    policy: Policy,
    play: Callable[[Policy], Awaitable[Reward]],
    *,
    width: int = 4,
    probes: int = 2,
    tokens: bool = False,
) -> Resampled:
    """Run branches of an episode, then further branches from the point at which their values diverge.

    First ``width`` branches run from the current state of the policy. If their values differ, the branch whose value is
    furthest from the mean is followed. Bisection finds the last of its turns after which values still differ: for each
    turn that is tried, ``probes`` branches continue from there, and the values differ if one of them is not the value
    of the followed branch. With ``tokens``, the same search then continues within the next turn. Finally ``width``
    further branches run from the place that was found. All branches become part of the episode. If the group has no
    room for more (GroupFull), the search continues with the branches that it has. A branch that a full context ends
    gets its ``reward_so_far``.

    Args:
        play: runs one branch to its end and returns its value. With ``tokens``, a branch may start within a turn: its
            first ``reply`` then gets the messages given before that turn, or none.
        width: number of branches at the start, and again at the place that was found.
        probes: number of branches per place that is tried.
        tokens: whether to search for the token, not only for the turn.
    """
    branching = _Branching(play, Resampled(sampled_tokens=policy.sampled_tokens))
    start = policy.turns
    rewards = await branching.branches(policy, None, None, width)
    if not rewards or len(set(rewards.values())) == 1:
        return branching.result
    mean = sum(rewards.values()) / len(rewards)
    followed = max(rewards, key=lambda branch: abs(rewards[branch] - mean))

    async def differs_after(turns: int, of_next: int | None = None) -> bool:
        tried = await branching.branches(followed, turns, of_next, probes)
        return any(reward != rewards[followed] for reward in tried.values())

    turn = branching.result.turn = await _last(start, followed.turns, differs_after)
    if tokens and turn < followed.turns:
        length = followed.turn_lengths[turn]
        branching.result.token = await _last(0, length, lambda token: differs_after(turn + 1, token))
    if branching.result.token:
        await branching.branches(followed, turn + 1, branching.result.token, width)
    elif turn > start:
        await branching.branches(followed, turn, None, width)
    else:
        await branching.branches(policy, None, None, width)
    return branching.result


async def _last(low: int, high: int, differs_after: Callable[[int], Awaitable[bool]]) -> int:
    """By bisection, the last place in [``low``, ``high``) after which values differ, given that they differ after
    ``low``."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await differs_after(middle) else (low, middle)  # waits: see branches
    return low


class _Branching:
    """The branches that have been run."""

    def __init__(self, play: Callable[[Policy], Awaitable[Reward]], result: Resampled) -> None:
        self._play, self.result = play, result

    async def branches(self, origin: Policy, turns: int | None, tokens: int | None, count: int) -> dict[Policy, float]:
        """Run up to ``count`` more branches and return their rewards. They start from the current state of ``origin``,
        from its state after ``turns`` turns, or within the last of these turns."""
        made: list[Policy] = []
        try:
            while len(made) < count:
                made.append(origin.fork(turns, tokens))
        except GroupFull:
            pass
        shared = sum(branch.sampled_tokens for branch in made)
        values = await asyncio.gather(*map(self._value, made))  # waits: EpisodeRunner has a deadline for its own code
        whole = sum(branch.sampled_tokens for branch in made)
        self.result.whole += whole
        self.result.sampled_tokens += whole - shared
        self.result.values |= dict(zip(made, values, strict=True))
        return {branch: as_outcome(value).reward for branch, value in zip(made, values, strict=True)}

    async def _value(self, branch: Policy) -> Reward:
        try:
            return await self._play(branch)  # waits: see branches
        except ContextFull:
            return branch.reward_so_far
