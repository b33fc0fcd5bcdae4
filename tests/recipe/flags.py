"""The flags of a recipe: what they may be, whether they are accepted, and samples of those that are."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
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
"""A random model gets marks for parts; an engine costs half of a start."""
KEPT = re.compile(
    r"model|teacher|frozen\..*|output|steps|held-out|task\..*|.*-s|.*\.ranks|.*-processes|.*\.(workers|replicas|tp)"
)
"""Flags that a sample does not change: they would make another task of it, give deadlines that a crowded machine cannot
keep, or start more processes."""
CHANGED_SHARE = 0.4
"""Of the flags that a sample may change."""
ZEROS = 4
"""Flags of a sample that are 0, of those that are not by default."""


def defaults(recipe: str, model: Path, output: Path) -> RunSettings:
    """The defaults of a recipe, with a model that is there; the folder of recipes must be among those of modules."""
    settings = importlib.import_module(f"recipes.{recipe}").Settings()  # `tools` alone is a folder's name, too
    made: RunSettings = replace(settings, model=str(model), output=output)
    return with_flag(made, "teacher", made.model) if hasattr(made, "teacher") else made


def name_of(settings: RunSettings) -> str:
    """Of the recipe that has these settings."""
    return type(settings).__module__.removeprefix("recipes.")


def leaves(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Each flag, the settings that hold it, and its name there; without what a recipe's command line leaves out."""
    hints = typing.get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), prefix + field.name.replace("_", "-")
        if tyro.conf.Suppress in typing.get_args(hints[field.name]):
            continue
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{name}.")
        elif isinstance(settings, NamedSettings) and field.name == "name":  # it has the family's flag: `--objective`
            yield prefix.removesuffix("."), settings, field.name
        else:
            yield name, settings, field.name


def flags(settings: Any) -> Iterator[tuple[str, Any, Any]]:
    """Each flag with its value and its type."""
    for flag, part, name in leaves(settings):
        yield flag, getattr(part, name), typing.get_type_hints(type(part))[name]


def members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def is_number(hint: Any) -> bool:
    return bool({int, float} & set(members(hint))) or (
        typing.get_origin(hint) is tuple and float in typing.get_args(hint)
    )


def words_of(hint: Any) -> tuple[str, ...]:
    """The words that a flag may have, if there is a list of them."""
    hint = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
    if str in members(hint):
        return ()
    return tuple(word for kind in members(hint) if typing.get_origin(kind) is Literal for word in typing.get_args(kind))


def typed(hint: Any, wrong: str) -> Any:
    """The value as a recipe's author may write it; NaN also where an integer is wanted."""
    kinds = members(hint)
    for kind in (int, float):
        if is_number(hint):
            with contextlib.suppress(ValueError):
                return kind(wrong)
    return Path(wrong) if Path in kinds else wrong


def with_flag(settings: Any, flag: str, value: Any) -> Any:
    """Settings with one of them changed."""
    name, _, rest = flag.replace("-", "_").partition(".")
    inner = getattr(settings, name)
    if rest:
        value = with_flag(inner, rest, value)
    elif isinstance(inner, Objective):
        value = Objective.defaults_of(value)
    return replace(settings, **{name: value})


class Spawning(Exception):
    """Raised where a recipe's run would spawn its actors."""


def accept(settings: RunSettings) -> Path:
    """What ``launch`` checks, and then the run, with what the recipe hands over, until actors would be spawned. Raises
    ValueError."""
    recipes = [sys.modules[base.__module__] for base in type(settings).__mro__]
    recipe = next(vars(recipe) for recipe in recipes if "train" in vars(recipe))
    check(settings, OFFERED, recipe["task"](settings))
    cluster = cast(Cluster, types.SimpleNamespace(devices=OFFERED))

    async def begun() -> None:
        async with Run.open(settings, cluster) as run:
            await recipe["train"](run, settings)

    async def spawn(
        _: Cluster, settings: RunSettings, task: ByValue[Task], model: ModelConfig, *__: Any, **___: Any
    ) -> None:
        raise Spawning(model.folder)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Spawning) as reached:
        patch.setattr("monarch_rl.pipeline.run.start_actors", spawn)
        asyncio.run(begun())
    return cast(Path, reached.value.args[0])


def ranges(settings: Any) -> Iterator[tuple[str, Range | None]]:
    """Each flag with the range of its numbers."""
    for flag, part, name in leaves(settings):
        yield flag, limits(type(part))[name][0]


def another(value: Any, hint: Any, allowed: Range | None, chance: random.Random) -> Any:
    """Another value that a user might give: other words, numbers of about the size of the default."""
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


def zeros(settings: RunSettings, kept: re.Pattern[str]) -> dict[str, Any]:
    """Flags that are not ``kept``, pass with 0 and have another value, with their zeros: among the wrong values, those
    that may mean off or automatic."""
    passed = {}
    for flag, value, hint in flags(settings):
        zero = (typed(hint, "0"),) * len(value) if isinstance(value, tuple) else typed(hint, "0")
        if is_number(hint) and value != zero and not kept.fullmatch(flag):
            with contextlib.suppress(ValueError):
                accept(with_flag(settings, flag, zero))
                passed[flag] = zero
    return passed


def sample(
    settings: RunSettings,
    seed: int,
    given: Mapping[str, Any] = SMALL,
    kept: str = "",
    share: float = CHANGED_SHARE,
) -> dict[str, Any]:
    """Random settings that pass: flags are changed one after the other, and what is refused is left as it was.

    Args:
        given: flags that the recipe may have, and their values.
        kept: a pattern of flags that the sample leaves as they are, beside ``KEPT`` and those ``given``.
        share: of the other flags that are changed.
    """
    chance, made = random.Random(seed), settings
    there = {flag for flag, _, _ in flags(settings)}
    changed = {flag: value for flag, value in given.items() if flag in there}
    for flag, value in changed.items():
        made = with_flag(made, flag, value)
    accept(made)
    untouched = re.compile("|".join([KEPT.pattern, *map(re.escape, given), *([kept] if kept else [])]))
    if not untouched.fullmatch("objective"):  # first, because it decides which other flags there are
        with contextlib.suppress(ValueError):
            accept(candidate := with_flag(made, "objective", name := chance.choice(Objective.names())))
            made, changed["objective"] = candidate, name
    allowed, passed = dict(ranges(made)), zeros(made, untouched)
    for flag in chance.sample(sorted(passed), min(ZEROS, len(passed))):
        with contextlib.suppress(ValueError):
            accept(candidate := with_flag(made, flag, passed[flag]))
            made, changed[flag] = candidate, passed[flag]
    assert any(changed[flag] == zero for flag, zero in passed.items() if flag in changed), passed
    candidates = [(flag, value, hint) for flag, value, hint in flags(made) if flag not in changed]
    for flag, value, hint in chance.sample(candidates, len(candidates)):
        new = another(value, hint, allowed[flag], chance)
        if untouched.fullmatch(flag) or new == value or chance.random() > share:
            continue
        with contextlib.suppress(ValueError):
            accept(candidate := with_flag(made, flag, new))
            made, changed[flag] = candidate, new
    assert len(changed) > len(given) + 10, f"seed {seed}: {changed}"
    return changed
