"""Definition of a task: items, and an episode, which is a coroutine that the task's author writes.

    async def episode(item, policy):
        reply = await policy.reply(item["question"])
        return float(reply.text.strip() == item["answer"])

The same coroutine runs for training and held-out items. The tokens that the policy was given and those that it
generated become an episode (``rollout/play.py``); nothing is tokenised twice.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import numbers
import re
import reprlib
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from monarch_rl.episode.admission_steps import AdmissionSteps
from monarch_rl.errors import UnusableReward
from monarch_rl.model.messages import Messages
from monarch_rl.user_code import definition, place_of

if TYPE_CHECKING:
    import numpy as np


MOST_PARTS = 100
"""Maximum number of parts of a reward."""
MOST_INFO_BYTES = 64 << 10
"""Maximum size of an outcome's ``info`` as JSON, because it is sent with its sequence to buffer, trainer and
journal."""
LARGEST_REWARD = 3.4028234663852886e38
"""Largest finite float32, the type in which rewards are trained."""
TAKEN_NAMES = re.compile(
    r"mean|accuracy(_low|_high)?|reward|failed|left_out|without_turn|pass_at_\d+(_low|_high)?|(oldest|newest)_version"
)
"""Names of metrics next to those of the parts of a reward, as in docs/metrics.md."""


PromptLike: TypeAlias = Messages
"""Input of a policy: a string, which is a user message, a message, or several; messages may also be mappings in the
form of OpenAI's API (docs/chat.md)."""


@dataclass(slots=True)
class Reply:
    """One turn of the policy."""

    text: str
    """Text without special tokens, thoughts and tool calls; if a stop string ended the turn, without it and the text
    after it."""
    token_ids: list[int]
    """All sampled tokens."""
    logprobs: np.ndarray
    """float32[n], natural log, under the distribution that each token was sampled from."""
    finish_reason: str
    """``stop``; ``length``: the turn reached its ``max_new_tokens``; ``context``: the episode has no room for another
    turn."""
    raw: str = ""
    """The whole text, including special tokens but not the end token."""
    thinking: str = ""
    """Text between the chat template's tags for thoughts."""
    tool_calls: Sequence[Any] = ()
    """Tool calls in order (``model/messages.py``: ToolCall). Check ``error`` before running one."""
    _reward: float | asyncio.Future[float] | None = field(default=None, init=False, repr=False)
    _over: bool = field(default=False, init=False, repr=False)

    @property
    def reward(self) -> float | None:
        """Process reward of this turn; None if it has not been set, or is still being computed."""
        if isinstance(self._reward, asyncio.Future):
            done = self._reward.done() and not self._reward.cancelled() and self._reward.exception() is None
            return self._reward.result() if done else None  # waits: it is done
        return self._reward

    @reward.setter
    def reward(self, value: Reward | Awaitable[Reward] | None) -> None:
        """Set the reward, at any time before the episode ends.

        The reward may be an awaitable, such as ``policy.in_scorer(check_step, reply.text)``. The episode then
        continues, and at its end waits for the result. A turn has a single number: named parts are added up and not
        kept, and an outcome's ``info`` is not kept either.

        Raises UnusableReward (a ValueError) if it is not a reward, RuntimeError if the episode is over.
        """
        frame = sys._getframe(1)
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if isinstance(value, Awaitable):
            reward: float | asyncio.Future[float] | None = asyncio.ensure_future(_awaited(value, place))
        else:
            reward = None if value is None else _of_turn(value, place)
        if self._over:
            _cancel(reward)
            raise RuntimeError("the episode is over: the reward of a turn can no longer be set")
        _cancel(self._reward)
        self._reward = reward

    @property
    def awaited_reward(self) -> asyncio.Future[float] | None:
        """The future of a reward that was set as an awaitable; None if it was set as a value."""
        return self._reward if isinstance(self._reward, asyncio.Future) else None

    def end(self) -> None:
        """End the episode: the reward cannot be set any more, and a pending one is cancelled."""
        self._over = True
        _cancel(self._reward)


async def _awaited(value: Awaitable[Reward], place: str) -> float:
    """Await a reward that was set at ``place``. A SystemExit is replaced, because it would end the event loop."""
    try:
        reward = await value  # waits: EpisodeRunner has a deadline for the episode's code
    except SystemExit as error:
        raise RuntimeError("a turn's reward raised SystemExit") from error
    # Not the coroutine's own line: that of asyncio.to_thread() is Python's, and a task has none.
    return _of_turn(reward, place)


