"""Training on a batch on one rank: advantages, packing, the policy's updates, and the critic's.

All ranks call these functions together, on the thread that computes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import torch

from monarch_rl.algorithms.group_view import GroupView
from monarch_rl.algorithms.returns import explained_variance, group_advantages
from monarch_rl.episode.logged import NOT_LOGGED, LoggedGroups
from monarch_rl.episode.shard import PackedShard, TokenRecord
from monarch_rl.errors import NotFinite
from monarch_rl.trainer.advantages import (
    BatchAdvantages,
    advantages_of,
    fingerprint,
    flat,
    group_views,
    with_overlong_penalty,
)
from monarch_rl.trainer.batch import MicroBatch, pack_shard
from monarch_rl.trainer.functions import LoadedFunctions
from monarch_rl.trainer.loss_settings import CriticSettings
from monarch_rl.trainer.metrics import batch_metrics, check_agreement
from monarch_rl.trainer.objective import RETURNS, VALUE, rows_loss
from monarch_rl.trainer.policy import Policy
from monarch_rl.trainer.supervised import mixed, pack_rows
from monarch_rl.trainer.token_records import begin_notes, token_records
from monarch_rl.user_code import place_of

logger = logging.getLogger("monarch_rl")


class TrainedBatch(NamedTuple):
    """The result of :func:`train` on one rank."""

    metrics: dict[str, float]
    """The metrics of :meth:`Policy.update_batch` and :func:`batch_metrics`."""
    advantages: BatchAdvantages
    """Advantages of the whole batch."""
    records: list[TokenRecord]
    """Of this rank's sequences of logged groups."""
    record_cpu_s: float
    """CPU seconds that this thread spent on the records."""


def train(
    policy: Policy,
    shard: PackedShard,
    functions: LoadedFunctions,
    normaliser_tokens: int,
    logged: LoggedGroups = NOT_LOGGED,
) -> TrainedBatch:
    """Train on this rank's share of a batch, including its supervised rows, in one or more optimiser steps. A critic
    computes its values before these steps, and is updated after them.

    Args:
        normaliser_tokens: tokens per episode in the normaliser of the ``constant`` aggregation.
        logged: the groups whose tokens are recorded.

    Raises:
        NotFinite: gradient or loss is not finite; names the step, the cause and the objective.
        ValueError: the advantage or the objective returned an unusable value, or ranks got different advantages.
    """
    if not shard.rewards:
        return TrainedBatch(train_rows(policy, shard), [], [], 0.0)
    advantage, objective, loss = functions.advantage, functions.objective, policy.settings.loss
    where, critic, epochs = f"step {shard.version + 1}", policy.critic, policy.settings.epochs
    if critic is not None:
        with _not_finite_in(where):
            shard = critic.with_values(shard)
    views = [with_overlong_penalty(view, loss) for view in group_views(shard)]
    columns = {} if critic is None else value_columns(views, critic.settings)  # before an advantage writes into them
    advantages = advantages_of(views, advantage)
    check_agreement(
        fingerprint(advantages),
        policy.device,
        f"the advantage {place_of(advantage)} returned different values on different trainer ranks: it must depend "
        "only on the groups that it is given, not on random numbers, clocks or the order of sets",
    )
    minibatches = pack_shard(shard, advantages, loss.aggregation, normaliser_tokens, policy.device, columns)
    begin_notes(shard, minibatches, logged)
    trained = minibatches if shard.supervised is None else mixed(minibatches, shard.supervised, policy.device)
    learns = critic is None or not critic.warming_up
    with _not_finite_in(where, f". The objective is {place_of(objective)}"):
        metrics = policy.update_batch(trained, objective, epochs, learns)
    if not math.isfinite(metrics["loss"]):
        problem = f"the objective {place_of(objective)} returned a loss of {metrics['loss']}"
        raise NotFinite(f"{where}: {problem}, although its gradient is finite")
    for number, microbatch in enumerate(chain.from_iterable(minibatches)):
        _report_left_out(policy.left_out.get(id(microbatch), {}), number, shard)
    _report_rows_left_out(policy, trained, shard)
    if critic is not None:
        with _not_finite_in(where):
            metrics |= critic.update_batch(minibatches, epochs) | value_metrics(columns)
    began = time.thread_time()
    records = token_records(shard, minibatches, advantages, logged)
    record_cpu_s = time.thread_time() - began
    return TrainedBatch(metrics | batch_metrics(shard, flat(advantages)), advantages, records, record_cpu_s)


