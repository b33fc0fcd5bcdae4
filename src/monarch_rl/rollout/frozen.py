"""Frozen models as an episode or a stage asks them: judges, teachers, reference models, opponents.

    judge = run.frozen("judge", "Qwen/Qwen3-8B")               # before run.start(...)

    async def episode(item, policy):
        reply = await policy.reply(item["question"])
        verdict = await judge.reply(f"Is this right? {reply.text}", max_new_tokens=8)
        return float("yes" in verdict.text.lower())

A :class:`FrozenModel` is a name: where it is asked, it finds the engines that this process was connected to
(:func:`connect`). What it is asked never becomes a part of the episode.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from monarch_rl.episode.sampling import Completion, GenerationError, RequestLost, Sampling, TopLogprobs
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.conversation import Conversation
from monarch_rl.model.messages import as_messages
from monarch_rl.model.tools import Tools
from monarch_rl.rollout.episode_clock import RUNNING_EPISODE, JudgeFailed, outside
from monarch_rl.rollout.policy import Stops
from monarch_rl.runtime.deadlines import DeadlineExceeded, within
from monarch_rl.runtime.endpoint import concurrent_endpoint, lasting_endpoint
from monarch_rl.runtime.lasting_calls import ResilientActor
from monarch_rl.tasks.task import PromptLike, Reply

T = TypeVar("T")


class FrozenRefused(ValueError):
    """A frozen model that cannot be had, or not for what is asked of it; says what to do."""


class FrozenReplicas(Protocol):
    """The replicas of a frozen model behind one handle; crosses processes, so it must pickle."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        """Draw after ``prompt_ids``. ``group`` is the same for requests that share a prefix."""
        ...

    async def call(self, group: int, what: str, call: Callable[[Any], Awaitable[T]]) -> T:
        """What an endpoint of a replica answers."""
        ...

    def update_replicas(self, paused: Sequence[int], lost: Sequence[int]) -> None:
        """Send no new requests to the ``paused`` replicas, and ask others for what the ``lost`` ones owe."""
        ...

    def replace(self, replica: int, handle: Any) -> None:
        """From now on ``replica`` is the one behind ``handle``."""
        ...


@dataclass(frozen=True)
class FrozenModel:
    """A model that never changes. ``run.frozen(...)`` makes it; episodes, stages and the recipe's loop ask it.

    Every method raises :class:`~monarch_rl.rollout.episode_clock.JudgeFailed` if the request was refused, took longer
    than ``frozen.request-deadline-s``, or outlived more replicas than ``frozen.request-losses``.
    """

    name: str
    model: str
    """Hugging Face folder."""
    key: str
    """Unique to the run."""
    limit: int
    """Tokens that prompt and answer may have together."""
    max_new_tokens: int = 256
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    request_deadline_s: float = 600.0
    foreign: str = ""
    """How its token ids differ from the policy's; "" if they do not. Then it has no log-probs of the policy's ids."""

    labels: int = 0
    """Numbers that its reward head returns; 0 if it has an LM head."""
    temperature: float = 1.0
    """Of the rollouts: at which its log-probs can be compared with theirs."""
    rollouts_truncated: bool = False
    """Whether the rollouts draw from a part of the vocabulary, so that none can be compared with theirs."""
    tool_parser: str = ""
    """As of :class:`~monarch_rl.model.chat.ChatTemplate`."""
    policy_ids: int = 1 << 24
    """Token ids that the policy has embeddings of. Models of one tokenizer are padded to different numbers."""

    async def reply(
        self,
        messages: PromptLike,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        stop: str | Sequence[str] = (),
        tools: Tools | None = None,
    ) -> Reply:
        """Have the model answer, after its own chat template.

        Args:
            messages: the whole conversation; each call begins a new one. Text is a user's message.
            max_new_tokens: None is ``frozen.max_new_tokens``.
            temperature: 0 takes the most likely token.
            stop: texts that end the answer.
            tools: functions or JSON schemas that the model may call.

        Raises:
            ValueError: its template cannot render the messages.
        """
        return await self.conversation().reply(
            messages, max_new_tokens=max_new_tokens, temperature=temperature, stop=stop, tools=tools
        )

    def conversation(self) -> FrozenConversation:
        """A conversation with the model that goes on over several turns, such as that of an opponent."""
        self._check_head()
        return FrozenConversation(self, self._connected())

    async def logprobs(
        self, ids: Sequence[int] | np.ndarray, start: int = 0, temperature: float | None = None
    ) -> np.ndarray:
        """Log-probs of given tokens, each after those before it, by the model's own engine.

        Args:
            ids: a sequence of token ids.
            start: place in it of the first token that is asked about.
            temperature: above 0; logits are divided by it. None is that of the rollouts, to compare with theirs.

        Returns:
            float32[len(ids) - start], natural log, over the whole vocabulary. 0 for the first token of all (``start``
            0), which nothing precedes.

        Raises:
            FrozenRefused: the model has another tokenizer than the policy.
        """
        self.check_ids()
        sequence = np.asarray(ids, np.int64).tolist()
        at = self.temperature if temperature is None else temperature
        what = f"return log-probs of {len(sequence) - start} tokens"
        replicas = self._connected().replicas
        return await self.asked(
            lambda: replicas.call(_group(), what, lambda handle: handle.logprobs.call_one(sequence, start, at))
        )

    async def top_logprobs(
        self, ids: Sequence[int] | np.ndarray, k: int, start: int = 1, temperature: float | None = None
    ) -> TopLogprobs:
        """The ``k`` most likely tokens at the places of given tokens, from ``start`` (at least 1) on, of those that the
        policy has, too.

        Entry j tells the distribution that ``ids[start + j]`` would be drawn from: int32[len(ids) - start, k] and
        float32[len(ids) - start, k]. Raises as :meth:`logprobs` does.
        """
        self.check_ids()
        sequence = np.asarray(ids, np.int64).tolist()
        at = self.temperature if temperature is None else temperature
        asked = k
        while True:
            found = (await self._most_likely(sequence, asked, start, at)).below(self.policy_ids, k)
            if found is not None:
                return found
            asked *= 2

    async def _most_likely(self, ids: list[int], k: int, start: int, temperature: float) -> TopLogprobs:
        what = f"return the {k} most likely tokens at {len(ids) - start} places"
        replicas = self._connected().replicas
        return await self.asked(
            lambda: replicas.call(
                _group(), what, lambda handle: handle.top_logprobs.call_one(ids, k, start, temperature)
            )
        )

    def opening(self, messages: PromptLike) -> list[int]:
        """The ids of a conversation by the model's own chat template, up to where the next answer begins.

        Raises:
            ValueError: its template cannot render the messages.
        """
        return self._connected().template.opening(as_messages(messages))

    async def reward(self, messages: PromptLike) -> float:
        """How the model's reward head rates a whole conversation, the policy's answer included; see :meth:`rewards`.

        Raises:
            ValueError: the head returns several numbers.
        """
        rewards = await self.rewards(messages)
        if len(rewards) != 1:
            raise ValueError(f"the head of frozen model {self.name} returns {len(rewards)} numbers: take rewards(...)")
        return float(rewards[0])

    async def rewards(self, messages: PromptLike) -> np.ndarray:
        """What the model's reward head returns for a whole conversation: float32[labels], before any normalisation.

        The conversation is written by the model's own chat template, without the prompt for another turn, and rated at
        its last token.

        Raises:
            ValueError: the model has no reward head, or its template cannot render the messages.
        """
        connected = self._connected()
        if not self.labels:
            raise ValueError(f"frozen model {self.name} has no reward head: ask it with reply(...)")
        ids = connected.template.opening(as_messages(messages), prompt=False)
        what = f"rate {len(ids)} tokens"
        return await self.asked(
            lambda: connected.replicas.call(_group(), what, lambda handle: handle.rewards.call_one(ids))
        )

    async def asked(self, ask: Callable[[], Awaitable[T]]) -> T:
        """An answer, within the deadline of a request. Raises JudgeFailed."""
        what, limit_s = f"frozen model {self.name} to answer", self.request_deadline_s
        try:
            with outside():
                return await within(limit_s, ask(), what, on=f"frozen {self.name}", flag="frozen.request-deadline-s")
        except DeadlineExceeded as error:
            raise JudgeFailed(f"frozen model {self.name} did not answer in time", str(error)) from error
        except GenerationError as error:
            raise JudgeFailed(f"frozen model {self.name} refused a request", str(error)) from error
        except RequestLost as error:
            raise JudgeFailed(f"frozen model {self.name} lost a request", str(error)) from error

    def _check_head(self) -> None:
        if self.labels:
            raise FrozenRefused(
                f"frozen model {self.name} has a reward head and draws nothing: ask it with reward(...)"
            )

    def check_ids(self) -> None:
        """Raise FrozenRefused if it has no log-probs of the policy's token ids."""
        self._check_head()
        if self.foreign:
            raise FrozenRefused(
                f"frozen model {self.name} has another tokenizer than the policy, so it has no log-probs of the "
                f"policy's ids: {self.foreign}. Take a teacher of the same family, or have it judge texts"
            )

    def _connected(self) -> Connected:
        connected = _connected.get(self.key)
        if connected is None:
            raise RuntimeError(
                f"frozen model {self.name!r} cannot be asked here: before run.start(...) it has no engines, and "
                "scoring processes have none. Ask it in the episode, in a reward that is a coroutine, or in a stage"
            )
        return connected


