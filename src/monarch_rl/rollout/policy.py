"""The policy of one episode: what its coroutine calls, token-in, token-out."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from monarch_rl.episode.episode import NO_VERSION, Episode, Turn
from monarch_rl.episode.sampling import Completion, DrawLost, KeptSets, Sampling
from monarch_rl.model.conversation import Conversation
from monarch_rl.model.messages import as_messages
from monarch_rl.model.tools import Tools
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.handles import GeneratorHandle
from monarch_rl.rollout.scoring import Scorer, ScoringFailed
from monarch_rl.rollout.stops import Stops
from monarch_rl.runtime import presence
from monarch_rl.runtime.deadline_clock import DeadlineClock
from monarch_rl.runtime.deadlines import within
from monarch_rl.tasks.task import ContextFull, Outcome, Reply, Reward, Said

OWN_CODE = "the episode's own code"


@dataclass(frozen=True, slots=True)
class Means:
    """What all episodes of a worker are played with."""

    generator: GeneratorHandle
    scorer: Scorer | None
    stops: Stops
    generate_deadline_s: float
    episode_deadline_s: float
    episode_limit: int | None = None
    """Tokens that an episode may have, prompts and drawn ones; None is any number."""


class OwnTime:
    """The clock of an episode's own code, from one turn of the policy to the next: it stands still during a turn."""

    __slots__ = ("_ended", "_seconds", "_wait", "clock")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ended = False
        self.clock: DeadlineClock | None = None
        self.go_on()

    def go_on(self) -> None:
        """Start at 0, unless the episode is over."""
        if not self._ended:
            self._wait = presence.begin_wait(OWN_CODE, "an episode's code", self._seconds)
            self.clock = DeadlineClock(self._seconds, OWN_CODE)

    def stop(self) -> None:
        """Stand still."""
        if self.clock is not None:
            presence.end_wait(self._wait)
            self.clock = None

    def end(self) -> None:
        """Stand still from here on."""
        self.stop()
        self._ended = True


