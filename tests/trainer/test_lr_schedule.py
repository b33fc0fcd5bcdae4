"""The learning rate: of a step, computed without torchtitan, and the warning for a high one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.model.lora import LoraSettings
from monarch_rl.settings.ranges import to_plain
from monarch_rl.trainer import platform
from monarch_rl.trainer.settings import HIGHEST_LR, TrainerSettings, lr_share, lr_warnings

platform.prepare()

from torchtitan.components.optimizer import LRSchedulersContainer  # noqa: E402


@given(
    warmup=st.integers(0, 12),
    ratio=st.none() | st.floats(0, 1),
    kind=st.sampled_from(["linear", "sqrt", "cosine"]),
    least=st.floats(0, 1),
    total=st.integers(1, 30),
    data=st.data(),
)
def test_the_learning_rates_share_is_that_of_torchtitans_schedule(
    warmup: int, ratio: float | None, kind: Any, least: float, total: int, data: st.DataObject
) -> None:
    step = data.draw(st.integers(0, total - 1))
    optimizer: Any = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedulers = LRSchedulersContainer.Config(
        warmup_steps=warmup, decay_ratio=ratio, decay_type=kind, min_lr_factor=least
    ).build(optimizers=[optimizer], training_steps=total)
    schedulers.load_state_dict({"last_epoch": step})
    settings = TrainerSettings(lr_warmup_steps=warmup, lr_decay_ratio=ratio, lr_decay_type=kind, lr_min_factor=least)
    expected = schedulers.schedulers[0].get_last_lr()[0]
    assert lr_share(to_plain(settings), step, total) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("parameters", "lr", "lora", "warned"),
    [
        (600_000, 3e-4, 0, False),  # recipes/grpo.py, with the tiny model
        (600_000, 1.5e-3, 8, False),  # recipes/grpo_lora.py
        (135 * 10**6, 1e-5, 0, False),  # the README's real model
        (600 * 10**6, 1e-6, 0, False),
        (1_700 * 10**6, 3e-4, 0, True),  # a default of the recipes, with another model
        (1_700 * 10**6, 3e-4, 16, False),
        (8 * 10**9, 1e-5, 0, False),
        (8 * 10**9, 2e-5, 0, True),
        (8 * 10**9, 1e-4, 16, False),
        (32 * 10**9, 1e-6, 0, False),
        (235 * 10**9, 1e-5, 0, True),
    ],
)
def test_rates_far_above_those_of_published_runs_are_reported(
    parameters: int, lr: float, lora: int, warned: bool
) -> None:
    warnings = lr_warnings(TrainerSettings(lr=lr, lora=LoraSettings(rank=lora)), parameters)
    assert len(warnings) == warned
    if warned:
        assert f"trainer.lr {lr:g}" in warnings[0] and "\n" not in warnings[0]
        assert f" {parameters / 1e9:g}B " in warnings[0], "and not 2.4e+02B"


def test_a_rate_of_zero_is_reported() -> None:
    (warning,) = lr_warnings(TrainerSettings(lr=0), 10**9)
    assert "trainer.lr is 0" in warning


def test_the_usual_rate_is_never_reported() -> None:
    assert not any(lr_warnings(TrainerSettings(), below - 1) for below, _ in HIGHEST_LR)
