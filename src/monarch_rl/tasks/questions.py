"""Questions of one's own: rows, and a function that rewards an answer.

Questions(jsonl("gsm8k.jsonl"), reward, held_out=200)
"""

from __future__ import annotations

import functools
import inspect
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from monarch_rl.tasks.task import Message, Outcome, Policy, Task, as_outcome
from monarch_rl.tasks.template import check_template, fill

Row = Mapping[str, Any]
RewardFunction = Callable[[Any, str], Any]
"""``reward(row, answer)``: a number, named parts, an :class:`Outcome`, or a coroutine that returns one of these."""
SAMPLED = 16
"""Prompts that are made before a run, to see whether they fit."""


class Rows(Sequence[Row]):
    """Rows of a file, which every process reads for itself: only its path travels.

    Args:
        path: of the file.
        read: all rows of the file.

    Raises ValueError where rows are first asked for, if the file cannot be read or has changed since.
    """

    def __init__(self, path: str | Path, read: Callable[[Path], Sequence[Row]]) -> None:
        self._path, self._read = Path(path).resolve(), read
        self._size = self._path.stat().st_size if self._path.is_file() else -1
        self._rows: Sequence[Row] | None = None

    def __len__(self) -> int:
        return len(self._all())

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}

    def _all(self) -> Sequence[Row]:
        if self._rows is None:
            try:
                self._rows = self._read(self._path)
            except (OSError, ValueError) as error:
                raise ValueError(f"rows of {self._path} cannot be read: {error}") from error
            if self._path.stat().st_size != self._size:
                raise ValueError(f"{self._path} has changed since the run began: processes would play other rows")
        return self._rows


def jsonl(path: str | Path) -> Rows:
    """Rows of a file with one JSON object a line."""
    return Rows(path, _read_jsonl)


def parquet(path: str | Path) -> Rows:
    """Rows of a parquet file."""
    return Rows(path, _read_parquet)


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    with path.open() as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number} is no JSON ({error})") from error
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} is no JSON object: {line.strip()[:60]}")
                rows.append(row)
    return rows


def _read_parquet(path: Path) -> list[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import read_table

    try:
        rows: list[Row] = read_table(path).to_pylist()
    except ArrowException as error:
        raise ValueError(str(error)) from error
    return rows


class Questions(Task):
    """One question, one answer, one reward, for each row.

    Training plays all rows that are not held out, in another order each time through. What it plays at a cursor depends
    on nothing but the rows, ``held_out`` and ``seed``.

    Args:
        rows: mappings of columns: a list, :func:`jsonl`, :func:`parquet`, or a data set of ``datasets``.
        reward: called with the row and the answer's text. A function runs in a scoring process, with a deadline, so it
            may be slow or hang; a coroutine runs in the worker.
        system: the system message; "" is none.
        template: the user's message, with the row's columns in braces.
        held_out: how many rows are held out, drawn at random; or sets of rows of their own, by name. Training plays no
            row with the prompt of a held-out one.
        name: for metrics.
        seed: of the order, and of which rows are held out.
        full_context_reward: of an episode that a full context ends.
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
    ) -> None:
        asking = _Asking(reward, system, template)
        if isinstance(held_out, int):
            split = _Split(rows, {}, held_out, template, seed)
            sets: Mapping[str, Any] = {"held_out": _HeldOut(split, held_out)} if held_out else {}
        else:
            split = _Split(rows, held_out, 0, template, seed)
            sets = held_out
        super().__init__(split.item, asking.play, sets, name, full_context_reward, check=split.check)


class _Asking:
    """How a row is asked and rewarded."""

    def __init__(self, reward: RewardFunction, system: str, template: str) -> None:
        self._reward, self._system, self._template = reward, system, template
        called = getattr(reward, "__call__", None)  # noqa: B004  that of an object may be a coroutine
        self._in_worker = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(called)

    async def play(self, row: Row, policy: Policy) -> Outcome:
        """The episode of a row."""
        if self._system:
            policy.read(Message("system", self._system))
        reply = await policy.reply(prompt_of(self._template, row))
        if self._in_worker:
            return as_outcome(await self._reward(row, reply.text))  # waits: the player has a deadline for it
        return await policy.in_scorer(self._reward, row, reply.text)


def prompt_of(template: str, row: Row) -> str:
    """The user's message of a row. Raises ValueError if the template does not fit it."""
    return fill(template, row, "template", "a row")


class _Split:
    """Which rows are trained on, in which order."""

    def __init__(
        self, rows: Sequence[Row], apart: Mapping[str, Sequence[Row]], count: int, template: str, seed: int
    ) -> None:
        self._rows, self._apart, self._count = rows, apart, count
        self._template, self._seed = template, seed
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def __reduce__(self) -> Any:
        return _Split, (self._rows, self._apart, self._count, self._template, self._seed)

    def item(self, cursor: int) -> Row:
        """The row of a cursor."""
        size = len(self._trained)
        return self._rows[self._order(cursor // size)[cursor % size]]

    @functools.cached_property
    def held_out(self) -> list[int]:
        """Which rows are held out."""
        if not 0 <= self._count < len(self._rows):
            raise ValueError(f"held_out {self._count} of {len(self._rows)} rows leaves none to train on: hold out less")
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
            raise ValueError(f"of {len(self._rows)} rows none is left to train on: all others have held-out prompts")
        return trained

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(self._trained)
        random.Random(f"order {self._seed}/{epoch}").shuffle(order)
        return order

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
