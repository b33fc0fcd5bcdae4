"""Metrics of a batch: statistics of its groups, and sums over the tokens of all ranks."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from monarch_rl.algorithms.mismatch import quantile
from monarch_rl.episode.episode import mean_parts
from monarch_rl.episode.shard import PackedShard
from monarch_rl.trainer.batch import MicroBatch
from monarch_rl.trainer.objective import (
    LAYER_CHOICES,
    LOGPROB_DIFFERENCE,
    MASKED_EPISODES,
    MASKED_TOKENS,
    ON_POLICY_MISMATCH,
    ON_POLICY_TOKENS,
    ROUTES_DIFFER,
    SUPERVISED_LOSS,
    SUPERVISED_TOKENS,
    Sums,
)


def batch_metrics(shard: PackedShard, advantages: Sequence[np.ndarray]) -> dict[str, float]:
    """Metrics of a batch, by their names in ``observe/registry.py``; equal on all ranks.

    Args:
        shard: any rank's shard: its ``rewards``, ``lengths``, ``cut``, ``tasks`` and ``parts`` are of the whole batch.
        advantages: one float array per group of the batch, with a value per episode or per sampled token; NaN is
            ignored.
    """
    lags, computed = shard.lag_counts, np.concatenate(advantages)
    trained = computed[np.isfinite(computed)]
    # In float64: in float32 equal rewards may have a standard deviation above 0, and the sum of large ones overflows.
    rewards, lengths = np.concatenate(shard.rewards, dtype=np.float64), np.concatenate(shard.lengths)
    values: dict[str, float] = {}
    if lags.sum():
        values["lag/mean"] = float((lags * range(len(lags))).sum() / lags.sum())
        values["lag/max"] = float(max(lag for lag, count in enumerate(lags) if count))
    if len(trained):
        values["advantage/std"] = float(np.std(trained, dtype=np.float64))
    return (
        values
        | {
            "reward/mean": float(np.mean(rewards)),
            "reward/std": float(np.std(rewards)),
            "reward/equal_groups_share": float(np.mean([np.ptp(of_group) == 0 for of_group in shard.rewards])),
            "length/mean": float(np.mean(lengths)),
            "length/max": float(np.max(lengths)),
            "length/cut_share": float(np.mean(np.concatenate(shard.cut))),
        }
        | (_success_metrics(shard) | _task_metrics(shard) | _turn_metrics(shard) | _replay_metrics(shard))
    )


def _success_metrics(shard: PackedShard) -> dict[str, float]:
    """Shares of groups in which all episodes are a success, or none is, over the groups of tasks that define it."""
    marked = [(of, mark) for of, mark in zip(shard.rewards, shard.success_rewards, strict=False) if mark is not None]
    if not marked:
        return {}
    return {
        "reward/all_right_share": float(np.mean([np.all(of_group >= mark) for of_group, mark in marked])),
        "reward/all_wrong_share": float(np.mean([np.all(of_group < mark) for of_group, mark in marked])),
    }


def _replay_metrics(shard: PackedShard) -> dict[str, float]:
    """The share of replayed groups; nothing if groups are not replayed."""
    return {"buffer/replayed_share": float(np.mean([uses > 0 for uses in shard.uses]))} if shard.uses else {}


def _task_metrics(shard: PackedShard) -> dict[str, float]:
    """Mean reward and length of each task and of each of its seats, and the mean of each reward component over the
    episodes that have it."""
    episodes: dict[str, list[tuple[float, dict[str, float], int]]] = {}
    """Reward, reward components and length of each episode, by task, and by task and seat."""
    of_groups = zip(shard.tasks, shard.seats, shard.rewards, shard.parts, shard.lengths, strict=True)
    for task, seats, rewards, parts, lengths in of_groups:
        for seat, reward, of_episode, length in zip(seats, rewards, parts, lengths, strict=True):
            for name in _names(task, seat):
                episodes.setdefault(name, []).append((float(reward), of_episode, int(length)))
    counts = Counter(task for task in shard.tasks if task)
    values = {f"groups/{task}": float(count) for task, count in counts.items()}
    for name, of_name in episodes.items():
        values |= {f"reward/{name}/{part}": mean for part, mean in mean_parts([p for _, p, _ in of_name]).items()}
        values[f"reward/{name}/mean"] = float(np.mean([reward for reward, _, _ in of_name]))
        values[f"length/{name}/mean"] = float(np.mean([length for *_, length in of_name]))
    return values


def _names(task: str, seat: str) -> tuple[str, ...]:
    """The names under which an episode is counted."""
    return () if not task else (task, f"{task}/{seat}") if seat else (task,)


def _turn_metrics(shard: PackedShard) -> dict[str, float]:
    """Mean reward of single turns, by task, and by task and seat. A turn that several branches share counts once."""
    found: dict[str, list[float]] = {}
    for task, seats, forks, turns in zip(shard.tasks, shard.seats, shard.forks, shard.turn_rewards, strict=True):
        for seat, fork, of_episode in zip(seats, forks, turns, strict=True):
            own = of_episode[0 if fork is None else fork.turns :]
            rewards = [reward for reward in own if reward is not None]
            for name in _names(task, seat) if rewards else ():
                found.setdefault(name, []).extend(rewards)
    return {f"turn_reward/{name}": float(np.mean(rewards)) for name, rewards in found.items()}


# -- sums over the tokens of all ranks. All ranks call these functions together ---------------------------------------
# Tensor-parallel ranks compute the same tokens: only one of them counts them.


def _all_reduce(values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduce ``values`` in place. A single rank, which has nothing to wait for, does not wake gloo's thread."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values, op=op)


def reduced_metrics(totals: Sums, sparse_layers: Sequence[int], counts: bool) -> dict[str, float]:
    """Add up the sums of all ranks, and divide each by the number of tokens that it covers, if there are any.

    Args:
        totals: this rank's sums by metric name; the same names on all ranks.
        sparse_layers: the model's layers that have experts.
        counts: whether this rank counts its tokens.

    Raises:
        ValueError: other ranks have sums with other names.
    """
    names = sorted(totals)
    device = totals[names[0]].device
    check_agreement(
        zlib.crc32(repr([(name, totals[name].numel()) for name in names]).encode()),
        device,
        f"trainer ranks have sums of different names; this one has {names}. The objective must return the same names "
        "for every micro-batch, even for one without tokens",
    )
    values = torch.cat([totals[name].to(torch.float32).reshape(-1) for name in names])
    _all_reduce(values if counts else values.zero_())
    reduced = dict(zip(names, values.cpu().split([totals[name].numel() for name in names]), strict=True))
    from_vectors = _expert_route_metrics(reduced, sparse_layers) | _difference_metrics(reduced)
    sums = {name: float(value) for name, value in reduced.items()}
    undivided = [name for name in ("loss", "tokens", MASKED_TOKENS, MASKED_EPISODES) if name in sums]
    metrics: dict[str, float] = {name: sums.pop(name) for name in undivided}
    numbers = {ON_POLICY_MISMATCH: sums.get(ON_POLICY_TOKENS, 0.0), SUPERVISED_LOSS: sums.get(SUPERVISED_TOKENS, 0.0)}
    if SUPERVISED_TOKENS in sums:
        metrics[SUPERVISED_TOKENS] = sums.pop(SUPERVISED_TOKENS)
    # A mean over no tokens is absent: 0 would say that engine and trainer agree, or that the loss is perfect.
    for name, value in sums.items():
        if number := numbers.get(name, metrics["tokens"]):
            metrics["on_policy_share" if name == ON_POLICY_TOKENS else name] = value / number
    return metrics | from_vectors


def summed(value: float, device: torch.device) -> float:
    """The sum over all ranks."""
    total = torch.tensor(value, device=device)
    _all_reduce(total)
    return float(total)


def check_agreement(value: int, device: torch.device, complaint: str) -> None:
    """Raise ValueError with ``complaint`` on all ranks unless all pass the same value."""
    bounds = torch.tensor([value, -value], device=device)
    _all_reduce(bounds, dist.ReduceOp.MAX)
    most, least = bounds.tolist()
    if most != -least:
        raise ValueError(complaint)


def _expert_route_metrics(reduced: Sums, sparse_layers: Sequence[int]) -> dict[str, float]:
    """Removes the sums of expert routes from ``reduced``."""
    if ROUTES_DIFFER not in reduced:
        return {}
    choices = max(float(reduced.pop(LAYER_CHOICES)), 1.0)
    shares = (reduced.pop(ROUTES_DIFFER) / choices).tolist()
    by_layer = {f"{ROUTES_DIFFER}_{layer}": share for layer, share in zip(sparse_layers, shares, strict=True)}
    return {ROUTES_DIFFER: sum(shares) / len(shares)} | by_layer


def _difference_metrics(reduced: Sums) -> dict[str, float]:
    """Removes the histogram of log-prob differences from ``reduced``."""
    if LOGPROB_DIFFERENCE not in reduced:
        return {}
    counts = reduced.pop(LOGPROB_DIFFERENCE)
    if not counts.sum():  # no token was sampled by the version being updated
        return {}
    quantiles = {"p50": 0.5, "p99": 0.99, "max": 1}
    return {f"{LOGPROB_DIFFERENCE}_{name}": quantile(counts, share) for name, share in quantiles.items()}


def waste_metrics(microbatches: Sequence[MicroBatch], device: torch.device, counts: bool) -> dict[str, float]:
    """``padding``, ``imbalance`` and ``computed_share`` (see :meth:`Policy.update_batch`).

    Args:
        counts: whether this rank counts its tokens.
    """
    largest = torch.tensor([float(batch.num_tokens) for batch in microbatches], device=device)
    padding = float(sum(batch.padding for batch in microbatches))
    separate = float(sum(batch.separate_tokens for batch in microbatches))
    own = [float(largest.sum()), padding, separate, 1.0]
    sums = torch.tensor(own, device=device) * counts
    _all_reduce(sums)
    _all_reduce(largest, dist.ReduceOp.MAX)
    computed, padding, separate, ranks = sums.tolist()
    return {
        "padding": padding / computed,
        "imbalance": 1.0 - computed / (float(largest.sum()) * ranks),
        "computed_share": (computed - padding) / max(separate, 1.0),
    }
