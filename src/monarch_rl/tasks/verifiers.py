"""Environments of verifiers 0.1.10 (MIT; ``pip install "monarch_rl[verifiers]"``).

    Verifiers(lambda: vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[right])), held_out=100)

The environment plays and scores as it does with a server: it is handed a client of which ``chat.completions.create`` is
the policy's turn. So what is trained are the ids that were drawn. 0.1.10 is the newest release that installs beside the
lock; later ones need a newer openai than SGLang, and have another protocol (docs/tasks.md).
"""

from __future__ import annotations

import functools
import importlib
import json
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from monarch_rl.tasks.orders import ShuffledOrder
from monarch_rl.tasks.task import ContextFull, Outcome, Policy, Reply, Task

SAMPLED = 16
"""Prompts that are made before a run, to see whether they fit."""
MAKING = threading.Lock()
"""Held while an environment is made: tasks of a mixture make their items on several threads."""
NOTHING = " "
"""Stands for an empty answer, which verifiers takes for the fault of a server and would not score."""


class Verifiers(Task):
    """Episodes in an environment of verifiers. The reward is the rubric's, and its functions are the parts.

    Training plays the rows of the environment's data set, in another order each time through; evaluations those of its
    ``eval_dataset``. Reward functions, tools and ``env_response`` run in the worker, on its event loop: what waits must
    be a coroutine. A reward function that raises counts as 0, and is logged: verifiers has it so. Where there is no
    room for another turn, the environment ends as with an overlong prompt, and is scored. A rubric that compares the
    rollouts of a group is refused by verifiers when it scores one of them.

    Args:
        make: makes the environment, once in each process that plays it.
        held_out: rows of the ``eval_dataset`` that evaluations play.
        name: for metrics.
        seed: of the order.
    """

    def __init__(self, make: Callable[[], Any], *, held_out: int = 0, name: str = "verifiers", seed: int = 0) -> None:
        playing = _Playing(make, seed, held_out)
        sets = {"held_out": _HeldOut(playing, held_out)} if held_out else {}
        super().__init__(playing.item, playing.play, sets, name, check=playing.check)


class _Playing:
    """The environment, and how a row of it is played."""

    def __init__(self, make: Callable[[], Any], seed: int, held_out: int) -> None:
        self._make, self._seed, self._held_out = make, seed, held_out
        self._made: Any = None

    def __reduce__(self) -> Any:
        return _Playing, (self._make, self._seed, self._held_out)

    @property
    def _environment(self) -> Any:
        """Made once. Raises ValueError if it cannot be."""
        if self._made is None:
            with MAKING:
                self._made = self._made or _without_handlers(self._make)
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

    def item(self, cursor: int) -> dict[str, Any]:
        """The row of a cursor."""
        row: dict[str, Any] = self._rows[self._order.place(cursor)]
        return row

    @functools.cached_property
    def _order(self) -> ShuffledOrder:
        return ShuffledOrder(range(len(self._rows)), f"order {self._seed}/")

    def check(self) -> list[str]:
        """First prompts. Raises ValueError saying what to change."""
        if self._environment.message_type != "chat":
            raise ValueError('an environment of message_type "completion" cannot be played: give it "chat"')
        if self._held_out:
            _ = self.held_out
        prompts = [self.item(cursor)["prompt"] for cursor in range(min(SAMPLED, len(self._rows)))]
        return ["".join(str(message["content"]) for message in prompt) for prompt in prompts]

    async def play(self, row: dict[str, Any], policy: Policy) -> Outcome:
        """The rollout of a row, scored."""
        environment, turns = self._environment, _Turns(policy)
        client = SimpleNamespace(chat=SimpleNamespace(completions=turns))
        # waits: the player has a deadline for it
        state = await environment.rollout(row, client, "policy", {})
        if turns.error is not None:
            raise turns.error
        if state["error"] is not None:
            raise state["error"]
        for reply, step in zip(turns.replies, state["trajectory"], strict=False):
            if step["reward"] is not None:
                reply.reward = float(step["reward"])
        await environment.rubric.score_rollout(state)  # waits: the player has a deadline for it
        info = {"stop": str(state["stop_condition"]), "truncated": bool(state["is_truncated"])}
        return Outcome(float(state["reward"]), {name: float(value) for name, value in state["metrics"].items()}, info)


def _without_handlers(make: Callable[[], Any]) -> Any:
    """An environment without its handlers of signals, which would be the process's, and which only the main thread may
    set. Raises ValueError if verifiers is not there."""
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
    """The rows for evaluations, which are made where they are played."""

    def __init__(self, playing: _Playing, count: int) -> None:
        self._playing, self._count = playing, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._playing.held_out[index]


class _Turns:
    """``client.chat.completions`` of one rollout: each call is a turn of the policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.replies: list[Reply] = []
        self.error: Exception | None = None
        """What a turn raised, but for a full context: verifiers would hide it."""
        self._said: list[Any] = []
        """All messages of the last call, and the answer's text."""
        self._calls: dict[str, Any] = {}

    async def create(
        self, *, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **_: Any
    ) -> Any:
        """The policy's turn, as an answer of OpenAI's API."""
        try:
            # waits: the player has a deadline for it
            reply = await self._policy.reply(self._new(messages), tools=tools or None)
        except ContextFull as error:
            raise _overlong(str(error)) from error
        except Exception as error:
            self.error = error
            raise
        self.replies.append(reply)
        answer = _answer(reply)
        self._said = [*messages, answer.choices[0].message.content]
        self._calls |= {call.id: call for call in reply.tool_calls}
        return answer

    def _new(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """What was said since the policy's last turn. Raises ValueError if what was said before is not as it was."""
        known = len(self._said)
        if known and ([*messages[: known - 1]] != self._said[:-1] or messages[known - 1]["content"] != self._said[-1]):
            raise ValueError(
                "the environment shows the policy another conversation than it had: what was said stays as it was, "
                "so get_prompt_messages may only add to it"
            )
        return [self._as_message(message) for message in messages[known:]]

    def _as_message(self, message: Mapping[str, Any]) -> Any:
        call = self._calls.get(message.get("tool_call_id", ""))
        if call is None or not isinstance(message["content"], str):
            return message
        return call.answer(message["content"])


def _answer(reply: Reply) -> Any:
    """A ``ChatCompletion`` of a turn."""
    types = importlib.import_module("openai.types.chat")
    calls = [
        {
            "id": call.id,
            "type": "function",
            # What cannot be read is no JSON here either, so that the environment answers it.
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


def _overlong(said: str) -> Exception:
    """What a server answers where a prompt has no room."""
    import httpx

    openai = importlib.import_module("openai")
    words = f"maximum context length is reached: {said}"
    response = httpx.Response(400, text=words, request=httpx.Request("POST", "http://policy"))
    error: Exception = openai.BadRequestError(words, response=response, body=None)
    return error
