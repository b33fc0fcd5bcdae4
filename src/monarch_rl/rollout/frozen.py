"""Frozen models that an episode or a stage can ask: judges, teachers, reference models, opponents.

    judge = run.frozen("judge", "Qwen/Qwen3-8B")               # before run.start(...)

    async def episode(item, policy):
        reply = await policy.reply(item["question"])
        verdict = await judge.reply(f"Is this right? {reply.text}", max_new_tokens=8)
        return float("yes" in verdict.text.lower())

A :class:`FrozenModel` contains only settings. When it is asked, it uses the engines that the current process was
connected to by :func:`connect_frozen_models`. Its conversations never become part of the episode.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from monarch_rl.episode.sampling import Completion, Sampling, TopLogprobs
from monarch_rl.errors import DeadlineExceeded, FrozenRefused, GenerationError, JudgeFailed, RequestLost
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.conversation import Conversation
from monarch_rl.model.messages import as_messages
from monarch_rl.model.tools import Tools
from monarch_rl.rollout.episode_clock import RUNNING_EPISODE, check_not_probed, episode_clock_stopped
from monarch_rl.rollout.policy import Stops, parsers_loaded
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint, persistent_endpoint
from monarch_rl.runtime.persistent_calls import ResilientActor
from monarch_rl.tasks.task import PromptLike, Reply

T = TypeVar("T")


class FrozenReplicas(Protocol):
    """The replicas of a frozen model behind one handle; it is sent to other processes, so it must pickle."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        """Generate after ``prompt_ids``. ``group`` is the same for requests that share a prefix."""
        ...

    async def call(self, group: int, what: str, call: Callable[[Any], Awaitable[T]]) -> T:
        """Result of an endpoint of a replica."""
        ...

    def update_replicas(self, paused: Sequence[int], lost: Sequence[int]) -> None:
        """Send no new requests to the ``paused`` replicas, and resend the unanswered requests of the ``lost`` ones to
        others."""
        ...

    def replace(self, replica: int, handle: Any) -> None:
        """Use ``handle`` for ``replica`` from now on."""
        ...


@dataclass(frozen=True)
class FrozenModel:
    """A model that never changes. It is created by ``run.frozen(...)``; episodes, stages and the recipe's loop can ask
    it.

    Every method that asks the engines raises :class:`~monarch_rl.rollout.episode_clock.JudgeFailed` if the request was
    refused, took longer than ``frozen.request-deadline-s``, or was lost with more replicas than
    ``frozen.request-losses``.
    """

    name: str
    model: str
    """Hugging Face model folder."""
    key: str
    """Identifier that is unique in the run."""
    limit: int
    """Maximum tokens of prompt and answer together."""
    max_new_tokens: int = 256
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    request_deadline_s: float = 600.0
    foreign: str = ""
    """How its token ids differ from the policy's; "" if they do not differ. If they differ, it has no log-probs of the
    policy's ids."""

    labels: int = 0
    """Number of outputs of its reward head; 0 if it has an LM head."""
    temperature: float = 1.0
    """Temperature of the rollouts, at which its log-probs are comparable with theirs."""
    rollouts_truncated: bool = False
    """Whether the rollouts sample from a part of the vocabulary only, so that no log-prob is comparable with theirs."""
    tool_parser: str = ""
    """As in :class:`~monarch_rl.model.chat.ChatTemplate`."""
    allow_control_tokens: bool = False
    """As in :class:`~monarch_rl.model.chat.ChatTemplate`."""
    policy_ids: int = 1 << 24
    """Number of token ids that the policy has embeddings for. Models with the same tokenizer are padded to different
    numbers."""

    async def reply(
        self,
        messages: PromptLike,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        stop: str | Sequence[str] = (),
        tools: Tools | None = None,
    ) -> Reply:
        """Generate an answer, with the model's own chat template.

        Args:
            messages: the whole conversation; each call starts a new one. A string is a user message.
            max_new_tokens: None means ``frozen.max_new_tokens``.
            temperature: 0 is greedy.
            stop: stop strings.
            tools: functions or JSON schemas that the model may call.

        Raises:
            ValueError: the chat template cannot render the messages.
        """
        return await self.conversation().reply(
            messages, max_new_tokens=max_new_tokens, temperature=temperature, stop=stop, tools=tools
        )

    def conversation(self) -> FrozenConversation:
        """A conversation with the model over several turns, for example with an opponent."""
        self._check_head()
        return FrozenConversation(self, self._connected())

    async def logprobs(
        self, ids: Sequence[int] | np.ndarray, start: int = 0, temperature: float | None = None
    ) -> np.ndarray:
        """Log-probs of given tokens, each conditioned on the tokens before it, computed by the model's engine.

        Args:
            ids: token ids of a sequence.
            start: index of the first token whose log-prob is returned.
            temperature: divides the logits, above 0. None means the temperature of the rollouts, for comparison with
                theirs.

        Returns:
            float32[len(ids) - start], natural log, over the whole vocabulary. The first token of the sequence
            (``start`` 0) has no context and gets 0.

        Raises:
            FrozenRefused: the model has another tokenizer than the policy.
        """
        self.check_ids()
        sequence = np.asarray(ids, np.int64).tolist()
        at = self.temperature if temperature is None else temperature
        what = f"return log-probs of {len(sequence) - start} tokens"
        replicas = self._connected().replicas
        return await self.request(
            lambda: replicas.call(_group(), what, lambda handle: handle.logprobs.call_one(sequence, start, at))
        )

    async def top_logprobs(
        self, ids: Sequence[int] | np.ndarray, k: int, start: int = 1, temperature: float | None = None
    ) -> TopLogprobs:
        """The ``k`` most likely tokens at each position from ``start`` (at least 1) on, limited to tokens that the
        policy has too.

        Entry j describes the distribution from which ``ids[start + j]`` would be sampled: int32[len(ids) - start, k]
        and float32[len(ids) - start, k]. Raises as :meth:`logprobs` does.
        """
        self.check_ids()
        sequence = np.asarray(ids, np.int64).tolist()
        at = self.temperature if temperature is None else temperature
        requested = k
        while True:
            found = (await self._most_likely(sequence, requested, start, at)).below(self.policy_ids, k)
            if found is not None:
                return found
            requested *= 2

    async def _most_likely(self, ids: list[int], k: int, start: int, temperature: float) -> TopLogprobs:
        what = f"return the {k} most likely tokens at {len(ids) - start} places"
        replicas = self._connected().replicas
        return await self.request(
            lambda: replicas.call(
                _group(), what, lambda handle: handle.top_logprobs.call_one(ids, k, start, temperature)
            )
        )

    def opening(self, messages: PromptLike) -> list[int]:
        """Token ids of a conversation in the model's own chat template, up to the start of the next answer.

        Raises:
            ValueError: the chat template cannot render the messages.
        """
        return self._connected().template.opening(as_messages(messages))

    async def reward(self, messages: PromptLike) -> float:
        """Score of the model's reward head for a whole conversation, including the policy's answer; see
        :meth:`rewards`.

        Raises:
            ValueError: the head returns several numbers.
        """
        rewards = await self.rewards(messages)
        if len(rewards) != 1:
            raise ValueError(
                f"the reward head of frozen model {self.name} returns {len(rewards)} numbers: use rewards(...)"
            )
        return float(rewards[0])

    async def rewards(self, messages: PromptLike) -> np.ndarray:
        """Outputs of the model's reward head for a whole conversation: float32[labels], before any normalisation.

        The conversation is rendered with the model's own chat template, without the prompt for another turn, and scored
        at its last token.

        Raises:
            ValueError: the model has no reward head, or its chat template cannot render the messages.
        """
        connected = self._connected()
        if not self.labels:
            raise ValueError(f"frozen model {self.name} has no reward head: ask it with reply(...)")
        ids = connected.template.opening(as_messages(messages), prompt=False)
        what = f"rate {len(ids)} tokens"
        return await self.request(
            lambda: connected.replicas.call(_group(), what, lambda handle: handle.rewards.call_one(ids))
        )

    async def request(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Await the answer within the request deadline. Raises JudgeFailed."""
        what, limit_s = f"frozen model {self.name} to answer", self.request_deadline_s
        try:
            with episode_clock_stopped():
                return await within(limit_s, ask(), what, on=f"frozen {self.name}", flag="frozen.request-deadline-s")
        except DeadlineExceeded as error:
            raise JudgeFailed(f"frozen model {self.name} did not answer in time", str(error)) from error
        except GenerationError as error:
            raise JudgeFailed(
                f"frozen model {self.name} refused a request", str(error), infrastructure=False
            ) from error
        except RequestLost as error:
            raise JudgeFailed(f"frozen model {self.name} lost a request", str(error)) from error

    def _check_head(self) -> None:
        if self.labels:
            raise FrozenRefused(
                f"frozen model {self.name} has a reward head and cannot generate: ask it with reward(...)"
            )

    def check_ids(self) -> None:
        """Raise FrozenRefused if the model has no log-probs of the policy's token ids."""
        self._check_head()
        if self.foreign:
            raise FrozenRefused(
                f"frozen model {self.name} has another tokenizer than the policy, so it has no log-probs of the "
                f"policy's ids: {self.foreign}. Use a teacher of the same family, or let this one judge texts"
            )

    def _connected(self) -> Connected:
        check_not_probed()
        connected = _connected.get(self.key)
        if connected is None:
            raise RuntimeError(
                f"frozen model {self.name!r} cannot be asked here: its engines start in run.start(...), and scoring "
                "processes have no engines. Ask it in an episode, in a reward that is a coroutine, or in a stage"
            )
        return connected


class FrozenConversation:
    """A conversation with a frozen model, token-in, token-out: token ids are only appended."""

    def __init__(self, model: FrozenModel, connected: Connected) -> None:
        self._model, self._connected = model, connected
        self._conversation = Conversation(connected.template)
        self._group = _group()

    def read(self, messages: PromptLike) -> None:
        """Give the model messages to read before its next turn."""
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
        """Generate the model's next turn. See :meth:`FrozenModel.reply`."""
        conversation, stops = self._conversation, (stop,) if isinstance(stop, str) else tuple(stop)
        if tools is not None:
            await parsers_loaded()
        conversation.add(messages, tools)
        sampled: list[int] = []
        reason = "length"
        try:
            completion = await self._generate(max_new_tokens, temperature, stops)
            sampled, reason = completion.token_ids.tolist(), completion.finish_reason
        finally:
            turn = conversation.replied(sampled, reason, stops)
        return Reply(turn.text, sampled, completion.logprobs, reason, turn.raw, turn.thinking, turn.tool_calls)

    async def _generate(self, max_new_tokens: int | None, temperature: float, stops: tuple[str, ...]) -> Completion:
        model, connected, ids = self._model, self._connected, self._conversation.ids
        room = model.limit - len(ids)
        if room < 1:
            raise JudgeFailed(
                f"frozen model {model.name} has no room for an answer",
                f"the prompt has {len(ids)} tokens, and the limit for prompt and answer is {model.limit} "
                "(frozen.context-length, frozen.max-total-tokens)",
                infrastructure=False,
            )
        sampling = Sampling(
            min(room, model.max_new_tokens if max_new_tokens is None else max_new_tokens),
            temperature,
            tuple(sorted({*connected.template.stop_token_ids, *connected.stops.token_ids(stops)})),
        )
        completion = await model.request(lambda: connected.replicas.generate(ids, sampling, self._group))
        return connected.stops.truncate(completion, stops) if stops else completion


# -- the engines that this process can ask ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Connected:
    """The engines of a frozen model, with its chat template and stop strings."""

    template: ChatTemplate
    stops: Stops
    replicas: FrozenReplicas


_connected: dict[str, Connected] = {}
"""Connected engines by the key of the model."""
_numbers = itertools.count(1 << 62)
"""Group ids of requests that belong to no group."""


def _group() -> int:
    """Group id of a request: requests of one group share prefixes and therefore a replica."""
    episode = RUNNING_EPISODE.get()
    return next(_numbers) if episode is None else episode.group


async def connect_frozen_models(models: Sequence[tuple[FrozenModel, FrozenReplicas]]) -> None:
    """Connect this process to the engines of frozen models. Raises what loading a chat template raises (OSError,
    ValueError)."""
    for model, replicas in models:
        template = await asyncio.to_thread(
            ChatTemplate,
            model.model,
            model.chat_options,
            tool_parser=model.tool_parser,
            allow_control_tokens=model.allow_control_tokens,
        )
        _connected[model.key] = Connected(template, Stops(template.token_texts, template.decode), replicas)


def replicas_of(key: str) -> FrozenReplicas:
    """Engines of a model that this process is connected to."""
    return _connected[key].replicas


class AsksFrozenModels(ResilientActor):
    """Base of actors whose processes ask frozen models: keeps the connections to their engines up to date."""

    @persistent_endpoint
    async def update_frozen(self, key: str, lost: list[int]) -> None:
        """Send no requests to the ``lost`` engines of a frozen model, and resend their unanswered requests to
        others."""
        replicas_of(key).update_replicas([], lost)

    @concurrent_endpoint
    async def replace_frozen(self, key: str, replica: int, handle: object) -> None:
        """Use ``handle`` for ``replica`` of a frozen model from now on."""
        replicas_of(key).replace(replica, handle)
