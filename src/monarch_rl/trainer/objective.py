"""Loss functions: the loss of a micro-batch's trainable tokens, composed from ``algorithms/``.

:func:`loss_function` makes one from an objective (``algorithms/objectives.py``) and the settings ``trainer.loss``. A
recipe's own is any function of type :data:`LossFunction`, passed to ``run.start(objective=...)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch

from monarch_rl.algorithms import losses
from monarch_rl.algorithms.advantages import positives_only
from monarch_rl.algorithms.distillation import reverse_kl, top_columns, top_k_divergence
from monarch_rl.algorithms.functions import entropy_gradient, needs, other_tokens
from monarch_rl.algorithms.losses import LossInputs
from monarch_rl.algorithms.mismatch import histogram
from monarch_rl.algorithms.objectives import TIS, Correction, Distillation, Objective, PolicyObjective
from monarch_rl.observe.registry import find
from monarch_rl.trainer.batch import MicroBatch
from monarch_rl.trainer.loss_settings import LossSettings, check_objective
from monarch_rl.trainer.token_logprobs import TokenLogprobs
from monarch_rl.user_code import code_behind, place_of

FAR_RATIO = 2.0
"""``ratio_outside`` counts tokens whose ratio trainer / engine is above this or below its inverse; ``tools/parity.py``
uses it, too."""

Sums = dict[str, torch.Tensor]
"""Sums over tokens, by metric name; ``tokens`` is the number of tokens. All are scalars, except two vectors:
:data:`LOGPROB_DIFFERENCE`, and :data:`ROUTES_DIFFER`, with a value per layer."""

LossFunction = Callable[[TokenLogprobs, MicroBatch], tuple[torch.Tensor, Sums]]
"""``(log-probs of the micro-batch's tokens, micro-batch) -> (loss, sums)``. The loss, a scalar with gradient, is
``(token_loss * batch.weights).sum()``: the weights already contain the normaliser of ``trainer.loss.aggregation`` over
the whole mini-batch and all ranks, so do not average. The sums must include ``tokens``; each other sum is logged as
``trainer/<name>``, its mean over tokens. The trainer itself adds :func:`common_sums`."""

OLD, REFERENCE, TEACHER = "old", "reference", "teacher"
"""Columns of log-probs: of the trainer's policy at the start of the batch (always there), of the reference model, and
of a teacher."""
ON_POLICY_TOKENS, ON_POLICY_MISMATCH = "on_policy_tokens", "mismatch_k3_on_policy"
"""Sums over tokens that the version being updated sampled."""
LOGPROB_DIFFERENCE = "logprob_difference"
"""A histogram of trainer - engine of these tokens (:func:`monarch_rl.algorithms.mismatch.histogram`)."""
SUPERVISED_TOKENS, SUPERVISED_LOSS = "supervised_tokens", "supervised_loss"
"""Sums over the answers of supervised rows, which ``tokens`` does not count."""
MASKED_TOKENS, MASKED_EPISODES = "masked_nonfinite", "masked_episodes"
"""Counts of what is left out because a log-prob or a column is not finite."""
ROUTES_DIFFER, LAYER_CHOICES = "routes_differ", "choices_of_a_layer"
"""The engine's choices of experts that differ from the trainer's, by layer, and all choices of a layer."""
TRAINERS_OWN = (
    *("loss", "lr", "grad_norm", "optimizer_steps", "drift_k3", "padding", "imbalance", "computed_share"),
    *("changed_share", "record_cpu_s"),
    *(MASKED_TOKENS, MASKED_EPISODES, "reference_device_s", SUPERVISED_LOSS, SUPERVISED_TOKENS),
    *("entropy", "logprob", "mismatch_k3_*", ON_POLICY_TOKENS, "on_policy_share", "kept_mass", "ratio_outside"),
    *(LOGPROB_DIFFERENCE, f"{LOGPROB_DIFFERENCE}_*", ROUTES_DIFFER, f"{ROUTES_DIFFER}_*", LAYER_CHOICES),
    *("wait_s", "step_s", "idle_share"),
)
"""Patterns of names, after ``trainer/``, of the trainer's own metrics and their inputs, which no sum of an objective
may replace."""
WEIGHT, CLIPPED, CORRECTED, TRUNCATED = "weight", "clipped", "corrected", "truncated"
"""Names in ``MicroBatch.notes`` that a loss function may set, [N] each. ``weight``: float32, the token's weight in the
loss; if it is not set, it is ``batch.weights``. The others, bool: whether the objective clips the token; whether its
importance weight differs from 1 by more than rounding; whether that weight was capped or set to 0 because it is beyond
its bound."""
ROUNDING = 1e-3
"""An importance weight that is nearer to 1 counts as 1: engine and trainer round differently."""
VALUE, RETURNS = "value", "returns"
"""Columns: the critic's value before each sampled token, computed before the critic's update, and its target."""


def loss_function(objective: Objective, settings: LossSettings) -> LossFunction:
    """The loss function of an objective and the settings that all objectives share.

    Raises:
        SettingsError: the settings do not fit the objective.
    """
    check_objective(objective, settings)
    if isinstance(objective, Distillation):
        return _distillation(objective, settings)
    if not isinstance(objective, PolicyObjective):
        raise TypeError(f"{objective!r} is neither a PolicyObjective nor Distillation")
    policy: PolicyObjective = objective

    def policy_loss(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        inputs = _loss_inputs(output, batch, settings)
        token = policy.token_loss(inputs)
        loss, sums = _loss_and_sums(token.loss, output, batch, inputs, policy, settings)
        if batch.notes is not None:
            batch.notes[CLIPPED] = token.clipped
        return loss, sums | {"clipped": token.clipped.sum()}

    return _with_metadata(policy_loss, objective, settings, *settings.needed_columns)


def _distillation(objective: Distillation, settings: LossSettings) -> LossFunction:
    ids, logprobs = top_columns(objective.top)

    def divergence(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        inputs, teacher = _loss_inputs(output, batch, settings), batch.columns[TEACHER]
        sums = {"reverse_kl": (inputs.new.detach() - teacher).sum()}
        loss, sampled_only = reverse_kl(inputs.new, teacher), output.others is None
        if output.others is not None:
            most_likely = torch.stack([batch.columns[name] for name in logprobs], -1)
            loss = top_k_divergence(output.others, most_likely, objective.divergence == "forward")
            sums["top_k_kl"] = loss.detach().sum()
        loss, common = _loss_and_sums(loss, output, batch, inputs, objective, settings, sampled_only)
        return loss, common | sums

    marked = _with_metadata(divergence, objective, settings, *settings.needed_columns, TEACHER, *logprobs)
    return other_tokens(ids)(marked) if ids else marked


def _with_metadata(function: LossFunction, objective: Objective, settings: LossSettings, *columns: str) -> LossFunction:
    setattr(function, _MADE_FROM, (objective, settings))
    if settings.entropy_coefficient:
        function = entropy_gradient(function)
    return needs(*columns)(function)


def _importance(inputs: LossInputs, corrections: Iterable[Correction]) -> torch.Tensor:
    """float32[N], without gradient: the product of the corrections' weights."""
    importance = torch.ones_like(inputs.old)
    for correction in corrections:
        importance = importance * correction.weights(inputs)
    return importance


def _loss_and_sums(
    loss: torch.Tensor,
    output: TokenLogprobs,
    batch: MicroBatch,
    inputs: LossInputs,
    objective: Objective,
    settings: LossSettings,
    sampled_only: bool = True,
) -> tuple[torch.Tensor, Sums]:
    """The loss of a micro-batch and its sums: token losses with corrections, KL to the reference and entropy.

    Args:
        loss: float32[N], the loss of each token before corrections.
        sampled_only: the loss is an estimate from the sampled token. Otherwise it is an expectation over the next
            token, like the entropy, to which no importance weight applies: only corrections that drop sequences do.
    """
    corrections = settings.applied_corrections(objective)
    applied = [each for each in corrections if sampled_only or not each.has_importance_ratio]
    importance = _importance(inputs, applied)
    loss = loss * importance
    sums = {"tokens": torch.ones_like(importance).sum(), "importance_weight": importance.sum()}
    if settings.kl_coefficient:
        divergence = losses.ESTIMATES[settings.estimates_kl_by](inputs.new, batch.columns[REFERENCE])
        sums["kl_reference"] = divergence.detach().sum()
        if settings.kl_in == "loss":
            # The KL is an expectation under the current policy, so it needs a weight even if the objective has its own
            # and no correction gives one.
            has_ratio = isinstance(objective, PolicyObjective) and objective.has_importance_ratio
            of_kl = _importance(inputs, [*corrections, TIS()] if has_ratio else corrections)
            loss = loss + settings.kl_coefficient * of_kl * divergence
    if settings.entropy_coefficient:
        loss = loss - settings.entropy_coefficient * output.entropies
    weights = batch.weights * losses.lag_discount(batch.lags, settings.lag_discount)
    if batch.notes is not None:
        ratios = _importance(inputs, [each for each in applied if each.has_importance_ratio])
        truncated = torch.zeros_like(importance, dtype=torch.bool)
        for correction in applied:
            truncated = truncated | correction.truncated(inputs)
        batch.notes |= {WEIGHT: weights * importance, CORRECTED: (ratios - 1).abs() > ROUNDING, TRUNCATED: truncated}
    return (loss * weights).sum(), sums


def _loss_inputs(output: TokenLogprobs, batch: MicroBatch, settings: LossSettings) -> LossInputs:
    """The log-probs to compare, and the advantages after KL penalty and ``positives_only``."""
    old, behaviour = batch.columns.get(OLD, output.logprobs.detach()), batch.behaviour_logprobs
    advantages = batch.advantages
    if settings.takes_kl_from_reward:
        divergence = losses.ESTIMATES[settings.estimates_kl_by](old, batch.columns[REFERENCE])  # same for all updates
        advantages = advantages - settings.kl_coefficient * divergence
    if settings.positives_only:
        advantages = positives_only(advantages)
    return LossInputs(output.logprobs, old, behaviour, advantages, batch.sequences)


def common_sums(output: TokenLogprobs, batch: MicroBatch) -> Sums:
    """Sums that do not depend on the loss function: the policy, and the engine compared with the trainer."""
    new, difference, on_policy = (
        output.logprobs.detach(),
        batch.columns[OLD] - batch.behaviour_logprobs,
        batch.lags == 0,
    )
    mismatch = losses.mismatch_k3(batch.columns[OLD], batch.behaviour_logprobs)
    return {
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
    loss = losses.policy_gradient(output.logprobs, torch.ones_like(output.logprobs))
    return (loss * batch.weights).sum(), {"tokens": torch.ones_like(loss).sum()}


def rows_loss(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
    """:func:`supervised` for supervised rows: their sums have separate names, and they do not count in ``tokens``."""
    loss, sums = supervised(output, batch)
    row_sums = {SUPERVISED_TOKENS: sums["tokens"], SUPERVISED_LOSS: -output.logprobs.detach().sum()}
    return loss, {"tokens": torch.zeros_like(sums["tokens"])} | row_sums


_MADE_FROM = "_monarch_rl_made_from"


def made_from(function: LossFunction) -> tuple[Objective, LossSettings] | None:
    """Objective and settings from which :func:`loss_function` made this function; None for a recipe's own."""
    # A recipe's own may be a wrapper of one of these with copied attributes, so the code is compared, too.
    made: tuple[Objective, LossSettings] | None = getattr(function, _MADE_FROM, None)
    if made is None or code_behind(function) != code_behind(loss_function(*made)):
        return None
    return made


def _unusable_names(names: Collection[str]) -> str:
    """What an objective should return instead of sums with these names; empty if the names are allowed."""
    if taken := sorted(name for name in names if any(fnmatchcase(name, own) for own in TRAINERS_OWN)):
        return f"other names than {taken}, which are the trainer's own metrics"
    if whole := sorted(name for name in names if find(name) is not None):
        return f"other names than {whole}, which are full names of metrics of a run: yours are logged as trainer/<name>"
    return ""


def evaluate_loss(function: LossFunction, output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
    """Call a loss function and check what it returns: the loss of a micro-batch, and its sums, which are detached.

    Raises:
        ValueError: it returned something else; names it and where it is defined.
    """
    returned: Any = function(output, batch)
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
        raise _refused(function, f"{returned!r:.100}", "a pair of the loss and a dictionary of sums")
    loss, sums = returned
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.is_floating_point():
        what = f"a loss of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"the loss {loss!r:.100}"
        raise _refused(function, what, "a scalar, the sum of token losses weighted by batch.weights")
    if not loss.requires_grad:
        raise _refused(function, "a loss without gradient", "a loss that is computed from the given log-probs")
    if "tokens" not in sums:
        raise _refused(function, f"the sums {sorted(sums)}", "a sum named 'tokens', the number of tokens")
    if instead := _unusable_names(sums):
        raise _refused(function, f"the sums {sorted(sums)}", instead)
    values = {name: torch.as_tensor(value, device=loss.device).detach() for name, value in sums.items()}
    for name, value in values.items():
        if value.ndim:
            raise _refused(function, f"{name} of shape {list(value.shape)}", "sums over tokens, which are scalars")
    return loss, values


def _refused(function: LossFunction, returned: str, instead: str) -> ValueError:
    return ValueError(f"the objective {place_of(function)} returned {returned}: return {instead}")
