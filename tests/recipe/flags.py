"""The flags of a recipe: their types and ranges, whether values are accepted, and samples of accepted values."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import random
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import tyro

from monarch_rl.algorithms.objectives import Objective
from monarch_rl.model.config import ModelConfig
from monarch_rl.pipeline.run import Run
from monarch_rl.pipeline.settings import RunSettings, check
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.devices import Devices
from monarch_rl.settings.ranges import NamedSettings, Range, limits
from monarch_rl.tasks.task import Task
from tests.recipe.running import ROOT

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))
OFFERED = Devices("cpu", 1, 64)
SMALL = {
    "steps": 2,
    "held-out": 4,
    "groups-per-step": 4,
    "rollout.group-size": 4,
    "rollout.max-new-tokens": 8,
    "task.template": "{word} -> ",
    "task.pass-mark": 0.0,
    "generator.replicas": 1,
    "stones": 6,
}
"""Flags of a small run. A random model gets partial marks; each engine is half of the start-up cost."""
FIXED = re.compile(
    r"model|teacher|frozen\..*|output|steps|held-out|task\..*|.*-s|.*\.ranks|.*-processes|.*\.(workers|replicas|tp)"
)
"""Flags that a sample does not change: they would change the task, give deadlines that a crowded machine misses, or
start more processes."""
CHANGED_SHARE = 0.4
"""Share of the changeable flags that a sample changes."""
ZEROS = 4
"""Number of flags that a sample sets to 0 although their default is another value."""


def defaults(recipe: str, model: Path, output: Path) -> RunSettings:
    """Return the defaults of a recipe with an existing model; ``sys.path`` must contain the folder of recipes."""
    settings = importlib.import_module(f"recipes.{recipe}").Settings()  # `tools` alone would be the folder tools/
    found: RunSettings = replace(settings, model=str(model), output=output)
    return with_flag(found, "teacher", found.model) if hasattr(found, "teacher") else found


def name_of(settings: RunSettings) -> str:
    """Return the name of the recipe with these settings."""
    return type(settings).__module__.removeprefix("recipes.")


def leaves(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield each flag on a recipe's command line, the settings object that holds it, and its field name there."""
    hints = typing.get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), prefix + field.name.replace("_", "-")
        if tyro.conf.Suppress in typing.get_args(hints[field.name]):
            continue
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{name}.")
        elif isinstance(settings, NamedSettings) and field.name == "name":  # its flag is that of the family
            yield prefix.removesuffix("."), settings, field.name
        else:
            yield name, settings, field.name


