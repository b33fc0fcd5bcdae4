"""The policy of one episode, which its coroutine calls: token-in, token-out.

An :class:`EpisodePolicy` is a handle to one conversation of the episode: the main one, that of a named seat, or a fork
of either. All handles of an episode share one :class:`Rollout`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from monarch_rl.episode.episode import Episode, EpisodeTimes, Turn
from monarch_rl.episode.group_bound import GroupBound
from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import (
    ContextFull,
    JudgeFailed,
    SamplingMaskMissing,
    ScoringFailed,
    UnusableReward,
    is_infrastructure,
)
from monarch_rl.model.conversation import Conversation
from monarch_rl.model.messages import Message, as_messages
from monarch_rl.model.reply_reader import load_parsers
from monarch_rl.model.tools import Tools
from monarch_rl.rollout.branches import Branch, Branches, Line
from monarch_rl.rollout.episode_clock import EpisodeClock, episode_clock_stopped
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.handles import GeneratorHandle
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.sequences import Outcomes, outcomes_of, rewards_so_far, sequences, untrained
from monarch_rl.rollout.tracebacks import describe, suspended
from monarch_rl.rollout.transcripts import as_rows
from monarch_rl.runtime.deadlines import now, within
from monarch_rl.tasks.task import Outcome, PromptLike, Reply, Reward

EPISODE_LIMIT_FLAGS = (
    "--trainer.tokens-per-microbatch, --generator.context-length, --generator.max-total-tokens or, in the recipe, "
    "RolloutSettings.max_tokens"
)
"""Settings that limit the tokens of an episode: ``episode_limit``, and its share of the group's tokens."""


@dataclass(frozen=True, slots=True)
class EpisodeContext:
    """Objects and limits that all episodes of a worker share."""

    generator: GeneratorHandle
    scorer: Scorer | None
    stops: Stops
    episode_deadline_s: float
    episode_limit: int | None = None
    """Maximum tokens of a sequence, prompts included; None means no limit."""
    max_turns: int | None = None
    """Maximum turns of a sequence; None means no limit."""


