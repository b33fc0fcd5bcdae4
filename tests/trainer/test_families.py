"""Every family of models that is accepted can be built."""

from __future__ import annotations

import pytest

from monarch_rl.model.architecture import ARCHITECTURES, architecture_of, find_architecture
from monarch_rl.trainer import platform

platform.prepare()

from monarch_rl.trainer.families import FAMILIES  # noqa: E402


def test_torchtitan_has_a_record_for_each_architecture() -> None:
    assert set(FAMILIES) == set(ARCHITECTURES.values())


def test_an_unknown_architecture_is_refused() -> None:
    assert find_architecture({"architectures": ["GPT2LMHeadModel"]}) is None and find_architecture({}) is None
    with pytest.raises(ValueError, match="GPT2LMHeadModel .*Qwen3ForCausalLM"):
        architecture_of({"architectures": ["GPT2LMHeadModel"]})
