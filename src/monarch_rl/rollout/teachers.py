"""Ready-made stages: a frozen model reads what the policy has drawn, while other groups are played.

    start = run.frozen("start", s.model)
    large = run.frozen("large", "Qwen/Qwen3-8B")
    await run.start(task, ..., stages=[reference(start), teacher(large)])

Each drawn token gets its log-prob by the model, at the temperature of the rollouts. What that costs is in the metrics
``stage/<name>/seconds``, ``stage/<name>/waited_s`` and ``frozen/<name>/device_s``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from monarch_rl.algorithms.distillation import top_columns
from monarch_rl.episode.episode import Episode, Group
from monarch_rl.rollout.frozen import FrozenModel, FrozenRefused
from monarch_rl.rollout.play import all_or_none
from monarch_rl.rollout.stages import Stage
from monarch_rl.tasks.task import PromptLike

Prompt = Callable[[Any, Episode], PromptLike]
"""``(item, episode) -> messages``: what a teacher reads in place of what the policy read before its first turn."""
GRACE_S = 60.0
"""Seconds that a stage has beyond the deadline of a request, whose message says more."""


def reference(engine: FrozenModel, concurrency: int = 8) -> Stage:
    """Fills the column ``reference``, which ``trainer.loss.kl-coefficient`` reads; instead of ``trainer.reference``,
    which has the trainer's own devices compute it.

    Args:
        concurrency: groups at a time, in each worker.

    Raises:
        FrozenRefused: the model has no log-probs that could be compared with the policy's; says why.
    """
    return _stage("reference", engine, None, 0, concurrency)


def teacher(engine: FrozenModel, prompt: Prompt | None = None, top: int = 0, concurrency: int = 8) -> Stage:
    """Fills the column ``teacher``, which the objective and the advantage ``distillation`` read.

    Args:
        prompt: what the teacher reads instead of the policy's first prompt, such as the same question with its
            solution; the rest of the conversation is as the policy has it. None: what the policy has read.
        top: of how many of the teacher's most likely tokens columns are filled, too (``trainer.loss.teacher-top``).
        concurrency: groups at a time, in each worker.

    Raises:
        FrozenRefused: as :func:`reference`.
    """
    return _stage("teacher", engine, prompt, top, concurrency)


def _stage(column: str, engine: FrozenModel, prompt: Prompt | None, top: int, concurrency: int) -> Stage:
    engine.check_ids()
    if engine.rollouts_truncated:
        raise FrozenRefused(
            f"frozen model {engine.name} has log-probs over the whole vocabulary, and rollout.top-k, top-p or min-p "
            f"have the policy draw from a part of it, so the column {column!r} could not be compared: leave them out, "
            "or, for a reference, have the trainer compute it (--trainer.reference)"
        )
    deadline_s = engine.request_deadline_s + GRACE_S
    ids, logprobs = top_columns(top)
    columns = column, *ids, *logprobs
    reader = ColumnReader(engine, columns, prompt)
    return Stage(reader, columns, concurrency, deadline_s, name=column, only_fills=True)


@dataclass(frozen=True)
class ColumnReader:
    """The function of such a stage."""

    engine: FrozenModel
    columns: tuple[str, ...]
    """Of the drawn token's log-probs; then of ids and log-probs of the most likely ones."""
    prompt: Prompt | None

    async def __call__(self, item: Any, group: Group) -> None:
        await all_or_none([self._fill(item, episode) for episode in group.episodes])

    async def _fill(self, item: Any, episode: Episode) -> None:
        ids, drawn = episode.token_ids, np.flatnonzero(episode.trainable)
        values = np.zeros((len(ids), len(self.columns)), np.float32)
        if len(drawn):
            first = int(drawn[0])
            read = self._read(item, episode, first)
            values[first:] = await self._ask([*read, *ids[first:].tolist()], len(read))
        for name, of_column in zip(self.columns, values.T, strict=True):
            episode.fill_column(name, of_column)

    async def _ask(self, ids: list[int], start: int) -> np.ndarray:
        """float32[len(ids) - start, columns]."""
        if len(self.columns) == 1:
            return (await self.engine.logprobs(ids, start))[:, None]
        top = await self.engine.top_logprobs(ids, len(self.columns) // 2, start)
        return np.concatenate([top.given[:, None], top.token_ids.astype(np.float32), top.logprobs], -1)

    def _read(self, item: Any, episode: Episode, first: int) -> list[int]:
        """The ids before the first drawn token."""
        if self.prompt is None:
            return episode.token_ids[:first].tolist()
        if episode.fork is not None:
            raise ValueError(
                "a teacher with a prompt of its own cannot read a branch, whose first turns are not its own"
            )
        return self.engine.opening(self.prompt(item, episode))
