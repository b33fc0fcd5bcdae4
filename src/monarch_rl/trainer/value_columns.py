"""What a critic learns from a batch, and what it knew of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from monarch_rl.algorithms.group_view import GroupView
from monarch_rl.algorithms.returns import explained_variance, group_advantages
from monarch_rl.trainer.advantages import BatchAdvantages
from monarch_rl.trainer.critic_settings import CriticSettings
from monarch_rl.trainer.objective import RETURNS, VALUE


def value_columns(views: Sequence[GroupView], settings: CriticSettings) -> dict[str, BatchAdvantages]:
    """The columns ``value`` and ``returns`` of all groups: ``returns`` are the advantages plus the values, before
    anything is normalised.

    Args:
        views: with the column ``value``.
    """
    values = [[value.clone() for value in view.columns[VALUE]] for view in views]  # the views are the advantage's
    advantages = [group_advantages(view, settings.gamma, settings.lam) for view in views]
    returns = [
        [value + advantage for value, advantage in zip(*of_group, strict=True)]
        for of_group in zip(values, advantages, strict=True)
    ]
    return {VALUE: values, RETURNS: returns}


def value_metrics(columns: Mapping[str, BatchAdvantages]) -> dict[str, float]:
    """What the critic knew of a batch before it was updated with it: metrics by their whole names."""
    values, returns = (torch.cat([torch.zeros(0), *chain(*columns[name])]) for name in (VALUE, RETURNS))
    if not len(values):
        return {}
    return {
        "critic/value": float(values.mean()),
        "critic/return": float(returns.mean()),
        "critic/explained_variance": explained_variance(values, returns),
    }