def _of_turn(value: Reward, place: str) -> float:
    try:
        return as_outcome(value).reward
    except Exception as error:  # a value may raise anything when it is converted
        problem = f"the reward of a turn is {reprlib.repr(value)}: {error} ({place})"
        raise UnusableReward(problem, place, "turn reward") from error


def _cancel(reward: object) -> None:
    if isinstance(reward, asyncio.Future):
        reward.cancel()
        # Retrieves the exception, which asyncio would otherwise log.
        reward.add_done_callback(lambda over: over.cancelled() or over.exception())


@dataclass(frozen=True, slots=True)
class Outcome:
    """Reward of an episode, or of one seat or branch of it."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, for metrics; not used by training."""
    info: dict[str, Any] = field(default_factory=dict)
    """JSON values for later inspection, at most 64 KiB; not used by training."""
    answer: str = ""
    """Text of the policy's last turn; this and the following fields are filled in for ``group_rewards``."""
    seat: str = ""
    """Name of the seat, if the policy has seats."""
    rollout: int = 0
    """Index of the episode in the group, 0, 1, ...: an episode with seats or branches has several outcomes."""


Reward = float | Mapping[str, float] | Outcome
"""A number, named parts whose sum is the reward, or an :class:`Outcome`."""
SeatRewards = Reward | Mapping[str, Reward]
"""If the policy has seats (:meth:`Policy.seat`), a mapping of their names to rewards; any other value is the reward of
every seat."""
Returned = SeatRewards | Sequence[SeatRewards] | Mapping["Policy", SeatRewards]
"""Return value of an episode. If the policy was forked, it has one value per branch: a list in the order of the forks,
or a mapping of policies. A forked policy counts as a branch only if it generates after the fork; its value then comes
before those of its forks."""


class Policy(Protocol):
    """The model in one episode: one conversation, which is only appended to."""

    reward_so_far: float
    """Reward if a full context ends the episode; initially the task's ``full_context_reward``."""

    @property
    def turns(self) -> int:
        """Number of its turns so far, including those before a fork."""
        ...

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens sampled so far, including those before a fork."""
        ...

    @property
    def turn_lengths(self) -> Sequence[int]:
        """Number of sampled tokens of each turn."""
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
        """Generate the policy's next turn.

        Args:
            messages: messages to append to the conversation before the turn.
            max_new_tokens: maximum tokens of this turn; None means ``rollout.max_new_tokens``.
            temperature: None means the temperature of the rollouts, or that of the evaluation for held-out items. A
                turn at another temperature is not trained, because the trainer computes log-probs for one temperature.
            stop: strings that end the turn. Tokens after the one that completes such a string are removed.
            tools: functions or JSON schemas that the policy may call. They are part of the start of the conversation,
                so only the first turn may add new ones (docs/chat.md).

        Raises:
            ContextFull: there is no room for a token, or the conversation has had ``rollout.max_turns`` turns.
            ValueError: the model's chat template cannot render the messages, or does not support tools; says why.
        """
        ...

    def read(self, messages: PromptLike) -> None:
        """Append messages to the conversation for the policy to read before its next turn."""
        ...

    def seat(self, name: str) -> Policy:
        """The same model in a separate conversation, as one of several players. The same name returns the same seat.

        Each seat becomes a sequence with its own reward: the episode returns a mapping with a reward for every seat
        that had a turn, or one reward for all.

        Raises:
            GroupFull: the episode may not have another sequence.
        """
        ...

    def fork(self, turns: int | None = None, tokens: int | None = None) -> Policy:
        """The same model with a copy of the conversation so far, at all seats, which continues independently.

        The engine finds the shared part in its prefix cache. Each branch becomes a sequence with its own reward. A
        token that was sampled before a fork is trained once, with the mean of its branches' advantages.

        Args:
            turns: share only the first ``turns`` turns of this policy and the messages before them; requires a single
                seat.
            tokens: share only this many sampled tokens of the last of these turns, at least one and not all. The fork
                then starts within that turn: its next ``reply`` continues it and returns the whole turn. Its messages
                are those given before that turn, or none.

        Raises:
            GroupFull: the episode may not have another sequence.
            RuntimeError: a turn is being generated.
            ValueError: there is no such turn or token, or there are several seats.
        """
        ...

    async def in_scorer(self, function: Callable[..., Reward], *args: Any) -> Outcome:
        """Run ``function(*args)`` in a scoring process, with ``rollout.score_deadline_s``: for slow or untrusted work.

        The arguments, and the state of a closure or an object, are those at the time of the call; changes to them stay
        in the scoring process. Global variables of a plain function are those of its first call.

        Raises ScoringFailed, which costs the episode, if the function raises, takes too long or ends its process.
        """
        ...


GroupRewards = Callable[[Any, Sequence[Outcome]], Any]
"""``group_rewards(item, outcomes)``: returns one reward per outcome, in order. It replaces the reward of the episode;
its named parts and its info are merged with the existing ones. A plain function runs in a scoring process, with that
deadline; a coroutine function runs in the worker, with the deadline of an episode's own code."""
EpisodeCode = Callable[[Any, Any], Awaitable[Returned]]
"""``async def episode(item, policy)``."""


