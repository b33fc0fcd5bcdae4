"""The loss of a micro-batch's trainable tokens: ratio, clip, correction, weight, composed from ``algorithms/``.

A loss of your own is a function of the type :data:`Objective`: give it to ``run.start(objective=...)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from typing import Any

import torch

from monarch_rl.algorithms import losses
from monarch_rl.algorithms.advantages import positives_only
from monarch_rl.algorithms.distillation import reverse_kl, top_columns, top_k_divergence
from monarch_rl.algorithms.functions import entropy_gradient, needs, other_tokens, place_of
from monarch_rl.algorithms.losses import CORRECTIONS, POLICY_LOSSES, Policies
from monarch_rl.algorithms.mismatch import BINS, histogram
from monarch_rl.observe.registry import find
from monarch_rl.trainer.batch import MicroBatch
from monarch_rl.trainer.loss_settings import LossSettings
from monarch_rl.trainer.token_logprobs import TokenLogprobs

FAR_RATIO = 2.0
"""A token whose ratio trainer / engine is beyond this factor, either way, counts as far off (in ``tools/parity.py``,
too)."""

LOGPROB_DIFFERENCE = "logprob_difference"
Sums = dict[str, torch.Tensor]
"""Sums over tokens, by metric name, scalars; ``tokens`` is the number of tokens summed over. ``logprob_difference``
alone is a vector, a histogram (:func:`monarch_rl.algorithms.mismatch.histogram`)."""

Objective = Callable[[TokenLogprobs, MicroBatch], tuple[torch.Tensor, Sums]]
"""``(log-probs of the micro-batch's tokens, micro-batch) -> (loss, sums)``: the loss is a scalar with gradient, a sum
over tokens with ``batch.weights``; of the sums, ``tokens`` must be there. Each of the others is logged as its mean
over tokens, under its name after ``trainer/``."""

OLD, REFERENCE, TEACHER = "old", "reference", "teacher"
"""Columns: log-probs of the trainer's policy at the start of the batch, which there always are, of the reference model,
and of a teacher."""
TRAINERS_OWN = (
    *("loss", "lr", "grad_norm", "optimizer_steps", "drift_k3", "padding", "imbalance", "computed_share"),
    *("masked_nonfinite", "masked_episodes", "reference_device_s", "supervised_loss", "supervised_tokens"),
    *("on_policy_share", "logprob_difference_*", "routes_differ", "routes_differ_*", "choices_of_a_layer"),
    *("wait_s", "step_s", "idle_share"),
)
"""Metrics of a step, after ``trainer/``, and what they are computed from; patterns. No sum of an objective may replace
them."""
ON_POLICY_TOKENS, ON_POLICY_MISMATCH = "on_policy_tokens", "mismatch_k3_on_policy"
"""Sums that are made a mean of each other."""
VALUE, RETURNS = "value", "returns"
"""Columns: what the critic, before it was updated, expected before each drawn token that the sequence would still get;
and what its values should have been."""


def reinforcement(settings: LossSettings) -> Objective:
    """The policy-gradient objective that ``settings`` describe."""

    def objective(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        policies = _policies(output, batch, settings)
        policy = POLICY_LOSSES[settings.policy_loss].rule(policies, settings)
        loss, sums = _total(policy.loss, output, batch, policies, settings)
        return loss, sums | {"clipped": policy.limited.sum()}

    return _marked(objective, "reinforcement", settings, *settings.needed_columns)


def distillation(settings: LossSettings) -> Objective:
    """The reverse KL to the teacher, token by token: of ``settings`` all counts but policy loss and advantage.

    Raises:
        ValueError: the settings change rewards, advantages or the policy loss, which are not read, or judge by them; or
            with ``teacher_top`` weigh tokens by who drew them.
    """
    _check_distilled(settings)
    ids, logprobs = top_columns(settings.teacher_top)

    def objective(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        policies, teacher = _policies(output, batch, settings), batch.columns[TEACHER]
        sums = {"reverse_kl": (policies.new.detach() - teacher).sum()}
        loss, of_drawn = reverse_kl(policies.new, teacher), output.others is None
        if output.others is not None:
            most_likely = torch.stack([batch.columns[name] for name in logprobs], -1)
            loss = top_k_divergence(output.others, most_likely, settings.teacher_divergence == "forward")
            sums["top_k_kl"] = loss.detach().sum()
        loss, further = _total(loss, output, batch, policies, settings, of_drawn)
        return loss, further | sums

    marked = _marked(objective, "distillation", settings, *settings.needed_columns, TEACHER, *logprobs)
    return other_tokens(ids)(marked) if ids else marked


def _check_distilled(settings: LossSettings) -> None:
    """Refuse what :func:`distillation` does not read."""
    if settings.ratio_to != "trainer" or settings.policy_loss != LossSettings().policy_loss:
        raise ValueError(
            "the objective distillation has no ratio and no policy loss: leave out trainer.loss.ratio-to and "
            "trainer.loss.policy-loss, or take the advantage of that name instead (trainer.loss.advantage distillation)"
        )
    if settings.positives_only or "opsm" in settings.applied_corrections or settings.takes_kl_from_reward:
        raise ValueError(
            "the objective distillation reads no advantages: leave out trainer.loss.positives-only, the correction "
            "opsm and kl-in reward, or take the advantage of that name instead (trainer.loss.advantage distillation)"
        )
    defaults = LossSettings()
    for name in ("clip_low", "clip_high", "dual_clip", "overlong_limit"):
        if getattr(settings, name) != getattr(defaults, name):
            raise ValueError(
                f"{settings.flag(name)}: the objective distillation reads no rewards and no policy loss. Leave it out"
            )
    if settings.teacher_top and not settings.kl_coefficient:
        weighs = [name for name in settings.corrections or () if CORRECTIONS[name].weighs_behaviour]
        given = [f"{settings.flag('corrections')} {weighs[0]}"] if weighs else []
        given += [settings.flag("importance_cap")] * (settings.importance_cap != defaults.importance_cap)
        if given:
            raise ValueError(
                f"{given[0]}: with trainer.loss.teacher-top the objective distillation is an expectation over what may "
                "be drawn, which needs no weight of who drew. Leave it out"
            )


def _marked(objective: Objective, name: str, settings: LossSettings, *columns: str) -> Objective:
    setattr(objective, _MADE_WITH, (name, settings))
    if settings.entropy_coefficient:
        objective = entropy_gradient(objective)
    return needs(*columns)(objective)


def _importance(policies: Policies, settings: LossSettings, of_drawn: bool = True) -> torch.Tensor:
    """float32[N], without gradient: the product of the corrections' weights; where the loss is not ``of_drawn`` tokens
    of those that drop sequences alone."""
    importance = torch.ones_like(policies.old)
    for name in settings.applied_corrections:
        if of_drawn or not CORRECTIONS[name].weighs_behaviour:
            importance = importance * CORRECTIONS[name].weights(policies, settings)
    return importance


def _total(
    loss: torch.Tensor,
    output: TokenLogprobs,
    batch: MicroBatch,
    policies: Policies,
    settings: LossSettings,
    of_drawn: bool = True,
) -> tuple[torch.Tensor, Sums]:
    """The loss of a micro-batch, and its sums, from the loss of each token, float32[N], before its corrections: with
    the KL to the reference and the entropy.

    Args:
        of_drawn: the loss is an estimate from the token that was drawn. If not, it is an expectation over what may be
            drawn, like the entropy, and has no weight of who drew.
    """
    importance = _importance(policies, settings, of_drawn)
    loss = loss * importance
    sums = _sums(output, batch, policies) | {"importance_weight": importance.sum()}
    if settings.kl_coefficient:
        divergence = losses.ESTIMATES[settings.estimates_kl_by](policies.new, batch.columns[REFERENCE])
        sums["kl_reference"] = divergence.detach().sum()
        if settings.kl_in == "loss":
            loss = loss + settings.kl_coefficient * _importance_of_kl(policies, settings) * divergence
    if settings.entropy_coefficient:
        loss = loss - settings.entropy_coefficient * output.entropies
    weights = batch.weights * losses.lag_discount(batch.lags, settings.lag_discount)
    return (loss * weights).sum(), sums


def _importance_of_kl(policies: Policies, settings: LossSettings) -> torch.Tensor:
    """float32[N]: the corrections' weights. Where the policy loss itself weighs tokens that another policy drew, and no
    correction does, the KL has a weight of its own: it is an expectation under the policy."""
    importance = _importance(policies, settings)
    if not settings.weighs_behaviour:
        return importance
    cap = settings.importance_cap
    return importance * losses.truncated_importance_weights(policies.old, policies.behaviour, cap)


def _policies(output: TokenLogprobs, batch: MicroBatch, settings: LossSettings) -> Policies:
    """With the advantages as the settings change them."""
    old, behaviour = batch.columns.get(OLD, output.logprobs.detach()), batch.behaviour_logprobs
    advantages = batch.advantages
    if settings.takes_kl_from_reward:
        divergence = losses.ESTIMATES[settings.estimates_kl_by](old, batch.columns[REFERENCE])  # one for all updates
        advantages = advantages - settings.kl_coefficient * divergence
    if settings.positives_only:
        advantages = positives_only(advantages)
    ratio_to = old if settings.ratio_to == "trainer" else behaviour
    return Policies(output.logprobs, old, behaviour, ratio_to, advantages, batch.sequences)


def _sums(output: TokenLogprobs, batch: MicroBatch, policies: Policies) -> Sums:
    """What is measured whatever the objective is."""
    new, difference, on_policy = policies.new.detach(), policies.old - policies.behaviour, batch.lags == 0
    mismatch = losses.mismatch_k3(policies.old, policies.behaviour)
    return {
        "tokens": torch.ones_like(new).sum(),
        "entropy": output.entropies.detach().sum(),
        "logprob": new.sum(),
        "mismatch_k3_all": mismatch.sum(),
        ON_POLICY_TOKENS: on_policy.sum(),
        ON_POLICY_MISMATCH: mismatch[on_policy].sum(),
        LOGPROB_DIFFERENCE: histogram(difference[on_policy]),
        "kept_mass": output.mask_mass.sum(),
        "ratio_outside": (difference.abs() > math.log(FAR_RATIO)).sum(),
    }


def supervised(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
    """Cross-entropy of the trainable tokens, for a warm start: the policy gradient with an advantage of 1."""
    logprobs, entropies = output.logprobs, output.entropies
    loss = losses.policy_gradient(logprobs, torch.ones_like(logprobs))
    sums = {
        "tokens": torch.ones_like(loss).sum(),
        "entropy": entropies.sum(),
        "logprob": logprobs.detach().sum(),
    }
    return (loss * batch.weights).sum(), sums


def rows_objective(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
    """:func:`supervised` for rows beside a batch: their sums have names of their own, and they count none of its
    tokens."""
    loss, sums = supervised(output, batch)
    row_sums = {"supervised_tokens": sums["tokens"], "supervised_loss": -sums["logprob"]}
    return loss, {"tokens": torch.zeros_like(sums["tokens"])} | row_sums


OBJECTIVES: dict[str, Callable[[LossSettings], Objective]] = {
    "reinforcement": reinforcement,
    "distillation": distillation,
    "supervised": lambda _: supervised,
}
"""By the names that ``run.start(objective=...)`` knows."""
_MADE_WITH = "_monarch_rl_made_with"


def made_with(objective: Objective) -> tuple[str, LossSettings] | None:
    """The name in :data:`OBJECTIVES` and the settings that make this objective; None for a recipe's own, which may be a
    wrapper of one of these with its attributes."""
    name, settings = getattr(objective, _MADE_WITH, ("supervised", LossSettings()))
    return (name, settings) if place_of(objective) == place_of(OBJECTIVES[name](settings)) else None


def _unusable_names(names: Collection[str]) -> str:
    """What an objective should return instead of sums with these names; empty if they will do."""
    if taken := sorted(name for name in names if any(fnmatchcase(name, own) for own in TRAINERS_OWN)):
        return f"other names than {taken}, which are the trainer's own metrics"
    if whole := sorted(name for name in names if find(name) is not None):
        return f"other names than {whole}, which are whole names of metrics of a run: yours are logged after trainer/"
    if (ON_POLICY_TOKENS in names) != (ON_POLICY_MISMATCH in names):
        return f"{ON_POLICY_TOKENS} and {ON_POLICY_MISMATCH} together, or neither"
    return ""


def call(objective: Objective, output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
    """The loss of a micro-batch and its sums, without gradient.

    Raises:
        ValueError: the objective returned something else; names it and where it is defined.
    """
    returned: Any = objective(output, batch)
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
        raise _refused(objective, f"{returned!r:.100}", "a pair of the loss and a dictionary of sums")
    loss, sums = returned
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.is_floating_point():
        what = f"a loss of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"the loss {loss!r:.100}"
        raise _refused(objective, what, "a scalar, the sum over tokens of their losses with batch.weights")
    if not loss.requires_grad:
        raise _refused(objective, "a loss without gradient", "a loss that is computed from the log-probs it was given")
    if "tokens" not in sums:
        raise _refused(objective, f"the sums {sorted(sums)}", "a sum named 'tokens', the number of tokens summed over")
    if instead := _unusable_names(sums):
        raise _refused(objective, f"the sums {sorted(sums)}", instead)
    values = {name: torch.as_tensor(value, device=loss.device).detach() for name, value in sums.items()}
    for name, value in values.items():
        shape, instead = list[int](), "sums over tokens, which are scalars"
        if name == LOGPROB_DIFFERENCE:
            shape, instead = [BINS], f"a histogram of shape [{BINS}] (monarch_rl.algorithms.mismatch)"
        if list(value.shape) != shape:
            raise _refused(objective, f"{name} of shape {list(value.shape)}", instead)
    return loss, values


def _refused(objective: Objective, returned: str, instead: str) -> ValueError:
    return ValueError(f"the objective {place_of(objective)} returned {returned}: return {instead}")
