"""The loss of a micro-batch's trainable tokens: ratio, clip, correction, weight, composed from ``algorithms/``.

A loss of your own is a function of the type :data:`Objective`: give it to the trainer as ``TrainerPlan.objective``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from monarch_rl.algorithms import corrections, losses
from monarch_rl.algorithms.mismatch import histogram
from monarch_rl.trainer.batch import MicroBatch
from monarch_rl.trainer.settings import LossSettings
from monarch_rl.trainer.token_logprobs import TokenLogprobs

FAR_RATIO = 2.0
"""A token whose ratio trainer / engine is beyond this factor, either way, counts as far off (in ``tools/parity.py``,
too)."""

Sums = dict[str, torch.Tensor]
"""Sums over tokens, by metric name, scalars or vectors; ``tokens`` is the number of tokens summed over."""

Objective = Callable[[TokenLogprobs, MicroBatch], tuple[torch.Tensor, Sums]]
"""``(log-probs of the micro-batch's tokens, micro-batch) -> (loss, sums)``: the loss is a scalar with gradient, a sum
over tokens with ``batch.weights``; of the sums, ``tokens`` must be there."""


def reinforcement(settings: LossSettings) -> Objective:
    """The policy-gradient objective that ``settings`` describe."""

    def objective(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        keep = corrections.finite_tokens(batch.behaviour_logprobs)
        logprobs, behaviour = output.logprobs[keep], batch.behaviour_logprobs[keep]
        advantages, lags = batch.advantages[keep], batch.lags[keep]
        weights, on_policy = batch.weights[keep] * corrections.lag_discount(lags, settings.lag_discount), lags == 0
        # One optimiser step a batch: the trainer's policy when the batch was formed is the current one.
        old = logprobs.detach()
        reference = old if settings.ratio_to == "trainer" else behaviour
        loss = losses.clipped_ratio(logprobs, reference, advantages, settings.clip_low, settings.clip_high)
        importance = torch.ones_like(loss)
        if settings.ratio_to == "trainer" and settings.importance_cap > 0:
            importance = corrections.truncated_importance_weights(old, behaviour, settings.importance_cap)
        mismatch = corrections.mismatch_k3(old, behaviour)
        clipped = losses.clip_fraction(old, reference, settings.clip_low, settings.clip_high)
        sums = {
            "tokens": torch.ones_like(old).sum(),
            "entropy": output.entropies[keep].sum(),
            "logprob": old.sum(),
            "importance_weight": importance.sum(),
            "clipped": clipped.sum(),
            "mismatch_k3_all": mismatch.sum(),
            "on_policy_tokens": on_policy.sum(),
            "mismatch_k3_on_policy": mismatch[on_policy].sum(),
            "logprob_difference": histogram((old - behaviour)[on_policy]),
            "masked_nonfinite": (~keep).sum(),
            "kept_mass": output.kept_mass[keep].sum(),
            "ratio_outside": ((old - behaviour).abs() > math.log(FAR_RATIO)).sum(),
        }
        return (loss * importance * weights).sum(), sums

    return objective


def supervised(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
    """Cross-entropy of the trainable tokens, for a warm start: the policy gradient with an advantage of 1."""
    logprobs, entropies, _ = output
    loss = losses.policy_gradient(logprobs, torch.ones_like(logprobs))
    sums = {
        "tokens": torch.ones_like(loss).sum(),
        "entropy": entropies.sum(),
        "logprob": logprobs.detach().sum(),
    }
    return (loss * batch.weights).sum(), sums
