"""Several tasks in one run: each group is of one of them, in given shares.

Mixture({sums: 2, words: 1})
Mixture({easy: lambda step: 500 - step, hard: lambda step: step}, groups_per_step=s.groups_per_step)
"""

from __future__ import annotations

import functools
import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_rl.tasks.task import Items, Policy, Returned, Task

Weight = float | Callable[[int], float]
"""Share of a task, in any unit; or a function from the step, 0, 1, 2, ..., to it, of which less than 0 counts as 0."""
BLOCK = 32
"""Groups within which the shares are kept, where no weight is a function of the step."""
STRIDE = 64
"""Blocks from one remembered state to the next."""
Counts = tuple[int, ...]
"""Of each task: groups of it."""


class Mixture(Task):
    """Several tasks, each with its own items, episode, rewards and held-out sets.

    Which task a cursor is of depends on nothing but the cursor, the weights and ``seed``. Each task is asked for its
    items 0, 1, 2, ... in turn, so that it plays all of them before one comes again, as it would by itself. In each
    block of groups (a step, if ``groups_per_step`` is given) a task has its share, to about one group; what is left of
    it counts in the next block. The order within a block is shuffled.

    The first held-out set, ``held_out``, has the first sets of all tasks, evenly mixed, so that each beginning of it
    has all tasks. The others are named ``<task>/<set>``.

    Args:
        weights: of each task. Tasks need different names.
        groups_per_step: of the run. Needed where a weight is a function: the step of a cursor is ``cursor //
            groups_per_step``. That is the step which the group is admitted for; it is trained up to ``max_policy_lag``
            steps later, and groups that are dropped move it on.
        name: of the whole, for messages; metrics are those of the tasks.
        seed: of the order within blocks.

    Raises ValueError if names are not different, no weight is above 0, or ``groups_per_step`` is missing.
    """

    def __init__(
        self,
        weights: Mapping[Task, Weight],
        *,
        groups_per_step: int | None = None,
        name: str = "mixture",
        seed: int = 0,
    ) -> None:
        schedule = Schedule(tuple(weights.values()), _block(weights, groups_per_step), seed)
        tasks = _Tasks(tuple(weights), schedule)
        super().__init__(
            tasks.item,
            tasks.play,
            tasks.held_out(),
            name,
            warm_up=tasks.warm_up,
            check=tasks.check,
            part_of=tasks.part_of,
        )


@dataclass(frozen=True, slots=True)
class PartItem:
    """An item of one of the tasks."""

    task: int
    """Which one, counted from 0."""
    item: Any


class _Tasks:
    """The tasks of a mixture."""

    def __init__(self, tasks: tuple[Task, ...], schedule: Schedule) -> None:
        self._tasks, self._schedule = tasks, schedule

    def item(self, cursor: int) -> PartItem:
        """The item of a cursor."""
        task, own_cursor = self._schedule.place(cursor)
        return PartItem(task, self._tasks[task].items(own_cursor))

    def part_of(self, item: PartItem) -> tuple[Task, Any]:
        """See :attr:`Task.part_of`; a task may be a mixture itself."""
        return self._tasks[item.task].player_of(item.item)

    async def play(self, item: PartItem, policy: Policy) -> Returned:
        """The episode of the item's own task."""
        task, own_item = self.part_of(item)
        return await task.episode(own_item, policy)  # waits: the player has a deadline for it

    def held_out(self) -> dict[str, Items]:
        """All held-out sets; see :class:`Mixture`."""
        firsts = [_Part(index, task.held_out_items()) for index, task in enumerate(self._tasks) if task.held_out]
        named = {
            f"{task.name}/{name}": _Part(index, items)
            for index, task in enumerate(self._tasks)
            for name, items in task.held_out.items()
        }
        return {"held_out": _Mixed(firsts), **named} if firsts else {}

    def warm_up(self) -> None:
        """Those of all tasks."""
        for task in self._tasks:
            if task.warm_up is not None:
                task.warm_up()

    def check(self) -> list[str]:
        """The checks of all tasks. Raises ValueError with the name of the task."""
        self._schedule.place(0)
        prompts: list[str] = []
        for task in self._tasks:
            try:
                prompts += task.check()
            except ValueError as error:
                raise ValueError(f"{task.name}: {error}") from error
        return prompts


class _Part:
    """Items of one of the tasks."""

    def __init__(self, task: int, items: Items) -> None:
        self._task, self._items = task, items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> PartItem:
        return PartItem(self._task, self._items[index])


