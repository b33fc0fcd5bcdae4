"""One episode from reset to its last turn. Knows no actors: the generator is anything that generates."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from monarch_rl.episode.episode import Episode, Turn
from monarch_rl.episode.failure import Failure, shortened
from monarch_rl.episode.sampling import Completion, DrawLost, Sampling
from monarch_rl.rollout.handles import GeneratorHandle
from monarch_rl.rollout.scoring import ScorerBroken, ScoringFailed
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.tokenizer import Tokenizer
from monarch_rl.rollout.tracebacks import describe, suspended
from monarch_rl.runtime.deadlines import DeadlineExceeded, within
from monarch_rl.tasks.task import Environment, Item, Message, StepResult

T = TypeVar("T")
QUOTED_CHARACTERS = 300
"""Of a prompt and of an answer in a report."""


class EpisodeFailed(Exception):
    """The environment or its score failed; costs this episode only. ``reason`` is short, so that it can be counted.

    ``place`` and ``report`` are as in :class:`~monarch_rl.episode.failure.Failure`.
    """

    def __init__(self, reason: str, place: str = "", report: str = "") -> None:
        super().__init__(reason)
        self.reason, self.place, self.report = reason, place, report
        self.tokens = 0
        """Drawn before it failed."""
        self.answer: str | None = None
        """The policy's last turn."""
        self.item: Item | None = None
        """What was played."""

    @property
    def failure(self) -> Failure:
        """What its author is shown: with the item, and with what the policy answered."""
        lines = [self.report] if self.report else []
        if self.item is not None:
            lines.append(f"Item {self.item.index}, prompt: {shortened(self.item.prompt, QUOTED_CHARACTERS)!r}")
        if self.answer is not None:
            lines.append(f"Answer: {shortened(self.answer, QUOTED_CHARACTERS)!r}")
        return Failure(self.reason, self.place, "\n".join(lines))


@dataclass(frozen=True)
class EpisodePlayer:
    """Plays episodes, token-in, token-out: what stays the same over all episodes of a worker."""

    generator: GeneratorHandle
    tokenizer: Tokenizer
    settings: RolloutSettings
    episode_limit: int | None = None
    """Tokens that an episode may have, prompts and drawn ones; None is any number."""

    async def play(self, environment: Environment, sampling: Sampling, group: int) -> Episode:
        """Play one episode.

        Returns:
            The episode; ``finish_reason`` is that of its last turn, ``info`` that of the last step.

        Raises:
            EpisodeFailed: the environment raised, did not answer in time or answered with what cannot be used, the
                episode may grow beyond the limit, or the engine's record of a token's kept set cannot be used.
            ValueError: the generator returned expert routes of another number of tokens than it was asked for.
            DeadlineExceeded: the generator did not answer in time. It and other errors of the generator are not
                this episode's fault: the first ends the run, others cost the worker.
        """
        state = _EpisodeState(sampling, group)
        try:
            return await self._play(environment, state)
        except EpisodeFailed as failure:
            failure.tokens = sum(int(turn.trainable.sum()) for turn in state.turns)
            failure.answer = state.answer
            raise

    async def _play(self, environment: Environment, state: _EpisodeState) -> Episode:
        """See :meth:`play`."""
        messages: list[Message] = await self._answer(environment.reset, "reset")
        context = _rendered(functools.partial(self.tokenizer.render, messages), "reset")
        while True:
            completion = await self._draw_turn(context, state)
            state.answer = text = self.tokenizer.decode(completion.token_ids.tolist())
            result: StepResult = await self._answer(functools.partial(environment.step, text), "step")
            state.add_reward(result)
            if result.done or len(state.turns) == self.settings.max_turns:
                return state.episode(completion.finish_reason, result.info)
            ended = completion.finish_reason == "stop"
            context = _rendered(functools.partial(self.tokenizer.render_reply, result.messages, ended), "step")

    async def _draw_turn(self, context: list[int], state: _EpisodeState) -> Completion:
        """Have the policy's next turn drawn after ``context``, and add both to the episode."""
        state.history += context
        sampling = state.next_sampling()
        if self.episode_limit is not None and len(state.history) + sampling.max_new_tokens > self.episode_limit:
            raise EpisodeFailed(
                f"prompt leaves no room within {self.episode_limit} tokens",
                report=f"{len(state.history)} tokens and {sampling.max_new_tokens} new ones are more. Lower "
                "--rollout.max-new-tokens, shorten prompts, or raise what gives the limit: "
                "--trainer.tokens-per-microbatch, --generator.context-length or --generator.max-total-tokens.",
            )
        what = f"turn {len(state.turns)} of an episode of group {state.group} from the generators"
        drawing = self.generator.generate(state.history, sampling, state.group)
        try:
            completion = await within(
                self.settings.generate_limit_s, drawing, what, on="generators", flag="rollout.generate-deadline-s"
            )
        except DrawLost as error:
            raise EpisodeFailed("the engine could not tell a token's kept set") from error
        state.history += completion.token_ids.tolist()
        if sampling.expert_routes_from is not None:
            rows = len(state.history) - 1 - sampling.expert_routes_from
            state.expert_routes.append(_expert_routes_of(completion, rows, what))
        state.turns.append(Turn.from_completion(context, completion))
        return completion

    async def _answer(self, ask: Callable[[], Coroutine[Any, Any, T]], name: str) -> T:
        """Await the environment; whatever goes wrong in it costs the episode and gets a countable reason."""
        deadline = self.settings.environment_deadline_s
        answer: Coroutine[Any, Any, T] | None = None
        try:
            answer = ask()
            return await within(deadline, answer, f"the environment's {name}", on="the environment")
        except ScoringFailed as error:
            raise EpisodeFailed(error.reason, error.place, error.report) from error
        except DeadlineExceeded as error:
            place, stack = suspended(answer) if answer is not None else ("", "")
            report = f"{stack}\nIf it may take longer, raise --rollout.environment-deadline-s.".lstrip()
            raise EpisodeFailed(f"environment's {name} took over {deadline:g} s", place, report) from error
        except ScorerBroken:
            raise
        except Exception as error:
            raise EpisodeFailed(f"environment's {name} raised {type(error).__name__}", *describe(error)) from error