class FrozenConversation:
    """A conversation with a frozen model, token-in, token-out: ids are only ever added."""

    def __init__(self, model: FrozenModel, connected: Connected) -> None:
        self._model, self._connected = model, connected
        self._conversation = Conversation(connected.template)
        self._group = _group()

    def read(self, messages: PromptLike) -> None:
        """Give the model something to read before its next turn."""
        self._conversation.read(messages)

    async def reply(
        self,
        messages: PromptLike = (),
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        stop: str | Sequence[str] = (),
        tools: Tools | None = None,
    ) -> Reply:
        """The model's next turn. See :meth:`FrozenModel.reply`."""
        conversation, stops = self._conversation, (stop,) if isinstance(stop, str) else tuple(stop)
        conversation.add(messages, tools)
        drawn: list[int] = []
        reason = "length"
        try:
            completion = await self._drawn(max_new_tokens, temperature, stops)
            drawn, reason = completion.token_ids.tolist(), completion.finish_reason
        finally:
            turn = conversation.replied(drawn, reason, stops)
        return Reply(turn.text, drawn, completion.logprobs, reason, turn.raw, turn.thinking, turn.tool_calls)

    async def _drawn(self, max_new_tokens: int | None, temperature: float, stops: tuple[str, ...]) -> Completion:
        model, connected, ids = self._model, self._connected, self._conversation.ids
        room = model.limit - len(ids)
        if room < 1:
            raise JudgeFailed(
                f"frozen model {model.name} has no room for an answer",
                f"the prompt has {len(ids)} tokens, and {model.limit} are the limit for it and the answer "
                "(frozen.context-length, frozen.max-total-tokens)",
            )
        sampling = Sampling(
            min(room, model.max_new_tokens if max_new_tokens is None else max_new_tokens),
            temperature,
            tuple(sorted({*connected.template.stop_token_ids, *connected.stops.token_ids(stops)})),
        )
        completion = await model.asked(lambda: connected.replicas.generate(ids, sampling, self._group))
        return connected.stops.cut(completion, stops) if stops else completion


