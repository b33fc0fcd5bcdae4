"""What a user sets about the policy loss and the critic. docs/algorithms.md has the formulas, and when to use what."""

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
from monarch_rl.settings.ranges import CheckedSettings, Range

WIDE_FOR_SEQUENCES = 0.01
"""A clip of gspo above this is a token's."""


@dataclass(frozen=True)
class LossSettings(CheckedSettings, flags="trainer.loss"):
    """The policy-gradient loss: advantage x policy loss x corrections, then aggregation (docs/algorithms.md)."""

    advantage: AdvantageName = "dr_grpo"
    """`dr_grpo`: R - mean of the group (arXiv:2503.20783); `grpo`: (R - mean) / std (arXiv:2402.03300); `rloo`: R -
    mean of the others (arXiv:2402.14740); `max_rl`: (R - mean) / mean, for rewards of at least 0 (arXiv:2602.02710);
    `reinforce_pp`: (R - mean) / std of the whole batch (arXiv:2501.03262); `seat_baselines`: R - running mean of the
    seat, for games (arXiv:2506.24119); `gae`: of the values in the column `value` (arXiv:1506.02438), which a critic
    (`trainer.critic.lr`) or a stage of the recipe fills; for distillation, `distillation`: log teacher - log policy of
    the token, from the column `teacher`, `sequence_distillation`: the same, summed to the end (arXiv:2306.08543). One
    whose column nobody fills is refused."""
    policy_loss: PolicyLossName = "ppo_clip"
    """`pg`: A log pi; `ppo_clip`: clipped ratio (PPO, DAPO); `cispo`: clipped weight (arXiv:2506.13585); `gspo`:
    clipped ratio of the sequence (arXiv:2507.18071); `sapo`: smooth gate (arXiv:2511.20347); `dppo_tv`: bound on the
    change of a token's probability (arXiv:2602.04879); `decoupled`: clip around the trainer's policy, weight of the
    policy that drew (arXiv:2505.24298). With one update a batch and `ratio_to trainer` the ratio is 1, and all are the
    policy gradient, `decoupled` with that weight."""
    ratio_to: Literal["trainer", "behaviour"] = "trainer"
    """The denominator of the ratio: the trainer's own policy when the batch was formed (then a correction weighs stale
    tokens), or the policy that drew the token (then the clip bounds staleness)."""
    clip_low: Annotated[float | None, Range(0, 1)] = None
    """Ratio floor is 1 - clip_low. None is the policy loss's own: 0.2 for `ppo_clip` (PPO, arXiv:1707.06347) and
    `decoupled`, 1 for `cispo` (no floor), 0.0003 for `gspo`. It matters where the ratio is not 1: with `ratio_to
    behaviour`, or several updates a batch."""
    clip_high: Annotated[float | None, Range(0, 1000)] = None
    """Ratio ceiling is 1 + clip_high. None is the policy loss's own: 0.28 for `ppo_clip` (DAPO, arXiv:2503.14476), 0.2
    for `decoupled`, 3 for `cispo` (arXiv:2510.13786), 0.0004 for `gspo`. It matters where the floor does."""
    dual_clip: Annotated[float, Range(0, 1000, "0 is off")] = 0.0
    """With `ppo_clip`: tokens of negative advantage lose at most dual_clip x |A|; 3 is usual (arXiv:1912.09729). 0 is
    off."""
    tau_positive: Annotated[float, Range(0.001, 1000)] = 1.0
    """With `sapo`: how steeply its gate closes where A > 0 (arXiv:2511.20347). Larger stays nearer to the old
    policy."""
    tau_negative: Annotated[float, Range(0.001, 1000)] = 1.05
    """With `sapo`: the same where A <= 0."""
    max_change: Annotated[float, Range(1e-6, 1)] = 0.2
    """With `dppo_tv`: how far a token's probability may move in the direction of its advantage (arXiv:2602.04879)."""
    behaviour_cap: Annotated[float, Range(0.001, 1_000_000)] = 5.0
    """With `decoupled`: tokens with pi_trainer / pi_engine above this are dropped (arXiv:2505.24298)."""
    corrections: tuple[CorrectionName, ...] | None = None
    """What is done about tokens that another policy drew, any of `tis` (weights capped at `importance_cap`), `icepop`
    (weights, and 0 outside `icepop_range`), `sequence_mask` (drops sequences whose mean ratio is outside
    `sequence_range`) and `opsm` (drops worse sequences that are further than `opsm_kl`). None is `tis` where neither
    the ratio nor the policy loss has such a weight."""
    importance_cap: Annotated[float, Range(0.001, 1_000_000)] = 2.0
    """With `tis`: tokens weigh min(pi_trainer / pi_engine, cap). Larger is less biased and noisier."""
    icepop_range: Annotated[tuple[float, float], Range(0, 1_000_000)] = (0.5, 2.0)
    """With `icepop`: lowest and highest pi_trainer / pi_engine of a token that is trained (arXiv:2510.18855)."""
    sequence_range: Annotated[tuple[float, float], Range(0, 1_000_000)] = (0.99, 1.01)
    """With `sequence_mask`: lowest and highest geometric mean of pi_trainer / pi_engine of a sequence that is
    trained."""
    opsm_kl: Annotated[float, Range(0, 1_000_000)] = 1e-4
    """With `opsm`: nats by which log pi_engine may exceed log pi, in the mean over a sequence of negative advantage
    (arXiv:2512.02556)."""
    lag_discount: Annotated[float, Range(0, 1, "1 is off")] = 1.0
    """Tokens weigh lag_discount ** lag (a heuristic); 1 is off. A smaller value trusts stale tokens less, and learns
    less from them."""
    positives_only: bool = False
    """Train on tokens of positive advantage only (arXiv:2304.06767)."""
    kl_coefficient: Annotated[float, Range(0, 1000, "0 is off")] = 0.0
    """Weight of the KL divergence from a reference model, whose log-probs the column `reference` holds; 0 is off, as in
    TRL, verl and slime."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the estimate is a part of the loss, or is taken from the token's advantage."""
    kl_estimate: EstimateName | None = None
    """How it is estimated at each token. None is `k3` in the loss, as in GRPO, and `k1` in the reward. In the loss `k2`
    has the gradient of KL(pi, reference), in the reward `k1` (arXiv:2506.09477)."""
    entropy_coefficient: Annotated[float, Range(0, 1000, "0 is off")] = 0.0
    """Weight of the entropy of the policy, which the loss then raises; 0 is off. It takes a few tensors of a chunk's
    logits more (trainer.logprob-chunk)."""
    teacher_top: Annotated[int, Range(0, 1000, "0 is the drawn token alone")] = 0
    """With the objective `distillation`: of how many of the teacher's most likely tokens the divergence is computed.
    Each takes 8 bytes for each drawn token, on its way. It is an expectation over what may be drawn, which no weight of
    who drew multiplies; 0 estimates it from the drawn token alone."""
    teacher_divergence: Literal["reverse", "forward"] = "reverse"
    """With `teacher_top`: `reverse` is KL(pi, teacher): say what the teacher would; `forward` is KL(teacher, pi): leave
    out nothing that the teacher might say (GKD, arXiv:2306.13649)."""
    overlong_limit: Annotated[int, Range(0, 2**31 - 1, "0 is off")] = 0
    """Drawn tokens at which an episode loses the whole `overlong_penalty` of its reward, such as rollout.max-new-tokens
    (DAPO's soft overlong punishment, arXiv:2503.14476); 0 is off."""
    overlong_buffer: Annotated[int, Range(0, 2**31 - 1, "0 is a fifth of the limit")] = 0
    """Tokens below that limit over which the penalty grows from nothing; 0 is a fifth of the limit (DAPO has 4,096 of
    20,480)."""
    overlong_penalty: Annotated[float, Range(0, 1000)] = 1.0
    """Reward that an episode of the limit's length loses. More makes answers shorter, and at some point worse."""
    aggregation: Aggregation = "constant"
    """`constant` divides by episodes x `max_tokens` (Dr.GRPO), `token_mean` by tokens (DAPO), `sequence_mean` by each
    episode's tokens and then by episodes (GRPO)."""
    max_tokens: Annotated[int, Range(0, 2**31 - 1, "0 is the episode limit")] = 0
    """What `constant` divides by. 0 is the most tokens that an episode may have, which is the smallest of
    `trainer.tokens-per-microbatch` and the limits of context and KV cache. Give a number to keep the scale of the
    gradient where those change."""

    @property
    def penalised_tokens(self) -> int:
        """Over which the overlong penalty grows."""
        return self.overlong_buffer or max(self.overlong_limit // 5, 1)

    @property
    def clip(self) -> tuple[float, float]:
        """``(clip_low, clip_high)``, by default those of the policy loss; zeros if it does not clip."""
        low, high = self._policy_loss.clip or (0.0, 0.0)
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    @property
    def applied_corrections(self) -> tuple[CorrectionName, ...]:
        """Those given, or those by default."""
        if self.corrections is not None:
            return self.corrections
        return () if self.weighs_behaviour else ("tis",)

    @property
    def estimates_kl_by(self) -> EstimateName:
        """The estimate given, or that by default."""
        return self.kl_estimate or ("k1" if self.kl_in == "reward" else "k3")

    @property
    def takes_kl_from_reward(self) -> bool:
        """Whether each token's advantage is lowered by its KL to the reference."""
        return self.kl_coefficient > 0 and self.kl_in == "reward"

    @property
    def _policy_loss(self) -> PolicyLoss:
        return POLICY_LOSSES[self.policy_loss]

    @property
    def weighs_behaviour(self) -> bool:
        """Whether the policy loss itself divides by the policy that drew."""
        return self.ratio_to == "behaviour" or self._policy_loss.weighs_behaviour

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """Columns that the loss reads beside ``old``, which there always is: ``reference``."""
        return ("reference",) * bool(self.kl_coefficient)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_parameters()
        self._check_corrections()
        _check_that_all_is_read(self)
        if self.kl_coefficient and self.kl_in == "loss" and self.kl_estimate == "k1":
            raise ValueError(
                "trainer.loss.kl-estimate k1 in the loss: its gradient is zero in expectation, whatever the reference. "
                "Give trainer.loss.kl-in reward, or kl-estimate k2 or k3"
            )

    def _check_parameters(self) -> None:
        """Refuse parameters that the policy loss does not read, and those that contradict each other."""
        name, rule = self.policy_loss, self._policy_loss
        if self.ratio_to == "behaviour" and (rule.weighs_behaviour or not rule.has_ratio):
            has = "has both ratios already" if rule.weighs_behaviour else "has no ratio"
            raise ValueError(f"trainer.loss.ratio-to behaviour: the policy loss {name} {has}. Leave it out")
        for bound in ("clip_low", "clip_high"):
            if getattr(self, bound) is not None and rule.clip is None:
                raise ValueError(f"{self.flag(bound)}: the policy loss {name} has no clip. Leave it out")
        if self.dual_clip and name != "ppo_clip":
            raise ValueError(f"trainer.loss.dual-clip is for ppo_clip, and the policy loss is {name}. Leave it out")
        if 0 < self.dual_clip <= 1 + self.clip[1]:
            raise ValueError(
                f"trainer.loss.dual-clip {self.dual_clip:g} must be above the clip's ceiling, {1 + self.clip[1]:g}, or "
                "it would end the gradient of tokens within: 3 is usual"
            )
        if self.overlong_buffer > self.overlong_limit:
            raise ValueError(
                f"trainer.loss.overlong-buffer {self.overlong_buffer} is more than trainer.loss.overlong-limit "
                f"{self.overlong_limit}: give the limit, such as rollout.max-new-tokens, or lower the buffer"
            )
        if self.advantage in ("distillation", "sequence_distillation") and self.overlong_limit:
            raise ValueError(
                f"trainer.loss.overlong-limit {self.overlong_limit} takes some from the reward of a long answer, and "
                f"the advantage {self.advantage} reads no rewards. Leave it out"
            )
        if self.advantage == "max_rl" and self.overlong_limit:
            raise ValueError(
                f"trainer.loss.advantage max_rl needs rewards of at least 0, and trainer.loss.overlong-limit "
                f"{self.overlong_limit} takes some from the reward of a long answer: leave one of them out"
            )
        if self.teacher_divergence == "forward" and not self.teacher_top:
            raise ValueError(
                "trainer.loss.teacher-divergence forward is an expectation over what the teacher would say, which the "
                "drawn token alone does not tell: give trainer.loss.teacher-top, such as 8"
            )
        for bounds in ("icepop_range", "sequence_range"):
            low, high = getattr(self, bounds)
            if low > high:
                raise ValueError(f"{self.flag(bounds)} {low:g} {high:g}: give the lowest first, then the highest")

    def _check_corrections(self) -> None:
        given = self.applied_corrections
        if self.positives_only and "opsm" in given:
            raise ValueError(
                "trainer.loss.corrections opsm drops sequences of negative advantage, and trainer.loss.positives-only "
                "trains on none: leave one of them out"
            )
        weights = [name for name in given if CORRECTIONS[name].weighs_behaviour]
        if len(set(given)) < len(given) or len(weights) > 1:
            raise ValueError(
                f"trainer.loss.corrections {' '.join(given)}: at most one of tis and icepop, and each once"
            )
        if weights and self.weighs_behaviour:
            by = "ratio-to behaviour" if self.ratio_to == "behaviour" else f"the policy loss {self.policy_loss}"
            raise ValueError(
                f"trainer.loss.corrections {weights[0]} weighs by pi_trainer / pi_engine, and so does {by}: "
                "leave one of them out"
            )


def _check_that_all_is_read(settings: LossSettings) -> None:
    """Refuse values that change nothing."""
    applied = settings.applied_corrections
    corrects = f"the corrections are {' '.join(applied) or 'none'}"
    capped = "tis" in applied or (
        settings.kl_coefficient > 0 and settings.kl_in == "loss" and settings.weighs_behaviour
    )
    loss = f"the policy loss is {settings.policy_loss}"
    positives = "trainer.loss.positives-only leaves out tokens of negative advantage"
    for names, reads, instead in (
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
            if not reads and getattr(settings, name) != LossSettings.__dataclass_fields__[name].default:
                raise ValueError(f"{settings.flag(name)}: nothing reads it, because {instead}. Leave it out")


def loss_warnings(loss: LossSettings, updates_per_batch: int) -> list[str]:
    """Sentences on settings of the objective ``reinforcement`` that work, but hardly as they were meant."""
    said = []
    clips = loss.clip_low is not None or loss.clip_high is not None or bool(loss.dual_clip)
    if updates_per_batch == 1 and loss.ratio_to == "trainer" and (loss.policy_loss not in ("pg", "ppo_clip") or clips):
        left = (
            "nothing is limited, and this is the policy gradient. Give trainer.loss.ratio-to behaviour, or more updates"
        )
        if loss.policy_loss == "decoupled":
            left = (
                "its clip limits nothing, and this is the policy gradient, weighted by pi_trainer / pi_engine and "
                f"without tokens where that is above behaviour-cap {loss.behaviour_cap:g}. Give more updates"
            )
        said.append(
            f"trainer.loss.policy-loss {loss.policy_loss}: with one update a batch (trainer.epochs 1, "
            f"trainer.minibatches 1) the ratio to the trainer's own policy is 1 by construction, so {left}"
        )
    if updates_per_batch > 1 and loss.policy_loss == "pg":
        said.append(
            f"trainer.loss.policy-loss pg with {updates_per_batch} updates a batch: from the second on tokens are not "
            "weighed by what the first has changed, and nothing bounds it. Give ppo_clip, or one update"
        )
    if loss.takes_kl_from_reward and loss.estimates_kl_by != "k1":
        said.append(
            f"trainer.loss.kl-estimate {loss.estimates_kl_by} with kl-in reward: its gradient is not that of "
            "KL(pi, reference). Give k1, or kl-in loss"
        )
    if loss.policy_loss == "gspo" and max(loss.clip) > WIDE_FOR_SEQUENCES:
        said.append(
            f"trainer.loss.clip-low {loss.clip[0]:g} and clip-high {loss.clip[1]:g} with gspo: ratios of whole "
            "sequences hardly leave 1, so this limits nothing. The paper has 0.0003 and 0.0004"
        )
    return said


# -- the critic -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CriticSettings(CheckedSettings, flags="trainer.critic"):
    """A critic on the trainer's devices, which estimates what a sequence will still get: what the advantage `gae` reads
    (PPO, arXiv:1707.06347; GAE, arXiv:1506.02438)."""

    lr: Annotated[float, Range(0, 1, "0 is no critic")] = 0.0
    """AdamW's learning rate of the critic, a model of its own that begins as the policy does; 0 is no critic. 1e-5 is
    verl's, ten times that of the policy. It takes 16 bytes a parameter, shared among the ranks, and two forward passes
    and a backward pass a batch."""
    gamma: Annotated[float, Range(0, 1)] = 1.0
    """With `trainer.loss.advantage gae`: a reward counts gamma times less with each token before it. 1, which counts
    all alike, is the default of TRL and verl."""
    lam: Annotated[float, Range(0, 1)] = 1.0
    """With the same: how far an advantage looks beyond the critic's next value. 1, verl's, takes what was given and
    subtracts the value: no bias; less is less noisy, and as biased as the critic (TRL has 0.95)."""
    clip: Annotated[float, Range(0, 1_000_000, "0 is off")] = 0.2
    """How far an update may move the value of a token from the value at the start of the batch, in units of the reward
    (0.2 in TRL, as in OpenAI's PPO; verl has 0.5); 0 is off. It matters with several updates a batch."""
    warmup: Annotated[int, Range(0, 10**9)] = 0
    """First batches from which only the critic learns, and the policy stays as it is: a critic that knows
    nothing yet adds noise (arXiv:2503.01491). 0 is verl's."""

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
                raise ValueError(
                    f"{self.flag(field.name)} {getattr(self, field.name)}: there is no critic. Give trainer.critic.lr, "
                    "such as 1e-5, or leave it out"
                )


NO_CRITIC = CriticSettings()
