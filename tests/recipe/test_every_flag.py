"""Every flag of every recipe with wrong values: refused by its name before anything is spawned, or accepted.

Flags are read from the settings, recipes from their folder: new ones are tested automatically.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import io
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tyro

from monarch_rl.algorithms.objectives import Correction, Objective
from monarch_rl.checkpoint.folders import GROUPS
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.settings.ranges import limits
from monarch_rl.trainer.loss_settings import CriticSettings
from tests.recipe.flags import RECIPES, accept, flags, is_number, name_of, ranges, typed, with_flag, words_of
from tests.recipe.running import ROOT, random_model
from tests.runtime.launched import Launched

NOT_FINITE = ("nan", "inf", "-inf")
WRONG = ("0", "-1", "1" + "0" * 20, *NOT_FINITE, "nonsense", "")
BY_COMMAND_LINE = ("-1", "nan", "nonsense")
"""Values that are also passed on the command line: one of them for a flag of each type."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random model for all recipes (""), one with experts, and one with a chat template."""
    folder = tmp_path_factory.mktemp("models")
    chat = random_model(folder / "chat", recipe=ROOT / "recipes" / "tools.py")
    return {"": random_model(folder / "dense"), "grpo_moe": random_model(folder / "moe", "moe"), "tools": chat}


@pytest.fixture
def settings(
    request: pytest.FixtureRequest, models: dict[str, Path], defaults: Callable[[str, Path], RunSettings]
) -> RunSettings:
    """Defaults of the recipe that is the test's parameter."""
    return defaults(request.param, models.get(request.param, models[""]))


def by_command_line(settings: RunSettings, flag: str, words: list[str]) -> RunSettings:
    arguments = [f"--{flag}", *words] if len(words) > 1 else [f"--{flag}={words[0]}"]
    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error):
            return tyro.cli(type(settings), default=settings, args=arguments)
    except SystemExit as ended:
        assert ended.code == 2
        raise ValueError(re.sub(r"[\s\u2500-\u257f]+|-{5,}", " ", error.getvalue())) from None


@functools.cache
def read_flags(kind: type[RunSettings]) -> frozenset[str]:
    """Return the flags to pass on a command line: one of each type, since types are parsed alike; first recipe only."""
    if name_of(settings := kind()) != RECIPES[0]:
        return frozenset()
    return frozenset({str(hint): flag for flag, _, hint in flags(settings)}.values())


def refusal(settings: RunSettings, flag: str, value: Any, hint: Any, wrong: str) -> str | None:
    """Return the message that refuses a wrong value, or None; any exception but ValueError fails the test.

    Most values are set in Python, because parsing takes a fifth of a CPU-second. The command line is used for one
    flag of each type and one of the values that it parses differently.
    """
    count = max(1, len(value)) if isinstance(value, tuple) else 1
    try:
        if wrong == BY_COMMAND_LINE[sum(map(ord, flag)) % len(BY_COMMAND_LINE)] and flag in read_flags(type(settings)):  # type: ignore[arg-type]
            changed = by_command_line(settings, flag, [wrong] * count)
        else:
            one = typed(hint, wrong)
            changed = with_flag(settings, flag, (one,) * count if isinstance(value, tuple) else one)
        accept(changed)
    except ValueError as error:
        return str(error)
    return None