class Rollout:
    """State that all handles of one episode share.

    Args:
        conversation: an empty conversation.
        sampling: sampling parameters of turns that do not set their own.
        group: id of the group; equal for prompts that share a prefix.
        share: bound on the sequences and tokens of the rollout.
    """

    def __init__(
        self,
        context: EpisodeContext,
        conversation: Conversation,
        sampling: Sampling,
        group: int,
        reward_so_far: float,
        share: GroupBound,
    ) -> None:
        self.context, self.sampling, self.group = context, sampling, group
        self.branches = Branches(Line(conversation, reward_so_far), share)
        self.prompt: str | None = None
        """The last user message before the first turn; if there is none, the first messages given to the policy."""
        self.answer: str | None = None
        """Text of the last turn."""
        self.broken: Exception | None = None
        """Error from outside the episode's code. It is raised whatever the coroutine does with it."""
        self.clock = EpisodeClock(context.episode_deadline_s)
        self.turn_rewards = TurnRewards()
        self.times = EpisodeTimes()
        self.scoring: list[float] = []
        """Start time of each score that is being waited for, by the event loop's clock."""

    @property
    def scoring_queue_report(self) -> str:
        """Describes the queue for the scoring processes if a score of this episode has waited for more than half of the
        episode deadline; else ""."""
        since = now() - self.context.episode_deadline_s / 2
        waits = self.context.scorer is not None and any(begun <= since for begun in self.scoring)
        return self.context.scorer.queue if waits and self.context.scorer is not None else ""

    @property
    def policy(self) -> EpisodePolicy:
        """The policy that the coroutine is given."""
        return EpisodePolicy(self, self.branches.all[0])

    def note_prompt(self, messages: Sequence[Message]) -> None:
        """Record ``messages`` as the prompt if they come before the first turn."""
        from_user = any(message.role == "user" for message in messages)
        if self.answer is None and messages and (from_user or self.prompt is None):
            self.prompt = prompt_text(messages)

    def end(self) -> None:
        """End the episode: code of it that is still running cannot generate turns any more."""
        self.clock.end()
        self.turn_rewards.end()
        self.broken = self.broken or RuntimeError("the episode is over")

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation of the first seat of the first branch so far, as JSON objects with role and content."""
        return as_rows(self._first_line.conversation.messages)

    @property
    def turns(self) -> list[Turn]:
        """The policy's turns in this conversation."""
        return list(self._first_line.turns)

    @property
    def _first_line(self) -> Line:
        line, *_ = self.branches.leaves[0].seats.values()
        return line

    @property
    def length(self) -> tuple[int, int]:
        """Turns and tokens of the longest conversation so far."""
        lines = (line for branch in self.branches.all for line in branch.lines.values())
        tokens, turns = max((len(line.conversation.ids), len(line.turns)) for line in lines)
        return turns, tokens

    @property
    def num_trainable(self) -> int:
        """Number of trainable tokens so far."""
        return sum(int(span.turn.trainable[span.start : span.end].sum()) for span in self.branches.spans)

    def outcomes(self, returned: Any) -> Outcomes:
        """Outcomes of the coroutine's return value. Raises TypeError or ValueError if it does not consist of
        rewards."""
        if isinstance(returned, Mapping) and returned and all(isinstance(key, EpisodePolicy) for key in returned):
            by_branch = {key.branch: value for key, value in returned.items()}
            if len(by_branch) < len(returned):
                raise ValueError("several values were returned for a branch: name its seats, as in {'white': 1.0, ...}")
            returned = by_branch
        return outcomes_of(returned, self.branches)

    def outcomes_so_far(self) -> Outcomes:
        """Outcomes if a full context ends the rollout now."""
        return rewards_so_far(self.branches)

    def sequences(self, outcomes: Outcomes) -> list[Episode]:
        """The sequences of the rollout; none of them has tokens if it ended before the policy's turn. Raises
        EpisodeFailed if there were turns, or a prompt without room for one, but there is nothing to train."""
        found = sequences(self.branches, outcomes, self.sampling.truncated)
        for sequence in found:
            sequence.times = self.times
        if not any(sequence.turns for sequence in found):
            full = [line for branch in self.branches.all for line in branch.lines.values() if line.full]
            if full:
                raise EpisodeFailed(
                    "prompt leaves no room within "
                    f"{self.context.episode_limit or self.branches.share.max_tokens} tokens",
                    report=f"It has {len(full[0].conversation.ids)} tokens. Shorten prompts, or raise the setting that "
                    f"limits them: {EPISODE_LIMIT_FLAGS}.",
                )
            if not found:
                raise EpisodeFailed("episode returned no reward", report="No seat has a turn, or a reward.")
            return found
        if self.sampling.temperature > 0 and not any(turn.trainable.any() for one in found for turn in one.turns):
            raise nothing_to_train()
        excess = self.branches.share.excess(len(found), sum(sequence.num_tokens for sequence in found))
        if excess is not None:
            raise EpisodeFailed(
                "episode is larger than its share of a group",
                report=f"It has {excess} (RolloutSettings.max_sequences, max_tokens).",
            )
        return found


