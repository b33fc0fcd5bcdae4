"""Ready-made stages: a frozen model computes log-probs of the sampled tokens, while other groups are generated.

    start = run.frozen("start", s.model)
    large = run.frozen("large", "Qwen/Qwen3-8B")
    await run.start(..., stages=[reference(start), teacher(large)])

Each sampled token gets its log-prob under the model, at the temperature of the rollouts. The cost is reported by the
metrics ``stage/<name>/seconds``, ``stage/<name>/waited_s`` and ``frozen/<name>/device_s``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from monarch_rl.algorithms.distillation import top_columns
from monarch_rl.episode.episode import Episode, Group
from monarch_rl.errors import FrozenRefused
from monarch_rl.rollout.frozen import FrozenModel
from monarch_rl.rollout.play import all_or_none
from monarch_rl.rollout.stages import Stage
from monarch_rl.tasks.task import PromptLike

Prompt = Callable[[Any, Episode], PromptLike]
"""``(item, episode) -> messages``: the teacher's replacement of the policy's first prompt."""
GRACE_S = 60.0
"""Seconds by which a stage's deadline exceeds that of a request, so that the request fails first: its message says
more."""


def reference(engine: FrozenModel, concurrency: int = 8) -> Stage:
    """A stage that fills the column ``reference``, which ``trainer.loss.kl-coefficient`` reads. It replaces
    ``trainer.reference``, which computes it on the trainer's own devices.

    Args:
        concurrency: groups at a time, per worker.

    Raises:
        FrozenRefused: the model has no log-probs that are comparable with the policy's; says why.
    """
    return _stage("reference", engine, None, 0, concurrency)


def teacher(engine: FrozenModel, prompt: Prompt | None = None, top: int = 0, concurrency: int = 8) -> Stage:
    """A stage that fills the column ``teacher``, which the objective and the advantage ``distillation`` read.

    Args:
        prompt: messages that the teacher reads instead of the policy's first prompt, such as the same question with its
            solution; the rest of the conversation is the policy's. None means the policy's own prompt.
        top: number of the teacher's most likely tokens that also get columns (``objective.top``).
        concurrency: groups at a time, per worker.

    Raises:
        FrozenRefused: as :func:`reference`.
    """
    return _stage("teacher", engine, prompt, top, concurrency)


def _stage(column: str, engine: FrozenModel, prompt: Prompt | None, top: int, concurrency: int) -> Stage:
    engine.check_ids()
    if engine.rollouts_truncated:
        raise FrozenRefused(
            f"frozen model {engine.name} computes log-probs over the whole vocabulary, but with rollout.top-k, top-p "
            f"or min-p the policy samples from a part of it, so the column {column!r} would not be comparable: leave "
            "them off, or, for a reference, let the trainer compute it (--trainer.reference)"
        )
    deadline_s = engine.request_deadline_s + GRACE_S
    ids, logprobs = top_columns(top)
    columns = column, *ids, *logprobs
    reader = ColumnReader(engine, columns, prompt)
    return Stage(reader, columns, concurrency, deadline_s, name=column, only_fills=True)


@dataclass(frozen=True)
class ColumnReader:
    """The function of these stages."""

    engine: FrozenModel
    columns: tuple[str, ...]
    """Names of the columns: log-probs of the sampled token, then ids and log-probs of the most likely tokens."""
    prompt: Prompt | None

    async def __call__(self, item: Any, group: Group) -> None:
        await all_or_none([self._fill(item, episode) for episode in group.episodes])

    async def _fill(self, item: Any, episode: Episode) -> None:
        ids, sampled = episode.token_ids, np.flatnonzero(episode.trainable)
        values = np.zeros((len(ids), len(self.columns)), np.float32)
        if len(sampled):
            first = int(sampled[0])
            context = self._context_ids(item, episode, first)
            values[first:] = await self._ask([*context, *ids[first:].tolist()], len(context))
        for name, of_column in zip(self.columns, values.T, strict=True):
            episode.fill_column(name, of_column)

    async def _ask(self, ids: list[int], start: int) -> np.ndarray:
        """float32[len(ids) - start, columns]."""
        if len(self.columns) == 1:
            return (await self.engine.logprobs(ids, start))[:, None]
        top = await self.engine.top_logprobs(ids, len(self.columns) // 2, start)
        return np.concatenate([top.given[:, None], top.token_ids.astype(np.float32), top.logprobs], -1)

    def _context_ids(self, item: Any, episode: Episode, first: int) -> list[int]:
        """The token ids that the model reads before the first sampled token."""
        if self.prompt is None:
            return episode.token_ids[:first].tolist()
        if episode.fork is not None:
            raise ValueError(
                "teacher(prompt=...) cannot be used for a forked branch: its first turns are trained in another "
                "sequence, so replacing its first prompt would also replace these turns"
            )
        return self.engine.opening(self.prompt(item, episode))
