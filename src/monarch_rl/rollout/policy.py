"""The policy of one episode: what its coroutine calls, token-in, token-out.

An :class:`EpisodePolicy` is a view on one line of the play (``branches.py``): the policy itself, one of its seats, or a
fork of them. What all of them have in common is a :class:`Rollout`.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from monarch_rl.episode.episode import Episode, Turn
from monarch_rl.episode.group_bound import GroupBound
from monarch_rl.episode.sampling import Completion, Sampling, SamplingMaskMissing
from monarch_rl.model.conversation import Conversation
from monarch_rl.model.messages import Message, as_messages
from monarch_rl.model.tools import Tools
from monarch_rl.rollout.branches import Branch, Branches, Line
from monarch_rl.rollout.episode_clock import EpisodeClock, JudgeFailed
from monarch_rl.rollout.episode_failed import EpisodeFailed, ScoringFailed
from monarch_rl.rollout.handles import GeneratorHandle
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.sequences import Outcomes, outcomes_of, rewards_so_far, sequences, untrained
from monarch_rl.rollout.tracebacks import describe, suspended
from monarch_rl.rollout.transcripts import as_rows
from monarch_rl.tasks.task import ContextFull, Outcome, PromptLike, Reply, Reward


@dataclass(frozen=True, slots=True)
class EpisodeContext:
    """What all episodes of a worker are played with."""

    generator: GeneratorHandle
    scorer: Scorer | None
    stops: Stops
    episode_deadline_s: float
    episode_limit: int | None = None
    """Tokens that a sequence may have, prompts and drawn ones; None is any number."""


class Rollout:
    """What the views on one play have in common.

    Args:
        conversation: an empty one.
        sampling: how turns are drawn that say nothing else.
        group: of the episode; the same for prompts that share a prefix.
        share: what the play may become.
    """

    def __init__(
        self,
        means: EpisodeContext,
        conversation: Conversation,
        sampling: Sampling,
        group: int,
        reward_so_far: float,
        share: GroupBound,
    ) -> None:
        self.means, self.sampling, self.group = means, sampling, group
        self.branches = Branches(Line(conversation, reward_so_far), share)
        self.prompt: str | None = None
        """The last user's message before the first turn; where there is none, what the policy was given first."""
        self.answer: str | None = None
        """Its last turn."""
        self.broken: Exception | None = None
        """What went wrong outside the episode's code: it is no matter of the coroutine, whatever that makes of it."""
        self.own_time = EpisodeClock(means.episode_deadline_s)
        self.turn_rewards = TurnRewards()
        self._scoring: list[float] = []
        """Of each score that is waited for: since when, by the event loop's clock."""

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """For the block, a score is waited for."""
        since = asyncio.get_running_loop().time()
        self._scoring.append(since)
        try:
            yield
        finally:
            self._scoring.remove(since)

    @property
    def queue(self) -> str:
        """Who waits for the scoring processes, if most of the time that the episode's own code may take has gone there;
        else ""."""
        since = asyncio.get_running_loop().time() - self.means.episode_deadline_s / 2
        waits = self.means.scorer is not None and any(begun <= since for begun in self._scoring)
        return self.means.scorer.queue if waits and self.means.scorer is not None else ""

    @property
    def policy(self) -> EpisodePolicy:
        """What the coroutine is given."""
        return EpisodePolicy(self, self.branches.all[0])

    def note_prompt(self, said: Sequence[Message]) -> None:
        """Note what the policy is given."""
        if self.answer is None and said:
            asked = [message.content for message in said if message.role == "user"]
            if asked:
                self.prompt = asked[-1]
            elif self.prompt is None:
                self.prompt = "".join(message.content for message in said)

    def end(self) -> None:
        """The episode is over: code of it that still runs can draw nothing more."""
        self.own_time.end()
        self.turn_rewards.end()
        self.broken = self.broken or RuntimeError("the episode is over")

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All that was said so far at the first seat of the first branch, as JSON objects with role and content."""
        line, *_ = self.branches.leaves[0].seats.values()
        return as_rows(line.conversation.messages)

    @property
    def drawn(self) -> int:
        """Trainable tokens so far."""
        return sum(int(span.turn.trainable[span.start : span.end].sum()) for span in self.branches.spans)

    def outcomes(self, returned: Any) -> Outcomes:
        """What the coroutine returned. Raises TypeError or ValueError if it is something else than rewards."""
        if isinstance(returned, Mapping) and returned and all(isinstance(key, EpisodePolicy) for key in returned):
            by_branch = {key.branch: value for key, value in returned.items()}
            if len(by_branch) < len(returned):
                raise ValueError("several values were returned for a branch: name its seats, as in {'white': 1.0, ...}")
            returned = by_branch
        return outcomes_of(returned, self.branches)

    def outcomes_so_far(self) -> Outcomes:
        """What the play is worth if a full context ends it."""
        return rewards_so_far(self.branches)

    def sequences(self, outcomes: Outcomes) -> list[Episode]:
        """What was played. Raises EpisodeFailed if there is nothing to train."""
        played = sequences(self.branches, outcomes, self.sampling.truncated)
        if not played:
            full = [line for branch in self.branches.all for line in branch.lines.values() if line.full]
            if full:
                raise EpisodeFailed(
                    f"prompt leaves no room within {self.means.episode_limit or self.branches.share.max_tokens} tokens",
                    report=f"It has {len(full[0].conversation.ids)} tokens. Shorten prompts, or raise what gives the "
                    "limit: --trainer.tokens-per-microbatch, --generator.context-length, "
                    "--generator.max-total-tokens or --rollout.max-tokens.",
                )
            raise EpisodeFailed("episode ended without a reply", report="It has to await policy.reply(...) once.")
        if self.sampling.temperature > 0 and not any(turn.trainable.any() for one in played for turn in one.turns):
            raise EpisodeFailed(
                "no turn of the episode can be trained",
                report="All were drawn at another temperature than --rollout.temperature.",
            )
        excess = self.branches.share.excess(len(played), sum(sequence.num_tokens for sequence in played))
        if excess is not None:
            raise EpisodeFailed(
                "episode is larger than its share of a group",
                report=f"It has {excess} (--rollout.max-sequences, --rollout.max-tokens).",
            )
        return played


class EpisodePolicy:
    """See :class:`monarch_rl.tasks.task.Policy`: one line of a play.

    Args:
        branch: of the play.
        name: of the seat; "" is the policy's own.
    """

    __slots__ = ("_line", "_means", "_name", "_play", "branch")

    def __init__(self, play: Rollout, branch: Branch, name: str = "") -> None:
        self._play, self._means, self._name = play, play.means, name
        self.branch = branch
        self._line = play.branches.seat(branch, name)

    @property
    def reward_so_far(self) -> float:
        """See :attr:`monarch_rl.tasks.task.Policy.reward_so_far`."""
        return self._line.reward_so_far

    @reward_so_far.setter
    def reward_so_far(self, reward: float) -> None:
        self._line.set_reward(reward)

    @property
    def turns(self) -> int:
        """See :attr:`monarch_rl.tasks.task.Policy.turns`."""
        return len(self._line.turns) - self._line.begun

    @property
    def turn_lengths(self) -> list[int]:
        """See :attr:`monarch_rl.tasks.task.Policy.turn_lengths`."""
        return [self._line.drawn(turn) for turn in range(self.turns)]

    @property
    def drawn(self) -> int:
        """See :attr:`monarch_rl.tasks.task.Policy.drawn`."""
        return sum(int(turn.trainable.sum()) for turn in self._line.turns)

    def seat(self, name: str) -> EpisodePolicy:
        """See :meth:`monarch_rl.tasks.task.Policy.seat`."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"a seat needs a name, got {name!r}")
        return EpisodePolicy(self._play, self.branch, name)

    def fork(self, turns: int | None = None, tokens: int | None = None) -> EpisodePolicy:
        """See :meth:`monarch_rl.tasks.task.Policy.fork`."""
        return EpisodePolicy(self._play, self._play.branches.fork(self.branch, turns, tokens), self._name)

    def read(self, messages: PromptLike) -> None:
        """See :meth:`monarch_rl.tasks.task.Policy.read`."""
        said = as_messages(messages)
        self._play.note_prompt(said)
        self._line.conversation.read(said)

    async def reply(
        self,
        messages: PromptLike = (),
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        stop: str | Sequence[str] = (),
        tools: Tools | None = None,
    ) -> Reply:
        """See :meth:`monarch_rl.tasks.task.Policy.reply`."""
        await self._check_turn()
        line, own = self._line, self._play.sampling
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling = replace(own, seed=line_seed(own.seed, line.number)) if line.number else own
        if max_new_tokens is not None or temperature is not None or stops:
            sampling = applied(sampling, max_new_tokens, temperature, self._means.stops.token_ids(stops))
        begun, before = line.conversation.begun, line.shared_logprobs
        if begun:
            sampling = after(sampling, len(begun))
        asked = sampling.max_new_tokens
        said = as_messages(messages)
        self._play.note_prompt(said)
        line.context += line.conversation.add(said, tools)
        drawn: list[int] = []
        try:
            sampling = self._within_room(sampling)
            completion = await self._draw(sampling)
            if stops:
                completion = self._means.stops.cut(completion, stops, begun)
            drawn, reason = completion.token_ids.tolist(), completion.finish_reason
        finally:  # also if no turn comes about: what it was given stands before the next one
            turn = line.conversation.replied(drawn, completion.finish_reason if drawn else "length", stops)
            if not drawn and line.begun:
                line.begun = False
                self.branch.turns += 1
        if reason == "length" and sampling.max_new_tokens < asked:
            reason, line.full = "context", True
        self._add(completion, sampling, reason)
        line.answers.append(turn.text)
        self._play.answer = turn.text
        logprobs = np.concatenate([before, completion.logprobs]) if begun else completion.logprobs
        reply = Reply(turn.text, [*begun, *drawn], logprobs, reason, turn.raw, turn.thinking, turn.tool_calls)
        self._play.turn_rewards.add(reply, line.turns[-1])
        return reply

    async def _check_turn(self) -> None:
        """Raise what keeps the policy from another turn."""
        play, line = self._play, self._line
        if play.broken is None and not line.drawing and not line.full:
            return
        drawing = line.drawing  # it may end meanwhile
        await asyncio.sleep(0)  # a loop that catches everything must not block the worker
        if play.broken is not None:
            raise play.broken
        if drawing:
            raise RuntimeError("the policy is at its turn: await each policy.reply(...) before the next one")
        raise ContextFull(f"the {len(line.conversation.ids)} tokens of the episode leave no room for another turn")

    async def in_scorer(self, function: Callable[..., Reward], *args: Any) -> Outcome:
        """See :meth:`monarch_rl.tasks.task.Policy.in_scorer`."""
        scorer = self._means.scorer
        if scorer is None:
            raise RuntimeError("there are no scoring processes here")
        try:
            with self._play.scoring():
                return await scorer.score(function, *args)  # waits: the player has a deadline for the episode's code
        except (ScoringFailed, TypeError):
            raise
        except Exception as error:
            self._play.broken = error
            raise

    def _within_room(self, sampling: Sampling) -> Sampling:
        """For the next turn: with the tokens that the episode has room for, and the first expert routes to return."""
        length = len(self._line.conversation.ids)
        if not length:
            raise ValueError("the policy has nothing to read: give its first turn a prompt")
        routes_from = sampling.expert_routes_from
        if routes_from is not None:
            routes_from = sum(map(len, self._line.expert_routes))
        new_tokens, began_at = min([sampling.max_new_tokens, *self._rooms(length)]), self._line.began_at
        if new_tokens < 1:
            self._line.fill()
            raise ContextFull(f"{length} tokens leave no room for another one")
        if began_at is None and new_tokens == sampling.max_new_tokens:
            return sampling
        return replace(
            sampling,
            max_new_tokens=new_tokens,
            expert_routes_from=routes_from,
            conversation_version=began_at,
        )

    def _rooms(self, length: int) -> list[int]:
        """Tokens that each limit leaves for the next turn."""
        limit, room = self._means.episode_limit, self._play.branches.room(self._line)
        return [*([limit - length] if limit is not None else []), *([room] if room is not None else [])]

    async def _draw(self, sampling: Sampling) -> Completion:
        """Have a turn drawn after the conversation. The clock of the episode's own code stands still meanwhile."""
        play, line = self._play, self._line
        play.own_time.stop()
        line.drawing = sampling.max_new_tokens
        try:
            # waits: the generator keeps the deadline
            return await self._means.generator.generate(line.conversation.ids, sampling, play.group)
        except SamplingMaskMissing as error:
            play.broken = EpisodeFailed("the engine could not tell a token's kept set")
            raise play.broken from error
        except Exception as error:
            play.broken = error
            raise
        finally:
            line.drawing = 0
            play.own_time.go_on()

    def _add(self, completion: Completion, sampling: Sampling, reason: str) -> None:
        """Add the turn that has been drawn to the episode."""
        line, own = self._line, self._play.sampling
        if sampling.expert_routes_from is not None:
            rows = len(line.conversation.ids) - 1 - sampling.expert_routes_from
            line.expert_routes.append(self._routes_of(completion, rows))
        if line.began_at is None and len(completion.policy_versions):
            line.began_at = int(completion.policy_versions[0])
        turn = Turn.from_completion(line.context, completion)
        line.context = []
        if sampling.temperature != own.temperature:
            turn = untrained(turn, own.truncated)
        if line.begun:
            turn = line.go_on(turn)
        line.turns.append(turn)
        line.finish_reasons.append(reason)
        self.branch.turns += 1

    def _routes_of(self, completion: Completion, rows: int) -> np.ndarray:
        """The ``rows`` of expert routes that a turn adds: one for the last token of the turn before, and one for each
        token of its context and of its completion but the last. A wrong number would put all later ones beside other
        tokens."""
        expert_routes = completion.expert_routes
        if expert_routes is None or len(expert_routes) != rows:
            received = 0 if expert_routes is None else len(expert_routes)
            self._play.broken = ValueError(
                f"turn {len(self._line.turns)} of an episode of group {self._play.group} from the generators: expert "
                f"routes of {rows} tokens were asked for, {received} were returned"
            )
            raise self._play.broken
        return expert_routes