def names(words: str, flag: str) -> bool:
    """Return whether a message names a whole flag: ``steps`` is not in ``lr-warmup-steps``, ``model`` not in `model's`.

    A flag of one word could occur in any sentence: the message must begin with it or write it with dashes.
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
    """Otherwise the tests below would prove nothing."""
    assert accept(settings) == Path(settings.model)


@pytest.fixture
def first(models: dict[str, Path], defaults: Callable[[str, Path], RunSettings]) -> dict[str, Any]:
    """Flags and defaults of the first recipe."""
    return {flag: value for flag, value, _ in flags(defaults(RECIPES[0], models[""]))}


def tries(recipe: str, flag: str, value: Any, wrong: str, first: Mapping[str, Any]) -> bool:
    """Whether a recipe's flag is tried with this value: with all of them if it is the first recipe, or the flag is not
    as there; else with one, and with the next one in the next recipe."""
    if recipe == RECIPES[0] or flag not in first or value != first[flag]:
        return True
    return WRONG.index(wrong) == (list(first).index(flag) + RECIPES.index(recipe)) % len(WRONG)


def test_flags_with_a_list_of_words_are_found(
    models: dict[str, Path], defaults: Callable[[str, Path], RunSettings]
) -> None:
    """Otherwise the test below would prove nothing about them."""
    assert len([flag for flag, _, hint in flags(defaults(RECIPES[0], models[""])) if words_of(hint)]) >= 10


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("settings", RECIPES, indirect=True)
def test_a_wrong_value_is_refused_by_the_flags_name(
    settings: RunSettings, first: Mapping[str, Any], wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags that all recipes share get every wrong value in one recipe, and one wrong value in each other recipe."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)  # `output` may be any word
    recipe = name_of(settings)
    chosen = [(flag, value, hint) for flag, value, hint in flags(settings) if tries(recipe, flag, value, wrong, first)]
    refused = {
        flag: refusal(settings, flag, value, hint, wrong)
        for flag, value, hint in chosen
        if hint is not bool and (wrong or is_number(hint) or words_of(hint))
    }
    messages = {flag: words for flag, words in refused.items() if words is not None}
    assert {flag: words for flag, words in messages.items() if not names(words, flag)} == {}
    numbers, allowed = {flag for flag, _, hint in chosen if is_number(hint)}, dict(ranges(settings))
    passed = {
        flag for flag in numbers - set(messages) if wrong != "0" or (given := allowed[flag]) is None or 0 not in given
    }
    assert passed == set(), "numbers that are accepted, and zeros outside the range"
    fixed = {flag for flag, _, hint in chosen if words_of(hint)}
    assert wrong == "0" or fixed - set(messages) == set(), "words outside the list that are accepted"


@pytest.mark.parametrize(
    ("flag", "wrong"),
    [
        ("stall-s", "0.01"),
        ("generator.max-total-tokens", "14"),
        ("generator.context-length", "20"),
        ("generator.attention-backend", "flash"),
        ("patience", "0.01"),
        ("rollout.concurrent-groups", "1000000"),
        ("trainer.max-grad-norm", "1e-300"),
        ("trainer.lora.alpha", "1e-300"),
        ("generator.random-seed", "1" + "0" * 20),
        ("trainer.lora.rank", "1000"),
        ("trainer.tokens-per-microbatch", "12"),
        ("rollout.workers", "1000000000"),
        ("rollout.temperature", "0.00001"),
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
def test_values_that_cannot_work_are_refused_by_the_flags_name(settings: RunSettings, flag: str, wrong: str) -> None:
    value, hint = next((value, hint) for name, value, hint in flags(settings) if name == flag)
    message = refusal(settings, flag, value, hint, wrong)
    assert message is not None and names(message, flag), message


@pytest.mark.parametrize("settings", ["grpo"], indirect=True)
def test_a_step_of_too_many_episodes_is_refused(settings: RunSettings) -> None:
    for changes in (("groups-per-step", 1_000_000), ("rollout.group-size", 1_000_000)), (("groups-per-step", 200_000),):
        changed = settings
        for flag, value in changes:
            changed = with_flag(changed, flag, value)
        with pytest.raises(ValueError, match=r"(^|- )groups-per-step [\d,]+ x rollout\.group-size [\d,]+ = "):
            accept(changed)


def test_every_number_has_a_range() -> None:
    """Otherwise a new number could be accepted at 1e20."""
    without = []
    kinds: list[type] = [RunSettings, *(type(part) for part in nested(RunSettings()))]
    kinds += [Objective.of_name(name) for name in Objective.names()]
    kinds += [Correction.of_name(name) for name in Correction.names()]
    for kind in kinds:
        for name, (allowed, _) in limits(kind).items():
            hint = typing.get_type_hints(kind)[name]
            if is_number(hint) and (allowed is None or not math.isfinite(allowed.high)):
                without.append(f"{kind.__name__}.{name}")
    assert without == []


def nested(settings: Any) -> Iterator[Any]:
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield value
            yield from nested(value)


def test_messages_name_no_flag_that_a_recipe_does_not_have() -> None:
    """In strings of the package, `group.some-flag` is advice to set it."""
    of_objectives = [RunSettings(objective=Objective.defaults_of(name)) for name in Objective.names()]
    known = {flag for settings in of_objectives for flag, _, _ in flags(settings)}
    known |= {CriticSettings.flag(field.name) for field in dataclasses.fields(CriticSettings)}
    prefixes = {flag.split(".")[0] for flag in known if "." in flag}
    named = re.compile(rf"(?<![\w./-])(?:{'|'.join(sorted(prefixes))})(?:\.[a-z]+(?:-[a-z]+)*)+(?<!\.md)(?![\w/(:*])")
    wrong = [
        (path.name, name)
        for path in (ROOT / "src").rglob("*.py")
        if path.name != "moved.py"  # its subject is flags that no recipe has
        for text in strings(ast.parse(path.read_text()))
        for name in named.findall(text)
        if name not in known and not any(flag.startswith(f"{name}.") for flag in known) and name != GROUPS
    ]
    assert wrong == []


def strings(tree: ast.AST) -> Iterator[str]:
    """Yield all strings except docstrings."""
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield node.value


# -- samples of accepted flags are started --------------------------------------------------------------------------

SAMPLED_IN_TEST_RECIPE = {"distill", "game", "grpo_lora", "grpo_moe", "ppo"}
"""Recipes whose runs in test_recipe.py use a sample of flags already."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe not in SAMPLED_IN_TEST_RECIPE])
def test_a_sample_of_accepted_flags_starts_and_makes_steps(
    recipe: str, models: dict[str, Path], run_sample: Callable[..., Launched]
) -> None:
    run_sample(recipe, models.get(recipe, models[""]))
