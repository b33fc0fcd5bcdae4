"""Settings that all objectives share, and the critic's. docs/algorithms.md has the formulas, and when to use which."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from monarch_rl.algorithms.advantages import AdvantageName
from monarch_rl.algorithms.losses import Aggregation, EstimateName
from monarch_rl.algorithms.objectives import (
    GSPO,
    TIS,
    Correction,
    Corrections,
    DecoupledPPO,
    Distillation,
    Objective,
    PolicyGradient,
    PolicyObjective,
    PPOClip,
    RatioObjective,
)
from monarch_rl.errors import SettingsError
from monarch_rl.settings.cli import NotAFlag
from monarch_rl.settings.ranges import CheckedSettings, Range

WIDE_FOR_SEQUENCES = 0.01
"""A clip of `gspo` above this is meant for ratios of tokens, not of sequences."""


@dataclass(frozen=True)
class LossSettings(CheckedSettings, flags="trainer.loss"):
    """Settings that all objectives share: advantage, corrections, KL, entropy and aggregation (docs/algorithms.md)."""

    advantage: AdvantageName = "dr_grpo"
    """How rewards R become advantages. Over the group: `dr_grpo`: R - mean (arXiv:2503.20783); `grpo`: (R - mean) / std
    (arXiv:2402.03300); `rloo`: R - mean of the other episodes (arXiv:2402.14740); `max_rl`: (R - mean) / mean, for
    rewards of at least 0 (arXiv:2602.02710). Over the batch: `reinforce_pp`: (R - mean) / std (arXiv:2501.03262). For
    games: `seat_baselines`: R - running mean of the seat (arXiv:2506.24119). Per token: `gae`: from the column `value`
    (arXiv:1506.02438), which a critic (`recipes/ppo.py`) or a stage of the recipe fills. For distillation, from the
    column `teacher` instead of rewards: `distillation`: log teacher - log policy of the token, and
    `sequence_distillation`: the same, summed to the end of the sequence (arXiv:2306.08543). An advantage whose column
    nothing fills is refused."""
    corrections: Corrections = None
    """Off-policy corrections of tokens that another policy sampled. `tis`: weight by pi_trainer / pi_engine, capped at
    2; `icepop`: weight by it, and drop tokens outside 0.5 to 2; `sequence_mask`: drop sequences whose mean ratio is
    outside 0.99 to 1.01; `opsm`: drop sequences of negative advantage whose divergence is above 1e-4. At most one of
    `tis` and `icepop`. In the recipe they take other parameters: TIS(cap=4.0). None: `tis`, unless the objective itself
    divides by the policy that sampled."""
    lag_discount: NotAFlag[Annotated[float, Range(0, 1, "1 is off")]] = 1.0
    """Multiplies each token's weight by lag_discount ** lag (a heuristic); 1 is off. Smaller values trust stale tokens
    less, and learn less from them."""
    positives_only: bool = False
    """Train only on tokens of positive advantage (arXiv:2304.06767)."""
    kl_coefficient: Annotated[float, Range(0, 1000, "0 is off")] = 0.0
    """Coefficient of the KL divergence from a reference model, whose log-probs are in the column `reference` (filled by
    `trainer.reference` or a stage of the recipe); 0 is off, as in TRL, verl and slime."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss`: add the KL estimate to the loss. `reward`: subtract it from the token's advantage, after its
    normalisation (verl's `use_kl_in_reward` changes the reward instead)."""
    kl_estimate: EstimateName | None = None
    """Estimator of the KL at each token. None: `k3` in the loss, as in GRPO, and `k1` in the reward. The gradient of
    KL(pi, reference) is that of `k2` in the loss, and of `k1` in the reward (arXiv:2506.09477)."""
    entropy_coefficient: Annotated[float, Range(0, 1000, "0 is off")] = 0.0
    """Coefficient of an entropy bonus, which raises the policy's entropy; 0 is off. Takes a few more tensors of the
    size of a chunk's logits (trainer.logprob-chunk)."""
    overlong_limit: Annotated[int, Range(0, 2**31 - 1, "0 is off")] = 0
    """Sampled tokens at which an episode loses the full `overlong_penalty`, such as rollout.max-new-tokens (DAPO's soft
    overlong punishment, arXiv:2503.14476); 0 is off. The reward falls linearly over the last fifth of them. The length
    of a branch includes the prefix that it shares."""
    overlong_buffer: NotAFlag[Annotated[int, Range(0, 2**31 - 1, "0 is a fifth of the limit")]] = 0
    """Tokens below `overlong_limit` over which the penalty grows linearly from 0; 0 is a fifth of the limit (DAPO:
    4,096 of 20,480)."""
    overlong_penalty: NotAFlag[Annotated[float, Range(0, 1000)]] = 1.0
    """Reward that an episode of `overlong_limit` tokens loses. Larger makes answers shorter, and at some point
    worse."""
    aggregation: Aggregation = "constant"
    """Normaliser of the sum of token losses. `constant`: episodes x `max_tokens` (Dr.GRPO); `token_mean`: tokens
    (DAPO); `sequence_mean`: the tokens of each episode, then episodes (GRPO)."""
    max_tokens: Annotated[int, Range(0, 2**31 - 1, "0 is rollout.max-new-tokens")] = 0
    """With `constant`: tokens per episode in the normaliser. 0 is `rollout.max-new-tokens`, as in Dr.GRPO. Episodes of
    many turns have larger gradients for it; give a number to keep the scale when that flag changes."""

    def normaliser(self, tokens: int) -> str:
        """What the gradient of a mini-batch is divided by, for the console; ``tokens``: those of ``constant``."""
        flag = "trainer.loss.max-tokens" if self.max_tokens else "rollout.max-new-tokens"
        return {
            "constant": f"its episodes x {tokens} tokens ({flag})",
            "token_mean": "its trained tokens",
            "sequence_mean": "the tokens of each episode and the number of its episodes",
        }[self.aggregation]

    @property
    def penalised_tokens(self) -> int:
        """Tokens over which the overlong penalty grows."""
        return self.overlong_buffer or max(self.overlong_limit // 5, 1)

    @property
    def estimates_kl_by(self) -> EstimateName:
        """The given KL estimator, or the default one."""
        return self.kl_estimate or ("k1" if self.kl_in == "reward" else "k3")

    @property
    def takes_kl_from_reward(self) -> bool:
        """Whether each token's KL estimate is subtracted from its advantage."""
        return self.kl_coefficient > 0 and self.kl_in == "reward"

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """Columns that the loss reads besides ``old``, which always exists: ``reference``, or none."""
        return ("reference",) * bool(self.kl_coefficient)

    def applied_corrections(self, objective: Objective) -> tuple[Correction, ...]:
        """The given corrections, or the default ones with this objective."""
        if self.corrections is not None:
            return self.corrections
        return () if isinstance(objective, PolicyObjective) and objective.has_importance_ratio else (TIS(),)

    def contradictions(self) -> Iterator[str]:
        yield from self._check_corrections()
        if self.overlong_buffer > self.overlong_limit:
            yield (
                f"trainer.loss.overlong_buffer {self.overlong_buffer} is more than trainer.loss.overlong-limit "
                f"{self.overlong_limit}: give the limit, such as rollout.max-new-tokens, or lower the buffer"
            )
        if self.advantage in ("distillation", "sequence_distillation") and self.overlong_limit:
            yield (
                f"trainer.loss.overlong-limit {self.overlong_limit} lowers the rewards of long answers, and the "
                f"advantage {self.advantage} reads no rewards. Leave it out"
            )
        if self.advantage == "max_rl" and self.overlong_limit:
            yield (
                f"trainer.loss.advantage max_rl needs rewards of at least 0, and trainer.loss.overlong-limit "
                f"{self.overlong_limit} lowers the rewards of long answers: leave one of them out"
            )
        if self.kl_coefficient and self.kl_in == "loss" and self.kl_estimate == "k1":
            yield (
                "trainer.loss.kl-estimate k1 in the loss: its gradient is zero in expectation, whatever the reference. "
                "Give trainer.loss.kl-in reward, or kl-estimate k2 or k3"
            )
        yield from self._check_for_unread_values()

    def _check_corrections(self) -> Iterator[str]:
        names = [correction.name for correction in self.corrections or ()]
        if self.positives_only and "opsm" in names:
            yield (
                "trainer.loss.corrections opsm drops sequences of negative advantage, and trainer.loss.positives-only "
                "trains on none: leave one of them out"
            )
        weights = [correction for correction in self.corrections or () if correction.has_importance_ratio]
        if len(set(names)) < len(names) or len(weights) > 1:
            yield (
                f"trainer.loss.corrections {' '.join(names)}: give each at most once, and at most one of tis and icepop"
            )

    def _check_for_unread_values(self) -> Iterator[str]:
        """Refuse values that have no effect."""
        for names, is_read, reason in (
            (("kl_in", "kl_estimate"), self.kl_coefficient > 0, "trainer.loss.kl-coefficient is 0"),
            (("overlong_penalty",), self.overlong_limit > 0, "trainer.loss.overlong-limit is 0"),
            (("max_tokens",), self.aggregation == "constant", f"the aggregation is {self.aggregation}"),
        ):
            for name in names:
                if not is_read and getattr(self, name) != LossSettings.__dataclass_fields__[name].default:
                    yield f"{self.flag(name)}: no effect, because {reason}. Leave it out"


def check_objective(objective: Objective, loss: LossSettings) -> None:
    """Refuse shared settings that contradict an objective, or that it does not read.

    Raises:
        SettingsError: names both, and what to leave out.
    """
    if isinstance(objective, Distillation):
        _check_distilled(objective, loss)
    if not isinstance(objective, PolicyObjective):
        return
    weights = [correction.name for correction in loss.corrections or () if correction.has_importance_ratio]
    if weights and objective.has_importance_ratio:
        other = (
            "objective.ratio-to behaviour"
            if isinstance(objective, RatioObjective)
            else f"the objective {objective.name}"
        )
        raise SettingsError(
            f"trainer.loss.corrections {weights[0]} weights by pi_trainer / pi_engine, and so does {other}: leave one "
            "of them out"
        )
    defaults = Objective.defaults_of(objective.name)
    for name in objective.for_negatives:
        if loss.positives_only and getattr(objective, name) != getattr(defaults, name):
            raise SettingsError(
                f"{objective.flag(name)}: no effect, because trainer.loss.positives-only drops tokens of negative "
                "advantage. Leave it out"
            )


def _check_distilled(objective: Distillation, loss: LossSettings) -> None:
    instead = "Leave it out, or give --objective ppo_clip with the advantage distillation"
    names = [correction.name for correction in loss.corrections or ()]
    for flag, is_given in (
        (loss.flag("positives_only"), loss.positives_only),
        (f"{loss.flag('corrections')} opsm", "opsm" in names),
        (f"{loss.flag('kl_in')} reward", loss.takes_kl_from_reward),
        (loss.flag("overlong_limit"), loss.overlong_limit > 0),
    ):
        if is_given:
            raise SettingsError(f"{flag}: the objective distillation reads no rewards and no advantages. {instead}")
    weights = [correction.name for correction in loss.corrections or () if correction.has_importance_ratio]
    if objective.top and weights and not loss.kl_coefficient:
        raise SettingsError(
            f"trainer.loss.corrections {weights[0]}: with objective.top the objective distillation is an expectation "
            "over the next token, to which no importance weight applies. Leave it out"
        )


def loss_warnings(objective: object, loss: LossSettings, updates_per_batch: int) -> list[str]:
    """Warnings, a sentence each, about an objective and settings that work, but hardly as intended.

    Args:
        objective: an :class:`Objective`, or a loss function of the recipe, of which nothing is known.
    """
    warnings = []
    if isinstance(objective, PolicyObjective):
        warnings += _ratio_warnings(objective, updates_per_batch)
    if loss.takes_kl_from_reward and loss.estimates_kl_by != "k1":
        warnings.append(
            f"trainer.loss.kl-estimate {loss.estimates_kl_by} with kl-in reward: its gradient is not that of "
            "KL(pi, reference). Give k1, or kl-in loss"
        )
    if isinstance(objective, GSPO) and max(objective.clip_low, objective.clip_high) > WIDE_FOR_SEQUENCES:
        warnings.append(
            f"objective.clip-low {objective.clip_low:g} and clip-high {objective.clip_high:g} with gspo: ratios of "
            "whole sequences stay so close to 1 that nothing is clipped. The paper uses 0.0003 and 0.0004"
        )
    return warnings


def _ratio_warnings(objective: PolicyObjective, updates_per_batch: int) -> list[str]:
    once = "with one update per batch (trainer.epochs 1, trainer.minibatches 1) the ratio to the trainer's own policy "
    once += "is 1 by construction, so"
    if updates_per_batch > 1:
        if not isinstance(objective, PolicyGradient):
            return []
        return [
            f"objective pg with {updates_per_batch} updates per batch: it neither weights nor clips tokens for what "
            "the earlier updates of the batch have changed. Give ppo_clip, or one update"
        ]
    if isinstance(objective, DecoupledPPO):
        return [
            f"objective decoupled: {once} its clip has no effect, and this is the policy gradient, weighted by "
            "pi_trainer / pi_engine, without tokens where that is above behaviour-cap "
            f"{objective.behaviour_cap:g}. Give more updates"
        ]
    # The default objective is left out: nobody has chosen it for its clip.
    is_default = objective == PPOClip()
    if isinstance(objective, RatioObjective) and objective.ratio_to == "trainer" and not is_default:
        return [
            f"objective {objective.name}: {once} nothing is clipped, and this is the policy gradient. Give "
            "objective.ratio-to behaviour, or more updates"
        ]
    return []


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

    def contradictions(self) -> Iterator[str]:
        if self.enabled:
            return
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                yield (
                    f"{self.flag(field.name)} {getattr(self, field.name)}: there is no critic. Give trainer.critic.lr, "
                    "such as 1e-5, or leave it out"
                )


NO_CRITIC = CriticSettings()
