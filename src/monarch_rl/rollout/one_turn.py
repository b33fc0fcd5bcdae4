"""Runs a group whose episodes are one turn (``tasks/one_turn.py``) as a unit.

The prompt is rendered once, one request asks a replica for all answers, and they are read and scored together. The
episodes are those that the task's coroutine would give with the same samples; it costs a rollout worker several times
the CPU time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from monarch_rl.episode.episode import Episode, EpisodeTimes, Turn
from monarch_rl.episode.group_bound import GroupBound
from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import LoopBlocked, SamplingMaskMissing, ScoringFailed
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.messages import Message, ParsedReply, as_messages
from monarch_rl.rollout.episode_clock import EpisodeClock
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.handles import DispatchedGenerators
from monarch_rl.rollout.play import EpisodeRunner, score_failed, too_late
from monarch_rl.rollout.policy import expert_routes_of, mask_missing, nothing_to_train, prompt_text
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.stages import EpisodeResult
from monarch_rl.rollout.tracebacks import describe
from monarch_rl.rollout.transcripts import as_rows
from monarch_rl.runtime.deadlines import ends_in_time, now
from monarch_rl.tasks.one_turn import OneTurn
from monarch_rl.tasks.task import Outcome, Task
from monarch_rl.user_code import definition


@dataclass(slots=True)
class _Answer:
    """The policy's turn in one episode."""

    turn: Turn
    reply: ParsedReply
    finish_reason: str
    expert_routes: np.ndarray | None


@dataclass(slots=True)
class _RunningGroup:
    """A group in progress, as :meth:`EpisodeRunner.longest` reports it."""

    group: int
    length: tuple[int, int]
    """Turns and tokens."""
    clock: EpisodeClock


class OneTurnGroups:
    """Runs groups of one-turn episodes.

    Args:
        generator: generates the answers.
        template: chat template of the model.
        settings: deadline and limits of episodes.
        scorer: the scoring processes.
        episode_limit: maximum tokens of a sequence, prompts included; None means no limit.
        runner: runs all other episodes, and reports those in progress.
    """

    def __init__(
        self,
        generator: DispatchedGenerators,
        template: ChatTemplate,
        settings: RolloutSettings,
        scorer: Scorer,
        episode_limit: int | None,
        runner: EpisodeRunner,
    ) -> None:
        self._generator, self._template, self._scorer = generator, template, scorer
        self._deadline_s, self._episode_limit, self._runner = settings.episode_deadline_s, episode_limit, runner

    async def play(
        self, task: Task, index: int, item: Any, samplings: Sequence[Sampling], group: int, share: GroupBound
    ) -> list[EpisodeResult] | None:
        """Run the episodes of a group, one per sampling; samplings differ only in their seeds.

        Returns None if the group needs the task's coroutine: its reward runs in the worker, the prompt leaves too
        little room, or the prompt cannot be made, which the coroutine then reports. Otherwise raises as
        :meth:`EpisodeRunner.play` does; failures are returned.
        """
        episode, max_new_tokens = task.episode, samplings[0].max_new_tokens
        if not isinstance(episode, OneTurn) or episode.rewards_in_worker:
            return None
        try:
            messages, reward_args = as_messages(episode.prompt(item)), episode.reward_args(item)
            prompt_ids = self._template.opening(messages)
        except (Exception, LoopBlocked):  # raised again by the coroutine, where it is reported with its place
            return None
        limits = [limit for limit in (self._episode_limit, share.max_tokens) if limit is not None]
        if not prompt_ids or any(len(prompt_ids) + max_new_tokens > limit for limit in limits):
            return None
        clock = EpisodeClock(self._deadline_s)
        clock.stop()  # the generator keeps the deadline of the answers
        times = EpisodeTimes()
        with self._runner.running(_RunningGroup(group, (0, len(prompt_ids)), clock), task.name, index):
            try:
                completions = await self._generator.generate_group(prompt_ids, samplings, group)
                clock.resume()
                answers = [
                    self._answer(prompt_ids, sampling, completion, group)
                    for sampling, completion in zip(samplings, completions, strict=True)
                ]
                calls = [(*reward_args, answer.reply.text) for answer in answers if isinstance(answer, _Answer)]
                scored = now()
                outcomes = iter(await self._outcomes(episode, calls, clock))
                times.score_s = now() - scored
            finally:
                clock.end()
                times.ended = time.time()
        results: list[EpisodeResult] = []
        for answer in answers:
            found = next(outcomes) if isinstance(answer, _Answer) else answer
            results.append(_result(answer, found, messages, samplings[0].temperature, index, times))
        return results

    def _answer(
        self, prompt_ids: list[int], sampling: Sampling, completion: Completion | Exception, group: int
    ) -> _Answer | EpisodeFailed:
        if isinstance(completion, SamplingMaskMissing):
            return mask_missing()
        if isinstance(completion, Exception):
            raise completion
        sampled, routes = completion.token_ids.tolist(), None
        if sampling.expert_routes_from is not None:
            rows = len(prompt_ids) + len(sampled) - 1 - sampling.expert_routes_from
            routes = expert_routes_of(completion, rows, 0, group)
        turn = Turn.from_completion(prompt_ids, completion)
        return _Answer(turn, self._template.read(sampled), completion.finish_reason, routes)

    async def _outcomes(
        self, episode: OneTurn, calls: list[tuple[Any, ...]], clock: EpisodeClock
    ) -> Sequence[Outcome | ScoringFailed | EpisodeFailed]:
        """Outcome or failure of each call of the reward."""
        if not calls:
            return []
        outcomes: dict[int, Outcome | ScoringFailed] = {}
        scoring = asyncio.ensure_future(self._scorer.score_each(episode.reward, calls, outcomes.__setitem__))
        if await ends_in_time(scoring, lambda: clock.deadline, self._deadline_s):
            try:
                scoring.result()
            except TypeError as error:  # the reward or its arguments cannot be pickled
                return [EpisodeFailed(f"episode raised {type(error).__name__}", *describe(error)) for _ in calls]
        else:
            scoring.cancel()
        place, queue = definition(episode.reward)[1], self._scorer.queue
        return [outcomes.get(call) or too_late(self._deadline_s, place, "", queue) for call in range(len(calls))]


def _result(
    answer: _Answer | EpisodeFailed,
    outcome: Outcome | ScoringFailed | EpisodeFailed,
    messages: list[Message],
    temperature: float,
    index: int,
    times: EpisodeTimes,
) -> EpisodeResult:
    """The episode, or its failure with all that its author is shown."""
    reply = answer.reply if isinstance(answer, _Answer) else None
    rows = as_rows([*messages, Message("assistant", "" if reply is None else reply.raw)])
    if isinstance(answer, _Answer) and isinstance(outcome, Outcome):
        if temperature == 0 or answer.turn.trainable.any():
            episode = Episode(
                [answer.turn], outcome.reward, answer.finish_reason, outcome.info, answer.expert_routes, outcome.parts
            )
            episode.messages, episode.answer, episode.times = rows, answer.reply.text, times
            return [episode]
        outcome = nothing_to_train()
    if isinstance(outcome, ScoringFailed):
        outcome = score_failed(outcome)
    assert isinstance(outcome, EpisodeFailed)
    outcome.tokens = int(answer.turn.trainable.sum()) if isinstance(answer, _Answer) else 0
    outcome.index, outcome.prompt, outcome.messages = index, prompt_text(messages), rows
    outcome.answer, outcome.times = None if reply is None else reply.text, times
    outcome.turns = [answer.turn] if isinstance(answer, _Answer) else []
    return outcome
