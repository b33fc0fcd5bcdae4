"""What is played: items, and an episode, which is a coroutine that its author writes.

    async def episode(item, policy):
        reply = await policy.reply(item["question"])
        return float(reply.text.strip() == item["answer"])

The same coroutine plays training and held-out items. What the policy was given and what it drew becomes an
episode of tokens (``rollout/play.py``); nothing is ever tokenised a second time.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np


MOST_PARTS = 100
"""Of one reward."""
MOST_INFO_BYTES = 64 << 10
"""Of what an outcome says beside its reward, as JSON: it travels with its sequence to buffer, trainer and journal."""
LARGEST_REWARD = 3.4028234663852886e38
"""float32, as which rewards are trained, has none beyond it."""
TAKEN_NAMES = re.compile(r"mean|accuracy(_low|_high)?|reward|failed|pass_at_\d+(_low|_high)?|(oldest|newest)_version")
"""Of metrics that stand beside those of the parts of a reward, as in docs/metrics.md."""


class MessageLike(Protocol):
    """Whatever has a role and content, as the messages of ``model/messages.py``."""

    @property
    def role(self) -> str:
        """``system``, ``user``, ``assistant`` or ``tool``."""
        ...

    @property
    def content(self) -> str:
        """Its text."""
        ...


PromptLike = str | MessageLike | Mapping[str, Any] | Sequence[MessageLike | Mapping[str, Any]]
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
    _reward: float | asyncio.Future[float] | None = field(default=None, init=False, repr=False)
    _over: bool = field(default=False, init=False, repr=False)

    @property
    def reward(self) -> float | None:
        """Process reward of this turn; None as long as there is none."""
        if isinstance(self._reward, asyncio.Future):
            done = self._reward.done() and not self._reward.cancelled() and self._reward.exception() is None
            return self._reward.result() if done else None  # waits: it is done
        return self._reward

    @reward.setter
    def reward(self, value: Reward | Awaitable[Reward] | None) -> None:
        """Set it, at any time before the episode ends. Of something to be awaited, such as
        ``policy.in_scorer(check_step, reply.text)``, the result is it: the episode goes on meanwhile, and ends once
        that is there. A turn has one number: named parts are added up, and not kept, nor is the info of an outcome.

        Raises TypeError or ValueError if it is no reward, RuntimeError if the episode is over.
        """
        if isinstance(value, Awaitable):
            reward: float | asyncio.Future[float] | None = asyncio.ensure_future(_awaited(value))
        else:
            reward = None if value is None else as_outcome(value).reward
        if self._over:
            _cancel(reward)
            raise RuntimeError("the episode is over: a turn's reward is no longer trained")
        _cancel(self._reward)
        self._reward = reward

    @property
    def awaited_reward(self) -> asyncio.Future[float] | None:
        """What the reward is, or was, awaited from, if it was not simply set."""
        return self._reward if isinstance(self._reward, asyncio.Future) else None

    def end(self) -> None:
        """The episode is over: the reward stays as it is, and what it is awaited from ends."""
        self._over = True
        _cancel(self._reward)


async def _awaited(value: Awaitable[Reward]) -> float:
    """The reward that ``value`` becomes. A SystemExit would end the event loop."""
    try:
        return as_outcome(await value).reward  # waits: the player has a deadline for the episode's code
    except SystemExit as error:
        raise RuntimeError("a turn's reward raised SystemExit") from error


def _cancel(reward: object) -> None:
    if isinstance(reward, asyncio.Future):
        reward.cancel()
        reward.add_done_callback(lambda over: over.cancelled() or over.exception())  # else asyncio logs what it raised


class ContextFull(Exception):
    """The episode has no room for another turn.

    Where the coroutine does not catch it, the episode ends with ``policy.reward_so_far``. It is trained like any other.
    """


class GroupFull(Exception):
    """The episode may not have another seat or branch: ``rollout.max_sequences`` or ``rollout.max_tokens``."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an episode was worth, or one seat or branch of it."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, to look at; never read by training."""
    info: dict[str, Any] = field(default_factory=dict)
    """JSON values to look at later, at most 64 KiB of them; never read by training."""
    answer: str = ""
    """The text of the policy's last turn; this and the following are filled in for ``group_rewards``."""
    seat: str = ""
    """Whose outcome it is, where the policy has seats."""
    play: int = 0
    """Which episode of the group it belongs to, 0, 1, ...: one with seats or branches has several outcomes."""


