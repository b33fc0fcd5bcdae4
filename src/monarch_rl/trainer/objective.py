"""Objectives: the loss of a micro-batch's trainable tokens, composed from ``algorithms/``.

A custom loss is a function of type :data:`Objective`, passed to ``run.start(objective=...)``.
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
from monarch_rl.algorithms.losses import CORRECTIONS, POLICY_LOSSES, LossInputs
from monarch_rl.algorithms.mismatch import BINS, histogram
from monarch_rl.errors import SettingsError
from monarch_rl.observe.registry import find
from monarch_rl.trainer.batch import MicroBatch
from monarch_rl.trainer.loss_settings import LossSettings
from monarch_rl.trainer.token_logprobs import TokenLogprobs

FAR_RATIO = 2.0
"""``ratio_outside`` counts tokens whose ratio trainer / engine is above this or below its inverse; ``tools/parity.py``
uses it, too."""

LOGPROB_DIFFERENCE = "logprob_difference"
Sums = dict[str, torch.Tensor]
"""Scalar sums over tokens, by metric name; ``tokens`` is the number of tokens. Only ``logprob_difference`` is a vector,
a histogram (:func:`monarch_rl.algorithms.mismatch.histogram`)."""

Objective = Callable[[TokenLogprobs, MicroBatch], tuple[torch.Tensor, Sums]]
"""``(log-probs of the micro-batch's tokens, micro-batch) -> (loss, sums)``. The loss, a scalar with gradient, is
``(token_loss * batch.weights).sum()``: the weights already contain the normaliser of ``trainer.loss.aggregation`` over
the whole mini-batch and all ranks, so do not average. The sums must include ``tokens``; each other sum is logged as
``trainer/<name>``, its mean over tokens."""

OLD, REFERENCE, TEACHER = "old", "reference", "teacher"
"""Columns of log-probs: of the trainer's policy at the start of the batch (always there), of the reference model, and
of a teacher."""
TRAINERS_OWN = (
    *("loss", "lr", "grad_norm", "optimizer_steps", "drift_k3", "padding", "imbalance", "computed_share"),
    *("masked_nonfinite", "masked_episodes", "reference_device_s", "supervised_loss", "supervised_tokens"),
    *("on_policy_share", "logprob_difference_*", "routes_differ", "routes_differ_*", "choices_of_a_layer"),
    *("wait_s", "step_s", "idle_share"),
)
"""Patterns of names, after ``trainer/``, of the trainer's own metrics and their inputs, which no sum of an objective
may replace."""
ON_POLICY_TOKENS, ON_POLICY_MISMATCH = "on_policy_tokens", "mismatch_k3_on_policy"
"""Sums whose quotient is logged: an objective returns both or neither."""
VALUE, RETURNS = "value", "returns"
"""Columns: the critic's value before each sampled token, computed before the critic's update, and its target."""


def reinforcement(settings: LossSettings) -> Objective:
    """The policy-gradient objective of ``settings``."""

    def objective(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        inputs = _loss_inputs(output, batch, settings)
        policy = POLICY_LOSSES[settings.policy_loss].rule(inputs, settings)
        loss, sums = _loss_and_sums(policy.loss, output, batch, inputs, settings)
        return loss, sums | {"clipped": policy.limited.sum()}

    return _with_metadata(objective, "reinforcement", settings, *settings.needed_columns)


def distillation(settings: LossSettings) -> Objective:
    """The KL divergence from the teacher at each token (by default the reverse KL).

    Of ``settings`` it uses ``teacher_top``, ``teacher_divergence``, the corrections (except ``opsm``),
    ``lag_discount``, the KL in the loss, entropy and aggregation. It ignores ``advantage``; other loss settings must
    keep their defaults.

    Raises:
        ValueError: ``ratio_to``, ``policy_loss``, ``positives_only``, ``clip_low``, ``clip_high``, ``dual_clip`` or
            ``overlong_limit`` is not the default; the corrections contain ``opsm``; the KL is subtracted from the
            reward; or ``teacher_top`` is set without ``kl_coefficient``, and ``corrections`` names ``tis`` or
            ``icepop``, or ``importance_cap`` is not the default.
    """
    _check_distilled(settings)
    ids, logprobs = top_columns(settings.teacher_top)

    def objective(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        inputs, teacher = _loss_inputs(output, batch, settings), batch.columns[TEACHER]
        sums = {"reverse_kl": (inputs.new.detach() - teacher).sum()}
        loss, sampled_only = reverse_kl(inputs.new, teacher), output.others is None
        if output.others is not None:
            most_likely = torch.stack([batch.columns[name] for name in logprobs], -1)
            loss = top_k_divergence(output.others, most_likely, settings.teacher_divergence == "forward")
            sums["top_k_kl"] = loss.detach().sum()
        loss, common = _loss_and_sums(loss, output, batch, inputs, settings, sampled_only)
        return loss, common | sums

    marked = _with_metadata(objective, "distillation", settings, *settings.needed_columns, TEACHER, *logprobs)
    return other_tokens(ids)(marked) if ids else marked


def _check_distilled(settings: LossSettings) -> None:
    """Refuse settings that :func:`distillation` does not read."""
    defaults = LossSettings()
    instead = "Leave it out, or use the advantage of that name instead (trainer.loss.advantage distillation)"
    for name in ("ratio_to", "policy_loss"):
        if getattr(settings, name) != getattr(defaults, name):
            flag = f"{settings.flag(name)} {getattr(settings, name)}"
            raise SettingsError(f"{flag}: the objective distillation has no ratio and no policy loss. {instead}")
    for flag, is_given in (
        (settings.flag("positives_only"), settings.positives_only),
        (f"{settings.flag('corrections')} opsm", "opsm" in settings.applied_corrections),
        (f"{settings.flag('kl_in')} reward", settings.takes_kl_from_reward),
    ):
        if is_given:
            raise SettingsError(f"{flag}: the objective distillation reads no advantages. {instead}")
    for name in ("clip_low", "clip_high", "dual_clip", "overlong_limit"):
        if getattr(settings, name) != getattr(defaults, name):
            raise SettingsError(
                f"{settings.flag(name)}: the objective distillation uses no rewards and no policy loss. Leave it out"
            )
    if settings.teacher_top and not settings.kl_coefficient:
        weighs = [name for name in settings.corrections or () if CORRECTIONS[name].has_importance_ratio]
        given = [f"{settings.flag('corrections')} {weighs[0]}"] if weighs else []
        given += [settings.flag("importance_cap")] * (settings.importance_cap != defaults.importance_cap)
        if given:
            raise SettingsError(
                f"{given[0]}: with trainer.loss.teacher-top the objective distillation is an expectation over the next "
                "token, to which no importance weight applies. Leave it out"
            )


def _with_metadata(objective: Objective, name: str, settings: LossSettings, *columns: str) -> Objective:
    setattr(objective, _NAME_AND_SETTINGS, (name, settings))
    if settings.entropy_coefficient:
        objective = entropy_gradient(objective)
    return needs(*columns)(objective)


def _importance(inputs: LossInputs, settings: LossSettings, sampled_only: bool = True) -> torch.Tensor:
    """float32[N], without gradient: the product of the corrections' weights. If not ``sampled_only`` (see
    :func:`_loss_and_sums`), only corrections that drop sequences apply."""
    importance = torch.ones_like(inputs.old)
    for name in settings.applied_corrections:
        if sampled_only or not CORRECTIONS[name].has_importance_ratio:
            importance = importance * CORRECTIONS[name].weights(inputs, settings)
    return importance


def _loss_and_sums(
    loss: torch.Tensor,
    output: TokenLogprobs,
    batch: MicroBatch,
    inputs: LossInputs,
    settings: LossSettings,
    sampled_only: bool = True,
) -> tuple[torch.Tensor, Sums]:
    """The loss of a micro-batch and its sums: token losses with corrections, KL to the reference and entropy.

    Args:
        loss: float32[N], the loss of each token before corrections.
        sampled_only: the loss is an estimate from the sampled token. Otherwise it is an expectation over the next
            token, like the entropy, to which no importance weight applies.
    """
    importance = _importance(inputs, settings, sampled_only)
    loss = loss * importance
    sums = _sums(output, batch, inputs) | {"importance_weight": importance.sum()}
    if settings.kl_coefficient:
        divergence = losses.ESTIMATES[settings.estimates_kl_by](inputs.new, batch.columns[REFERENCE])
        sums["kl_reference"] = divergence.detach().sum()
        if settings.kl_in == "loss":
            loss = loss + settings.kl_coefficient * _importance_of_kl(inputs, settings) * divergence
    if settings.entropy_coefficient:
        loss = loss - settings.entropy_coefficient * output.entropies
    weights = batch.weights * losses.lag_discount(batch.lags, settings.lag_discount)
    return (loss * weights).sum(), sums


def _importance_of_kl(inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
    """float32[N]: the importance weights of the KL to the reference."""
    # The KL is an expectation under the current policy, so it needs a weight even if the policy loss has its own, and
    # no correction gives one.
    importance = _importance(inputs, settings)
    if not settings.has_importance_ratio:
        return importance
    cap = settings.importance_cap
    return importance * losses.truncated_importance_weights(inputs.old, inputs.behaviour, cap)


def _loss_inputs(output: TokenLogprobs, batch: MicroBatch, settings: LossSettings) -> LossInputs:
    """The log-probs to compare, and the advantages after KL penalty and ``positives_only``."""
    old, behaviour = batch.columns.get(OLD, output.logprobs.detach()), batch.behaviour_logprobs
    advantages = batch.advantages
    if settings.takes_kl_from_reward:
        divergence = losses.ESTIMATES[settings.estimates_kl_by](old, batch.columns[REFERENCE])  # same for all updates
        advantages = advantages - settings.kl_coefficient * divergence
    if settings.positives_only:
        advantages = positives_only(advantages)
    ratio_to = old if settings.ratio_to == "trainer" else behaviour
    return LossInputs(output.logprobs, old, behaviour, ratio_to, advantages, batch.sequences)


def _sums(output: TokenLogprobs, batch: MicroBatch, inputs: LossInputs) -> Sums:
    """Sums that all objectives but ``supervised`` report."""
    new, difference, on_policy = inputs.new.detach(), inputs.old - inputs.behaviour, batch.lags == 0
    mismatch = losses.mismatch_k3(inputs.old, inputs.behaviour)
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
    """Cross-entropy of the trainable tokens, for a supervised start: the policy gradient with an advantage of 1."""
    logprobs, entropies = output.logprobs, output.entropies
    loss = losses.policy_gradient(logprobs, torch.ones_like(logprobs))
    sums = {
        "tokens": torch.ones_like(loss).sum(),
        "entropy": entropies.sum(),
        "logprob": logprobs.detach().sum(),
    }
    return (loss * batch.weights).sum(), sums


def rows_objective(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
    """:func:`supervised` for supervised rows: their sums have separate names, and they do not count in ``tokens``."""
    loss, sums = supervised(output, batch)
    row_sums = {"supervised_tokens": sums["tokens"], "supervised_loss": -sums["logprob"]}
    return loss, {"tokens": torch.zeros_like(sums["tokens"])} | row_sums


OBJECTIVES: dict[str, Callable[[LossSettings], Objective]] = {
    "reinforcement": reinforcement,
    "distillation": distillation,
    "supervised": lambda _: supervised,
}
"""Factories by the names that ``run.start(objective=...)`` accepts."""
_NAME_AND_SETTINGS = "_monarch_rl_name_and_settings"


def name_and_settings(objective: Objective) -> tuple[str, LossSettings] | None:
    """The name in :data:`OBJECTIVES` and the settings that created this objective; None for a recipe's own."""
    # A recipe's own may be a wrapper of one of these with copied attributes, so the place is compared, too.
    name, settings = getattr(objective, _NAME_AND_SETTINGS, ("supervised", LossSettings()))
    return (name, settings) if place_of(objective) == place_of(OBJECTIVES[name](settings)) else None


