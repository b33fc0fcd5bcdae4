"""Your own questions: rows, and a function that rewards an answer.

Questions(jsonl("gsm8k.jsonl"), reward, held_out=200)
"""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monarch_rl.tasks.orders import ShuffledOrder
from monarch_rl.tasks.rows import Row
from monarch_rl.tasks.task import GroupRewards, Outcome, Policy, Task, as_outcome, is_coroutine_function, returned_by
from monarch_rl.tasks.template import check_template, fill

RewardFunction = Callable[[Any, str], Any]
"""``reward(row, answer)``: returns a number, named parts, an :class:`Outcome`, or a coroutine that returns one of
these."""
SAMPLED = 16
"""Number of prompts that are made before a run, to check that they fit."""


class Questions(Task):
    """One question, one answer and one reward per row.

    Training uses all rows that are not held out, in a different order per epoch. The row of a cursor depends only on
    the rows, ``held_out`` and ``seed``.

    Args:
        rows: mappings of columns: a list, or the readers of ``rows.py``: JSONL, parquet, a data set of ``datasets``.
        reward: called with the row and the answer's text. A plain function runs in a scoring process, with a deadline,
            so it may be slow or hang; a coroutine function runs in the worker. If it has an attribute ``warm_up``, that
            is called once in every worker and scoring process beforehand.
        system: system message; "" for none.
        template: user message, with the row's columns in braces.
        held_out: number of rows to hold out, chosen at random; or separate sets of rows, by name. Training uses no row
            with the prompt of a held-out row.
        name: name for metrics.
        seed: seed of the order and of the choice of held-out rows.
        full_context_reward: reward of an episode that a full context ends.
        group_rewards: rewards that compare the answers of a group (:class:`~monarch_rl.tasks.task.Task`).
    """

    def __init__(
        self,
        rows: Sequence[Row],
        reward: RewardFunction,
        *,
        system: str = "",
        template: str = "{question}",
        held_out: int | Mapping[str, Sequence[Row]] = 0,
        name: str = "questions",
        seed: int = 0,
        full_context_reward: float = 0.0,
        group_rewards: GroupRewards | None = None,
    ) -> None:
        episode = _QuestionEpisode(reward, system, template)
        sets: Mapping[str, Any]
        if isinstance(held_out, Mapping):
            split = _Split(rows, held_out, 0, template, seed)
            sets = held_out
        else:
            try:
                count = operator.index(held_out)
            except TypeError as error:
                raise ValueError(
                    f"held_out must be a number of rows, or a mapping of names to sets of rows, got {held_out!r}"
                ) from error
            split = _Split(rows, {}, count, template, seed)
            sets = {"held_out": _HeldOut(split, count)} if count else {}
        super().__init__(
            split.item,
            episode.run,
            sets,
            name,
            full_context_reward,
            warm_up=getattr(reward, "warm_up", None),
            check=split.check,
            group_rewards=group_rewards,
        )


class _QuestionEpisode:
    """Asks the question of a row and rewards the answer."""

    def __init__(self, reward: RewardFunction, system: str, template: str) -> None:
        self._reward, self._system, self._template = reward, system, template
        self._in_worker = is_coroutine_function(reward)

    async def run(self, row: Row, policy: Policy) -> Outcome:
        """Run the episode of a row."""
        if self._system:
            policy.read({"role": "system", "content": self._system})
        reply = await policy.reply(prompt_of(self._template, row))
        if self._in_worker:
            rewarded = await self._reward(row, reply.text)  # waits: EpisodeRunner has a deadline for it
            return returned_by(self._reward, rewarded, as_outcome)
        return await policy.in_scorer(self._reward, row, reply.text)


def prompt_of(template: str, row: Row) -> str:
    """The user message of a row. Raises ValueError if the template does not fit the row."""
    return fill(template, row, "template", "a row")


class _Split:
    """Splits rows into training and held-out rows, and orders the training rows."""

    def __init__(
        self, rows: Sequence[Row], apart: Mapping[str, Sequence[Row]], count: int, template: str, seed: int
    ) -> None:
        self._rows, self._apart, self._count = rows, apart, count
        self._template, self._seed = template, seed

    def __reduce__(self) -> Any:
        return _Split, (self._rows, self._apart, self._count, self._template, self._seed)

    def item(self, cursor: int) -> Row:
        """The row of a cursor."""
        return self._rows[self._order.place(cursor)]

    @functools.cached_property
    def _order(self) -> ShuffledOrder:
        return ShuffledOrder(self._trained, f"order {self._seed}/")

    @functools.cached_property
    def held_out(self) -> list[int]:
        """Indices of the held-out rows."""
        if not 0 <= self._count < len(self._rows):
            raise ValueError(
                f"held_out {self._count} of {len(self._rows)} rows leaves none to train on: hold out fewer rows"
            )
        return random.Random(f"held out {self._seed}").sample(range(len(self._rows)), self._count)

    def held_out_row(self, index: int) -> Row:
        """A held-out row."""
        return self._rows[self.held_out[index]]

    @functools.cached_property
    def _trained(self) -> list[int]:
        held_out = [self._rows[index] for index in self.held_out]
        held_out += [row for rows in self._apart.values() for row in rows]
        if not held_out:
            return list(range(len(self._rows)))
        apart = {prompt_of(self._template, row) for row in held_out}
        trained = [index for index, row in enumerate(self._rows) if prompt_of(self._template, row) not in apart]
        if not trained:
            raise ValueError(
                f"none of the {len(self._rows)} rows is left to train on: all have the prompt of a held-out row"
            )
        return trained

    def check(self) -> list[str]:
        """Prompts of the first rows. Raises ValueError saying what to change."""
        if not len(self._rows):
            raise ValueError("there are no rows to train on")
        check_template(self._template, "template")
        return [prompt_of(self._template, self.item(cursor)) for cursor in range(min(SAMPLED, len(self._trained)))]


class _HeldOut:
    """The held-out rows of a split."""

    def __init__(self, split: _Split, count: int) -> None:
        self._split, self._count = split, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        return self._split.held_out_row(index)
