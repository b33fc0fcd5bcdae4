from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")

import monarch.actor
import pytest

from tests.rollout.helpers import write_tokenizer

FAULTS: list[object] = []
monarch.actor.unhandled_fault_hook = FAULTS.append  # by default a dead process ends pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a character-level tokenizer."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return write_tokenizer(folder)