class Items(Protocol):
    """A collection of items, such as a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def no_prompts() -> Sequence[str]:
    """The default check, which knows no prompts before the run."""
    return ()


@dataclass(frozen=True, eq=False)
class Task:
    """Defines a run's items and episodes. It is pickled by value (``runtime/by_value.py``), with its functions, and
    sent to the workers."""

    items: Callable[[int], Any]
    """The training item of a cursor, 0, 1, 2, ...; a pure function, so that a group that is restarted and a resumed run
    use the same item."""
    episode: EpisodeCode
    """Runs an item: ``async def episode(item, policy)``. An exception costs only the episode."""
    held_out: Mapping[str, Items] = field(default_factory=dict)
    """Sets of items that are not trained on, by name. Evaluations run the first one unless they name another."""
    name: str = "task"
    """Name for metrics."""
    full_context_reward: float = 0.0
    """Reward of an episode that a full context ends, unless it sets its own (``policy.reward_so_far``)."""
    warm_up: Callable[[], object] | None = None
    """Called once in every worker and scoring process before the first episode, for imports and data."""
    check: Callable[[], Sequence[str]] = no_prompts
    """Called before any actor is spawned; returns some of the prompts, to check that they fit. Raises ValueError
    saying what to change."""
    group_rewards: GroupRewards | None = None
    """Rewards that compare the episodes of a group: called with the item and the outcomes once all have ended. Not used
    for held-out items, whose episodes are not compared."""
    items_by_step: Callable[[int, AdmissionSteps], Any] | None = None
    """For curricula: the training item of a cursor in a run, in place of ``items``, which assumes that no group is
    dropped. A pure function of the cursor and of the steps up to it."""
    part_of: Callable[[Any], tuple[Task, Any]] | None = None
    """For mixtures: returns the task that an item belongs to, and the item as that task defines it."""
    success_reward: float | None = None
    """An episode with at least this reward is a success, which accuracy, pass@k and ``reward/all_right_share`` count.
    None: there is no such mark, as for log-probs or lengths. These metrics are then missing, and the mean reward
    decides which version is the best."""
    tasks: tuple[Task, ...] = ()
    """For mixtures: the tasks."""
    probe: bool = True
    """Whether one item may be run before the run, without the model, to find mistakes (``--probe``)."""
    epoch: Callable[[], int] | None = None
    """Returns the number of training items, after which they repeat, for ``data/epochs``. None: they do not repeat, or
    their number is not known."""

    def __post_init__(self) -> None:
        for name in ("success_reward", "full_context_reward"):
            value = getattr(self, name)
            if name == "success_reward" and value is None:
                continue
            if not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
            # A plain float: it becomes JSON, and NumPy would compare a float64 with float32 rewards in float64.
            object.__setattr__(self, name, float(value))
        if not is_coroutine_function(self.episode):
            wrong = f"the episode {self.episode!r:.80} of task {self.name} is not a coroutine function"
            raise ValueError(f"{wrong}: write it as `async def episode(item, policy)`")
        check_call(self.episode, "episode", "item", "policy")
        check_call(self.items, "items", "cursor")
        if self.warm_up is not None:
            check_plain_call(self.warm_up, "warm_up")
        if self.group_rewards is not None:
            check_call(self.group_rewards, "group_rewards", "item", "outcomes")

    def with_episode(self, episode: EpisodeCode, success_reward: float | None = None) -> Task:
        """The same task with another episode, and the :attr:`success_reward` of the rewards that this one returns."""
        part_of = None
        if self.part_of is not None:
            part_of = functools.partial(_with_episode, self.part_of, episode, success_reward)
        changed = {
            "episode": episode,
            "part_of": part_of,
            "success_reward": success_reward,
            "tasks": tuple(task.with_episode(episode, success_reward) for task in self.tasks),
        }
        # Not `replace`, because a mixture has another constructor.
        return Task(**{each.name: getattr(self, each.name) for each in fields(Task)} | changed)

    def item(self, cursor: int, steps: AdmissionSteps) -> Any:
        """The training item of a cursor in a run; ``steps``: those for which groups up to it are admitted."""
        return self.items(cursor) if self.items_by_step is None else self.items_by_step(cursor, steps)

    def owner_of(self, item: Any) -> tuple[Task, Any]:
        """The task that an item belongs to, which is this one unless it is a mixture, and the item as that task defines
        it."""
        return (self, item) if self.part_of is None else self.part_of(item)

    def held_out_items(self, name: str = "") -> Items:
        """A held-out set; the first one without a name. Raises ValueError if there is none."""
        if not self.held_out:
            raise ValueError(f"task {self.name} has no held-out items: give it some, or turn evaluation off")
        if name and name not in self.held_out:
            raise ValueError(f"task {self.name} has no held-out set {name!r}; it has {', '.join(self.held_out)}")
        return self.held_out[name or next(iter(self.held_out))]


def _with_episode(
    part_of: Callable[[Any], tuple[Task, Any]], episode: EpisodeCode, success_reward: float | None, item: Any
) -> tuple[Task, Any]:
    task, own_item = part_of(item)
    return task.with_episode(episode, success_reward), own_item


def as_outcome(value: Reward) -> Outcome:
    """The return value of an episode or a score, with plain numbers. Raises TypeError or ValueError if it is not a
    reward."""
    if isinstance(value, Outcome):
        parts = {str(name): _number(part) for name, part in value.parts.items()} if value.parts else {}
        outcome = Outcome(_number(value.reward), parts, value.info)
        if not isinstance(value.info, dict):
            raise TypeError(f"info must be a dictionary, got {value.info!r:.80}")
        if value.info and (size := len(json.dumps(value.info, allow_nan=False))) > MOST_INFO_BYTES:
            raise ValueError(
                f"info has {size:,} bytes of JSON, and the limit is {MOST_INFO_BYTES:,}, because it is sent with the "
                "episode. Write longer values to a file, and put its name into info"
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
        raise ValueError(f"a part of a reward is called {taken[0]!r}, the name of another metric: rename it")
    if len(outcome.parts) > MOST_PARTS:
        raise ValueError(
            f"a reward has {len(outcome.parts)} parts, and the limit is {MOST_PARTS}, because each is a metric: return "
            "fewer"
        )
    return outcome


T = TypeVar("T")


def returned_by(function: Any, value: Any, convert: Callable[[Any], T]) -> T:
    """``convert(value)``, for the return value of a function of the task's author.

    Raises:
        UnusableReward: it is not a reward; names the function, its file and line.
    """
    try:
        return convert(value)
    except Exception as error:  # a value may raise anything when it is converted
        problem = f"{place_of(function)} returned {reprlib.repr(value)}: {error}"
        raise UnusableReward(problem, definition(function)[1]) from error


def check_call(function: Any, role: str, *args: str) -> None:
    """Raises ValueError if a function of the task's author does not take as many positional arguments as ``args``."""
    try:
        inspect.signature(function).bind(*args)
    except ValueError:  # a function that is not written in Python may have no signature
        pass
    except TypeError as error:
        raise ValueError(f"{place_of(function)} cannot be called as {role}({', '.join(args)}): {error}") from error


