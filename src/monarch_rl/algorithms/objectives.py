"""Objectives and off-policy corrections as values: each carries its own parameters, with the defaults of its paper.

    objective = GSPO(clip_high=5e-4)                            in a recipe's settings
    --objective gspo --objective.clip-high 5e-4                 on its command line
    LossSettings(corrections=(TIS(cap=4.0), SequenceMask()))    corrections, and by name --trainer.loss.corrections tis

The formulas are in ``losses.py``; docs/algorithms.md says when to use which. To add one, add its class here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import tyro

from monarch_rl.algorithms import losses
from monarch_rl.algorithms.losses import LossInputs, TokenLoss
from monarch_rl.settings.ranges import NamedSettings, Range

ObjectiveName = Literal["pg", "ppo_clip", "cispo", "gspo", "sapo", "dppo_tv", "decoupled", "distillation"]
_Name = Annotated[ObjectiveName, tyro.conf.arg(name="objective", prefix_name=False)]


@dataclass(frozen=True, kw_only=True)
class Objective(NamedSettings, flags="objective"):
    """The loss of each token. ``trainer.loss`` has the settings that all objectives share."""

    name: _Name
    """`pg`: A log pi; `ppo_clip`: clipped ratio (PPO, DAPO); `cispo`: clipped weight (arXiv:2506.13585); `gspo`:
    clipped ratio of the sequence (arXiv:2507.18071); `sapo`: smooth gate (arXiv:2511.20347); `dppo_tv`: bound on the
    change of a token's probability (arXiv:2602.04879); `decoupled`: clip around the trainer's policy, weighted by
    pi_trainer / pi_engine (arXiv:2505.24298); `distillation`: KL divergence from a teacher. The other flags here are
    this objective's own: give `--objective NAME --help` for those of another."""


class PolicyObjective(Objective):
    """An objective of the policy gradient, which reads advantages. With one update per batch and ``ratio_to="trainer"``
    the ratio is 1, and all of them are the policy gradient (``decoupled``: with its weight)."""

    has_ratio: ClassVar[bool] = True
    """Whether it uses a ratio to an older policy."""
    for_negatives: ClassVar[tuple[str, ...]] = ()
    """Names of its parameters that only concern tokens of negative advantage."""

    @property
    def has_importance_ratio(self) -> bool:
        """Whether it divides by the policy that sampled, so that no correction may do so, too."""
        return False

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        """The loss of each token, before corrections and weights."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(PolicyObjective):
    """The policy gradient, ``-A log pi`` (Williams, 1992)."""

    has_ratio: ClassVar[bool] = False
    name: _Name = "pg"

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        loss = losses.policy_gradient(inputs.new, inputs.advantages)
        return TokenLoss(loss, torch.zeros_like(inputs.advantages, dtype=torch.bool))


@dataclass(frozen=True, kw_only=True)
class RatioObjective(PolicyObjective):
    """A policy objective with a ratio to the policy that :attr:`ratio_to` names."""

    ratio_to: Literal["trainer", "behaviour"] = "trainer"
    """Denominator of the ratio. `trainer`: the trainer's policy at the start of the batch; the corrections of
    `trainer.loss` then weight stale tokens. `behaviour`: the policy that sampled the token; the objective's own bound
    then limits staleness, too."""

    @property
    def has_importance_ratio(self) -> bool:
        return self.ratio_to == "behaviour"

    def old_logprobs(self, inputs: LossInputs) -> torch.Tensor:
        """float32[N]: log-probs in the denominator of the ratio."""
        return inputs.old if self.ratio_to == "trainer" else inputs.behaviour


@dataclass(frozen=True, kw_only=True)
class PPOClip(RatioObjective):
    """PPO's clipped ratio (arXiv:1707.06347) with DAPO's wider upper bound (arXiv:2503.14476). The clip has an effect
    only where the ratio is not 1: with `ratio_to behaviour`, or several updates per batch."""

    for_negatives: ClassVar[tuple[str, ...]] = ("dual_clip",)
    name: _Name = "ppo_clip"
    clip_low: Annotated[float, Range(0, 1)] = 0.2
    """The ratio is clipped below at 1 - clip_low (PPO)."""
    clip_high: Annotated[float, Range(0, 1000)] = 0.28
    """The ratio is clipped above at 1 + clip_high (DAPO)."""
    dual_clip: Annotated[float, Range(0, 1000, "0 is off")] = 0.0
    """Bounds the loss of a token of negative advantage to dual_clip x |A|; 3 is usual (arXiv:1912.09729). 0 is off."""

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        return losses.clipped_ratio(
            inputs.new, self.old_logprobs(inputs), inputs.advantages, self.clip_low, self.clip_high, self.dual_clip
        )

    def contradictions(self) -> Iterator[str]:
        if 0 < self.dual_clip <= 1 + self.clip_high:
            yield (
                f"objective.dual-clip {self.dual_clip:g} must be above the clip's ceiling, {1 + self.clip_high:g}, or "
                "it would remove the gradient of tokens within the clip: 3 is usual"
            )


@dataclass(frozen=True, kw_only=True)
class CISPO(RatioObjective):
    """The clipped ratio as a token's weight, so that every token keeps a gradient (MiniMax-M1, arXiv:2506.13585)."""

    name: _Name = "cispo"
    clip_low: Annotated[float, Range(0, 1)] = 1.0
    """The weight is clipped below at 1 - clip_low; 1 is no floor, as in MiniMax-M1."""
    clip_high: Annotated[float, Range(0, 1000)] = 3.0
    """The weight is clipped above at 1 + clip_high; 4 to 8 are equally good (arXiv:2510.13786)."""

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        return losses.cispo(inputs.new, self.old_logprobs(inputs), inputs.advantages, self.clip_low, self.clip_high)


