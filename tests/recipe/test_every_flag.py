"""Every flag of every recipe at wrong values: refused by its name before anything is spawned, or accepted.

Flags are read from the settings, recipes from their folder: a new one is tested as it comes.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import importlib
import io
import math
import random
import re
import sys
import types
import typing
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import tyro

from monarch_rl.checkpoint.folders import GROUPS
from monarch_rl.pipeline.run import Run
from monarch_rl.pipeline.settings import RunSettings, check
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.devices import Devices
from monarch_rl.settings.ranges import Range, limits
from monarch_rl.tasks.task import Task
from tests.recipe.running import ROOT, finished, random_model
from tests.runtime.launched import Start

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))
OFFERED = Devices("cpu", 1, 64)
NOT_FINITE = ("nan", "inf", "-inf")
WRONG = ("0", "-1", "1" + "0" * 20, *NOT_FINITE, "nonsense", "")
READ = ("-1", "nan", "nonsense")
"""Those that the command line is tried with."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random model, and by recipe one with experts and one with a chat template."""
    folder = tmp_path_factory.mktemp("models")
    chat = random_model(folder / "chat", recipe=ROOT / "recipes" / "tools.py")
    return {"": random_model(folder / "dense"), "grpo_moe": random_model(folder / "moe", "moe"), "tools": chat}


@pytest.fixture
def settings(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RunSettings:
    """The defaults of the recipe that the test is for, with a model that is there."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    defaults = importlib.import_module(f"recipes.{request.param}").Settings()  # `tools` alone is a folder's name, too
    made: RunSettings = replace(defaults, model=str(models.get(request.param, models[""])), output=tmp_path)
    return with_flag(made, "teacher", made.model) if hasattr(made, "teacher") else made


def name_of(settings: RunSettings) -> str:
    """Of the recipe that has these settings."""
    return type(settings).__module__.removeprefix("recipes.")


def flags(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each flag with its value and its type."""
    hints = typing.get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), prefix + field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from flags(value, f"{name}.")
        else:
            yield name, value, hints[field.name]


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
    return replace(settings, **{name: with_flag(getattr(settings, name), rest, value) if rest else value})


def by_command_line(settings: RunSettings, flag: str, words: list[str]) -> RunSettings:
    arguments = [f"--{flag}", *words] if len(words) > 1 else [f"--{flag}={words[0]}"]
    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error):
            return tyro.cli(type(settings), default=settings, args=arguments)
    except SystemExit as ended:
        assert ended.code == 2
        raise ValueError(re.sub(r"[\s\u2500-\u257f]+|-{5,}", " ", error.getvalue())) from None


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
        await recipe["train"](Run(settings, AsyncExitStack(), cluster), settings)

    async def spawn(_: Cluster, settings: RunSettings, task: ByValue[Task], model: Path, *__: Any, **___: Any) -> None:
        raise Spawning(model)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Spawning) as reached:
        patch.setattr("monarch_rl.pipeline.run.start_actors", spawn)
        asyncio.run(begun())
    return cast(Path, reached.value.args[0])


def refusal(settings: RunSettings, flag: str, value: Any, hint: Any, wrong: str) -> str | None:
    """What is said to a wrong value; None if it is accepted. Any other exception than ValueError is the test's.

    By the command line where that reads otherwise than Python, and as Python else: reading takes 30 ms a flag.
    """
    count = max(1, len(value)) if isinstance(value, tuple) else 1
    try:
        if name_of(settings) == RECIPES[0] and wrong in READ:
            made = by_command_line(settings, flag, [wrong] * count)
        else:
            one = typed(hint, wrong)
            made = with_flag(settings, flag, (one,) * count if isinstance(value, tuple) else one)
        accept(made)
    except ValueError as error:
        return str(error)
    return None


def names(words: str, flag: str) -> bool:
    """Whether a message names a flag as a whole: ``steps`` is not in ``lr-warmup-steps``, ``model`` not in `model's`.

    A flag of one word is any sentence's: such a message begins with it, or has its dashes.
    """
    before = r"(?<![\w.-])" if re.search("[.-]", flag) else r"^(?:.*Error parsing \w+: )?(?:no such |frozen model )?"
    return re.search(rf"(?:{before}|(?<![\w-])--){re.escape(flag)}(?![\w-]|'s|\.\w)", words) is not None


def test_a_flag_is_named_as_a_whole() -> None:
    assert names("steps must be positive", "steps") and names(" Error parsing '--steps': invalid", "steps")
    assert names(" Error parsing Settings: steps must be", "steps") and names("no such model: x is", "model")
    assert not names("lr-warmup-steps must be", "steps") and not names("the steps of it", "steps")
    assert names("give less rollout.top-k, or", "rollout.top-k") and not names("rollout.top-ks is", "rollout.top-k")
    assert not names("trainer.lora.rank", "trainer.lora") and not names("x.trainer.lr", "trainer.lr")


