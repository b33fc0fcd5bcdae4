"""Loads a recipe without starting its run: its settings, task and functions, for tools."""

from __future__ import annotations

import asyncio
import runpy
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monarch_rl.errors import SettingsError
from monarch_rl.generator.frozen import FrozenSettings
from monarch_rl.pipeline.capture import capturing
from monarch_rl.pipeline.frozen import FrozenPlans
from monarch_rl.pipeline.run import Run
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.rollout.frozen import FrozenModel
from monarch_rl.runtime.by_value import run_recipe_code
from monarch_rl.runtime.devices import devices
from monarch_rl.settings.cli import saved_defaults
from monarch_rl.tasks.task import Task


@dataclass(frozen=True)
class Recipe:
    """A recipe's settings, and the arguments that it passes to :meth:`Run.start`."""

    settings: RunSettings
    task: Task
    functions: dict[str, Any]
    """The other arguments of :meth:`Run.start`: ``advantage``, ``objective``, ..."""
    frozen: FrozenPlans = field(default_factory=FrozenPlans)
    """Its frozen models (:meth:`Run.frozen`), on the devices after those of one engine."""


class _Started(Exception):
    def __init__(self, task: Task, functions: dict[str, Any], frozen: FrozenPlans) -> None:
        super().__init__("the recipe has started its run")
        self.task, self.functions, self.frozen = task, functions, frozen


class _NoRun(Run):
    """A run that ends where it would start its actors."""

    def frozen(
        self, name: str, model: str, settings: FrozenSettings | None = None, *, snapshot_every: int = 0
    ) -> FrozenModel:
        return self._add_frozen(name, model, settings, self.settings.generator.tp, devices(), snapshot_every)

    async def start(self, task: Task | None = None, **functions: Any) -> None:
        raise _Started(task or self.task, functions, self._frozen)


def load_recipe(path: Path, flags: Sequence[str], saved: Mapping[str, Any] | None = None, writer: str = "") -> Recipe:
    """Run a recipe's file up to the point where it would start its actors.

    Args:
        flags: the recipe's command-line arguments.
        saved: settings of a run in the form of ``settings.json``, which replace the recipe's defaults; flags override
            them.
        writer: version of this package that saved them, for errors; "" if it is unknown.

    Raises:
        ValueError: the file launches no run, does not start its run, uses a frozen model that cannot be served, or
            cannot read the saved settings.
        SystemExit: the flags are invalid, or ask for help.
    """
    launched: list[tuple[Callable[[Run, Any], Awaitable[None]], RunSettings, Callable[[Any], Task] | None]] = []
    with (
        _as_program(path, flags),
        saved_defaults(saved, writer) if saved else nullcontext(),
        capturing(lambda *arguments: launched.append(arguments)),
    ):
        names = runpy.run_path(str(path), run_name="__main__")
    if not launched:
        raise SettingsError(f"{path} launches no run: a recipe ends with launch(train, settings, task)")
    train, settings, task = launched[0]
    run_recipe_code(getattr(train, "__globals__", names))  # `names` is a copy of these
    try:
        asyncio.run(_to_its_start(train, settings, None if task is None else task(settings)))
    except _Started as started:
        return Recipe(settings, started.task, started.functions, started.frozen)
    raise SettingsError(f"{path}: train() returned without calling run.start(...)")


async def _to_its_start(train: Callable[[Run, Any], Awaitable[None]], settings: RunSettings, task: Task | None) -> None:
    await train(_NoRun(settings, task=task), settings)  # waits: it ends where it would start actors


@contextmanager
def _as_program(path: Path, flags: Sequence[str]) -> Iterator[None]:
    """Set ``sys.argv`` and ``sys.path`` as for ``python path flags``. The recipe's folder stays first in ``sys.path``
    after the block."""
    arguments = sys.argv
    sys.argv = [str(path), *flags]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv = arguments
