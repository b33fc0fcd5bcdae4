"""Settings of the policy loss and the critic. docs/algorithms.md has the formulas, and when to use which."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from monarch_rl.algorithms.advantages import AdvantageName
from monarch_rl.algorithms.losses import (
    CORRECTIONS,
    POLICY_LOSSES,
    Aggregation,
    CorrectionName,
    EstimateName,
    PolicyLoss,
    PolicyLossName,
)
from monarch_rl.errors import SettingsError
from monarch_rl.settings.ranges import CheckedSettings, Range

WIDE_FOR_SEQUENCES = 0.01
"""A clip of `gspo` above this is meant for ratios of tokens, not of sequences."""


@dataclass(frozen=True)
class LossSettings(CheckedSettings, flags="trainer.loss"):
    """The policy-gradient loss: advantage x policy loss x corrections, then aggregation (docs/algorithms.md)."""

    advantage: AdvantageName = "dr_grpo"
    """How rewards R become advantages. Over the group: `dr_grpo`: R - mean (arXiv:2503.20783); `grpo`: (R - mean) / std
    (arXiv:2402.03300); `rloo`: R - mean of the other episodes (arXiv:2402.14740); `max_rl`: (R - mean) / mean, for
    rewards of at least 0 (arXiv:2602.02710). Over the batch: `reinforce_pp`: (R - mean) / std (arXiv:2501.03262). For
    games: `seat_baselines`: R - running mean of the seat (arXiv:2506.24119). Per token: `gae`: from the column `value`
    (arXiv:1506.02438), which a critic (`trainer.critic.lr`) or a stage of the recipe fills. For distillation, from the
    column `teacher` instead of rewards: `distillation`: log teacher - log policy of the token, and
    `sequence_distillation`: the same, summed to the end of the sequence (arXiv:2306.08543). An advantage whose column
    nothing fills is refused."""
    policy_loss: PolicyLossName = "ppo_clip"
    """`pg`: A log pi; `ppo_clip`: clipped ratio (PPO, DAPO); `cispo`: clipped weight (arXiv:2506.13585); `gspo`:
    clipped ratio of the sequence (arXiv:2507.18071); `sapo`: smooth gate (arXiv:2511.20347); `dppo_tv`: bound on the
    change of a token's probability (arXiv:2602.04879); `decoupled`: clip around the trainer's policy, weighted by
    pi_trainer / pi_engine (arXiv:2505.24298). With one update per batch and `ratio_to trainer` the ratio is 1, and all
    of them are the policy gradient (`decoupled`: with its weight)."""
    ratio_to: Literal["trainer", "behaviour"] = "trainer"
    """Denominator of the ratio. `trainer`: the trainer's policy at the start of the batch; `corrections` then weight
    stale tokens. `behaviour`: the policy that sampled the token; the clip then bounds staleness."""
    clip_low: Annotated[float | None, Range(0, 1)] = None
    """The ratio is clipped below at 1 - clip_low. None: the policy loss's own default, 0.2 for `ppo_clip` (PPO,
    arXiv:1707.06347) and `decoupled`, 1 for `cispo` (no floor), 0.0003 for `gspo`. Has an effect only where the ratio
    is not 1: with `ratio_to behaviour`, or several updates per batch."""
    clip_high: Annotated[float | None, Range(0, 1000)] = None
    """The ratio is clipped above at 1 + clip_high. None: the policy loss's own default, 0.28 for `ppo_clip` (DAPO,
    arXiv:2503.14476), 0.2 for `decoupled`, 3 for `cispo` (arXiv:2510.13786), 0.0004 for `gspo`. Has an effect only
    where `clip_low` has."""
    dual_clip: Annotated[float, Range(0, 1000, "0 is off")] = 0.0
    """With `ppo_clip`: bounds the loss of a token of negative advantage to dual_clip x |A|; 3 is usual
    (arXiv:1912.09729). 0 is off."""
    tau_positive: Annotated[float, Range(0.001, 1000)] = 1.0
    """With `sapo`: how steeply the gate closes for tokens with A > 0 (arXiv:2511.20347). Larger values stay nearer to
    the old policy."""
    tau_negative: Annotated[float, Range(0.001, 1000)] = 1.05
    """With `sapo`: how steeply the gate closes for tokens with A <= 0."""
    max_change: Annotated[float, Range(1e-6, 1)] = 0.2
    """With `dppo_tv`: largest change of a token's probability in the direction of its advantage (arXiv:2602.04879)."""
    behaviour_cap: Annotated[float, Range(0.001, 1_000_000)] = 5.0
    """With `decoupled`: drops tokens whose pi_trainer / pi_engine is above this (arXiv:2505.24298)."""
    corrections: tuple[CorrectionName, ...] | None = None
    """Off-policy corrections of tokens that another policy sampled. `tis`: weight by pi_trainer / pi_engine, capped at
    `importance_cap`; `icepop`: weight by it, and drop tokens outside `icepop_range`; `sequence_mask`: drop sequences
    whose mean ratio is outside `sequence_range`; `opsm`: drop sequences of negative advantage whose divergence is above
    `opsm_kl`. At most one of `tis` and `icepop`. None: `tis`, unless the ratio or the policy loss already weights by
    the policy that sampled."""
    importance_cap: Annotated[float, Range(0.001, 1_000_000)] = 2.0
    """With `tis`: a token's weight is min(pi_trainer / pi_engine, importance_cap). Larger: less bias, more variance."""
    icepop_range: Annotated[tuple[float, float], Range(0, 1_000_000)] = (0.5, 2.0)
    """With `icepop`: lowest and highest pi_trainer / pi_engine of the tokens that are trained (arXiv:2510.18855)."""
    sequence_range: Annotated[tuple[float, float], Range(0, 1_000_000)] = (0.99, 1.01)
    """With `sequence_mask`: lowest and highest geometric mean of pi_trainer / pi_engine of the sequences that are
    trained."""
    opsm_kl: Annotated[float, Range(0, 1_000_000)] = 1e-4
    """With `opsm`: largest mean of log(pi_engine / pi), in nats, over a sequence of negative advantage that is trained
    (arXiv:2512.02556)."""
    lag_discount: Annotated[float, Range(0, 1, "1 is off")] = 1.0
    """Multiplies each token's weight by lag_discount ** lag (a heuristic); 1 is off. Smaller values trust stale tokens
    less, and learn less from them."""
    positives_only: bool = False
    """Train only on tokens of positive advantage (arXiv:2304.06767)."""
    kl_coefficient: Annotated[float, Range(0, 1000, "0 is off")] = 0.0
    """Coefficient of the KL divergence from a reference model, whose log-probs are in the column `reference` (filled by
    `trainer.reference` or a stage of the recipe); 0 is off, as in TRL, verl and slime."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss`: add the KL estimate to the loss. `reward`: subtract it from the token's advantage."""
    kl_estimate: EstimateName | None = None
    """Estimator of the KL at each token. None: `k3` in the loss, as in GRPO, and `k1` in the reward. The gradient of
    KL(pi, reference) is that of `k2` in the loss, and of `k1` in the reward (arXiv:2506.09477)."""
    entropy_coefficient: Annotated[float, Range(0, 1000, "0 is off")] = 0.0
    """Coefficient of an entropy bonus, which raises the policy's entropy; 0 is off. Takes a few more tensors of the
    size of a chunk's logits (trainer.logprob-chunk)."""
    teacher_top: Annotated[int, Range(0, 1000, "0 is the sampled token alone")] = 0
    """With the objective `distillation`: compute the divergence over this many of the teacher's most likely tokens,
    each of which adds 8 bytes per sampled token to what is transferred. The divergence is then an expectation over the
    next token, to which no importance weight applies. 0 estimates it from the sampled token alone."""
    teacher_divergence: Literal["reverse", "forward"] = "reverse"
    """With `teacher_top`: `reverse` is KL(pi, teacher), mode-seeking: generate only what the teacher would. `forward`
    is KL(teacher, pi), mode-covering: miss nothing that the teacher might generate (GKD, arXiv:2306.13649)."""
    overlong_limit: Annotated[int, Range(0, 2**31 - 1, "0 is off")] = 0
    """Sampled tokens at which an episode loses the full `overlong_penalty`, such as rollout.max-new-tokens (DAPO's soft
    overlong punishment, arXiv:2503.14476); 0 is off."""
    overlong_buffer: Annotated[int, Range(0, 2**31 - 1, "0 is a fifth of the limit")] = 0
    """Tokens below `overlong_limit` over which the penalty grows linearly from 0; 0 is a fifth of the limit (DAPO:
    4,096 of 20,480)."""
    overlong_penalty: Annotated[float, Range(0, 1000)] = 1.0
    """Reward that an episode of `overlong_limit` tokens loses. Larger makes answers shorter, and at some point
    worse."""
    aggregation: Aggregation = "constant"
    """Normaliser of the sum of token losses. `constant`: episodes x `max_tokens` (Dr.GRPO); `token_mean`: tokens
    (DAPO); `sequence_mean`: the tokens of each episode, then episodes (GRPO)."""
    max_tokens: Annotated[int, Range(0, 2**31 - 1, "0 is the episode limit")] = 0
    """With `constant`: tokens per episode in the normaliser. 0 is the most tokens that an episode may have, the
    smallest of `trainer.tokens-per-microbatch` and the limits of context and KV cache. Give a number to keep the
    gradient's scale when those change."""

    @property
    def penalised_tokens(self) -> int:
        """Tokens over which the overlong penalty grows."""
        return self.overlong_buffer or max(self.overlong_limit // 5, 1)

    @property
    def clip(self) -> tuple[float, float]:
        """``(clip_low, clip_high)``, each by default the policy loss's; zeros if it does not clip."""
        low, high = self._policy_loss.clip or (0.0, 0.0)
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    @property
    def applied_corrections(self) -> tuple[CorrectionName, ...]:
        """The given corrections, or the default ones."""
        if self.corrections is not None:
            return self.corrections
        return () if self.has_importance_ratio else ("tis",)

    @property
    def estimates_kl_by(self) -> EstimateName:
        """The given KL estimator, or the default one."""
        return self.kl_estimate or ("k1" if self.kl_in == "reward" else "k3")

    @property
    def takes_kl_from_reward(self) -> bool:
        """Whether each token's KL estimate is subtracted from its advantage."""
        return self.kl_coefficient > 0 and self.kl_in == "reward"

    @property
    def _policy_loss(self) -> PolicyLoss:
        return POLICY_LOSSES[self.policy_loss]

    @property
    def has_importance_ratio(self) -> bool:
        """Whether the policy loss itself divides by the policy that sampled."""
        return self.ratio_to == "behaviour" or self._policy_loss.has_importance_ratio

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """Columns that the loss reads besides ``old``, which always exists: ``reference``, or none."""
        return ("reference",) * bool(self.kl_coefficient)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_parameters()
        self._check_corrections()
        _check_for_unread_values(self)
        if self.kl_coefficient and self.kl_in == "loss" and self.kl_estimate == "k1":
            raise SettingsError(
                "trainer.loss.kl-estimate k1 in the loss: its gradient is zero in expectation, whatever the reference. "
                "Give trainer.loss.kl-in reward, or kl-estimate k2 or k3"
            )

    def _check_parameters(self) -> None:
        """Refuse parameters that the policy loss does not read, and parameters that contradict each other."""
        name, rule = self.policy_loss, self._policy_loss
        if self.ratio_to == "behaviour" and (rule.has_importance_ratio or not rule.has_ratio):
            has = "already has both ratios" if rule.has_importance_ratio else "has no ratio"
            raise SettingsError(f"trainer.loss.ratio-to behaviour: the policy loss {name} {has}. Leave it out")
        for bound in ("clip_low", "clip_high"):
            if getattr(self, bound) is not None and rule.clip is None:
                raise SettingsError(f"{self.flag(bound)}: the policy loss {name} has no clip. Leave it out")
        if self.dual_clip and name != "ppo_clip":
            raise SettingsError(f"trainer.loss.dual-clip is for ppo_clip, and the policy loss is {name}. Leave it out")
        if 0 < self.dual_clip <= 1 + self.clip[1]:
            raise SettingsError(
                f"trainer.loss.dual-clip {self.dual_clip:g} must be above the clip's ceiling, {1 + self.clip[1]:g}, or "
                "it would remove the gradient of tokens within the clip: 3 is usual"
            )
        if self.overlong_buffer > self.overlong_limit:
            raise SettingsError(
                f"trainer.loss.overlong-buffer {self.overlong_buffer} is more than trainer.loss.overlong-limit "
                f"{self.overlong_limit}: give the limit, such as rollout.max-new-tokens, or lower the buffer"
            )
        if self.advantage in ("distillation", "sequence_distillation") and self.overlong_limit:
            raise SettingsError(
                f"trainer.loss.overlong-limit {self.overlong_limit} lowers the rewards of long answers, and the "
                f"advantage {self.advantage} reads no rewards. Leave it out"
            )
        if self.advantage == "max_rl" and self.overlong_limit:
            raise SettingsError(
                f"trainer.loss.advantage max_rl needs rewards of at least 0, and trainer.loss.overlong-limit "
                f"{self.overlong_limit} lowers the rewards of long answers: leave one of them out"
            )
        if self.teacher_divergence == "forward" and not self.teacher_top:
            raise SettingsError(
                "trainer.loss.teacher-divergence forward is an expectation over the teacher's tokens, which cannot be "
                "estimated from the sampled token alone: give trainer.loss.teacher-top, such as 8"
            )
        for bounds in ("icepop_range", "sequence_range"):
            low, high = getattr(self, bounds)
            if low > high:
                raise SettingsError(f"{self.flag(bounds)} {low:g} {high:g}: give the lowest first, then the highest")

    def _check_corrections(self) -> None:
        given = self.applied_corrections
        if self.positives_only and "opsm" in given:
            raise SettingsError(
                "trainer.loss.corrections opsm drops sequences of negative advantage, and trainer.loss.positives-only "
                "trains on none: leave one of them out"
            )
        weights = [name for name in given if CORRECTIONS[name].has_importance_ratio]
        if len(set(given)) < len(given) or len(weights) > 1:
            raise SettingsError(
                f"trainer.loss.corrections {' '.join(given)}: give each at most once, and at most one of tis and icepop"
            )
        if weights and self.has_importance_ratio:
            other = "ratio-to behaviour" if self.ratio_to == "behaviour" else f"the policy loss {self.policy_loss}"
            raise SettingsError(
                f"trainer.loss.corrections {weights[0]} weights by pi_trainer / pi_engine, and so does {other}: "
                "leave one of them out"
            )


def _check_for_unread_values(settings: LossSettings) -> None:
    """Refuse values that have no effect."""
    applied = settings.applied_corrections
    corrects = f"the corrections are {' '.join(applied) or 'none'}"
    capped = "tis" in applied or (
        settings.kl_coefficient > 0 and settings.kl_in == "loss" and settings.has_importance_ratio
    )
    loss = f"the policy loss is {settings.policy_loss}"
    positives = "trainer.loss.positives-only drops tokens of negative advantage"
    for names, is_read, reason in (
        (("tau_positive", "tau_negative"), settings.policy_loss == "sapo", loss),
        (("dual_clip", "tau_negative"), not settings.positives_only, positives),
        (("max_change",), settings.policy_loss == "dppo_tv", loss),
        (("behaviour_cap",), settings.policy_loss == "decoupled", loss),
        (("importance_cap",), capped, corrects),
        (("icepop_range",), "icepop" in applied, corrects),
        (("sequence_range",), "sequence_mask" in applied, corrects),
        (("opsm_kl",), "opsm" in applied, corrects),
        (("kl_in", "kl_estimate"), settings.kl_coefficient > 0, "trainer.loss.kl-coefficient is 0"),
        (("overlong_penalty",), settings.overlong_limit > 0, "trainer.loss.overlong-limit is 0"),
        (("max_tokens",), settings.aggregation == "constant", f"the aggregation is {settings.aggregation}"),
    ):
        for name in names:
            if not is_read and getattr(settings, name) != LossSettings.__dataclass_fields__[name].default:
                raise SettingsError(f"{settings.flag(name)}: no effect, because {reason}. Leave it out")


def loss_warnings(loss: LossSettings, updates_per_batch: int) -> list[str]:
    """Warnings, a sentence each, about settings of the objective ``reinforcement`` that work, but hardly as
    intended."""
    warnings = []
    clips = loss.clip_low is not None or loss.clip_high is not None or bool(loss.dual_clip)
    if updates_per_batch == 1 and loss.ratio_to == "trainer" and (loss.policy_loss not in ("pg", "ppo_clip") or clips):
        effect = (
            "nothing is clipped, and this is the policy gradient. Give trainer.loss.ratio-to behaviour, or more updates"
        )
        if loss.policy_loss == "decoupled":
            effect = (
                "its clip has no effect, and this is the policy gradient, weighted by pi_trainer / pi_engine, without "
                f"tokens where that is above behaviour-cap {loss.behaviour_cap:g}. Give more updates"
            )
        warnings.append(
            f"trainer.loss.policy-loss {loss.policy_loss}: with one update per batch (trainer.epochs 1, "
            f"trainer.minibatches 1) the ratio to the trainer's own policy is 1 by construction, so {effect}"
        )
    if updates_per_batch > 1 and loss.policy_loss == "pg":
        warnings.append(
            f"trainer.loss.policy-loss pg with {updates_per_batch} updates per batch: it neither weights nor clips "
            "tokens for what the earlier updates of the batch have changed. Give ppo_clip, or one update"
        )
    if loss.takes_kl_from_reward and loss.estimates_kl_by != "k1":
        warnings.append(
            f"trainer.loss.kl-estimate {loss.estimates_kl_by} with kl-in reward: its gradient is not that of "
            "KL(pi, reference). Give k1, or kl-in loss"
        )
    if loss.policy_loss == "gspo" and max(loss.clip) > WIDE_FOR_SEQUENCES:
        warnings.append(
            f"trainer.loss.clip-low {loss.clip[0]:g} and clip-high {loss.clip[1]:g} with gspo: ratios of whole "
            "sequences stay so close to 1 that nothing is clipped. The paper uses 0.0003 and 0.0004"
        )
    return warnings


# -- the critic -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CriticSettings(CheckedSettings, flags="trainer.critic"):
    """A critic on the trainer's devices, which estimates the return of the rest of a sequence for the advantage `gae`
    (PPO, arXiv:1707.06347; GAE, arXiv:1506.02438)."""

    lr: Annotated[float, Range(0, 1, "0 is no critic")] = 0.0
    """AdamW's learning rate of the critic, a separate model that starts from the policy's initial weights; 0 is no
    critic. 1e-5 is verl's default, ten times the policy's. Takes 16 bytes per parameter, sharded over the ranks, and
    two forward passes and a backward pass per batch."""
    gamma: Annotated[float, Range(0, 1)] = 1.0
    """With `trainer.loss.advantage gae`: discount of rewards per token. 1, no discount, is the default of TRL and
    verl."""
    lam: Annotated[float, Range(0, 1)] = 1.0
    """With `trainer.loss.advantage gae`: GAE's lambda. 1, verl's default, is the return minus the critic's value: no
    bias. Smaller values have less variance, and the bias of the critic (TRL: 0.95)."""
    clip: Annotated[float, Range(0, 1_000_000, "0 is off")] = 0.2
    """How far a token's value may move from its value at the start of the batch, in units of the reward (0.2 in TRL, as
    in OpenAI's PPO; verl: 0.5); 0 is off. Has an effect only with several updates per batch."""
    warmup: Annotated[int, Range(0, 10**9)] = 0
    """Batches at the start of the run that train the critic only, not the policy, because an untrained critic adds
    noise (arXiv:2503.01491). 0 is verl's default."""

    @property
    def enabled(self) -> bool:
        """Whether there is a critic."""
        return self.lr > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enabled:
            return
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                raise SettingsError(
                    f"{self.flag(field.name)} {getattr(self, field.name)}: there is no critic. Give trainer.critic.lr, "
                    "such as 1e-5, or leave it out"
                )


NO_CRITIC = CriticSettings()
