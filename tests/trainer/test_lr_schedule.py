"""The learning rate of a step, computed without torchtitan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.settings.ranges import to_plain
from monarch_rl.trainer import platform
from monarch_rl.trainer.settings import TrainerSettings, lr_share

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