def flags(settings: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield each flag with its value and its type."""
    for flag, part, name in leaves(settings):
        yield flag, getattr(part, name), typing.get_type_hints(type(part))[name]


def members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def is_number(hint: Any) -> bool:
    return bool({int, float} & set(members(hint))) or (
        typing.get_origin(hint) is tuple and float in typing.get_args(hint)
    )


def words_of(hint: Any) -> tuple[str, ...]:
    """Return the words that a flag accepts, if it has a fixed list of them."""
    hint = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
    if str in members(hint):
        return ()
    return tuple(word for kind in members(hint) if typing.get_origin(kind) is Literal for word in typing.get_args(kind))


def typed(hint: Any, wrong: str) -> Any:
    """Convert a word of the command line to a Python value; floats such as NaN also where an integer is expected."""
    kinds = members(hint)
    for kind in (int, float):
        if is_number(hint):
            with contextlib.suppress(ValueError):
                return kind(wrong)
    return Path(wrong) if Path in kinds else wrong


def with_flag(settings: Any, flag: str, value: Any) -> Any:
    """Return the settings with one flag changed."""
    name, _, rest = flag.replace("-", "_").partition(".")
    inner = getattr(settings, name)
    if rest:
        value = with_flag(inner, rest, value)
    elif isinstance(inner, Objective):
        value = Objective.defaults_of(value)
    return replace(settings, **{name: value})


class Spawning(Exception):
    """Raised in place of spawning the actors of a run."""


def accept(settings: RunSettings) -> Path:
    """Run the checks of ``launch`` and of the recipe's run up to the spawning of actors.

    Returns:
        The folder of the model.

    Raises:
        ValueError: if the settings are refused.
    """
    recipes = [sys.modules[base.__module__] for base in type(settings).__mro__]
    recipe = next(vars(recipe) for recipe in recipes if "train" in vars(recipe))
    # As in its launch(): a task that asks a frozen model is created in train().
    task = recipe["task"](settings) if len(inspect.signature(recipe["task"]).parameters) == 1 else None
    check(settings, OFFERED, task)
    cluster = cast(Cluster, types.SimpleNamespace(devices=OFFERED))

    async def start() -> None:
        async with Run.open(replace(settings, probe=False), cluster, task=task) as run:
            await recipe["train"](run, settings)

    async def spawn(
        _: Cluster, settings: RunSettings, task: ByValue[Task], model: ModelConfig, *__: Any, **___: Any
    ) -> None:
        raise Spawning(model.folder)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Spawning) as reached:
        patch.setattr("monarch_rl.pipeline.run.start_actors", spawn)
        asyncio.run(start())
    return cast(Path, reached.value.args[0])


def ranges(settings: Any) -> Iterator[tuple[str, Range | None]]:
    """Yield each flag with the range of its numbers."""
    for flag, part, name in leaves(settings):
        yield flag, limits(type(part))[name][0]


def another(value: Any, hint: Any, allowed: Range | None, chance: random.Random) -> Any:
    """Return another plausible value: another word, or a number of similar size."""
    if hint is bool:
        return not value
    if isinstance(value, tuple):
        return tuple(another(one, typing.get_args(hint)[0], allowed, chance) for one in value)
    if words_of(hint):
        return chance.choice(words_of(hint))
    if not is_number(hint) or allowed is None:
        return value
    number = value * 2 ** chance.uniform(-1, 1) if value else chance.choice([0.1, 1.0, 3.0])
    number = min(max(number, allowed.low), allowed.high)
    return round(number) if int in members(hint) else round(number, 6)


def zeros(settings: RunSettings, fixed: re.Pattern[str]) -> dict[str, Any]:
    """Return zeros (off, automatic) for the flags that accept 0, have another value and are not ``fixed``."""
    passed = {}
    for flag, value, hint in flags(settings):
        zero = (typed(hint, "0"),) * len(value) if isinstance(value, tuple) else typed(hint, "0")
        if is_number(hint) and value != zero and not fixed.fullmatch(flag):
            with contextlib.suppress(ValueError):
                accept(with_flag(settings, flag, zero))
                passed[flag] = zero
    return passed


def sample(
    settings: RunSettings,
    seed: int,
    given: Mapping[str, Any] = SMALL,
    fixed: str = "",
    share: float = CHANGED_SHARE,
) -> dict[str, Any]:
    """Return random flags that are accepted together: one after the other is changed, and refused changes are undone.

    Args:
        given: values of flags; flags that the recipe does not have are ignored.
        fixed: a pattern of flags that the sample does not change, in addition to ``FIXED`` and ``given``.
        share: the share of the other flags that is changed.
    """
    chance, current = random.Random(seed), settings
    known = {flag for flag, _, _ in flags(settings)}
    changed = {flag: value for flag, value in given.items() if flag in known}
    for flag, value in changed.items():
        current = with_flag(current, flag, value)
    accept(current)
    untouched = re.compile("|".join([FIXED.pattern, *map(re.escape, given), *([fixed] if fixed else [])]))
    if not untouched.fullmatch("objective"):  # first, because it decides which other flags there are
        with contextlib.suppress(ValueError):
            accept(candidate := with_flag(current, "objective", name := chance.choice(Objective.names())))
            current, changed["objective"] = candidate, name
    allowed, passed = dict(ranges(current)), zeros(current, untouched)
    for flag in chance.sample(sorted(passed), min(ZEROS, len(passed))):
        with contextlib.suppress(ValueError):
            accept(candidate := with_flag(current, flag, passed[flag]))
            current, changed[flag] = candidate, passed[flag]
    assert any(changed[flag] == zero for flag, zero in passed.items() if flag in changed), passed
    candidates = [(flag, value, hint) for flag, value, hint in flags(current) if flag not in changed]
    for flag, value, hint in chance.sample(candidates, len(candidates)):
        new = another(value, hint, allowed[flag], chance)
        if untouched.fullmatch(flag) or new == value or chance.random() > share:
            continue
        with contextlib.suppress(ValueError):
            accept(candidate := with_flag(current, flag, new))
            current, changed[flag] = candidate, new
    assert len(changed) > len(given) + 10, f"seed {seed}: {changed}"
    return changed