def train_rows(policy: Policy, shard: PackedShard) -> dict[str, float]:
    """One optimiser step on supervised rows alone, at the learning rate ``trainer.lr`` x the plan's factor, after a
    linear warm-up over ``trainer.lr_warmup_steps`` steps like the schedule's. Raises NotFinite like :func:`train`."""
    assert shard.supervised is not None
    # These steps make the first versions.
    settings, number = policy.settings, shard.version + 1
    lr = settings.lr * shard.supervised.lr_factor * min(1.0, number / max(settings.lr_warmup_steps, 1))
    minibatches = pack_rows(shard.supervised, policy.device)
    with _not_finite_in(f"step {shard.version + 1}, which is supervised"):
        metrics = policy.update_batch(minibatches, rows_loss, lr=lr)
    _report_rows_left_out(policy, minibatches, shard)
    return metrics


@contextmanager
def _not_finite_in(where: str, more: str = "") -> Iterator[None]:
    """Add ``where`` (the step) and ``more`` to the message of NotFinite."""
    try:
        yield
    except NotFinite as error:
        raise NotFinite(f"{where}: {error}{more}") from error


def _report_left_out(causes: dict[int, str], microbatch: int, shard: PackedShard) -> None:
    """Log the episodes of a micro-batch that were not trained because one of their values is not finite."""
    for place, cause in causes.items():
        group, episode, _ = shard.places[microbatch][place]
        task = f" of task {shard.tasks[group]}" if shard.tasks[group] else ""
        what = f"step {shard.version + 1}: episode {episode} of item {shard.items[group]}{task}"
        logger.warning("%s is not trained: its %s is not finite", what, cause)


def _report_rows_left_out(policy: Policy, minibatches: Sequence[Sequence[MicroBatch]], shard: PackedShard) -> None:
    """Log the supervised rows that were not trained for the same reason."""
    row_batches = [microbatch for microbatch in chain.from_iterable(minibatches) if microbatch.supervised]
    places = [] if shard.supervised is None else shard.supervised.rows
    for microbatch, rows in zip(row_batches, places, strict=True):
        for place, cause in policy.left_out.get(id(microbatch), {}).items():
            what = f"step {shard.version + 1}: supervised row {rows[place] + 1}"
            logger.warning("%s is not trained: its %s is not finite", what, cause)


# -- the critic's targets in a batch, and metrics of its predictions --------------------------------------------------


def value_columns(views: Sequence[GroupView], settings: CriticSettings) -> dict[str, BatchAdvantages]:
    """The columns ``value`` and ``returns`` of all groups. ``returns`` are advantages + values, before normalisation.

    Args:
        views: views of the groups, with the column ``value``.
    """
    # Copies, because the advantage may write into the views.
    values = [[value.clone() for value in view.columns[VALUE]] for view in views]
    advantages = [group_advantages(view, settings.gamma, settings.lam) for view in views]
    returns = [
        [value + advantage for value, advantage in zip(*of_group, strict=True)]
        for of_group in zip(values, advantages, strict=True)
    ]
    return {VALUE: values, RETURNS: returns}


def value_metrics(columns: Mapping[str, BatchAdvantages]) -> dict[str, float]:
    """Metrics, by their full names, of the critic's predictions for a batch before it was updated with it."""
    values, returns = (torch.cat([torch.zeros(0), *chain(*columns[name])]) for name in (VALUE, RETURNS))
    if not len(values):
        return {}
    return {
        "critic/value": float(values.mean()),
        "critic/return": float(returns.mean()),
        "critic/explained_variance": explained_variance(values, returns),
    }
