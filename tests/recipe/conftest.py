"""Fixtures of the recipe tests: a model, commands that are started and ended, and runs with sampled flags."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.pipeline.settings import RunSettings
from tests.recipe import flags
from tests.recipe.running import ROOT, as_arguments, finished, keep_environment, random_model
from tests.runtime.launched import Launched, Start, launching


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 that spells in characters."""
    return random_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start commands; processes that a failed test leaves behind are killed."""
    keep_environment(monkeypatch)
    with launching(tmp_path) as begin:
        yield begin


@pytest.fixture
def defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], RunSettings]:
    """Returns a function from a recipe's name and a model folder to its default settings."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return lambda recipe, model: flags.defaults(recipe, model, tmp_path / "runs")


@pytest.fixture
def run_sample(defaults: Callable[[str, Path], RunSettings], start: Start, tmp_path: Path) -> Callable[..., Launched]:
    """Returns a function that runs a recipe to its end with sampled flags; see :func:`tests.recipe.flags.sample`."""

    def run(recipe: str, model: Path, **sampling: Any) -> Launched:
        settings, seed = defaults(recipe, model), flags.RECIPES.index(recipe)
        changed = flags.sample(settings, seed, **sampling)
        print(f"sample of seed {seed}: {changed}")  # pytest shows it if the test fails
        folders = [f"--{flag}={model}" for flag in ("model", "teacher") if hasattr(settings, flag)]
        script = str(ROOT / "recipes" / f"{recipe}.py")
        run = start([sys.executable, script, *folders, f"--output={settings.output}", *as_arguments(changed)])
        finished(run)
        steps = changed["steps"]
        assert re.search(rf"^step {steps}/{steps} ", run.output(), re.MULTILINE), run.output()
        return run

    return run
