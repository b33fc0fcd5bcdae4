"""What tests of the recipe share: a model, and commands that are started and ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipe.running import keep_environment, random_model
from tests.runtime.launched import Start, launching


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 that spells in characters."""
    return random_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start commands; whatever a failed test leaves of them is killed."""
    keep_environment(monkeypatch)
    with launching(tmp_path) as begin:
        yield begin
