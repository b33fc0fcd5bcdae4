"""Environments of verifiers 0.1.10 (MIT; ``pip install "monarch_rl[verifiers]"``).

    Verifiers(lambda: vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[right])), held_out=100)

The environment runs and scores episodes as with a server: it gets a client whose ``chat.completions.create`` generates
the policy's turn. The trained token ids are therefore those that were sampled. 0.1.10 is the newest release that can be
installed with the locked dependencies; later ones need a newer openai than SGLang does, and have another protocol
(docs/tasks.md).
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from monarch_rl.errors import ContextFull, is_infrastructure
from monarch_rl.model.messages import as_messages, text_of
from monarch_rl.tasks.orders import ShuffledOrder
from monarch_rl.tasks.rows import compact
from monarch_rl.tasks.task import Outcome, Policy, Reply, Task, is_coroutine_function

SAMPLED = 16
"""Number of prompts that are made before a run, to check that they fit."""
MAKING = threading.Lock()
"""Held while an environment is created: tasks of a mixture make their items on several threads."""
NOTHING = " "
"""Replaces an empty answer, which verifiers treats as a server error and does not score."""


class Verifiers(Task):
    """Episodes in an environment of verifiers. The reward is that of the rubric, and the rubric's functions are its
    parts.

    Training uses the rows of the environment's data set, in a different order per epoch; evaluations use its
    ``eval_dataset``. Reward functions, tools and ``env_response`` run in the worker, on its event loop, so functions
    that wait must be coroutine functions. verifiers counts a reward function that raises as 0, and logs it; but if a
    service is to blame (:func:`~monarch_rl.errors.is_infrastructure`), such as a judge, the episode fails. If there is
    no room for another turn, the environment ends as with an overlong prompt, and is scored. verifiers refuses a rubric
    that compares the rollouts of a group, when it scores one of them.

    Args:
        make: creates the environment, once in each process that uses it.
        held_out: number of rows of the ``eval_dataset`` that evaluations run.
        name: name for metrics.
        seed: seed of the order.
        success_reward: as in :class:`~monarch_rl.tasks.task.Task`.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        held_out: int = 0,
        name: str = "verifiers",
        seed: int = 0,
        success_reward: float | None = None,
    ) -> None:
        episode = _EnvironmentEpisode(make, seed, held_out)
        sets = {"held_out": _HeldOut(episode, held_out)} if held_out else {}
        super().__init__(
            episode.item,
            episode.run,
            sets,
            name,
            check=episode.check,
            success_reward=success_reward,
            probe=False,
            epoch=episode.epoch,
        )


class _EnvironmentEpisode:
    """The environment, and the episode of a row."""

    def __init__(self, make: Callable[[], Any], seed: int, held_out: int) -> None:
        self._make, self._seed, self._held_out = make, seed, held_out
        self._made: Any = None

    def __reduce__(self) -> Any:
        return _EnvironmentEpisode, (self._make, self._seed, self._held_out)

    @property
    def _environment(self) -> Any:
        """Created on first use. Raises ValueError if that fails."""
        if self._made is None:
            with MAKING:
                if self._made is None:
                    self._made = _without_handlers(self._make)
                    note_infrastructure(self._made.rubric)
        return self._made

    @functools.cached_property
    def _rows(self) -> Any:
        return self._environment.get_dataset()

    @functools.cached_property
    def held_out(self) -> Any:
        """The rows for evaluations. Raises ValueError if there are not enough."""
        environment, wanted = self._environment, self._held_out
        if environment.eval_dataset_source is None:
            raise ValueError(f"held_out={wanted}, but the environment has no eval_dataset: give it one")
        rows = environment.get_eval_dataset()
        if len(rows) < wanted:
            raise ValueError(f"held_out={wanted}, but the environment's eval_dataset has {len(rows)} rows")
        return rows

    def epoch(self) -> int:
        """Number of training rows."""
        return len(self._rows)

    def item(self, cursor: int) -> dict[str, Any]:
        """The row of a cursor."""
        row: dict[str, Any] = self._rows[self._order.place(cursor)]
        return row

    @functools.cached_property
    def _order(self) -> ShuffledOrder:
        return ShuffledOrder(range(len(self._rows)), f"order {self._seed}/")

    def check(self) -> list[str]:
        """The first prompts. Raises ValueError saying what to change."""
        if self._environment.message_type != "chat":
            raise ValueError('an environment with message_type "completion" is not supported: use "chat"')
        if self._held_out:
            _ = self.held_out
        prompts = [self.item(cursor)["prompt"] for cursor in range(min(SAMPLED, len(self._rows)))]
        return [text_of(as_messages(prompt)) for prompt in prompts]

    async def run(self, row: dict[str, Any], policy: Policy) -> Outcome:
        """Run and score the rollout of a row."""
        environment, turns = self._environment, _Turns(policy)
        client = SimpleNamespace(chat=SimpleNamespace(completions=turns))
        # waits: EpisodeRunner has a deadline for it
        state = await environment.rollout(row, client, "policy", {})
        if turns.error is not None:
            raise turns.error
        if state["error"] is not None:
            raise state["error"]
        for reply, step in zip(turns.replies, state["trajectory"], strict=False):
            if step["reward"] is not None:
                reply.reward = float(step["reward"])
        errors = list[Exception]()
        noting = _ERRORS.set(errors)
        try:
            await environment.rubric.score_rollout(state)  # waits: EpisodeRunner has a deadline for it
        finally:
            _ERRORS.reset(noting)
        if errors:
            raise errors[0]
        info = {"stop": str(state["stop_condition"]), "truncated": bool(state["is_truncated"])}
        return Outcome(float(state["reward"]), {name: float(value) for name, value in state["metrics"].items()}, info)