class EpisodePolicy:
    """See :class:`monarch_rl.tasks.task.Policy`. One conversation, and the turns that it consists of so far.

    Args:
        conversation: an empty one.
        sampling: how turns are drawn that say nothing else.
        group: of the episode; the same for prompts that share a prefix.
    """

    def __init__(
        self, means: Means, conversation: Conversation, sampling: Sampling, group: int, reward_so_far: float
    ) -> None:
        self.reward_so_far = reward_so_far
        self._means, self._sampling, self._group = means, sampling, group
        self._conversation = conversation
        self._drawing = False
        self._context: list[int] = []
        """What the policy was given since its last turn."""
        self._turns: list[Turn] = []
        self._expert_routes: list[np.ndarray] = []
        """What each turn added, where routes are kept."""
        self._finish_reason = ""
        """Of the last turn."""
        self.full = False
        """Whether the context has ended a turn, or left no room for one."""
        self.prompt: str | None = None
        """What the policy was given first, as text."""
        self.answer: str | None = None
        """Its last turn."""
        self.broken: Exception | None = None
        """What went wrong outside the episode's code: it is no matter of the coroutine, whatever that makes of it."""
        self.own_time = OwnTime(means.episode_deadline_s)

    def read(self, messages: Said) -> None:
        """See :meth:`monarch_rl.tasks.task.Policy.read`."""
        said = as_messages(messages)
        if self.prompt is None and said:
            self.prompt = "".join(message.content for message in said)
        self._conversation.read(said)

    async def reply(
        self,
        messages: Said = (),
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        stop: str | Sequence[str] = (),
        tools: Tools | None = None,
    ) -> Reply:
        """See :meth:`monarch_rl.tasks.task.Policy.reply`."""
        await self._check_turn()
        sampling, stops = self._sampling, (stop,) if isinstance(stop, str) else tuple(stop)
        if max_new_tokens is not None or temperature is not None or stops:
            sampling = applied(sampling, max_new_tokens, temperature, self._means.stops.token_ids(stops))
        asked = sampling.max_new_tokens
        self.read(messages)
        self._context += self._conversation.add(tools=tools)
        drawn: list[int] = []
        try:
            sampling = self._within_room(sampling)
            completion = await self._draw(sampling)
            if stops:
                completion = self._means.stops.cut(completion, stops)
            drawn, reason = completion.token_ids.tolist(), completion.finish_reason
        finally:  # also if no turn comes about: what it was given stands before the next one
            turn = self._conversation.replied(drawn, completion.finish_reason if drawn else "length", stops)
        self._add(completion, sampling)
        if reason == "length" and sampling.max_new_tokens < asked:
            reason, self.full = "context", True
        self.answer, self._finish_reason = turn.text, reason
        return Reply(turn.text, drawn, completion.logprobs, reason, turn.raw, turn.thinking, turn.tool_calls)

    async def _check_turn(self) -> None:
        """Raise what keeps the policy from another turn."""
        if self.broken is None and not self._drawing and not self.full:
            return
        await asyncio.sleep(0)  # a loop that catches everything must not block the worker
        if self.broken is not None:
            raise self.broken
        if self._drawing:
            raise RuntimeError("the policy is at its turn: await each policy.reply(...) before the next one")
        raise ContextFull(f"the {len(self._conversation.ids)} tokens of the episode leave no room for another turn")

    async def in_scorer(self, function: Callable[..., Reward], *args: Any) -> Outcome:
        """See :meth:`monarch_rl.tasks.task.Policy.in_scorer`."""
        scorer = self._means.scorer
        if scorer is None:
            raise RuntimeError("there are no scoring processes here")
        try:
            return await scorer.score(function, *args)  # waits: the player has a deadline for the episode's code
        except (ScoringFailed, TypeError):
            raise
        except Exception as error:
            self.broken = error
            raise

    def _within_room(self, sampling: Sampling) -> Sampling:
        """For the next turn: with the tokens that the episode has room for, and the first expert routes to return."""
        limit, length = self._means.episode_limit, len(self._conversation.ids)
        if not length:
            raise ValueError("the policy has nothing to read: give its first turn a prompt")
        routes_from = sampling.expert_routes_from
        if routes_from is not None:
            routes_from = sum(map(len, self._expert_routes))
        new_tokens = sampling.max_new_tokens
        if limit is not None and length + new_tokens > limit:
            new_tokens = limit - length
            if new_tokens < 1:
                self.full = True
                raise ContextFull(f"{length} tokens leave no room for another one within {limit}")
        if new_tokens == sampling.max_new_tokens and routes_from == sampling.expert_routes_from:
            return sampling
        return replace(sampling, max_new_tokens=new_tokens, expert_routes_from=routes_from)

    async def _draw(self, sampling: Sampling) -> Completion:
        """Have a turn drawn after the conversation. The clock of the episode's own code stands still meanwhile."""
        what = f"turn {len(self._turns)} of an episode of group {self._group} from the generators"
        deadline_s = self._means.generate_deadline_s
        self.own_time.stop()
        self._drawing = True
        try:
            drawing = self._means.generator.generate(self._conversation.ids, sampling, self._group)
            return await within(deadline_s, drawing, what, on="generators", flag="rollout.generate-deadline-s")
        except DrawLost as error:
            self.broken = EpisodeFailed("the engine could not tell a token's kept set")
            raise self.broken from error
        except Exception as error:
            self.broken = error
            raise
        finally:
            self._drawing = False
            self.own_time.go_on()

    def _add(self, completion: Completion, sampling: Sampling) -> None:
        """Add the turn that has been drawn to the episode."""
        if sampling.expert_routes_from is not None:
            rows = len(self._conversation.ids) - 1 - sampling.expert_routes_from
            self._expert_routes.append(self._routes_of(completion, rows))
        turn = Turn.from_completion(self._context, completion)
        self._context = []
        if sampling.temperature != self._sampling.temperature:
            turn = _untrained(turn.token_ids, self._sampling.truncated)
        self._turns.append(turn)

    def _routes_of(self, completion: Completion, rows: int) -> np.ndarray:
        """The ``rows`` of expert routes that a turn adds: one for the last token of the turn before, and one for each
        token of its context and of its completion but the last. A wrong number would put all later ones beside other
        tokens."""
        expert_routes = completion.expert_routes
        if expert_routes is None or len(expert_routes) != rows:
            received = 0 if expert_routes is None else len(expert_routes)
            self.broken = ValueError(
                f"turn {len(self._turns)} of an episode of group {self._group} from the generators: expert routes of "
                f"{rows} tokens were asked for, {received} were returned"
            )
            raise self.broken
        return expert_routes

    def end(self) -> None:
        """The episode is over: code of it that still runs can draw nothing more."""
        self.own_time.end()
        self.broken = self.broken or RuntimeError("the episode is over")

    @property
    def drawn(self) -> int:
        """Trainable tokens so far."""
        return sum(int(turn.trainable.sum()) for turn in self._turns)

    def episode(self, outcome: Outcome) -> Episode:
        """What was played. Raises EpisodeFailed if there is nothing to train."""
        if not self._turns:
            limit, length = self._means.episode_limit, len(self._conversation.ids)
            if self.full:
                raise EpisodeFailed(
                    f"prompt leaves no room within {limit} tokens",
                    report=f"It has {length} tokens. Shorten prompts, or raise what gives the limit: "
                    "--trainer.tokens-per-microbatch, --generator.context-length or --generator.max-total-tokens.",
                )
            raise EpisodeFailed("episode ended without a reply", report="It has to await policy.reply(...) once.")
        if self._sampling.temperature > 0 and not self.drawn:
            raise EpisodeFailed(
                "no turn of the episode can be trained",
                report="All were drawn at another temperature than --rollout.temperature.",
            )
        expert_routes = np.concatenate(self._expert_routes) if self._expert_routes else None
        reason = "context" if self.full else self._finish_reason
        return Episode(self._turns, outcome.reward, reason, outcome.info, expert_routes, parts=outcome.parts)


def applied(
    sampling: Sampling, max_new_tokens: int | None, temperature: float | None, stop_token_ids: Sequence[int]
) -> Sampling:
    """``sampling`` with what one turn asks for; None is as it is. Raises ValueError or TypeError if that cannot be."""
    most = sampling.max_new_tokens
    if max_new_tokens is not None and not 1 <= operator.index(max_new_tokens) <= most:
        raise ValueError(f"max_new_tokens must be 1 to {most}, which is --rollout.max-new-tokens, got {max_new_tokens}")
    if temperature is not None and not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must not be negative, got {temperature}")
    return replace(
        sampling,
        max_new_tokens=most if max_new_tokens is None else max_new_tokens,
        temperature=sampling.temperature if temperature is None else temperature,
        stop_token_ids=tuple(sorted({*sampling.stop_token_ids, *stop_token_ids})),
    )


def _untrained(token_ids: np.ndarray, truncated: bool) -> Turn:
    """A turn of which no token is trained."""
    n = len(token_ids)
    kept_sets = KeptSets.none(n) if truncated else None
    return Turn(token_ids, np.zeros(n, np.float32), np.full(n, NO_VERSION, np.int32), np.zeros(n, bool), kept_sets)