class EpisodePolicy:
    """One line of a rollout; see :class:`monarch_rl.tasks.task.Policy`.

    Args:
        branch: branch of the rollout.
        name: name of the seat; "" is the policy itself.
    """

    __slots__ = ("_context", "_line", "_name", "_rollout", "branch")

    def __init__(self, rollout: Rollout, branch: Branch, name: str = "") -> None:
        self._rollout, self._context, self._name = rollout, rollout.context, name
        self.branch = branch
        self._line = rollout.branches.seat(branch, name)

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
        return [self._line.turn_length(turn) for turn in range(self.turns)]

    @property
    def sampled_tokens(self) -> int:
        """See :attr:`monarch_rl.tasks.task.Policy.sampled_tokens`."""
        return sum(int(turn.trainable.sum()) for turn in self._line.turns)

    def seat(self, name: str) -> EpisodePolicy:
        """See :meth:`monarch_rl.tasks.task.Policy.seat`."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"a seat needs a name, got {name!r}")
        return EpisodePolicy(self._rollout, self.branch, name)

    def fork(self, turns: int | None = None, tokens: int | None = None) -> EpisodePolicy:
        """See :meth:`monarch_rl.tasks.task.Policy.fork`."""
        return EpisodePolicy(self._rollout, self._rollout.branches.fork(self.branch, turns, tokens), self._name)

    def read(self, messages: PromptLike) -> None:
        """See :meth:`monarch_rl.tasks.task.Policy.read`."""
        given = as_messages(messages)
        self._rollout.note_prompt(given)
        self._line.conversation.read(given)

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
        if tools is not None:
            await parsers_loaded()
        line, own = self._line, self._rollout.sampling
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling = replace(own, seed=line_seed(own.seed, line.number)) if line.number else own
        if max_new_tokens is not None or temperature is not None or stops:
            sampling = override(sampling, max_new_tokens, temperature, self._context.stops.token_ids(stops))
        begun, before = line.conversation.begun, line.shared_logprobs
        if begun:
            sampling = for_rest_of_turn(sampling, len(begun))
        requested = sampling.max_new_tokens
        given = as_messages(messages)
        self._rollout.note_prompt(given)
        line.context += line.conversation.add(given, tools)
        sampled: list[int] = []
        try:
            sampling = self._within_room(sampling)
            completion = await self._generate(sampling)
            if stops:
                completion = self._context.stops.truncate(completion, stops, begun)
            sampled, reason = completion.token_ids.tolist(), completion.finish_reason
        finally:  # also if no turn was generated: its messages then come before the next one
            turn = line.conversation.replied(sampled, completion.finish_reason if sampled else "length", stops)
            if not sampled and line.begun:
                line.begun = False
                self.branch.turns += 1
        if reason == "length" and sampling.max_new_tokens < requested:
            reason = line.full = "context"  # not mark_full(): there is a turn, so this alone is no outcome
        self._add(completion, sampling, reason)
        line.answers.append(turn.text)
        self._rollout.answer = turn.text
        logprobs = np.concatenate([before, completion.logprobs]) if begun else completion.logprobs
        reply = Reply(turn.text, [*begun, *sampled], logprobs, reason, turn.raw, turn.thinking, turn.tool_calls)
        self._rollout.turn_rewards.add(reply, line.turns[-1])
        return reply

    async def _check_turn(self) -> None:
        """Raise if the policy cannot have another turn.

        Raises:
            ContextFull: there is no room for a turn, or it had the most turns.
            RuntimeError: a turn is being generated, or the episode is over.
            Exception: the error that broke the rollout.
        """
        rollout, line = self._rollout, self._line
        most = self._context.max_turns
        no_turns_left = most is not None and self.turns >= most
        if rollout.broken is None and not line.pending_tokens and not line.full and not no_turns_left:
            return
        is_generating = line.pending_tokens > 0  # the turn may end during the next await
        await asyncio.sleep(0)  # a loop that catches every exception must not block the worker
        if rollout.broken is not None:
            raise rollout.broken
        if is_generating:
            raise RuntimeError("the policy is generating a turn: await each policy.reply(...) before the next one")
        if no_turns_left and line.full != "context":
            line.mark_full("turns")
            raise ContextFull(f"the conversation has had {most} turns, the most that --rollout.max-turns allows")
        raise ContextFull(
            f"the episode has {len(line.conversation.ids)} tokens and cannot have another turn. Its length is limited "
            f"by {EPISODE_LIMIT_FLAGS}"
        )

    async def in_scorer(self, function: Callable[..., Reward], *args: Any) -> Outcome:
        """See :meth:`monarch_rl.tasks.task.Policy.in_scorer`."""
        scorer = self._context.scorer
        if scorer is None:
            raise RuntimeError("policy.in_scorer(...) needs scoring processes, and there are none here")
        since = now()
        self._rollout.scoring.append(since)
        try:
            return await scorer.score(function, *args)  # waits: EpisodeRunner has a deadline for the episode's code
        except (ScoringFailed, TypeError):
            raise
        except Exception as error:
            self._rollout.broken = error
            raise
        finally:
            self._rollout.scoring.remove(since)
            self._rollout.times.score_s += now() - since

    def _within_room(self, sampling: Sampling) -> Sampling:
        """``sampling`` with ``max_new_tokens`` limited to the room that is left, and with the first expert route to
        return."""
        length = len(self._line.conversation.ids)
        if not length:
            raise ValueError("the first turn has no prompt: give policy.reply(...) a message, or call policy.read(...)")
        routes_from = sampling.expert_routes_from
        if routes_from is not None:
            routes_from = sum(map(len, self._line.expert_routes))
        new_tokens, first_version = min([sampling.max_new_tokens, *self._rooms(length)]), self._line.first_version
        if new_tokens < 1:
            self._line.mark_full("context")
            raise ContextFull(
                f"the episode has {length} tokens and cannot have another one. Its length is limited by "
                f"{EPISODE_LIMIT_FLAGS}"
            )
        if first_version is None and new_tokens == sampling.max_new_tokens:
            return sampling
        return replace(
            sampling,
            max_new_tokens=new_tokens,
            expert_routes_from=routes_from,
            conversation_version=first_version,
        )

    def _rooms(self, length: int) -> list[int]:
        """Number of tokens that each limit leaves for the next turn."""
        episode_limit, room = self._context.episode_limit, self._rollout.branches.room(self._line)
        return [*([episode_limit - length] if episode_limit is not None else []), *([room] if room is not None else [])]

    async def _generate(self, sampling: Sampling) -> Completion:
        """Generate a turn after the conversation. The episode clock is stopped meanwhile."""
        rollout, line = self._rollout, self._line
        rollout.clock.stop()
        line.pending_tokens = sampling.max_new_tokens
        try:
            # waits: the generator keeps the deadline
            return await self._context.generator.generate(line.conversation.ids, sampling, rollout.group)
        except SamplingMaskMissing as error:
            rollout.broken = mask_missing()
            raise rollout.broken from error
        except Exception as error:
            rollout.broken = error
            raise
        finally:
            line.pending_tokens = 0
            rollout.clock.resume()

    def _add(self, completion: Completion, sampling: Sampling, reason: str) -> None:
        """Add a generated turn to the episode."""
        line, own = self._line, self._rollout.sampling
        if sampling.expert_routes_from is not None:
            rows = len(line.conversation.ids) - 1 - sampling.expert_routes_from
            line.expert_routes.append(self._routes_of(completion, rows))
        if line.first_version is None and len(completion.policy_versions):
            line.first_version = int(completion.policy_versions[0])
        turn = Turn.from_completion(line.context, completion)
        line.context = []
        if sampling.temperature != own.temperature:
            turn = untrained(turn, own.truncated)
        if line.begun:
            turn = line.complete_partial_turn(turn)
        line.turns.append(turn)
        line.finish_reasons.append(reason)
        self.branch.turns += 1

    def _routes_of(self, completion: Completion, rows: int) -> np.ndarray:
        """The ``rows`` of expert routes that a turn adds: one for the last token of the previous turn, and one for each
        token of its context and completion but the last."""
        try:
            return expert_routes_of(completion, rows, len(self._line.turns), self._rollout.group)
        except ValueError as error:
            self._rollout.broken = error
            raise


# -- what also holds for a group that runs as a unit (``one_turn.py``) -------------------------------------------------


def prompt_text(messages: Sequence[Message]) -> str:
    """The last user message; if there is none, all contents."""
    from_user = [message.content for message in messages if message.role == "user"]
    return from_user[-1] if from_user else "".join(message.content for message in messages)


def expert_routes_of(completion: Completion, rows: int, turn: int, group: int) -> np.ndarray:
    """The expert routes of a completion. Raises ValueError unless there are ``rows`` of them."""
    expert_routes = completion.expert_routes
    # A wrong number of rows would align all later rows with the wrong tokens.
    if expert_routes is None or len(expert_routes) != rows:
        received = 0 if expert_routes is None else len(expert_routes)
        raise ValueError(
            f"the generators returned expert routes of {received} tokens for turn {turn} of an episode of group "
            f"{group}; {rows} were requested"
        )
    return expert_routes


def mask_missing() -> EpisodeFailed:
    """The failure of an episode whose engine returned a token without its sampling mask."""
    return EpisodeFailed("the engine returned no sampling mask for a token", infrastructure=True)


def nothing_to_train() -> EpisodeFailed:
    """The failure of an episode without trainable tokens."""
    return EpisodeFailed(
        "no turn of the episode can be trained",
        report="All turns were sampled at another temperature than --rollout.temperature, so none is trained.",
    )


# -- SGLang's parsers of tool calls, imported where a conversation first has tools -------------------------------------

PARSERS_DEADLINE_S = 600.0
"""Deadline in seconds of their import, which takes a second once torch is loaded, and a minute from a slow disk."""


@functools.cache
def _importing_thread() -> concurrent.futures.Executor:
    """One thread: episodes that need the parsers at the same time wait for the same import."""
    return concurrent.futures.ThreadPoolExecutor(1, "tool parsers")


async def parsers_loaded() -> None:
    """Import SGLang's parsers, unless this process has: on a thread, because on the event loop it would hold up all
    episodes of the worker. The episode's clock is stopped meanwhile."""
    if not load_parsers.cache_info().currsize:
        loading = asyncio.get_running_loop().run_in_executor(_importing_thread(), load_parsers)
        with episode_clock_stopped():
            await within(PARSERS_DEADLINE_S, loading, "SGLang's tool parsers to be imported", on="an import")