_ERRORS: contextvars.ContextVar[list[Exception]] = contextvars.ContextVar("errors of reward functions")
"""Errors for which a service is to blame, of the episode that is being scored."""


def note_infrastructure(rubric: Any) -> None:
    """Have the reward functions of a rubric, or of a group of rubrics, note in ``_ERRORS`` that a service is to blame
    for their error: verifiers would count it as a reward of 0."""
    for part in getattr(rubric, "rubrics", ()):
        note_infrastructure(part)
    if functions := getattr(rubric, "funcs", ()):
        rubric.funcs = [_noting(function) for function in functions]


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if is_infrastructure(error) and (errors := _ERRORS.get(None)) is not None:
                errors.append(error)
            raise

    @functools.wraps(function)
    def called(*args: Any, **columns: Any) -> Any:
        with noted():
            return function(*args, **columns)

    @functools.wraps(function)
    async def awaited(*args: Any, **columns: Any) -> Any:
        with noted():
            return await function(*args, **columns)  # waits: EpisodeRunner has a deadline for it

    return awaited if is_coroutine_function(function) else called


def _without_handlers(make: Callable[[], Any]) -> Any:
    """Create an environment without its signal handlers. They would apply to the whole process, and only the main
    thread may set them. Raises ValueError if verifiers is not installed."""
    try:
        module: Any = importlib.import_module("verifiers.envs.environment")
    except ImportError as error:
        raise ValueError(f'verifiers 0.1.10 is needed ({error}): pip install "monarch_rl[verifiers]"') from error
    module.signal = SimpleNamespace(**(vars(signal) | {"signal": lambda *_: None}))
    try:
        return make()
    finally:
        module.signal = signal


class _HeldOut:
    """The rows for evaluations, which are loaded in the processes that use them."""

    def __init__(self, episode: _EnvironmentEpisode, count: int) -> None:
        self._playing, self._count = episode, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._playing.held_out[index]


class _Turns:
    """``client.chat.completions`` of one rollout: each call generates a turn of the policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.replies: list[Reply] = []
        self.error: Exception | None = None
        """Exception of a turn, except ContextFull. It is kept here because verifiers would hide it."""
        self._conversation: list[Any] = []
        """All messages of the last call, and the text of the answer."""
        self._calls: dict[str, Any] = {}

    async def create(
        self, *, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **_: Any
    ) -> Any:
        """Generate the policy's turn; returns it as a response of OpenAI's API."""
        try:
            # waits: EpisodeRunner has a deadline for it
            reply = await self._policy.reply(self._new(messages), tools=tools or None)
        except ContextFull as error:
            raise _overlong(str(error)) from error
        except Exception as error:
            self.error = error
            raise
        self.replies.append(reply)
        answer = _answer(reply)
        self._conversation = [*messages, answer.choices[0].message.content]
        self._calls |= {call.id: call for call in reply.tool_calls}
        return answer

    def _new(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Messages since the policy's last turn. Raises ValueError if earlier messages have changed."""
        seen, old = len(self._conversation), self._conversation
        if seen and ([*messages[: seen - 1]] != old[:-1] or messages[seen - 1]["content"] != old[-1]):
            raise ValueError(
                "the environment changed earlier messages of the conversation, which is not supported: its "
                "get_prompt_messages may only append messages"
            )
        return [self._as_message(message) for message in messages[seen:]]

    def _as_message(self, message: Mapping[str, Any]) -> Any:
        """The message, with the name of the tool that answers, which some chat templates need, and without the null
        keys that a data set adds."""
        call = self._calls.get(message.get("tool_call_id") or "")
        return compact(dict(message) if call is None else {"name": call.name, **message})


def _answer(reply: Reply) -> Any:
    """A turn as a ``ChatCompletion``."""
    types = importlib.import_module("openai.types.chat")
    calls = [
        {
            "id": call.id,
            "type": "function",
            # An unreadable call is passed on as invalid JSON, so that the environment answers it.
            "function": {"name": call.name, "arguments": json.dumps(call.arguments) if call.name else call.error},
        }
        for call in reply.tool_calls
    ]
    ended = "tool_calls" if calls else "stop" if reply.finish_reason == "stop" else "length"
    message = {"role": "assistant", "content": reply.text or NOTHING, "tool_calls": calls or None}
    choice = {"index": 0, "finish_reason": ended, "message": message | {"reasoning_content": reply.thinking}}
    return types.ChatCompletion.model_validate(
        {"id": "turn", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
    )


def _overlong(detail: str) -> Exception:
    """The error of a server whose context has no room for a prompt."""
    import httpx

    openai = importlib.import_module("openai")
    message = f"maximum context length is reached: {detail}"
    response = httpx.Response(400, text=message, request=httpx.Request("POST", "http://policy"))
    error: Exception = openai.BadRequestError(message, response=response, body=None)
    return error
