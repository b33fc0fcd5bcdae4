"""What is played: items, and an episode, which is a coroutine that its author writes.

    async def episode(item, policy):
        reply = await policy.reply(item["question"])
        return float(reply.text.strip() == item["answer"])

The same coroutine plays training, held-out items and simulations. What the policy was given and what it drew becomes an
episode of tokens (``rollout/play.py``); nothing is ever tokenised a second time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np


MOST_PARTS = 100
"""Of one reward."""


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Spoken(Protocol):
    """Whatever has a role and content: a :class:`Message`, or a tool's answer (``ToolCall.answer``)."""

    @property
    def role(self) -> str:
        """As in :class:`Message`."""
        ...

    @property
    def content(self) -> str:
        """Its text."""
        ...


Said = str | Spoken | Mapping[str, Any] | Sequence[Spoken | Mapping[str, Any]]
"""What a policy is given: text, which is a user's message, a message, or several, also as mappings with role and
content, as data sets hold them."""


@dataclass(slots=True)
class Reply:
    """One turn of the policy."""

    text: str
    """Without special tokens, thoughts and calls; where a stop string ended it, without that and what follows."""
    token_ids: list[int]
    """All that were drawn."""
    logprobs: np.ndarray
    """float32[n], natural log, of the distribution that drew each token."""
    finish_reason: str
    """``stop``; ``length``: the turn had its ``max_new_tokens``; ``context``: the episode has no room for another."""
    raw: str = ""
    """The whole text, special tokens included, without the end token."""
    thinking: str = ""
    """What stands between the chat template's tags for thoughts."""
    tool_calls: Sequence[Any] = ()
    """In order (``model/messages.py``: ToolCall). Check ``error`` before carrying one out."""


class ContextFull(Exception):
    """The episode has no room for another turn.

    Where the coroutine does not catch it, the episode ends with ``policy.reward_so_far``. It is trained like any other.
    """


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an episode was worth."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, to look at; never read by training."""
    info: dict[str, Any] = field(default_factory=dict)
    """JSON values to look at later; never read by training."""


Reward = float | Mapping[str, float] | Outcome
"""A number, named parts of which the reward is the sum, or an :class:`Outcome`."""


class Policy(Protocol):
    """The model in one episode: one conversation, to which is only ever added."""

    reward_so_far: float
    """The reward if a full context ends the episode; at first the task's ``full_context_reward``."""

    async def reply(
        self,
        messages: Said = (),
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        stop: str | Sequence[str] = (),
        tools: Sequence[Any] | None = None,
    ) -> Reply:
        """Have the policy answer.

        Args:
            messages: what it is given before, after all that it was given and has drawn so far.
            max_new_tokens: of this turn; None is ``rollout.max_new_tokens``.
            temperature: None is that of the rollouts, and greedy for held-out items. A turn with another one is not
                trained: the trainer computes log-probs for one temperature.
            stop: texts that end the turn. Tokens after the one that completes such a text are left out.
            tools: functions or JSON schemas that the policy may call; they stand in the opening, so only the first turn
                may name new ones (docs/chat.md).

        Raises:
            ContextFull: there is no room for a token.
            ValueError: the model's chat template cannot render the messages, or has no place for tools; says why.
        """
        ...

    def read(self, messages: Said) -> None:
        """Give the policy something to read before its next turn."""
        ...

    async def in_scorer(self, function: Callable[..., Reward], *args: Any) -> Outcome:
        """``function(*args)`` in a scoring process, with ``rollout.score_deadline_s``: for slow or untrusted work.

        Raises ScoringFailed, which costs the episode, if the function raises, takes too long or ends its process.
        """
        ...


EpisodeCode = Callable[[Any, Any], Awaitable[Reward]]
"""``async def episode(item, policy)``."""


class Items(Protocol):
    """A set of items, such as a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def no_prompts() -> Sequence[str]:
    """The check of a task of which nothing is known before it is played."""
    return ()


@dataclass(frozen=True)
class Task:
    """What a run plays. It travels to the workers by value (``runtime/by_value.py``), with the functions in it."""

    items: Callable[[int], Any]
    """The training item of a cursor, 0, 1, 2, ...; a pure function, so that a group that is begun again or a resumed
    run plays the same item."""
    episode: EpisodeCode
    """Plays an item: ``async def episode(item, policy)``. What it raises costs the episode only."""
    held_out: Mapping[str, Items] = field(default_factory=dict)
    """Sets of items that are not trained on, by name. Evaluations play the first one unless they name another."""
    name: str = "task"
    """For metrics."""
    full_context_reward: float = 0.0
    """Reward of an episode that a full context ends, if it says nothing else (``policy.reward_so_far``)."""
    warm_up: Callable[[], object] | None = None
    """Called once in every worker and scoring process before anything is played: imports, data."""
    check: Callable[[], Sequence[str]] = no_prompts
    """Called before anything is spawned; returns some of the prompts, to see whether they fit. Raises ValueError saying
    what to change."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.full_context_reward):
            raise ValueError(f"full_context_reward must be a finite number, got {self.full_context_reward}")

    def played_by(self, episode: EpisodeCode) -> Task:
        """The same items with another episode."""
        return Task(self.items, episode, self.held_out, self.name, self.full_context_reward, self.warm_up, self.check)

    def held_out_items(self, name: str = "") -> Items:
        """A held-out set; the first one without a name. Raises ValueError if there is none."""
        if not self.held_out:
            raise ValueError(f"task {self.name} has no held-out items: give it some, or do not evaluate")
        if name and name not in self.held_out:
            raise ValueError(f"task {self.name} has no held-out set {name!r}; it has {', '.join(self.held_out)}")
        return self.held_out[name or next(iter(self.held_out))]


def as_outcome(value: Reward) -> Outcome:
    """What an episode or a score returned, as plain numbers. Raises TypeError or ValueError if it is something else."""
    if isinstance(value, Outcome):
        parts = {str(name): _number(part) for name, part in value.parts.items()} if value.parts else {}
        outcome = Outcome(_number(value.reward), parts, value.info)
        if not isinstance(value.info, dict):
            raise TypeError(f"info must be a dictionary, got {value.info!r:.80}")
        if value.info:
            json.dumps(value.info, allow_nan=False)
    elif isinstance(value, Mapping):
        parts = {str(name): _number(part) for name, part in value.items()}
        outcome = Outcome(sum(parts.values()), parts)
    else:
        outcome = Outcome(_number(value))
    if not math.isfinite(outcome.reward):
        raise ValueError(f"the reward is {outcome.reward}, not a finite number")
    wrong = [f"{name} is {part}" for name, part in outcome.parts.items() if not math.isfinite(part)]
    if wrong:
        raise ValueError(f"parts of a reward must be finite numbers: {', '.join(wrong[:3])}")
    if len(outcome.parts) > MOST_PARTS:
        raise ValueError(f"a reward has {len(outcome.parts)} parts, each of which is a metric: at most {MOST_PARTS}")
    return outcome


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise ValueError(f"could not convert to a reward: {value!r} is text, return a number")
    if value is None:
        raise TypeError("the reward is None: return a number, named parts, or an Outcome")
    return float(value)