# -- sampling seeds, derived from a setting for each episode and each line of an episode ------------------------------


def episode_seed(seed: int | None, group_id: int, episode: int) -> int | None:
    """A 31-bit seed for one episode, the same in every process; None if sampling is not seeded."""
    return None if seed is None else _mixed(f"{seed}/{group_id}/{episode}")


def line_seed(seed: int | None, number: int) -> int | None:
    """The seed of one seat or branch. Without different seeds all branches would sample the same tokens.

    Args:
        seed: seed of the episode, which the first line uses itself.
        number: index of the line, in order of creation.
    """
    return seed if seed is None or not number else _mixed(f"{seed}/{number}")


def _mixed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") & 0x7FFFFFFF


# -- stop strings, which end a turn besides the model's own end token -------------------------------------------------

MOST_IDS = 1000
"""Maximum number of stop token ids per stop string, because the ids are sent with every request. A string that more
tokens contain, such as a letter, only truncates the turn afterwards."""


class Stops:
    """Stop strings, for engines that only support stop tokens.

    The engine ends a turn at a token that contains the whole string. If the string spans several tokens, the engine
    continues, and the tokens after it are removed afterwards. The turn is then a prefix of the sampled tokens, with the
    log-probs they were sampled with.

    Args:
        token_texts: returns the text of each token id; called once, when the first stop string is used.
        decode: returns the text of some ids.
    """

    def __init__(self, token_texts: Callable[[], list[str]], decode: Callable[[list[int]], str]) -> None:
        self._token_texts = functools.cache(token_texts)
        self._decode = decode
        self.token_ids = functools.lru_cache(maxsize=64)(self._find)
        """Ids at which the engine ends a turn for these strings; strings that more than :data:`MOST_IDS` tokens contain
        add none. Raises ValueError if a string is empty."""

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

    def truncate(self, completion: Completion, stops: Sequence[str], begun: Sequence[int] = ()) -> Completion:
        """``completion`` up to the token that completes the first stop string; unchanged if there is none. The tokens
        in ``begun``, with which the turn started, may contain the beginning of the string."""
        ids = completion.token_ids.tolist()
        if not self._contains([*begun, *ids], stops):
            return completion
        low, high = 1, len(ids)  # bisects for the fewest tokens whose text contains a stop string
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._contains([*begun, *ids[:middle]], stops) else (middle + 1, high)
        removed = len(ids) - low
        routes, masks = completion.expert_routes, completion.sampling_masks
        return Completion(
            completion.token_ids[:low],
            completion.logprobs[:low],
            completion.policy_versions[:low],
            "stop",
            None if masks is None else masks[:low],
            routes if routes is None or not removed else routes[:-removed],
        )

    def _contains(self, ids: list[int], stops: Sequence[str]) -> bool:
        text = self._decode(ids)
        return any(stop in text for stop in stops)