@dataclass(frozen=True, kw_only=True)
class GSPO(RatioObjective):
    """PPO's clip of the sequence's ratio, the geometric mean of its tokens' ratios (arXiv:2507.18071, the source of the
    defaults)."""

    name: _Name = "gspo"
    clip_low: Annotated[float, Range(0, 1)] = 3e-4
    """The ratio of the sequence is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, Range(0, 1000)] = 4e-4
    """The ratio of the sequence is clipped above at 1 + clip_high."""

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        return losses.gspo(
            inputs.new,
            self.old_logprobs(inputs),
            inputs.advantages,
            inputs.sequences,
            self.clip_low,
            self.clip_high,
        )


@dataclass(frozen=True, kw_only=True)
class SAPO(RatioObjective):
    """A gate that closes gradually as the ratio moves away from 1 (arXiv:2511.20347, the source of the defaults)."""

    for_negatives: ClassVar[tuple[str, ...]] = ("tau_negative",)
    name: _Name = "sapo"
    tau_positive: Annotated[float, Range(0.001, 1000)] = 1.0
    """How steeply the gate closes for tokens with A > 0. Larger values stay nearer to the old policy."""
    tau_negative: Annotated[float, Range(0.001, 1000)] = 1.05
    """How steeply the gate closes for tokens with A <= 0."""

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        return losses.sapo(
            inputs.new, self.old_logprobs(inputs), inputs.advantages, self.tau_positive, self.tau_negative
        )


@dataclass(frozen=True, kw_only=True)
class DPPO(RatioObjective):
    """DPPO with the bound on total variation: no gradient for a token whose probability has already moved far
    (arXiv:2602.04879, the source of the default)."""

    name: _Name = "dppo_tv"
    max_change: Annotated[float, Range(1e-6, 1)] = 0.2
    """Largest change of a token's probability in the direction of its advantage."""

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        return losses.dppo_tv(inputs.new, self.old_logprobs(inputs), inputs.advantages, self.max_change)


@dataclass(frozen=True, kw_only=True)
class DecoupledPPO(PolicyObjective):
    """PPO's clip around the trainer's policy at the start of the batch, weighted by pi_trainer / pi_engine
    (arXiv:2505.24298, the source of the defaults). Its clip has an effect only with several updates per batch."""

    name: _Name = "decoupled"
    clip_low: Annotated[float, Range(0, 1)] = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, Range(0, 1000)] = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    behaviour_cap: Annotated[float, Range(0.001, 1_000_000)] = 5.0
    """Drops tokens whose pi_trainer / pi_engine is above this."""

    @property
    def has_importance_ratio(self) -> bool:
        return True

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        return losses.decoupled(
            inputs.new,
            inputs.old,
            inputs.behaviour,
            inputs.advantages,
            self.clip_low,
            self.clip_high,
            self.behaviour_cap,
        )


@dataclass(frozen=True, kw_only=True)
class Distillation(Objective):
    """The KL divergence from a teacher at each token; by default the reverse KL, estimated from the sampled token. It
    reads no rewards and no advantages."""

    name: _Name = "distillation"
    top: Annotated[int, Range(0, 1000, "0 is the sampled token alone")] = 0
    """Compute the divergence over this many of the teacher's most likely tokens, each of which adds 8 bytes per sampled
    token to what is transferred. The divergence is then an expectation over the next token, to which no importance
    weight applies. 0 estimates it from the sampled token alone."""
    divergence: Literal["reverse", "forward"] = "reverse"
    """With `top`: `reverse` is KL(pi, teacher), mode-seeking: generate only what the teacher would. `forward` is
    KL(teacher, pi), mode-covering: miss nothing that the teacher might generate (GKD, arXiv:2306.13649)."""

    def contradictions(self) -> Iterator[str]:
        if self.divergence == "forward" and not self.top:
            yield (
                "objective.divergence forward is an expectation over the teacher's tokens, which cannot be estimated "
                "from the sampled token alone: give objective.top, such as 8"
            )