@pytest.mark.parametrize("settings", RECIPES, indirect=True)
def test_the_defaults_are_accepted(settings: RunSettings) -> None:
    """Or the tests below would show nothing."""
    assert accept(settings) == Path(settings.model)


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("settings", RECIPES, indirect=True)
def test_a_wrong_value_is_refused_by_the_flags_name(
    settings: RunSettings, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)  # `output` may be any word
    refused = {
        flag: refusal(settings, flag, value, hint, wrong)
        for flag, value, hint in flags(settings)
        if hint is not bool and (wrong or is_number(hint) or words_of(hint))
    }
    said = {flag: words for flag, words in refused.items() if words is not None}
    assert {flag: words for flag, words in said.items() if not names(words, flag)} == {}
    numbers, allowed = {flag for flag, _, hint in flags(settings) if is_number(hint)}, dict(ranges(settings))
    passed = {
        flag for flag in numbers - set(said) if wrong != "0" or (given := allowed[flag]) is None or 0 not in given
    }
    assert passed == set(), "numbers that pass, and zeros that are in no range"
    fixed = {flag for flag, _, hint in flags(settings) if words_of(hint)}
    assert len(fixed) >= 10
    assert wrong == "0" or fixed - set(said) == set(), "words that pass although there is a list of them"


@pytest.mark.parametrize(
    ("flag", "wrong"),
    [
        ("stall-s", "0.01"),
        ("generator.max-total-tokens", "14"),
        ("generator.context-length", "20"),
        ("generator.attention-backend", "flash"),
        ("generator.start-deadline-s", "0.1"),
        ("generator.start-deadline-s", "5"),
        ("update-deadline-s", "1"),
        ("rollout.slot-deadline-s", "0.1"),
        ("rollout.generate-deadline-s", "0.1"),
        ("rollout.concurrent-groups", "1000000"),
        ("trainer.max-grad-norm", "1e-300"),
        ("trainer.lora.alpha", "1e-300"),
        ("generator.random-seed", "1" + "0" * 20),
        ("trainer.lora.rank", "1000"),
        ("trainer.tokens-per-microbatch", "12"),
        ("rollout.workers", "1000000000"),
        ("rollout.temperature", "0.00001"),
        ("task.train-size", "1" + "0" * 20),
        ("task.held-out-size", "1000000000"),
        ("task.template", ""),
        ("task.template", "no field"),
        ("task.template", "{word.length}"),
        ("task.template", "{word.__class__}"),
        ("task.template", "{word:100000000}"),
        ("task.template", "{word:10000}" * 100),
        ("task.config", '{"min_word_len": 90, "max_word_len": 99}'),
        ("task.config", '{"data_file": "no such file"}'),
        ("output", "/dev/null/runs"),
        ("model", "~nobody-of-that-name/model"),
        ("model", "x" * 5000),
    ],
)
@pytest.mark.parametrize("settings", ["grpo"], indirect=True)
def test_what_cannot_work_is_refused_by_name(settings: RunSettings, flag: str, wrong: str) -> None:
    value, hint = next((value, hint) for name, value, hint in flags(settings) if name == flag)
    said = refusal(settings, flag, value, hint, wrong)
    assert said is not None and names(said, flag), said


@pytest.mark.parametrize("settings", ["grpo"], indirect=True)
def test_a_step_of_too_many_episodes_is_refused(settings: RunSettings) -> None:
    for changes in (("groups-per-step", 1_000_000), ("rollout.group-size", 1_000_000)), (("groups-per-step", 200_000),):
        made = settings
        for flag, value in changes:
            made = with_flag(made, flag, value)
        with pytest.raises(ValueError, match=r"^groups-per-step [\d,]+ x rollout\.group-size [\d,]+ = "):
            accept(made)


def test_every_number_has_a_range() -> None:
    """Or a new one would be the next that cannot work at 1e20."""
    without = []
    for recipe in (RunSettings(),):
        for part in [recipe, *nested(recipe)]:
            for name, (allowed, _) in limits(type(part)).items():
                hint = typing.get_type_hints(type(part))[name]
                if is_number(hint) and (allowed is None or not math.isfinite(allowed.high)):
                    without.append(f"{type(part).__name__}.{name}")
    assert without == []


def nested(settings: Any) -> Iterator[Any]:
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield value
            yield from nested(value)