# -- process rewards of turns, which may be computed while the episode continues --------------------------------------


class TurnRewards:
    """Assigns the rewards that an episode's code sets (:attr:`Reply.reward`) to its turns."""

    def __init__(self) -> None:
        self._turns: list[tuple[Reply, Turn]] = []

    def add(self, reply: Reply, turn: Turn) -> None:
        """Register the next turn and its reply, which the episode's code has."""
        self._turns.append((reply, turn))

    async def settled(self) -> None:
        """Wait for pending rewards, then assign every turn its reward.

        Raises:
            EpisodeFailed: a reward raised, or was cancelled.
            ScoringFailed: a reward failed in a scoring process.
            JudgeFailed: a judge did not answer a reward function.
        """
        while True:
            rewards = self._awaited()
            for reward in rewards:
                if reward.done():
                    _check(reward)
            pending = [reward for reward in rewards if not reward.done()]
            if not pending:
                break
            # waits: EpisodeRunner has a deadline for the episode's code, which includes these
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for reply, turn in self._turns:
            turn.reward = reply.reward

    def suspended(self) -> tuple[str, str]:
        """Place and stack of the first pending reward, in the format of ``tracebacks.suspended``."""
        for reward in self._awaited():
            if isinstance(reward, asyncio.Task) and not reward.done():
                coroutine: Any = reward.get_coro()
                return suspended(coroutine)
        return "", ""

    def end(self) -> None:
        """End the episode: rewards cannot be set any more, and pending ones are cancelled."""
        for reply, _ in self._turns:
            reply.end()

    def _awaited(self) -> list[asyncio.Future[float]]:
        rewards = [reply.awaited_reward for reply, _ in self._turns]
        return [reward for reward in rewards if reward is not None]


