from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import monarch_rl.runtime  # noqa: F401  before monarch: it sets how often Monarch polls for dead processes
from monarch_rl.runtime import scratch
from tests.runtime.launched import Start, launching


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start commands; processes that a failed test leaves behind are killed."""
    with launching(tmp_path) as begin:
        yield begin


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory with a short path."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(scratch, "MOST_BYTES", 200)
    return folder
