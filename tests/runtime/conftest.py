from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import monarch_rl.runtime  # noqa: F401  before monarch: it sets how often Monarch looks for dead processes
from tests.runtime.launched import Start, launching


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start commands; whatever a failed test leaves of them is killed."""
    with launching(tmp_path) as begin:
        yield begin
