"""What a policy plays against: a small protocol, and the one-question case of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class Item:
    """One question."""

    index: int
    prompt: str
    answer: str
    """The data set's own answer, to look at; other answers may get the full score too."""
    entry: dict[str, Any]
    """reasoning-gym's record, which its scorer needs."""


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


@dataclass(frozen=True, slots=True)
class Score:
    """What a scorer gives for one answer."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, to look at; never read by training."""


@dataclass(slots=True)
class StepResult:
    """What the environment answers to one turn of the policy."""

    reward: float
    """Reward of this turn; an episode's reward is the sum over its turns."""
    done: bool
    """Whether the episode ends here."""
    messages: list[Message] = field(default_factory=list)
    """What the policy sees next, without its own turn; empty when done."""
    info: dict[str, Any] = field(default_factory=dict)
    """JSON values to look at later; never read by training."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of this turn's reward; an episode's part is the sum over its turns. Never read by training."""


class Environment(Protocol):
    """One episode's other side. Made for each episode; an exception costs that episode only."""

    async def reset(self) -> list[Message]:
        """The messages that open the episode."""
        ...

    async def step(self, text: str) -> StepResult:
        """Answer the policy's turn. Long or untrusted work belongs in a scoring process (``rollout/scoring.py``)."""
        ...


class SingleTurn:
    """One question, one answer, one score."""

    def __init__(self, prompt: str, score: Callable[[str], Awaitable[Score]]) -> None:
        self._prompt = prompt
        self._score = score

    async def reset(self) -> list[Message]:
        """The question, as the user's message."""
        return [Message("user", self._prompt)]

    async def step(self, text: str) -> StepResult:
        """The score of ``text``; the episode ends."""
        score = await self._score(text)  # waits: EpisodePlayer has a deadline for a step
        return StepResult(score.reward, done=True, parts=score.parts)