Reward = float | Mapping[str, float] | Outcome
"""A number, named parts of which the reward is the sum, or an :class:`Outcome`."""
SeatRewards = Reward | Mapping[str, Reward]
"""Where the policy has seats (:meth:`Policy.seat`), a mapping is of their names to the reward of each; anything else is
the reward of every seat."""
Returned = SeatRewards | Sequence[SeatRewards] | Mapping["Policy", SeatRewards]
"""What an episode returns. Where the policy was forked, a value for each branch: a list in the order of the forks, or a
mapping of policies. A policy that was forked and has drawn nothing since is no branch, but the beginning of its forks;
if it has drawn on, its value stands before theirs."""


class Policy(Protocol):
    """The model in one episode: one conversation, to which is only ever added."""

    reward_so_far: float
    """The reward if a full context ends the episode; at first the task's ``full_context_reward``."""

    @property
    def turns(self) -> int:
        """Its turns so far, those before a fork included."""
        ...

    @property
    def drawn(self) -> int:
        """Tokens that it has drawn so far, those before a fork included."""
        ...

    @property
    def turn_lengths(self) -> Sequence[int]:
        """Tokens that it has drawn in each of its turns."""
        ...

    async def reply(
        self,
        messages: PromptLike = (),
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
            temperature: None is that of the rollouts, or of the evaluation for held-out items. A turn with another one
                is not trained: the trainer computes log-probs for one temperature.
            stop: texts that end the turn. Tokens after the one that completes such a text are left out.
            tools: functions or JSON schemas that the policy may call; they stand in the opening, so only the first turn
                may name new ones (docs/chat.md).

        Raises:
            ContextFull: there is no room for a token.
            ValueError: the model's chat template cannot render the messages, or has no place for tools; says why.
        """
        ...

    def read(self, messages: PromptLike) -> None:
        """Give the policy something to read before its next turn."""
        ...

    def seat(self, name: str) -> Policy:
        """The same model in a conversation of its own: a player of several. Asked for again, it is the same one.

        Each seat becomes a sequence with its own reward: the episode returns a mapping of all seats that drew to their
        rewards, or one reward for all.

        Raises:
            GroupFull: the episode may not become another sequence.
        """
        ...

    def fork(self, turns: int | None = None, tokens: int | None = None) -> Policy:
        """The same model with everything that was said and drawn so far, at all seats, which goes on by itself.

        The engine finds what they share in its prefix cache. Each branch becomes a sequence with its own reward. A
        token that was drawn before a fork is trained once, with the mean of its branches' advantages.

        Args:
            turns: share only the first turns of this policy, and what came before them; with a single seat.
            tokens: share only so many drawn tokens of the last of these turns, at least one, and not all. The fork
                stands in the middle of that turn: its next ``reply`` goes on with it, and is the whole turn's. It may
                be given what was given before that turn once more, or nothing.

        Raises:
            GroupFull: the episode may not become another sequence.
            RuntimeError: a turn is under way.
            ValueError: there is no such turn or token, or there are several seats.
        """
        ...

    async def in_scorer(self, function: Callable[..., Reward], *args: Any) -> Outcome:
        """``function(*args)`` in a scoring process, with ``rollout.score_deadline_s``: for slow or untrusted work.
        The arguments, and what a closure or an object holds, are those of the time of the call; what it changes in them
        stays in its process. Global variables of a plain function are those of its first call.

        Raises ScoringFailed, which costs the episode, if the function raises, takes too long or ends its process.
        """
        ...


GroupRewards = Callable[[Any, Sequence[Outcome]], Any]
"""``group_rewards(item, outcomes)``: a reward for each outcome, in order. It replaces the reward of its episode; its
named parts and its info join those that are there. A function runs in a scoring process, with its deadline; a coroutine
in the worker, with that of an episode's own code."""
EpisodeCode = Callable[[Any, Any], Awaitable[Returned]]
"""``async def episode(item, policy)``."""


class Items(Protocol):
    """A set of items, such as a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def no_prompts() -> Sequence[str]:
    """The check of a task of which nothing is known before it is played."""
    return ()


@dataclass(frozen=True, eq=False)
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
    group_rewards: GroupRewards | None = None
    """Rewards that compare the episodes of a group: called once they have all ended, with the item and what each was
    worth. Not for held-out items, whose episodes are not compared."""
    part_of: Callable[[Any], tuple[Task, Any]] | None = None
    """Of a mixture: which of its tasks plays an item, and the item as that task knows it."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.full_context_reward):
            raise ValueError(f"full_context_reward must be a finite number, got {self.full_context_reward}")
        if not is_coroutine_function(self.episode):
            wrong = f"the episode {self.episode!r:.80} of task {self.name} is no coroutine function"
            raise ValueError(f"{wrong}: write it as `async def episode(item, policy)`")

    def with_episode(self, episode: EpisodeCode) -> Task:
        """The same items with another episode."""
        part_of = None if self.part_of is None else functools.partial(_part_played_by, self.part_of, episode)
        return Task(
            self.items,
            episode,
            self.held_out,
            self.name,
            self.full_context_reward,
            self.warm_up,
            self.check,
            self.group_rewards,
            part_of,
        )

    def player_of(self, item: Any) -> tuple[Task, Any]:
        """The task that plays an item, which is this one unless it is a mixture, and the item as that task knows it."""
        return (self, item) if self.part_of is None else self.part_of(item)

    def held_out_items(self, name: str = "") -> Items:
        """A held-out set; the first one without a name. Raises ValueError if there is none."""
        if not self.held_out:
            raise ValueError(f"task {self.name} has no held-out items: give it some, or do not evaluate")
        if name and name not in self.held_out:
            raise ValueError(f"task {self.name} has no held-out set {name!r}; it has {', '.join(self.held_out)}")
        return self.held_out[name or next(iter(self.held_out))]


def _part_played_by(part_of: Callable[[Any], tuple[Task, Any]], episode: EpisodeCode, item: Any) -> tuple[Task, Any]:
    task, own_item = part_of(item)
    return task.with_episode(episode), own_item


def as_outcome(value: Reward) -> Outcome:
    """What an episode or a score returned, as plain numbers. Raises TypeError or ValueError if it is something else."""
    if isinstance(value, Outcome):
        parts = {str(name): _number(part) for name, part in value.parts.items()} if value.parts else {}
        outcome = Outcome(_number(value.reward), parts, value.info)
        if not isinstance(value.info, dict):
            raise TypeError(f"info must be a dictionary, got {value.info!r:.80}")
        if value.info and (size := len(json.dumps(value.info, allow_nan=False))) > MOST_INFO_BYTES:
            raise ValueError(
                f"info has {size:,} bytes of JSON: at most {MOST_INFO_BYTES:,}, because it travels with the episode. "
                "Write what is longer to a file, and its name into info"
            )
    elif isinstance(value, Mapping):
        if not value:
            raise ValueError("the reward is an empty dictionary: return a number, named parts, or an Outcome")
        parts = {str(name): _number(part) for name, part in value.items()}
        outcome = Outcome(sum(parts.values()), parts)
    else:
        outcome = Outcome(_number(value))
    if not _is_finite(outcome.reward):
        raise ValueError(f"the reward is {outcome.reward}, not a finite number of float32")
    wrong = [f"{name} is {part}" for name, part in outcome.parts.items() if not _is_finite(part)]
    if wrong:
        raise ValueError(f"parts of a reward must be finite numbers of float32: {', '.join(wrong[:3])}")
    taken = [name for name in outcome.parts if TAKEN_NAMES.fullmatch(name)]
    if taken:
        raise ValueError(f"no part of a reward can be called {taken[0]!r}, as another metric is: give it another name")
    if len(outcome.parts) > MOST_PARTS:
        raise ValueError(f"a reward has {len(outcome.parts)} parts, each of which is a metric: at most {MOST_PARTS}")
    return outcome


def _is_finite(value: float) -> bool:
    return abs(value) <= LARGEST_REWARD  # False for NaN, too


def as_outcomes(values: Any) -> list[Outcome]:
    """What group rewards returned, as plain numbers. Raises TypeError or ValueError if it is something else."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"group rewards must be a list with a reward for each episode, got {values!r:.80}")
    return [as_outcome(value) for value in values]


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise ValueError(f"could not convert to a reward: {value!r} is text, return a number")
    if value is None:
        raise TypeError("the reward is None: return a number, named parts, or an Outcome")
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError("the reward is a coroutine: await it, or write the function that returns it as `async def`")
    return float(value)


# -- which of the functions that a task is made of are coroutine functions --------------------------------------------


def is_coroutine_function(function: object) -> bool:
    """Whether calling it gives a coroutine; that of an object may, and so may a partial of either."""
    while isinstance(function, functools.partial):
        function = function.func
    called = getattr(type(function), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
