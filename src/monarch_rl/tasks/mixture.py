"""Several tasks in one run: each group belongs to one of them, in given proportions.

Mixture({sums: 2, words: 1})
Mixture({easy: lambda step: 500 - step, hard: lambda step: step}, groups_per_step=s.groups_per_step)
"""

from __future__ import annotations

import functools
import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_rl.episode.admission_steps import AdmissionSteps
from monarch_rl.tasks.task import Items, Policy, Returned, Task

Weight = float | Callable[[int], float]
"""Weight of a task, in any unit; or a function of the step, 0, 1, 2, ..., that returns it. Negative results of a
function count as 0."""
BLOCK = 32
"""Number of groups per block if no weight is a function of the step; each block keeps the proportions."""
CHECKED_S = 5.0
"""Seconds after which no more weights are checked before a run."""
STRIDE = 64
"""Blocks between two cached states."""
Counts = tuple[int, ...]
"""Number of groups of each task."""
State = tuple[Counts, tuple[float, ...]]
"""The groups of each task before a block, and the fraction of a group carried over to it."""


class Mixture(Task):
    """Several tasks, each with its own items, episode, rewards and held-out sets.

    The task of a cursor depends only on the cursor, the weights and ``seed``. Each task gets its own cursors 0, 1, 2,
    ... in order, so that all of its items are used before one is repeated, as in a run of that task alone. In each
    block of groups (a step, if ``groups_per_step`` is given) each task has its share, to within about one group; the
    remainder is carried over to the next block. The order within a block is shuffled.

    The first held-out set, ``held_out``, contains the first sets of all tasks, evenly mixed, so that every prefix of it
    covers all tasks. The other sets are named ``<task>/<set>``.

    Args:
        weights: weight of each task. Tasks need different names.
        groups_per_step: groups per step of the run, which then has the shares in each step. Required if a weight is a
            function. It gets the step that the next groups are expected to be trained in as they are admitted
            (:class:`AdmissionSteps`): groups that were dropped before do not count. ``items``, outside of a run,
            assumes that none is: its step is ``cursor // groups_per_step``.
        name: name of the mixture, for messages; metrics use the names of the tasks.
        seed: seed of the order within blocks.

    Raises ValueError if names are not different, no weight is above 0, ``groups_per_step`` is missing, or a task is
    itself a mixture whose weights are functions.
    """

    groups_per_step: int | None
    schedule: Schedule

    def __init__(
        self,
        weights: Mapping[Task, Weight],
        *,
        groups_per_step: int | None = None,
        name: str = "mixture",
        seed: int = 0,
    ) -> None:
        if not isinstance(weights, Mapping):
            raise ValueError(f"a mixture needs a mapping of tasks to their weights, got {weights!r:.80}")
        object.__setattr__(self, "groups_per_step", groups_per_step)  # a frozen dataclass
        schedule = Schedule(tuple(weights.values()), _block(weights, groups_per_step), seed)
        changes = any(map(callable, weights.values()))
        object.__setattr__(self, "schedule", schedule)
        tasks = _Tasks(tuple(weights), schedule)
        marks = [task.success_reward for task in weights if task.success_reward is not None]
        super().__init__(
            tasks.item,
            tasks.run,
            tasks.held_out(),
            name,
            warm_up=tasks.warm_up,
            check=tasks.check,
            items_by_step=tasks.item_by_step if changes else None,
            part_of=tasks.part_of,
            # Each item has that of its own task; this one is for items that could not be made.
            success_reward=max(marks) if len(marks) == len(weights) else None,
            tasks=tuple(weights),
        )


@dataclass(frozen=True, slots=True)
class PartItem:
    """An item of one of the tasks."""

    task: int
    """Index of the task."""
    item: Any


