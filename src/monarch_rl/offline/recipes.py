"""A recipe without its run: its settings, its task and its functions, for tools that play, evaluate or replay."""

from __future__ import annotations

import asyncio
import runpy
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monarch_rl.generator.frozen import FrozenSettings
from monarch_rl.pipeline.capture import capturing
from monarch_rl.pipeline.frozen import FrozenPlans
from monarch_rl.pipeline.run import Run
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.rollout.frozen import FrozenModel
from monarch_rl.runtime.devices import devices
from monarch_rl.tasks.task import Task


@dataclass(frozen=True)
class Recipe:
    """What a recipe hands to :meth:`Run.start`."""

    settings: RunSettings
    task: Task
    functions: dict[str, Any]
    """The other arguments of :meth:`Run.start`: ``advantage``, ``objective``, ..."""
    frozen: FrozenPlans = field(default_factory=FrozenPlans)
    """The models that it asks (:meth:`Run.frozen`), behind the devices of one engine."""


class _Started(Exception):
    def __init__(self, task: Task, functions: dict[str, Any], frozen: FrozenPlans) -> None:
        super().__init__("the recipe has started its run")
        self.task, self.functions, self.frozen = task, functions, frozen


class _NoRun(Run):
    """A run that ends where it would start."""

    def frozen(
        self, name: str, model: str, settings: FrozenSettings | None = None, *, snapshot_every: int = 0
    ) -> FrozenModel:
        s, given = self.settings, settings or FrozenSettings()
        behind, offered = s.generator.tp, devices()
        return self._frozen.add(name, model, given, s.model, behind, offered, snapshot_every, s.rollout)

    async def start(self, task: Task, **functions: Any) -> None:
        raise _Started(task, functions, self._frozen)


def load_recipe(path: Path, flags: Sequence[str]) -> Recipe:
    """Run a recipe's file up to where it would start its actors.

    Args:
        flags: of the recipe, as on its command line.

    Raises:
        ValueError: the file launches no run, or its run does not start, or asks a frozen model that cannot be served.
        SystemExit: the flags are wrong, or ask for help.
    """
    launched: list[tuple[Callable[[Run, Any], Awaitable[None]], RunSettings]] = []
    with _as_program(path, flags), capturing(lambda train, settings: launched.append((train, settings))):
        runpy.run_path(str(path), run_name="__main__")
    if not launched:
        raise ValueError(f"{path} launches no run: a recipe ends with launch(train, settings, task)")
    train, settings = launched[0]
    try:
        asyncio.run(_to_its_start(train, settings))
    except _Started as started:
        return Recipe(settings, started.task, started.functions, started.frozen)
    raise ValueError(f"{path}: train() ended without run.start(...)")


def as_flags(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Settings as ``settings.json`` has them, as a recipe's flags.

    Args:
        prefix: of the names of all flags.
    """
    for name, value in values.items():
        flag = f"{prefix}{name.replace('_', '-')}"
        if isinstance(value, dict):
            yield from as_flags(value, f"{flag}.")
        elif isinstance(value, bool):
            yield f"--{flag}" if value else f"--{prefix}no-{name.replace('_', '-')}"
        elif isinstance(value, list):
            yield from (f"--{flag}", *map(str, value))
        else:
            yield f"--{flag}={value}"


async def _to_its_start(train: Callable[[Run, Any], Awaitable[None]], settings: RunSettings) -> None:
    async with AsyncExitStack() as lifetimes:
        await train(_NoRun(settings, lifetimes), settings)  # waits: it ends where actors would be started


@contextmanager
def _as_program(path: Path, flags: Sequence[str]) -> Iterator[None]:
    """As ``python path flags``: the recipe's folder comes first where modules are looked for, from here on."""
    arguments = sys.argv
    sys.argv = [str(path), *flags]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv = arguments
