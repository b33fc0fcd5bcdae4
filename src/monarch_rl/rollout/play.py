"""One episode from reset to its last turn. Knows no actors: the generator is anything that generates."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from monarch_rl.episode.episode import Episode, Turn
from monarch_rl.episode.sampling import Completion, DrawLost, Sampling
from monarch_rl.rollout.handles import GeneratorHandle
from monarch_rl.rollout.scoring import ScorerBroken, ScoringFailed
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.tokenizer import Tokenizer
from monarch_rl.runtime.deadlines import DeadlineExceeded, within
from monarch_rl.tasks.task import Environment, StepResult

T = TypeVar("T")


class EpisodeFailed(Exception):
    """The environment or its score failed; costs this episode only. ``reason`` is short, so that it can be counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.tokens = 0
        """Drawn before it failed."""


async def play(
    environment: Environment,
    generator: GeneratorHandle,
    tokenizer: Tokenizer,
    sampling: Sampling,
    group: int,
    settings: RolloutSettings,
    limit: int | None = None,
) -> Episode:
    """Play one episode, token-in, token-out, of at most ``limit`` tokens.

    Returns:
        The episode; ``finish_reason`` is that of its last turn, ``info`` that of the last step.

    Raises:
        EpisodeFailed: the environment raised or did not answer in time, the episode may grow beyond ``limit``, or the
            engine could not tell from which set it drew a token.
        ValueError: the generator told routes of other tokens than were asked for.
        DeadlineExceeded: the generator did not answer in time. It and other errors of the generator are not
            this episode's fault: the first ends the run, others cost the worker.
    """
    turns: list[Turn] = []
    try:
        return await _play(environment, generator, tokenizer, sampling, group, settings, limit, turns)
    except EpisodeFailed as failure:
        failure.tokens = sum(int(turn.trainable.sum()) for turn in turns)
        raise


async def _play(
    environment: Environment,
    generator: GeneratorHandle,
    tokenizer: Tokenizer,
    sampling: Sampling,
    group: int,
    settings: RolloutSettings,
    limit: int | None,
    turns: list[Turn],
) -> Episode:
    """See :func:`play`; ``turns`` grows by what was drawn."""
    context = tokenizer.render(await _answer(environment.reset(), settings, "reset"))
    history: list[int] = []
    expert_routes: list[np.ndarray] = []
    reward = 0.0
    while True:
        history += context
        if limit is not None and len(history) + sampling.max_new_tokens > limit:
            raise EpisodeFailed(f"prompt leaves no room within {limit} tokens")
        what = f"turn {len(turns)} of an episode of group {group} from the generators"
        if sampling.expert_routes_from is not None:
            sampling = replace(sampling, expert_routes_from=sum(map(len, expert_routes)))
        drawing = generator.generate(history, sampling, group)
        try:
            completion = await within(settings.generate_deadline_s, drawing, what, on="generators")
        except DrawLost as error:
            raise EpisodeFailed("the engine could not tell a token's kept set") from error
        drawn = completion.token_ids.tolist()
        history += drawn
        if sampling.expert_routes_from is not None:
            expert_routes.append(_expert_routes_of(completion, len(history) - 1 - sampling.expert_routes_from, what))
        turns.append(Turn.from_completion(context, completion))
        result: StepResult = await _answer(environment.step(tokenizer.decode(drawn)), settings, "step")
        reward += result.reward
        if result.done or len(turns) == settings.max_turns:
            kept = np.concatenate(expert_routes) if expert_routes else None
            return Episode(turns, reward, completion.finish_reason, result.info, kept)
        context = tokenizer.render_reply(result.messages, ended=completion.finish_reason == "stop")


def _expert_routes_of(completion: Completion, rows: int, what: str) -> np.ndarray:
    """The routes that a turn adds: of its context and of what it drew, but for the last token, and of the last token
    of the turn before. A wrong number of them would put all later ones beside other tokens."""
    found = completion.expert_routes
    if found is None or len(found) != rows:
        raise ValueError(
            f"{what}: routes of {rows} tokens were asked for, of {0 if found is None else len(found)} came"
        )
    return found


async def _answer(answer: Coroutine[Any, Any, T], settings: RolloutSettings, name: str) -> T:
    """Await the environment; whatever goes wrong in it costs the episode and gets a countable reason."""
    try:
        return await within(settings.environment_deadline_s, answer, f"the environment's {name}", on="the environment")
    except ScoringFailed as error:
        raise EpisodeFailed(error.reason) from error
    except DeadlineExceeded as error:
        raise EpisodeFailed(f"environment's {name} took over {settings.environment_deadline_s:g} s") from error
    except ScorerBroken:
        raise
    except Exception as error:
        raise EpisodeFailed(f"environment's {name} raised {type(error).__name__}") from error


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