class _Tasks:
    """The tasks of a mixture."""

    def __init__(self, tasks: tuple[Task, ...], schedule: Schedule) -> None:
        self._tasks, self._schedule = tasks, schedule

    def item(self, cursor: int) -> PartItem:
        """The item of a cursor."""
        return self.item_by_step(cursor, AdmissionSteps(self._schedule.block))

    def item_by_step(self, cursor: int, steps: AdmissionSteps) -> PartItem:
        """The item of a cursor in a run; see :attr:`Task.items_by_step`."""
        task, own_cursor = self._schedule.place(cursor, steps)
        return PartItem(task, self._tasks[task].items(own_cursor))

    def part_of(self, item: PartItem) -> tuple[Task, Any]:
        """See :attr:`Task.part_of`; a task may be a mixture, too."""
        return self._tasks[item.task].owner_of(item.item)

    async def run(self, item: PartItem, policy: Policy) -> Returned:
        """Run the episode of the item's task."""
        task, own_item = self.part_of(item)
        return await task.episode(own_item, policy)  # waits: EpisodeRunner has a deadline for it

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
        """Warm up all tasks."""
        for task in self._tasks:
            if task.warm_up is not None:
                task.warm_up()

    def check(self) -> list[str]:
        """Check all tasks. Raises ValueError with the name of the task."""
        self._schedule.place(0, AdmissionSteps(self._schedule.block))
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
    """Several sets in one, evenly mixed: every prefix contains about the same share of each set."""

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
    """Assigns cursors to tasks.

    Args:
        weights: weights of the tasks.
        block: groups per block; weights are constant within a block, and each block keeps the proportions.
        seed: seed of the order within blocks.
    """

    def __init__(self, weights: tuple[Weight, ...], block: int, seed: int) -> None:
        self.block = block
        self._weights, self._seed = weights, seed
        self._lock = threading.Lock()
        """Needed because items are made on several threads."""
        self._states: dict[tuple[int, AdmissionSteps], State] = {}
        """The states before blocks :data:`STRIDE`, 2 x :data:`STRIDE`, ..., by the steps of the blocks before."""
        self._placed = functools.lru_cache(maxsize=16)(self._place_block)

    def __reduce__(self) -> Any:
        return Schedule, (self._weights, self.block, self._seed)

    def place(self, cursor: int, steps: AdmissionSteps) -> tuple[int, int]:
        """The task of a cursor, and the number of earlier cursors of the same task.

        Raises ValueError if a weight is not a number, or none is above 0.
        """
        block, place = divmod(cursor, self.block)
        return self._placed(block, steps.until(block))[place]

    def _place_block(self, block: int, steps: AdmissionSteps) -> list[tuple[int, int]]:
        before, carried = self._state(block, steps)
        after, _ = self._after(steps.step(block), before, carried)
        order = [task for task, count in enumerate(before) for _ in range(after[task] - count)]
        random.Random(f"block {self._seed}/{block}").shuffle(order)
        cursors, placed = list(before), []
        for task in order:
            placed.append((task, cursors[task]))
            cursors[task] += 1
        return placed

    def _state(self, block: int, steps: AdmissionSteps) -> State:
        """The state before a block."""
        with self._lock:
            first = block - block % STRIDE
            while first and (first, steps.until(first - 1)) not in self._states:
                first -= STRIDE
            tasks = len(self._weights)
            state = self._states[first, steps.until(first - 1)] if first else ((0,) * tasks, (0.0,) * tasks)
            for earlier in range(first, block):
                state = self._after(steps.step(earlier), *state)
                if (earlier + 1) % STRIDE == 0:
                    self._states[earlier + 1, steps.until(earlier)] = state
        return state

    def _after(self, step: int, before: Counts, carried: tuple[float, ...]) -> State:
        quotas = [self.block * share + rest for share, rest in zip(self._shares(step), carried, strict=True)]
        counts = apportioned(quotas, self.block)
        after = tuple(map(sum, zip(before, counts, strict=True)))
        return after, tuple(quota - count for quota, count in zip(quotas, counts, strict=True))

    def check_steps(self, last: int) -> None:
        """Compute the weights of up to about a thousand of the steps 0 to ``last``, for up to :data:`CHECKED_S`.

        Raises ValueError if a function fails or returns no weight, or none is above 0; names the step.
        """
        ends = time.monotonic() + CHECKED_S
        for step in (*range(0, last, 1 + last // 1000), last):
            if time.monotonic() > ends:
                return
            try:
                self._shares(step)
            except ValueError:
                raise
            except Exception as error:  # of the recipe's function
                raise ValueError(f"a weight of the mixture fails in step {step} ({error!r})") from error

    def _shares(self, step: int) -> list[float]:
        weights = [_number(weight(step) if callable(weight) else weight, step) for weight in self._weights]
        total = sum(weights)
        if not total > 0:
            raise ValueError(f"no weight of the mixture is above 0 in step {step}: {weights}")
        return [weight / total for weight in weights]


def apportioned(quotas: Sequence[float], seats: int) -> list[int]:
    """Non-negative integers near ``quotas`` with the sum ``seats``: the largest remainders are rounded up."""
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
    try:
        number = float(weight)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"a weight of the mixture is {weight!r} in step {step}: it must be a finite number")
    return max(0.0, number)


def _is_weight(weight: Any) -> bool:
    try:
        return callable(weight) or bool(weight >= 0)
    except TypeError:  # text, None
        return False


def _block(weights: Mapping[Task, Weight], groups_per_step: int | None) -> int:
    """Number of groups of a block; see :class:`Schedule`. Raises ValueError if the mixture is invalid."""
    names = [task.name for task in weights]
    if len(set(names)) < len(names):
        raise ValueError(f"tasks of a mixture need different names, got {', '.join(names)}: set name= for each task")
    if not weights:
        raise ValueError("the mixture has no tasks: give it some, with their weights")
    curricula = [task.name for task in weights if task.items_by_step is not None]
    if curricula:
        raise ValueError(
            f"the weights of {', '.join(curricula)}, a mixture within the mixture, are functions of the step, but only "
            "the outer mixture knows the run's step: give its tasks to the outer mixture, with such weights"
        )
    wrong = [f"{task.name} has {weight!r}" for task, weight in weights.items() if not _is_weight(weight)]
    if wrong:
        raise ValueError(f"weights of a mixture must be numbers of at least 0: {', '.join(wrong)}")
    if groups_per_step is None:
        if any(map(callable, weights.values())):
            raise ValueError(
                "a weight is a function of the step, so the mixture needs groups_per_step=s.groups_per_step"
            )
        return BLOCK
    if groups_per_step < 1:
        raise ValueError(f"groups_per_step must be at least 1, got {groups_per_step}")
    return groups_per_step