# -- seeds of the engine's sampling: a setting's, spread over episodes and over the lines of an episode ---------------


def episode_seed(seed: int | None, group_id: int, episode: int) -> int | None:
    """A seed of 31 bits for one episode, the same in every process; None if draws are free."""
    return None if seed is None else _mixed(f"{seed}/{group_id}/{episode}")


def line_seed(seed: int | None, number: int) -> int | None:
    """A seed for a seat or a branch of an episode, or all branches would draw the same.

    Args:
        seed: of the episode, which is that of its first line.
        number: of the line, in the order in which they were begun.
    """
    return seed if seed is None or not number else _mixed(f"{seed}/{number}")


def _mixed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") & 0x7FFFFFFF


# -- stop texts: what ends a turn besides the model's own end token ---------------------------------------------------

MOST_IDS = 1000
"""For a string that more tokens hold, such as a letter, turns are only cut afterwards: ids travel with a request."""


class Stops:
    """Stop strings, for engines that know only tokens.

    The engine ends a turn at a token that holds the whole text. Where it comes in several tokens, the engine goes on,
    and what follows is left out afterwards: a beginning of what was drawn, with the log-probs that it was drawn with.

    Args:
        token_texts: the text of each token id; called once, when the first stop string is used.
        decode: the text of some ids.
    """

    def __init__(self, token_texts: Callable[[], list[str]], decode: Callable[[list[int]], str]) -> None:
        self._token_texts = functools.cache(token_texts)
        self._decode = decode
        self.token_ids = functools.lru_cache(maxsize=64)(self._find)
        """The ids at which an engine ends a turn for these strings; none for those that very many tokens hold. Raises
        ValueError if one is empty."""

    def _find(self, stops: tuple[str, ...]) -> tuple[int, ...]:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        texts = self._token_texts() if stops else []
        found: set[int] = set()
        for stop in stops:
            ids = [index for index, text in enumerate(texts) if stop in text]
            if len(ids) <= MOST_IDS:
                found.update(ids)
        return tuple(sorted(found))

    def cut(self, completion: Completion, stops: Sequence[str], begun: Sequence[int] = ()) -> Completion:
        """``completion`` up to the token that completes the first stop string; the whole if there is none. What the
        turn had ``begun`` with may hold a part of the string."""
        ids = completion.token_ids.tolist()
        if not self._holds([*begun, *ids], stops):
            return completion
        low, high = 1, len(ids)  # the fewest tokens whose text holds one
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._holds([*begun, *ids[:middle]], stops) else (middle + 1, high)
        left_out = len(ids) - low
        routes, kept = completion.expert_routes, completion.sampling_masks
        return Completion(
            completion.token_ids[:low],
            completion.logprobs[:low],
            completion.policy_versions[:low],
            "stop",
            None if kept is None else kept[:low],
            routes if routes is None or not left_out else routes[:-left_out],
        )

    def _holds(self, ids: list[int], stops: Sequence[str]) -> bool:
        text = self._decode(ids)
        return any(stop in text for stop in stops)