# -- off-policy corrections -------------------------------------------------------------------------------------------

CorrectionName = Literal["tis", "icepop", "sequence_mask", "opsm"]


@dataclass(frozen=True, kw_only=True)
class Correction(NamedSettings, flags="trainer.loss.corrections"):
    """A factor on the losses of tokens that another policy sampled. A token's weight is the product of all given
    ones."""

    has_importance_ratio: ClassVar[bool] = False
    """Whether it multiplies by pi_trainer / pi_engine; other corrections only drop sequences."""
    name: CorrectionName

    def weights(self, inputs: LossInputs) -> torch.Tensor:
        """float32[N], without gradient: factors on the token losses."""
        raise NotImplementedError

    def truncated(self, inputs: LossInputs) -> torch.Tensor:
        """bool[N]: tokens whose importance ratio is beyond this correction's bound, so that it is capped, or the token
        dropped."""
        return torch.zeros_like(inputs.old, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class TIS(Correction):
    """Truncated importance sampling: the weight min(pi_trainer / pi_engine, cap)."""

    has_importance_ratio: ClassVar[bool] = True
    name: CorrectionName = "tis"
    cap: Annotated[float, Range(0.001, 1_000_000)] = 2.0
    """Largest weight. Larger: less bias, more variance."""

    def weights(self, inputs: LossInputs) -> torch.Tensor:
        return losses.truncated_importance_weights(inputs.old, inputs.behaviour, self.cap)

    def truncated(self, inputs: LossInputs) -> torch.Tensor:
        return torch.exp(inputs.old.detach() - inputs.behaviour) > self.cap


@dataclass(frozen=True, kw_only=True)
class _Bounded(Correction):
    low: Annotated[float, Range(0, 1_000_000)]
    high: Annotated[float, Range(0, 1_000_000)]

    def contradictions(self) -> Iterator[str]:
        if self.low > self.high:
            yield f"{type(self).__name__}(low={self.low:g}, high={self.high:g}): low is above high"


@dataclass(frozen=True, kw_only=True)
class IcePop(_Bounded):
    """The weight pi_trainer / pi_engine, and 0 for tokens where it is outside [low, high] (arXiv:2510.18855, which uses
    0.5 and 5)."""

    has_importance_ratio: ClassVar[bool] = True
    name: CorrectionName = "icepop"
    low: Annotated[float, Range(0, 1_000_000)] = 0.5
    high: Annotated[float, Range(0, 1_000_000)] = 2.0

    def weights(self, inputs: LossInputs) -> torch.Tensor:
        return losses.icepop_weights(inputs.old, inputs.behaviour, self.low, self.high)

    def truncated(self, inputs: LossInputs) -> torch.Tensor:
        ratio = torch.exp(inputs.old.detach() - inputs.behaviour)
        return (ratio < self.low) | (ratio > self.high)


@dataclass(frozen=True, kw_only=True)
class SequenceMask(_Bounded):
    """Drops sequences whose geometric mean of pi_trainer / pi_engine is outside [low, high]."""

    name: CorrectionName = "sequence_mask"
    low: Annotated[float, Range(0, 1_000_000)] = 0.99
    high: Annotated[float, Range(0, 1_000_000)] = 1.01

    def weights(self, inputs: LossInputs) -> torch.Tensor:
        return losses.sequence_mask(inputs.old, inputs.behaviour, inputs.sequences, self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class OPSM(Correction):
    """Drops sequences of negative advantage that the policy has moved away from (DeepSeek-V3.2, arXiv:2512.02556)."""

    name: CorrectionName = "opsm"
    max_kl: Annotated[float, Range(0, 1_000_000)] = 1e-4
    """Largest mean of log(pi_engine / pi), in nats, over a sequence that is trained; slime's default."""

    def weights(self, inputs: LossInputs) -> torch.Tensor:
        return losses.off_policy_sequence_mask(
            inputs.new, inputs.behaviour, inputs.advantages, inputs.sequences, self.max_kl
        )


def _by_names(names: list[str]) -> tuple[Correction, ...]:
    return tuple(Correction.defaults_of(name) for name in names)


Corrections = Annotated[
    tuple[Correction, ...] | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"[{{{','.join(Correction.names())}}} ...]",
        instance_from_str=_by_names,
        is_instance=lambda value: value is None or isinstance(value, tuple),
        str_from_instance=lambda value: ["None"] if value is None else [each.name for each in value],
    ),
]
"""The type of a setting whose command line takes corrections by name, with their default parameters."""