def _unusable_names(names: Collection[str]) -> str:
    """What an objective should return instead of sums with these names; empty if the names are allowed."""
    if taken := sorted(name for name in names if any(fnmatchcase(name, own) for own in TRAINERS_OWN)):
        return f"other names than {taken}, which are the trainer's own metrics"
    if whole := sorted(name for name in names if find(name) is not None):
        return f"other names than {whole}, which are full names of metrics of a run: yours are logged as trainer/<name>"
    if (ON_POLICY_TOKENS in names) != (ON_POLICY_MISMATCH in names):
        return f"{ON_POLICY_TOKENS} and {ON_POLICY_MISMATCH} together, or neither"
    return ""


def evaluate_objective(objective: Objective, output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
    """Call an objective and check what it returns: the loss of a micro-batch, and its sums, which are detached.

    Raises:
        ValueError: the objective returned something else; names the objective and where it is defined.
    """
    returned: Any = objective(output, batch)
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
        raise _refused(objective, f"{returned!r:.100}", "a pair of the loss and a dictionary of sums")
    loss, sums = returned
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.is_floating_point():
        what = f"a loss of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"the loss {loss!r:.100}"
        raise _refused(objective, what, "a scalar, the sum of token losses weighted by batch.weights")
    if not loss.requires_grad:
        raise _refused(objective, "a loss without gradient", "a loss that is computed from the given log-probs")
    if "tokens" not in sums:
        raise _refused(objective, f"the sums {sorted(sums)}", "a sum named 'tokens', the number of tokens")
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
