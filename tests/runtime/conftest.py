from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import monarch_rl.runtime  # noqa: F401  before monarch: it sets how often Monarch looks for dead processes
from tests.runtime.launched import Launched

Start = Callable[[Sequence[str]], Launched]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start commands; whatever a failed test leaves of them is killed."""
    started: list[Launched] = []

    def begin(command: Sequence[str]) -> Launched:
        launched = Launched(command, tmp_path / f"log{len(started)}")
        started.append(launched)
        return launched

    yield begin
    for launched in started:
        launched.kill()
