"""Sums of a rank's tokens as metrics of the whole batch. All ranks call these functions together.

Tensor-parallel ranks compute the same tokens, which one of them counts.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from monarch_rl.algorithms.mismatch import quantile
from monarch_rl.trainer.batch import MicroBatch
from monarch_rl.trainer.objective import Sums


def reduced_metrics(totals: Sums, sparse_layers: Sequence[int], counts: bool) -> dict[str, float]:
    """Add up the sums of all ranks, and divide by the number of tokens (of their own kind).

    Args:
        totals: of this rank, by metric name; the same names on all ranks.
        sparse_layers: the model's layers that have experts.
        counts: this rank counts its tokens.

    Raises:
        ValueError: other ranks have sums of other names.
    """
    names = sorted(totals)
    device = totals[names[0]].device
    check_agreement(
        zlib.crc32(repr([(name, totals[name].numel()) for name in names]).encode()),
        device,
        f"trainer ranks have sums of different names; this one has {names}. The objective must return the same names "
        "for every micro-batch, also for one without tokens",
    )
    values = torch.cat([totals[name].to(torch.float32).reshape(-1) for name in names])
    dist.all_reduce(values if counts else values.zero_())
    reduced = dict(zip(names, values.cpu().split([totals[name].numel() for name in names]), strict=True))
    from_vectors = _expert_route_metrics(reduced, sparse_layers) | _difference_metrics(reduced)
    sums = {name: float(value) for name, value in reduced.items()}
    totals_alone = [name for name in ("loss", "tokens", "masked_nonfinite", "masked_episodes") if name in sums]
    metrics: dict[str, float] = {name: sums.pop(name) for name in totals_alone}
    if "on_policy_tokens" in sums:
        count = sums.pop("on_policy_tokens")
        metrics["on_policy_share"] = count / max(metrics["tokens"], 1)
        metrics["mismatch_k3_on_policy"] = sums.pop("mismatch_k3_on_policy") / max(count, 1)
    if "supervised_tokens" in sums:
        metrics["supervised_tokens"] = count = sums.pop("supervised_tokens")
        metrics["supervised_loss"] = sums.pop("supervised_loss") / max(count, 1)
    return metrics | {name: value / max(metrics["tokens"], 1) for name, value in sums.items()} | from_vectors


def summed(value: float, device: torch.device) -> float:
    """The sum over all ranks."""
    total = torch.tensor(value, device=device)
    dist.all_reduce(total)
    return float(total)


def check_agreement(value: int, device: torch.device, complaint: str) -> None:
    """Raise ValueError with ``complaint`` on all ranks if they have not called this with the same value."""
    bounds = torch.tensor([value, -value], device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    most, least = bounds.tolist()
    if most != -least:
        raise ValueError(complaint)


def _expert_route_metrics(reduced: Sums, sparse_layers: Sequence[int]) -> dict[str, float]:
    """Takes its sums out of ``reduced``."""
    if "routes_differ" not in reduced:
        return {}
    choices = max(float(reduced.pop("choices_of_a_layer")), 1.0)
    shares = (reduced.pop("routes_differ") / choices).tolist()
    by_layer = {f"routes_differ_{layer}": share for layer, share in zip(sparse_layers, shares, strict=True)}
    return {"routes_differ": sum(shares) / len(shares)} | by_layer


def _difference_metrics(reduced: Sums) -> dict[str, float]:
    """Takes its histogram out of ``reduced``."""
    if "logprob_difference" not in reduced:
        return {}
    counts = reduced.pop("logprob_difference")
    if not counts.sum():  # no token of the version that is updated
        return {}
    return {f"logprob_difference_{name}": quantile(counts, q) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1))}


def waste_metrics(microbatches: Sequence[MicroBatch], device: torch.device, counts: bool) -> dict[str, float]:
    """``padding``, ``imbalance`` and ``computed_share``: see :meth:`Policy.update`; ``counts``: this rank counts."""
    largest = torch.tensor([float(batch.num_tokens) for batch in microbatches], device=device)
    padding = float(sum(batch.padding for batch in microbatches))
    separate = float(sum(batch.separate_tokens for batch in microbatches))
    own = [float(largest.sum()), padding, separate, 1.0]
    sums = torch.tensor(own, device=device) * counts
    dist.all_reduce(sums)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    computed, padding, separate, ranks = sums.tolist()
    return {
        "padding": padding / computed,
        "imbalance": 1.0 - computed / (float(largest.sum()) * ranks),
        "computed_share": (computed - padding) / max(separate, 1.0),
    }