def check_plain_call(function: Any, role: str, *args: str) -> None:
    """As :func:`check_call`; a coroutine function is refused, too, because it would never run."""
    check_call(function, role, *args)
    if is_coroutine_function(function):
        raise ValueError(f"{place_of(function)} is `async def`, but {role} is not awaited: write it as `def`")


def _is_finite(value: float) -> bool:
    return abs(value) <= LARGEST_REWARD  # also False for NaN


def as_outcomes(values: Any) -> list[Outcome]:
    """The return value of group rewards, with plain numbers. Raises TypeError or ValueError if it is not a list of
    rewards."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"group rewards must be a list with one reward per episode, got {values!r:.80}")
    return [as_outcome(value) for value in values]


def _number(value: Any) -> float:
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str | bytes):
        raise ValueError(f"could not convert to a reward: {value!r} is text, not a number")
    if value is None:
        raise TypeError("the reward is None: return a number, named parts, or an Outcome")
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError("the reward is a coroutine: await it, or write the function that returns it as `async def`")
    if isinstance(value, tuple | list | Awaitable):
        raise TypeError(f"the reward is a {type(value).__name__}: return a number, named parts, or an Outcome")
    return float(value)


# -- detection of coroutine functions ---------------------------------------------------------------------------------


def is_coroutine_function(function: object) -> bool:
    """Whether calling it returns a coroutine; also detects callable objects, and partials of either."""
    while isinstance(function, functools.partial):
        function = function.func
    called = getattr(type(function), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