# ---- the engines that this process can ask ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Connected:
    """The engines of a frozen model, and what text is made with."""

    template: ChatTemplate
    stops: Stops
    replicas: FrozenReplicas


_connected: dict[str, Connected] = {}
"""By the key of the model."""
_numbers = itertools.count(1 << 62)
"""Numbers of requests that belong to no group."""


def _group() -> int:
    """Requests of one group share prefixes, and so a replica."""
    playing = RUNNING_EPISODE.get()
    return next(_numbers) if playing is None else playing.group


async def connect(models: Sequence[tuple[FrozenModel, FrozenReplicas]]) -> None:
    """Have this process ask these engines. Raises what loading a chat template raises (OSError, ValueError)."""
    for model, replicas in models:
        options, parser = model.chat_options, model.tool_parser
        template = await asyncio.to_thread(ChatTemplate, model.model, options, tool_parser=parser)
        _connected[model.key] = Connected(template, Stops(template.token_texts, template.decode), replicas)


def replicas_of(key: str) -> FrozenReplicas:
    """The engines of a model that this process asks."""
    return _connected[key].replicas


class AsksFrozenModels(ResilientActor):
    """The part of an actor that keeps its process's engines of frozen models up to date."""

    @lasting_endpoint
    async def update_frozen(self, key: str, lost: list[int]) -> None:
        """Send no requests to the ``lost`` engines of a frozen model, and ask others for what they owe."""
        replicas_of(key).update_replicas([], lost)

    @concurrent_endpoint
    async def replace_frozen(self, key: str, replica: int, handle: object) -> None:
        """From now on ``replica`` of a frozen model is the engine behind ``handle``."""
        replicas_of(key).replace(replica, handle)
