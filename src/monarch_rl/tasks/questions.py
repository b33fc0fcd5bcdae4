"""Your own questions: rows, and a function that rewards an answer.

Questions(jsonl("gsm8k.jsonl"), reward, held_out=200)
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import random
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from monarch_rl.errors import ChatError
from monarch_rl.model.messages import Message, as_messages, as_row, text_of
from monarch_rl.tasks.one_turn import OneTurn
from monarch_rl.tasks.orders import ShuffledOrder
from monarch_rl.tasks.rows import Row, as_rows, compact, read_all
from monarch_rl.tasks.task import GroupRewards, Task, check_call, check_plain_call
from monarch_rl.tasks.template import DoesNotFit, check_template, fill
from monarch_rl.values import lone_surrogate

RewardFunction = Callable[[Any, str], Any]
"""``reward(row, answer)``: returns a number, named parts, an :class:`Outcome`, or a coroutine that returns one of
these."""
CheckRow = Callable[[Row], object]
"""Raises ValueError if a reward cannot use a row."""
SAMPLED = 16
"""Number of prompts whose tokens are counted before a run, to check that they fit."""


class Questions(Task):
    """One question, one answer and one reward per row.

    Training uses all rows that are not held out, in a different order per epoch. The row of a cursor depends only on
    the rows, ``held_out`` and ``seed``.

    Args:
        rows: mappings of columns: a list, or the readers of ``rows.py``: JSONL, parquet, a data set of ``datasets``.
        reward: called with the row and the answer's text. A plain function runs in a scoring process, with a deadline,
            so it may be slow or hang; a coroutine function runs in the worker. If it has an attribute ``warm_up``, that
            is called once in every worker and scoring process beforehand. If it has an attribute ``check_row``, that is
            called with each row before the run, and raises ValueError for a row that it cannot reward.
        system: system message; "" for none.
        template: user message, with the row's columns in braces. A single column may also hold messages. Numbers are
            written as 3 and 0.00001; null is refused before the run.
        held_out: number of rows to hold out, chosen at random; or separate sets of rows, by name. Training uses no row
            with the prompt of a held-out row.
        name: name for metrics.
        seed: seed of the order and of the choice of held-out rows.
        full_context_reward: reward of an episode that a full context ends.
        success_reward: reward from which on an answer counts as right, for accuracy and pass@k; None if there is no
            such mark (:class:`~monarch_rl.tasks.task.Task`). By default the reward function's attribute
            ``success_reward``, which :class:`~monarch_rl.tasks.mathematics.MathReward` has, else None.
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
        success_reward: float | None = None,
        group_rewards: GroupRewards | None = None,
    ) -> None:
        check_call(reward, "reward", "row", "answer")
        for argument, text in (("template", template), ("system", system)):
            if not isinstance(text, str):
                raise ValueError(f"{argument} must be text, got {text!r:.80}")
        if (check_row := getattr(reward, "check_row", None)) is not None:
            check_plain_call(check_row, "check_row", "row")
        rows = as_rows(rows)
        sets: Mapping[str, Any]
        if isinstance(held_out, Mapping):
            sets = {set_name: as_rows(apart) for set_name, apart in held_out.items()}
            split = _Split(rows, sets, 0, template, system, seed)
        else:
            try:
                count = operator.index(held_out)
            except TypeError as error:
                raise ValueError(
                    f"held_out must be a number of rows, or a mapping of names to sets of rows, got {held_out!r}"
                ) from error
            split = _Split(rows, {}, count, template, system, seed)
            sets = {"held_out": _HeldOut(split, count)} if count else {}
        super().__init__(
            split.item,
            OneTurn(functools.partial(_messages, template, system), reward),
            sets,
            name,
            full_context_reward,
            warm_up=getattr(reward, "warm_up", None),
            check=functools.partial(split.check, check_row),
            group_rewards=group_rewards,
            success_reward=getattr(reward, "success_reward", None) if success_reward is None else success_reward,
            epoch=split.epoch,
        )


