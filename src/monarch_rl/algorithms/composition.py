"""Policy losses and corrections by the names that settings give them, all called alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from monarch_rl.algorithms import corrections, losses
from monarch_rl.algorithms.losses import TokenLoss


@dataclass(frozen=True, slots=True)
class Policies:
    """Log-probs of N tokens under the policies that a loss compares, and what else a rule reads."""

    new: torch.Tensor
    """float32[N], with gradient: the policy being updated."""
    old: torch.Tensor
    """float32[N]: the trainer's at the start of the batch. With one update a batch it is the one being updated."""
    behaviour: torch.Tensor
    """float32[N]: the one that drew each token."""
    ratio_to: torch.Tensor
    """float32[N]: ``old`` or ``behaviour``."""
    advantages: torch.Tensor
    """float32[N]."""
    sequences: torch.Tensor
    """int64[N]."""


class Parameters(Protocol):
    """What rules read of ``LossSettings``, which says what they mean."""

    @property
    def clip(self) -> tuple[float, float]: ...
    @property
    def dual_clip(self) -> float: ...
    @property
    def tau_positive(self) -> float: ...
    @property
    def tau_negative(self) -> float: ...
    @property
    def max_change(self) -> float: ...
    @property
    def behaviour_cap(self) -> float: ...
    @property
    def importance_cap(self) -> float: ...
    @property
    def icepop_range(self) -> tuple[float, float]: ...
    @property
    def sequence_range(self) -> tuple[float, float]: ...
    @property
    def opsm_kl(self) -> float: ...


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy loss that can be named on the command line."""

    rule: Callable[[Policies, Parameters], TokenLoss]
    clip: tuple[float, float] | None = None
    """``(clip_low, clip_high)`` by default; None does not clip."""
    has_ratio: bool = True
    """To the policy that ``ratio_to`` says."""
    weighs_behaviour: bool = False
    """It multiplies by pi_old / pi_behaviour itself."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A correction that can be named on the command line."""

    weights: Callable[[Policies, Parameters], torch.Tensor]
    """float32[N], without gradient: what each token's loss is multiplied by."""
    weighs_behaviour: bool = False
    """It multiplies by pi_old / pi_behaviour; the others only drop sequences."""


def _policy_gradient(p: Policies, _: Parameters) -> TokenLoss:
    return TokenLoss(losses.policy_gradient(p.new, p.advantages), torch.zeros_like(p.advantages, dtype=torch.bool))


POLICY_LOSSES = {
    "pg": PolicyLoss(_policy_gradient, has_ratio=False),
    "ppo_clip": PolicyLoss(
        lambda p, s: losses.clipped_ratio(p.new, p.ratio_to, p.advantages, *s.clip, s.dual_clip), (0.2, 0.28)
    ),
    "cispo": PolicyLoss(lambda p, s: losses.cispo(p.new, p.ratio_to, p.advantages, *s.clip), (1.0, 3.0)),
    "gspo": PolicyLoss(lambda p, s: losses.gspo(p.new, p.ratio_to, p.advantages, p.sequences, *s.clip), (3e-4, 4e-4)),
    "sapo": PolicyLoss(lambda p, s: losses.sapo(p.new, p.ratio_to, p.advantages, s.tau_positive, s.tau_negative)),
    "dppo_tv": PolicyLoss(lambda p, s: losses.dppo_tv(p.new, p.ratio_to, p.advantages, s.max_change)),
    "decoupled": PolicyLoss(
        lambda p, s: losses.decoupled(p.new, p.old, p.behaviour, p.advantages, *s.clip, s.behaviour_cap),
        (0.2, 0.2),
        weighs_behaviour=True,
    ),
}
"""By their names in the settings."""

CORRECTIONS = {
    "tis": Correction(
        lambda p, s: corrections.truncated_importance_weights(p.old, p.behaviour, s.importance_cap), True
    ),
    "icepop": Correction(lambda p, s: corrections.icepop_weights(p.old, p.behaviour, *s.icepop_range), True),
    "sequence_mask": Correction(
        lambda p, s: corrections.sequence_mask(p.old, p.behaviour, p.sequences, *s.sequence_range)
    ),
    "opsm": Correction(
        lambda p, s: corrections.off_policy_sequence_mask(p.new, p.behaviour, p.advantages, p.sequences, s.opsm_kl)
    ),
}
"""By their names in the settings. A token's weight is the product of all that are applied."""

if TYPE_CHECKING:
    PolicyLossName = str
    CorrectionName = str
else:
    PolicyLossName = Literal[tuple(POLICY_LOSSES)]
    CorrectionName = Literal[tuple(CORRECTIONS)]
"""For settings, whose command line and check read the choices."""