def test_messages_name_no_flag_that_a_recipe_does_not_have() -> None:
    """In strings of the package, `room.some-flag` is advice to set it."""
    known = {flag for flag, _, _ in flags(RunSettings())}
    rooms = {flag.split(".")[0] for flag in known if "." in flag}
    named = re.compile(rf"(?<![\w./-])(?:{'|'.join(sorted(rooms))})(?:\.[a-z]+(?:-[a-z]+)*)+(?<!\.md)(?![\w/(:*])")
    wrong = [
        (path.name, name)
        for path in (ROOT / "src").rglob("*.py")
        for text in strings(ast.parse(path.read_text()))
        for name in named.findall(text)
        if name not in known and not any(flag.startswith(f"{name}.") for flag in known) and name != GROUPS
    ]
    assert wrong == []


def strings(tree: ast.AST) -> Iterator[str]:
    """All strings but docstrings."""
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield node.value


# -- a sample of what passes is started ------------------------------------------------------------------------------

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
ZEROS = 4
"""Flags of a sample that are 0, of those that are not by default."""


def ranges(settings: Any, prefix: str = "") -> Iterator[tuple[str, Range | None]]:
    """Each flag with the range of its numbers."""
    allowed = limits(type(settings))
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), prefix + field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from ranges(value, f"{name}.")
        else:
            yield name, allowed[field.name][0]


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


def zeros(settings: RunSettings) -> dict[str, Any]:
    """Flags that pass with 0 and have another value, with their zeros: among the wrong values, those that may mean off
    or automatic."""
    passed = {}
    for flag, value, hint in flags(settings):
        zero = (typed(hint, "0"),) * len(value) if isinstance(value, tuple) else typed(hint, "0")
        if is_number(hint) and value != zero and not KEPT.fullmatch(flag) and flag not in SMALL:
            with contextlib.suppress(ValueError):
                accept(with_flag(settings, flag, zero))
                passed[flag] = zero
    return passed


def sample(settings: RunSettings, seed: int) -> dict[str, Any]:
    """Random settings that pass: flags are changed one after the other, and what is refused is left as it was."""
    chance, made = random.Random(seed), settings
    there = {flag for flag, _, _ in flags(settings)}
    changed = {flag: value for flag, value in SMALL.items() if flag in there}
    for flag, value in changed.items():
        made = with_flag(made, flag, value)
    accept(made)
    allowed, passed = dict(ranges(made)), zeros(made)
    for flag in chance.sample(sorted(passed), min(ZEROS, len(passed))):
        with contextlib.suppress(ValueError):
            accept(candidate := with_flag(made, flag, passed[flag]))
            made, changed[flag] = candidate, passed[flag]
    assert any(changed[flag] == zero for flag, zero in passed.items() if flag in changed), passed
    candidates = [(flag, value, hint) for flag, value, hint in flags(made) if flag not in changed]
    for flag, value, hint in chance.sample(candidates, len(candidates)):
        new = another(value, hint, allowed[flag], chance)
        if KEPT.fullmatch(flag) or new == value or chance.random() > CHANGED_SHARE:
            continue
        with contextlib.suppress(ValueError):
            accept(candidate := with_flag(made, flag, new))
            made, changed[flag] = candidate, new
    return changed


def as_arguments(changed: dict[str, Any]) -> list[str]:
    """Settings as a user writes them on the command line."""
    arguments = []
    for flag, value in changed.items():
        if isinstance(value, bool):
            room, _, name = flag.rpartition(".")
            arguments.append(f"--{room}{'.' if room else ''}{'' if value else 'no-'}{name}")
        elif isinstance(value, tuple):
            arguments += [f"--{flag}", *map(str, value)]
        else:
            arguments.append(f"--{flag}={value}")
    return arguments


@pytest.mark.slow
@pytest.mark.parametrize("settings", RECIPES, indirect=True)
def test_a_sample_of_what_passes_starts_and_makes_steps(settings: RunSettings, start: Start, tmp_path: Path) -> None:
    seed = RECIPES.index(name_of(settings))
    changed = sample(settings, seed)
    print(f"sample of seed {seed}: {changed}")  # pytest shows it if the test fails, wherever it does
    assert len(changed) > len(SMALL) + 10, f"seed {seed}: {changed}"
    script = ROOT / "recipes" / f"{name_of(settings)}.py"
    folders = [f"--{flag}={settings.model}" for flag in ("model", "teacher") if hasattr(settings, flag)]
    arguments = [*folders, f"--output={tmp_path / 'runs'}", *as_arguments(changed)]
    run = start([sys.executable, str(script), *arguments])
    finished(run)
    assert re.search(r"^step 2/2 ", run.output(), re.MULTILINE), f"seed {seed}: {changed}\n{run.output()}"