def _check(reward: asyncio.Future[Any]) -> None:
    if reward.cancelled():
        raise EpisodeFailed("turn reward was cancelled by the episode's own code")
    error = reward.exception()
    if isinstance(error, ScoringFailed | EpisodeFailed | JudgeFailed | UnusableReward):
        raise error
    if error is not None:
        reason = f"turn reward raised {type(error).__name__}"
        raise EpisodeFailed(reason, *describe(error), is_infrastructure(error)) from error


# -- sampling parameters of one turn ----------------------------------------------------------------------------------


def for_rest_of_turn(sampling: Sampling, begun: int) -> Sampling:
    """``sampling`` for the rest of a turn that has ``begun`` tokens. Raises ValueError if it may not have more."""
    if begun >= sampling.max_new_tokens:
        raise ValueError(f"max_new_tokens must be above {begun}, the number of tokens that the turn already has")
    return replace(sampling, max_new_tokens=sampling.max_new_tokens - begun)


def override(
    sampling: Sampling, max_new_tokens: int | None, temperature: float | None, stop_token_ids: Sequence[int]
) -> Sampling:
    """``sampling`` with the values that one turn sets; None keeps a value.

    Raises ValueError or TypeError if a value is invalid.
    """
    most = sampling.max_new_tokens
    if max_new_tokens is not None and not 1 <= operator.index(max_new_tokens) <= most:
        raise ValueError(f"max_new_tokens must be 1 to {most} (--rollout.max-new-tokens), got {max_new_tokens}")
    if temperature is not None and not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be finite and not negative, got {temperature}")
    return replace(
        sampling,
        max_new_tokens=most if max_new_tokens is None else max_new_tokens,
        temperature=sampling.temperature if temperature is None else temperature,
        stop_token_ids=tuple(sorted({*sampling.stop_token_ids, *stop_token_ids})),
    )