def _messages(template: str, system: str, row: Row) -> list[Message]:
    messages = as_messages(prompt_of(template, row, system))
    return [Message("system", system), *messages] if system else messages


def prompt_of(template: str, row: Row, system: str = "") -> str | list[Message]:
    """The user message of a row; or messages, if the template is a single column that holds them.

    Raises DoesNotFit if the template, or a system message besides it, does not fit the row.
    """
    column = _single_column(template)
    given = None if column is None else row.get(column)
    if not isinstance(given, list | tuple | np.ndarray) or not len(given) or not all(map(_is_message, given)):
        return fill(template, row)
    try:
        messages = as_messages(compact(as_row(message)) for message in as_messages(given))
    except ChatError as error:
        raise DoesNotFit(f"{column} cannot be given to a policy", f": {error}") from error
    if system and messages[0].role == "system":
        raise DoesNotFit(f"{column} begins with a system message, and the task has one, too: leave one of them out")
    if not any(message.content.strip() for message in messages):
        raise DoesNotFit(f"the messages of {column} are empty")
    return messages


@functools.lru_cache
def _single_column(template: str) -> str | None:
    """The column of a template such as "{prompt}"; None for others."""
    parts = list(string.Formatter().parse(template))
    text, column, form, conversion = parts[0] if len(parts) == 1 else ("", None, None, None)
    return None if text or form or conversion else column


def _is_message(value: Any) -> bool:
    return "role" in value if isinstance(value, Mapping) else hasattr(value, "role")


class _Split:
    """Splits rows into training and held-out rows, and orders the training rows."""

    def __init__(
        self,
        rows: Sequence[Row],
        apart: Mapping[str, Sequence[Row]],
        count: int,
        template: str,
        system: str,
        seed: int,
    ) -> None:
        self._rows, self._apart, self._count = rows, apart, count
        self._template, self._system, self._seed = template, system, seed

    def __reduce__(self) -> Any:
        return _Split, (self._rows, self._apart, self._count, self._template, self._system, self._seed)

    def epoch(self) -> int:
        """Number of training rows."""
        return len(self._trained)

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
        if not self._count and not self._apart:
            return list(range(len(self._rows)))
        return self._read()

    def _read(self, check_row: CheckRow | None = None) -> list[int]:
        """Make the prompts of all rows; returns the indices of the training rows."""

        def prompt(row: Row) -> bytes:
            if check_row is not None:
                check_row(row)
            return _digest(prompt_of(self._template, row, self._system))

        unfit = f"do not fit the template {self._template!r} or the reward"
        digests = list(read_all(self._rows, prompt, "rows", unfit))
        apart = {digests[index] for index in self.held_out}
        for name, rows in self._apart.items():
            apart.update(read_all(rows, prompt, f"rows of held-out set {name!r}", unfit))
        trained = [index for index, digest in enumerate(digests) if digest not in apart]
        if not trained:
            raise ValueError(
                f"none of the {len(self._rows)} rows is left to train on: all have the prompt of a held-out row"
            )
        return trained

    def check(self, check_row: CheckRow | None) -> list[str]:
        """Prompts of the first rows. Raises ValueError saying what to change."""
        if not len(self._rows):
            raise ValueError("there are no rows to train on")
        check_template(self._template, "template")
        if problem := lone_surrogate(self._system):
            raise ValueError(f"the system message is not valid Unicode: {problem}")
        self._trained = self._read(check_row)
        first = range(min(SAMPLED, len(self._trained)))
        prompts = (prompt_of(self._template, self.item(cursor), self._system) for cursor in first)
        return [prompt if isinstance(prompt, str) else text_of(prompt) for prompt in prompts]


def _digest(prompt: str | list[Message]) -> bytes:
    text = prompt if isinstance(prompt, str) else json.dumps(list(map(as_row, prompt)), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class _HeldOut:
    """The held-out rows of a split."""

    def __init__(self, split: _Split, count: int) -> None:
        self._split, self._count = split, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        return self._split.held_out_row(index)