# -- process rewards of turns, some of which are computed while the episode goes on -----------------------------------


class TurnRewards:
    """The rewards that an episode's code sets (:attr:`Reply.reward`), on their way to its turns."""

    def __init__(self) -> None:
        self._turns: list[tuple[Reply, Turn]] = []

    def add(self, reply: Reply, turn: Turn) -> None:
        """The next turn, and what the code has of it."""
        self._turns.append((reply, turn))

    async def settled(self) -> None:
        """Wait for the rewards that are still being computed, and give each turn its own.

        Raises:
            EpisodeFailed: one raised, or was cancelled.
            ScoringFailed: one failed in a scoring process.
            JudgeFailed: a judge that one asked did not answer.
        """
        while True:
            rewards = self._awaited()
            for reward in rewards:
                if reward.done():
                    _check(reward)
            pending = [reward for reward in rewards if not reward.done()]
            if not pending:
                break
            # waits: the player has a deadline for the episode's code, which these belong to
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for reply, turn in self._turns:
            turn.reward = reply.reward

    def suspended(self) -> tuple[str, str]:
        """Where the first reward that is still being computed waits, as by ``tracebacks.suspended``."""
        for reward in self._awaited():
            if isinstance(reward, asyncio.Task) and not reward.done():
                coroutine: Any = reward.get_coro()
                return suspended(coroutine)
        return "", ""

    def end(self) -> None:
        """The episode is over: no reward can be set any more, and none is computed on."""
        for reply, _ in self._turns:
            reply.end()

    def _awaited(self) -> list[asyncio.Future[float]]:
        rewards = [reply.awaited_reward for reply, _ in self._turns]
        return [reward for reward in rewards if reward is not None]


def _check(reward: asyncio.Future[Any]) -> None:
    if reward.cancelled():
        raise EpisodeFailed("turn reward was cancelled by the episode's own code")
    error = reward.exception()
    if isinstance(error, ScoringFailed | EpisodeFailed | JudgeFailed):
        raise error
    if error is not None:
        raise EpisodeFailed(f"turn reward raised {type(error).__name__}", *describe(error)) from error


# -- sampling of one turn, where it asks for something else than all others -------------------------------------------


def after(sampling: Sampling, begun: int) -> Sampling:
    """``sampling`` for the rest of a turn that has so many tokens. Raises ValueError if it may have no more."""
    if begun >= sampling.max_new_tokens:
        raise ValueError(f"max_new_tokens must be above {begun}, the tokens that the turn has already")
    return replace(sampling, max_new_tokens=sampling.max_new_tokens - begun)


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
