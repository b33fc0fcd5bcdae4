"""Every family of models that is accepted can be built."""

from __future__ import annotations

from monarch_rl.model.architecture import ARCHITECTURES
from monarch_rl.trainer import platform

platform.prepare()

from monarch_rl.trainer.families import FAMILIES  # noqa: E402


def test_torchtitan_has_a_record_for_each_architecture() -> None:
    assert set(FAMILIES) == set(ARCHITECTURES.values())
