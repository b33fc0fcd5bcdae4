"""What tests that run on several layouts of ranks share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def ran() -> set[int]:
    """The numbers of ranks that the module's programs have run for."""
    return set()