@dataclass(slots=True)
class _EpisodeState:
    """What an episode is drawn with, and what it consists of so far."""

    sampling: Sampling
    group: int
    turns: list[Turn] = field(default_factory=list)
    history: list[int] = field(default_factory=list)
    """The ids of all turns and of the context of the next one."""
    expert_routes: list[np.ndarray] = field(default_factory=list)
    """What each turn added, where routes are kept."""
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    """Of the reward, summed over turns by name."""
    answer: str | None = None
    """The last turn, as the environment reads it."""

    def next_sampling(self) -> Sampling:
        """For the next turn: expert routes are asked for from the first token on that has none."""
        if self.sampling.expert_routes_from is None:
            return self.sampling
        return replace(self.sampling, expert_routes_from=sum(map(len, self.expert_routes)))

    def add_reward(self, result: StepResult) -> None:
        """Add the reward of a turn, and its parts. Raises EpisodeFailed if they are no finite numbers."""
        try:
            self.reward += result.reward
            for name, value in result.parts.items():
                self.parts[name] = self.parts.get(name, 0.0) + value
            if not math.isfinite(self.reward):
                raise ValueError(f"the reward is {self.reward}, not a finite number")
        except Exception as error:
            reason, (_, report) = "environment's step returned what cannot be used", describe(error)
            report = f"{report}\nIt has to return a StepResult, with a number as its reward."
            raise EpisodeFailed(reason, report=report) from error

    def episode(self, finish_reason: str, info: dict[str, Any]) -> Episode:
        """The episode, once its last turn is answered."""
        expert_routes = np.concatenate(self.expert_routes) if self.expert_routes else None
        return Episode(self.turns, self.reward, finish_reason, info, expert_routes, parts=self.parts)


def _rendered(render: Callable[[], list[int]], name: str) -> list[int]:
    """The ids of what the environment said. Raises EpisodeFailed if that cannot be rendered."""
    try:
        return render()
    except Exception as error:
        reason, (_, report) = f"environment's {name} returned what cannot be rendered", describe(error)
        report = f"{report}\nWhat it says has to be a list of Message(role, content)."
        raise EpisodeFailed(reason, report=report) from error


def _expert_routes_of(completion: Completion, rows: int, what: str) -> np.ndarray:
    """The ``rows`` of expert routes that a turn adds: one for the last token of the turn before, and one for each token
    of its context and of its completion but the last. A wrong number would put all later ones beside other tokens."""
    expert_routes = completion.expert_routes
    if expert_routes is None or len(expert_routes) != rows:
        received = 0 if expert_routes is None else len(expert_routes)
        raise ValueError(f"{what}: expert routes of {rows} tokens were asked for, {received} were returned")
    return expert_routes


def episode_seed(seed: int | None, group_id: int, episode: int) -> int | None:
    """A seed of 31 bits for one episode, the same in every process; None if draws are free."""
    if seed is None:
        return None
    digest = hashlib.sha256(f"{seed}/{group_id}/{episode}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF


async def all_or_none(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run them at once; the first exception cancels the others, waits for them, and is raised as it is."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)  # waits: as long as what is run, whose waits are its own
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # waits: they are done or cancelled