class _Mixed:
    """Several sets in one, evenly mixed: each beginning has of each set about its share of the whole."""

    def __init__(self, sets: Sequence[Items]) -> None:
        self._sets = sets

    def __len__(self) -> int:
        return sum(map(len, self._sets))

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        place, own_index = self._order[index]
        return self._sets[place][own_index]

    @functools.cached_property
    def _order(self) -> list[tuple[int, int]]:
        order = ((place, index) for place, items in enumerate(self._sets) for index in range(len(items)))
        return sorted(order, key=lambda entry: ((entry[1] + 0.5) / len(self._sets[entry[0]]), entry))


class Schedule:
    """Which task each cursor is of.

    Args:
        weights: of the tasks.
        block: groups for which the weights stay as they are, and within which shares are kept.
        seed: of the order within blocks.
    """

    def __init__(self, weights: tuple[Weight, ...], block: int, seed: int) -> None:
        self._weights, self._block, self._seed = weights, block, seed
        self._lock = threading.Lock()
        """Items are made on several threads."""
        self._states = [((0,) * len(weights), (0.0,) * len(weights))]
        """Before blocks 0, :data:`STRIDE`, ...: groups of each task so far, and what it was owed beyond them."""
        self._placed = functools.lru_cache(maxsize=16)(self._place_block)

    def __reduce__(self) -> Any:
        return Schedule, (self._weights, self._block, self._seed)

    def place(self, cursor: int) -> tuple[int, int]:
        """Which task a cursor is of, and how many cursors before it are of the same one.

        Raises ValueError if a weight is no number, or none is above 0.
        """
        block, place = divmod(cursor, self._block)
        return self._placed(block)[place]

    def _place_block(self, block: int) -> list[tuple[int, int]]:
        before, owed = self._state(block)
        after, _ = self._after(block, before, owed)
        order = [task for task, count in enumerate(before) for _ in range(after[task] - count)]
        random.Random(f"block {self._seed}/{block}").shuffle(order)
        cursors, placed = list(before), []
        for task in order:
            placed.append((task, cursors[task]))
            cursors[task] += 1
        return placed

    def _state(self, block: int) -> tuple[Counts, tuple[float, ...]]:
        """What was before a block."""
        with self._lock:
            first = min(block // STRIDE, len(self._states) - 1)
            state = self._states[first]
            for earlier in range(first * STRIDE, block):
                state = self._after(earlier, *state)
                if earlier + 1 == len(self._states) * STRIDE:
                    self._states.append(state)
        return state

    def _after(self, block: int, before: Counts, owed: tuple[float, ...]) -> tuple[Counts, tuple[float, ...]]:
        quotas = [self._block * share + rest for share, rest in zip(self._shares(block), owed, strict=True)]
        counts = apportioned(quotas, self._block)
        after = tuple(map(sum, zip(before, counts, strict=True)))
        return after, tuple(quota - count for quota, count in zip(quotas, counts, strict=True))

    def _shares(self, block: int) -> list[float]:
        weights = [_number(weight(block) if callable(weight) else weight, block) for weight in self._weights]
        total = sum(weights)
        if not total > 0:
            raise ValueError(f"no weight of the mixture is above 0 in step {block}: {weights}")
        return [weight / total for weight in weights]


def apportioned(quotas: Sequence[float], seats: int) -> list[int]:
    """Whole numbers near ``quotas`` with the sum ``seats``, none below 0: the largest rests are rounded up."""
    counts = [max(0, math.floor(quota)) for quota in quotas]
    places = range(len(quotas))
    while (missing := seats - sum(counts)) != 0:
        if missing > 0:
            counts[max(places, key=lambda place: quotas[place] - counts[place])] += 1
        else:
            filled = (place for place in places if counts[place])
            counts[min(filled, key=lambda place: quotas[place] - counts[place])] -= 1
    return counts


def _number(weight: Any, step: int) -> float:
    number = float(weight)
    if not math.isfinite(number):
        raise ValueError(f"a weight of the mixture is {number} in step {step}: it must be a finite number")
    return max(0.0, number)


def _block(weights: Mapping[Task, Weight], groups_per_step: int | None) -> int:
    """Groups of a block; see :class:`Schedule`. Raises ValueError if the mixture cannot be."""
    names = [task.name for task in weights]
    if len(set(names)) < len(names):
        raise ValueError(f"tasks of a mixture need different names, got {', '.join(names)}: give each its name=")
    if not weights:
        raise ValueError("a mixture of no tasks: give it some, with their weights")
    wrong = [
        f"{task.name} has {weight}" for task, weight in weights.items() if not callable(weight) and not weight >= 0
    ]
    if wrong:
        raise ValueError(f"weights of a mixture must not be negative: {', '.join(wrong)}")
    if groups_per_step is None:
        if any(map(callable, weights.values())):
            raise ValueError("a weight is a function of the step: give the mixture groups_per_step=s.groups_per_step")
        return BLOCK
    if groups_per_step < 1:
        raise ValueError(f"groups_per_step must be at least 1, got {groups_per_step}")
    return groups_per_step
