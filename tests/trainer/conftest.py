"""Fixtures for tests that run on several layouts of ranks."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def ran() -> set[int]:
    """The numbers of ranks for which the module's programs have run."""
    return set()
