"""Branching again where it mattered: at the turn, or the token, before which an episode could still go either way.

async def episode(item, policy):
    policy.read(item["question"])
    return (await resampled(policy, partial(solve, item))).values
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from monarch_rl.tasks.task import ContextFull, GroupFull, Policy, Reward, as_outcome


@dataclass(slots=True)
class Resampled:
    """The branches of one episode. ``values`` is what the episode returns."""

    values: dict[Policy, Reward] = field(default_factory=dict)
    """Of each branch."""
    turn: int | None = None
    """The pivot: values still part after this many turns of the branch that was followed, and no more after the next
    one. None if all were equal."""
    token: int = 0
    """Within the next turn: values still part after this many of its tokens, and no more after the next one. 0 is
    before the turn, as it is if ``tokens`` was not asked for."""
    drawn: int = 0
    """Tokens drawn, by all branches."""
    whole: int = 0
    """Tokens that as many whole episodes would have drawn."""

    @property
    def saved(self) -> int:
        """Tokens that branches have in common, and that were drawn once."""
        return self.whole - self.drawn


async def resampled(
    policy: Policy,
    play: Callable[[Policy], Awaitable[Reward]],
    *,
    width: int = 4,
    probes: int = 2,
    tokens: bool = False,
) -> Resampled:
    """Play branches of an episode, then more of them from where their values part.

    The rule: ``width`` branches are played from where the policy is. If their values differ, the one whose value is
    furthest from their mean is followed. Its last turn at which values still part is found by bisection: at each place
    that is tried ``probes`` branches go on from there, and the values part if one of them differs from that of the
    branch. With ``tokens`` the place is then sought in the same way within the turn after it. From the place found
    ``width`` further branches are played. All are branches of the episode; where the group has no room for more
    (GroupFull), these are all. A branch that a full context ends is worth its ``reward_so_far``.

    Args:
        play: plays one branch to its end, and returns its value. With ``tokens``, a branch may begin in the middle of a
            turn: then its first ``reply`` is given what was given before that turn, or nothing.
        tokens: seek the token, not the turn alone.
    """
    course = _Course(play, Resampled(drawn=policy.drawn))
    start = policy.turns
    rewards = await course.branches(policy, None, None, width)
    if not rewards or len(set(rewards.values())) == 1:
        return course.result
    mean = sum(rewards.values()) / len(rewards)
    followed = max(rewards, key=lambda branch: abs(rewards[branch] - mean))

    async def part_after(turns: int, of_next: int | None = None) -> bool:
        tried = await course.branches(followed, turns, of_next, probes)
        return any(reward != rewards[followed] for reward in tried.values())

    turn = course.result.turn = await _last(start, followed.turns, part_after)
    if tokens and turn < followed.turns:
        length = followed.turn_lengths[turn]
        course.result.token = await _last(0, length, lambda token: part_after(turn + 1, token))
    if course.result.token:
        await course.branches(followed, turn + 1, course.result.token, width)
    elif turn > start:
        await course.branches(followed, turn, None, width)
    else:
        await course.branches(policy, None, None, width)
    return course.result


async def _last(low: int, high: int, part_after: Callable[[int], Awaitable[bool]]) -> int:
    """By bisection, the last place from ``low`` to below ``high`` after which values part; they do after ``low``."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await part_after(middle) else (low, middle)  # waits: see branches
    return low


class _Course:
    """The branches that have been played."""

    def __init__(self, play: Callable[[Policy], Awaitable[Reward]], result: Resampled) -> None:
        self._play, self.result = play, result

    async def branches(self, origin: Policy, turns: int | None, tokens: int | None, count: int) -> dict[Policy, float]:
        """Play up to ``count`` more, from what ``origin`` was after ``turns`` turns, or within the last of them, or is;
        their rewards."""
        made: list[Policy] = []
        try:
            while len(made) < count:
                made.append(origin.fork(turns, tokens))
        except GroupFull:
            pass
        known = sum(branch.drawn for branch in made)
        values = await asyncio.gather(*map(self._value, made))  # waits: the player has a deadline for its own code
        whole = sum(branch.drawn for branch in made)
        self.result.whole += whole
        self.result.drawn += whole - known
        self.result.values |= dict(zip(made, values, strict=True))
        return {branch: as_outcome(value).reward for branch, value in zip(made, values, strict=True)}

    async def _value(self, branch: Policy) -> Reward:
        try:
            return await self._play(branch)  # waits: see branches
        except ContextFull:
            return branch.reward_so_far
