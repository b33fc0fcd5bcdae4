"""The loss of a batch: policy losses, off-policy corrections, KL estimates, and how tokens are weighted into a sum.

All are pure functions of per-token tensors, each of shape [N] over the trainable tokens. A policy loss returns the loss
of each token, to be minimised, unreduced; :func:`token_weights` gives each token its weight. ``old`` are the log-probs
that a ratio ``r = exp(logprobs - old)`` is taken against. The table of all of them, with what to use when, is
docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch


class TokenLoss(NamedTuple):
    """The loss of each token, and where the rule has taken hold."""

    loss: torch.Tensor
    """float[N], with gradient."""
    limited: torch.Tensor
    """bool[N]: tokens whose ratio is outside the rule's range, and those that it drops, for metrics."""


def ratio_of(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """``exp(logprobs - old_logprobs)``, within ``LOG_RATIO_BOUND``: float[N]."""
    return torch.exp((logprobs - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def policy_gradient(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """``-A log pi`` (Williams, 1992).

    Args:
        logprobs: float[N], with gradient.
        advantages: float[N].
    """
    return -advantages * logprobs


def clipped_ratio(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float = 0.0,
) -> TokenLoss:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``; with ``dual_clip`` c, ``-max(that min, c A)`` where A < 0.

    PPO (arXiv:1707.06347) with DAPO's wider upper bound, "clip higher" (arXiv:2503.14476), whose defaults these are.
    Without the dual clip (arXiv:1912.09729, which takes c = 3) nothing bounds the loss where A < 0 and r is large.

    Args:
        logprobs: float[N], with gradient.
        old_logprobs: float[N], of the policy that the ratio is taken against.
        advantages: float[N].
        dual_clip: above 1; 0 is off.
    """
    ratio = ratio_of(logprobs, old_logprobs)
    gain = _clipped_gain(ratio, advantages, clip_low, clip_high)
    if dual_clip:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)
    return TokenLoss(-gain, outside(ratio, 1.0 - clip_low, 1.0 + clip_high))


def cispo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float = 1.0,
    clip_high: float = 3.0,
) -> TokenLoss:
    """``-stop_grad(clip(r, 1 - clip_low, 1 + clip_high)) A log pi``: the clip bounds a token's weight, and every token
    keeps a gradient (MiniMax-M1, arXiv:2506.13585).

    The defaults are no floor, as there, and a ceiling of 4 (arXiv:2510.13786, which finds 4 to 8 alike).

    Args:
        logprobs: float[N], with gradient.
        old_logprobs, advantages: float[N].
    """
    ratio = ratio_of(logprobs.detach(), old_logprobs)
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLoss(-weight * advantages * logprobs, outside(ratio, 1.0 - clip_low, 1.0 + clip_high))


def gspo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    sequences: torch.Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """PPO's clip of the sequence's ratio, the geometric mean of its tokens' (arXiv:2507.18071, whose defaults these
    are: ratios of whole sequences are far nearer to 1 than those of tokens).

    ``s = exp(mean of log r over the sequence)``. Each token's ratio is ``s`` in value, and has the gradient of its own
    log-prob ("GSPO-token" there): with one advantage for a sequence, and equal weights of its tokens, their sum has
    GSPO's gradient.

    Args:
        logprobs: float[N], with gradient.
        old_logprobs, advantages: float[N].
        sequences: int64[N], the sequence of each token.
    """
    log_ratio = (logprobs.detach() - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = torch.exp(sequence_means(log_ratio, sequences))
    of_token = ratio * torch.exp(logprobs - logprobs.detach())
    gain = _clipped_gain(of_token, advantages, clip_low, clip_high)
    return TokenLoss(-gain, outside(ratio, 1.0 - clip_low, 1.0 + clip_high))


def sapo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> TokenLoss:
    """``-4 / tau sigmoid(tau (r - 1)) A``, tau by the sign of A: a gate that closes gradually as r leaves 1, where its
    slope is that of r (arXiv:2511.20347, whose defaults these are).

    ``limited`` counts tokens of which less than half of the policy gradient is left.

    Args:
        logprobs: float[N], with gradient.
        old_logprobs, advantages: float[N].
    """
    ratio = ratio_of(logprobs, old_logprobs)
    tau = torch.where(advantages > 0, ratio.new_tensor(tau_positive), ratio.new_tensor(tau_negative))
    gate = torch.sigmoid(tau * (ratio - 1.0))
    left = (4.0 * gate * (1.0 - gate)).detach()
    return TokenLoss(-4.0 / tau * gate * advantages, left < 0.5)


def dppo_tv(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, max_change: float = 0.2
) -> TokenLoss:
    """``-r A``, but nothing for a token whose probability has already moved by more than ``max_change`` in the
    direction in which A pushes it: DPPO's mask by total variation of the drawn token against the rest
    (arXiv:2602.04879).

    A ratio says little about rare tokens, whose probability may double and stay next to nothing; this bounds what a
    token adds to the distance between the policies.

    Args:
        logprobs: float[N], with gradient.
        old_logprobs, advantages: float[N].
        max_change: of the probability, in (0, 1].
    """
    ratio = ratio_of(logprobs, old_logprobs)
    moved = (torch.exp(logprobs) - torch.exp(old_logprobs)).detach() * torch.sign(advantages)
    limited = moved > max_change
    return TokenLoss(torch.where(limited, 0.0, -ratio * advantages), limited)


def decoupled(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    behaviour_cap: float = 5.0,
) -> TokenLoss:
    """PPO's clip around the trainer's policy at the start of the batch, times the weight of the policy that drew:
    ``pi_old / pi_behaviour x clip(pi / pi_old)`` (arXiv:2110.00641; for language models AReaL, arXiv:2505.24298, which
    drops tokens whose behaviour weight is above the cap).

    So the trust region follows the newest policy, however old the tokens are.

    Args:
        logprobs: float[N], with gradient.
        old_logprobs: float[N], the trainer's when the batch was formed.
        behaviour_logprobs: float[N], of the policy that drew each token.
        advantages: float[N].
    """
    clipped = clipped_ratio(logprobs, old_logprobs, advantages, clip_low, clip_high)
    weight = capped_behaviour_weights(old_logprobs, behaviour_logprobs, behaviour_cap)
    return TokenLoss(clipped.loss * weight, clipped.limited | (weight == 0.0))


def _clipped_gain(ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """``min(r A, clip(r) A)``: float[N], with gradient."""
    return torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)


def outside(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """bool[N]: ratios outside a range, without gradient."""
    ratio = ratio.detach()
    return (ratio < low) | (ratio > high)


# -- how per-token losses become one number: each token's weight, so that the loss is a plain sum ---------------------
# The normalisers are those of the whole batch, over all ranks and micro-batches, so that how a batch is cut does not
# change its gradient.

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def token_weights(
    episode_lengths: torch.Tensor,
    aggregation: Aggregation,
    *,
    batch_tokens: int,
    batch_episodes: int,
    max_tokens: int,
) -> torch.Tensor:
    """The weight of every trainable token of each episode.

    - ``token_mean``: 1 / tokens of the batch (DAPO, arXiv:2503.14476).
    - ``sequence_mean``: 1 / (tokens of the episode x episodes of the batch) (GRPO, arXiv:2402.03300).
    - ``constant``: 1 / (max_tokens x episodes of the batch), free of the bias towards short right and long
      wrong answers (Dr.GRPO, arXiv:2503.20783).

    Args:
        episode_lengths: int[E], trainable tokens of each episode.
        batch_tokens: trainable tokens of the whole batch.
        batch_episodes: episodes of the whole batch.
        max_tokens: tokens that an episode may draw.

    Returns:
        float[E].

    Raises:
        ValueError: unknown aggregation.
    """
    lengths = episode_lengths.to(torch.float32)
    match aggregation:
        case "token_mean":
            return torch.full_like(lengths, 1.0 / max(batch_tokens, 1))
        case "sequence_mean":
            return 1.0 / (lengths.clamp(min=1) * max(batch_episodes, 1))
        case "constant":
            return torch.full_like(lengths, 1.0 / (max_tokens * max(batch_episodes, 1)))
    raise ValueError(f"unknown aggregation {aggregation!r}: token_mean, sequence_mean or constant")


# -- off-policy corrections: weights of tokens that another policy sampled --------------------------------------------
# rho = pi_old (trainer) / pi_behaviour (engine), per token: it differs from 1 where the token was drawn under older
# weights and, slightly, where engine and trainer compute differently.

LOG_RATIO_BOUND = 20.0
"""Beyond ``exp(20)``, either way, a ratio is that and has no gradient: in float32 it would become infinite at 88, and
infinity times an advantage of 0 is NaN."""


def truncated_importance_weights(
    old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, cap: float = 2.0
) -> torch.Tensor:
    """``min(rho, cap)``, without gradient (IMPALA, arXiv:1802.01561; "TIS", Yao et al., 2025).

    Args:
        old_logprobs: float[N], the trainer's, when the batch was formed.
        behaviour_logprobs: float[N], the engine's, when the token was drawn.
        cap: the largest weight; larger lowers the bias and raises the variance.
    """
    return torch.exp(old_logprobs.detach() - behaviour_logprobs).clamp(max=cap)


def icepop_weights(
    old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, low: float = 0.5, high: float = 2.0
) -> torch.Tensor:
    """rho where it is in [low, high], and 0 elsewhere, without gradient: tokens on which engine and trainer disagree
    too much, either way, are dropped, not capped (IcePop, arXiv:2510.18855, which takes 0.5 and 5).

    Args:
        old_logprobs, behaviour_logprobs: float[N], as in :func:`truncated_importance_weights`.
    """
    rho = torch.exp(old_logprobs.detach() - behaviour_logprobs)
    return torch.where((rho >= low) & (rho <= high), rho, 0.0)


def capped_behaviour_weights(
    old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, cap: float = 5.0
) -> torch.Tensor:
    """rho, and 0 where it is above ``cap``, without gradient: the behaviour weight of the decoupled objective (AReaL,
    arXiv:2505.24298).

    Args:
        old_logprobs, behaviour_logprobs: float[N], as in :func:`truncated_importance_weights`.
    """
    return icepop_weights(old_logprobs, behaviour_logprobs, 0.0, cap)


def sequence_mask(
    old_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    sequences: torch.Tensor,
    low: float = 0.99,
    high: float = 1.01,
) -> torch.Tensor:
    """1 for tokens of sequences whose rho, the geometric mean over its tokens, is in [low, high], else 0: float[N].

    One token that went wrong can spoil all that follow it, so the whole sequence goes (Liu et al., "When Speed Kills
    Stability", 2025). The mean makes the bounds independent of the length.

    Args:
        old_logprobs, behaviour_logprobs: float[N].
        sequences: int64[N], the sequence of each token.
    """
    rho = torch.exp(sequence_means(old_logprobs.detach() - behaviour_logprobs, sequences))
    return ((rho >= low) & (rho <= high)).to(old_logprobs.dtype)


def off_policy_sequence_mask(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    sequences: torch.Tensor,
    max_kl: float = 1e-4,
) -> torch.Tensor:
    """0 for tokens of negative advantage in sequences that the policy has moved away from, else 1: float[N].

    A sequence's estimate is the mean of ``log(pi_behaviour / pi)`` over its tokens; above ``max_kl`` it is dropped. A
    model learns from its own mistakes, but from those of another it is only pushed away (DeepSeek-V3.2,
    arXiv:2512.02556; 1e-4 is slime's default).

    Args:
        logprobs: float[N], of the policy being updated.
        behaviour_logprobs, advantages: float[N].
        sequences: int64[N].
    """
    distance = sequence_means(behaviour_logprobs - logprobs.detach(), sequences)
    return ((advantages >= 0) | (distance <= max_kl)).to(logprobs.dtype)


def finite_tokens(*logprobs: torch.Tensor) -> torch.Tensor:
    """bool[N]: tokens whose log-probs are all finite. The others must be masked, and counted."""
    finite = torch.ones_like(logprobs[0], dtype=torch.bool)
    for values in logprobs:
        finite &= torch.isfinite(values)
    return finite


def mismatch_k3(old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of KL(behaviour || old) at each token: ``rho - 1 - log rho`` (Schulman, 2020), its exponent
    within ``LOG_RATIO_BOUND``.

    Its mean over tokens drawn under the trainer's own version is the mismatch of engine and trainer.
    """
    log_ratio = old_logprobs.detach() - behaviour_logprobs
    return torch.expm1(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)) - log_ratio


def lag_discount(lags: torch.Tensor, factor: float) -> torch.Tensor:
    """``factor ** lag``: stale tokens count less.

    A heuristic: asynchronous SGD gains from steps that shrink with staleness (arXiv:1511.05950 divides by it), but that
    work is not about single tokens, nor about language models. Unlike the importance weight it needs no log-prob, and
    it is biased: it shrinks the update by the lag of its tokens.

    Args:
        lags: int[N], the version being updated minus the one that drew each token.
        factor: 1 is off, 0 trains tokens of lag 0 only.

    Returns:
        float32[N].
    """
    return torch.pow(torch.tensor(factor, dtype=torch.float32, device=lags.device), lags)


# -- policy losses and corrections by the names that settings give them, all called alike -----------------------------


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
    return TokenLoss(policy_gradient(p.new, p.advantages), torch.zeros_like(p.advantages, dtype=torch.bool))


POLICY_LOSSES = {
    "pg": PolicyLoss(_policy_gradient, has_ratio=False),
    "ppo_clip": PolicyLoss(
        lambda p, s: clipped_ratio(p.new, p.ratio_to, p.advantages, *s.clip, s.dual_clip), (0.2, 0.28)
    ),
    "cispo": PolicyLoss(lambda p, s: cispo(p.new, p.ratio_to, p.advantages, *s.clip), (1.0, 3.0)),
    "gspo": PolicyLoss(lambda p, s: gspo(p.new, p.ratio_to, p.advantages, p.sequences, *s.clip), (3e-4, 4e-4)),
    "sapo": PolicyLoss(lambda p, s: sapo(p.new, p.ratio_to, p.advantages, s.tau_positive, s.tau_negative)),
    "dppo_tv": PolicyLoss(lambda p, s: dppo_tv(p.new, p.ratio_to, p.advantages, s.max_change)),
    "decoupled": PolicyLoss(
        lambda p, s: decoupled(p.new, p.old, p.behaviour, p.advantages, *s.clip, s.behaviour_cap),
        (0.2, 0.2),
        weighs_behaviour=True,
    ),
}
"""By their names in the settings."""

CORRECTIONS = {
    "tis": Correction(lambda p, s: truncated_importance_weights(p.old, p.behaviour, s.importance_cap), True),
    "icepop": Correction(lambda p, s: icepop_weights(p.old, p.behaviour, *s.icepop_range), True),
    "sequence_mask": Correction(lambda p, s: sequence_mask(p.old, p.behaviour, p.sequences, *s.sequence_range)),
    "opsm": Correction(lambda p, s: off_policy_sequence_mask(p.new, p.behaviour, p.advantages, p.sequences, s.opsm_kl)),
}
"""By their names in the settings. A token's weight is the product of all that are applied."""

if TYPE_CHECKING:
    PolicyLossName = str
    CorrectionName = str
else:
    PolicyLossName = Literal[tuple(POLICY_LOSSES)]
    CorrectionName = Literal[tuple(CORRECTIONS)]
"""For settings, whose command line and check read the choices."""


# -- estimates of the KL divergence from a reference, KL(pi || reference), at each sampled token ----------------------
# Pure functions over tokens [N].
#
# All three are unbiased or nearly so in value, for tokens drawn from pi (Schulman, "Approximating KL divergence",
# 2020). What differs is the gradient, where the estimate is a part of the loss (arXiv:2506.09477): that of ``k1`` is
# zero in expectation, whatever the reference; that of ``k2`` is the gradient of KL(pi || reference); that of ``k3``
# is the gradient of KL(reference || pi). Where the estimate is taken from the advantage, that of ``k1`` alone is the
# gradient of KL(pi || reference). So ``k1`` belongs in the reward, ``k2`` in the loss, and ``k3``, GRPO's, is always
# at least 0 and pulls towards all that the reference may say.

Estimate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``(logprobs float[N] of pi, with gradient; reference log-probs float[N]) -> float[N]``."""


def k1(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """``log pi - log reference``."""
    return logprobs - reference


def k2(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """``(log pi - log reference)^2 / 2``."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """``reference / pi - 1 - log(reference / pi)`` (GRPO, arXiv:2402.03300), its exponent within
    ``LOG_RATIO_BOUND``."""
    log_ratio = reference - logprobs
    return torch.expm1(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)) - log_ratio


ESTIMATES: dict[str, Estimate] = {"k1": k1, "k2": k2, "k3": k3}
"""By their names in the settings."""

if TYPE_CHECKING:
    EstimateName = str
else:
    EstimateName = Literal[tuple(ESTIMATES)]
"""For settings, whose command line and check read the choices."""


# -- sums and means over the tokens of each sequence ------------------------------------------------------------------


def sequence_means(values: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """The mean over a token's whole sequence, at each token.

    Args:
        values: float[N].
        sequences: int64[N], the sequence of each token: any numbers from 0 on.

    Returns:
        float[N].
    """
    counts = torch.bincount(sequences)
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add(0, sequences, values)
    return (sums / counts.clamp(min=1))[sequences]


def whole_sequences(tokens: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """bool[N]: tokens of sequences all of whose tokens are in ``tokens``, bool[N]."""
    return sequence_means((~tokens).float(), sequences) == 0
