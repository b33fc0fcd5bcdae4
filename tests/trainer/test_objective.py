"""The objective that settings describe: every part of the loss, as a NumPy formula; and settings that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from monarch_rl.algorithms.functions import Columns, differentiates_entropy, needed_columns, other_token_columns
from monarch_rl.algorithms.group_view import GroupView
from monarch_rl.algorithms.objectives import (
    CISPO,
    DPPO,
    GSPO,
    OPSM,
    SAPO,
    TIS,
    Correction,
    DecoupledPPO,
    Distillation,
    IcePop,
    Objective,
    PolicyGradient,
    PolicyObjective,
    PPOClip,
    RatioObjective,
    SequenceMask,
)
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.trainer.advantages import with_overlong_penalty
from monarch_rl.trainer.batch import MicroBatch, pack
from monarch_rl.trainer.finite import finite_only
from monarch_rl.trainer.loss_settings import LossSettings, loss_warnings
from monarch_rl.trainer.objective import evaluate_loss, loss_function
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.trainer.token_logprobs import SampledTokens, TokenLogprobs
from tests.trainer.batches import batch

CPU = torch.device("cpu")
PPO_CLIP = PPOClip()


def made(seed: int = 1, columns: bool = True) -> tuple[TokenLogprobs, MicroBatch]:
    """Tokens of four episodes under policies that are near each other."""
    microbatch = pack(batch(seed)[0].episodes, torch.tensor([1.0, -1.0, 0.5, -0.5]), torch.full((4,), 0.25), seed, CPU)
    rng = np.random.default_rng(seed)
    n = len(microbatch.advantages)

    def near(spread: float) -> torch.Tensor:
        return microbatch.behaviour_logprobs + torch.from_numpy(rng.normal(0, spread, n)).float()

    if columns:
        microbatch = replace(microbatch, columns=Columns({"old": near(0.1), "reference": near(0.3)}))
    logprobs = near(0.2).requires_grad_()
    entropies = torch.from_numpy(rng.uniform(1, 3, n)).float().requires_grad_()
    return TokenLogprobs(logprobs, entropies, torch.ones(n)), microbatch


def loss_of(
    objective: Objective = PPO_CLIP, **settings: Any
) -> tuple[float, dict[str, torch.Tensor], TokenLogprobs, MicroBatch]:
    output, microbatch = made()
    loss, sums = evaluate_loss(loss_function(objective, LossSettings(**settings)), output, microbatch)
    loss.backward()
    return loss.item(), sums, output, microbatch


def numbers(output: TokenLogprobs, microbatch: MicroBatch) -> dict[str, np.ndarray]:
    tensors = {
        "new": output.logprobs,
        "entropies": output.entropies,
        "behaviour": microbatch.behaviour_logprobs,
        "advantages": microbatch.advantages,
        "weights": microbatch.weights,
        **microbatch.columns,
    }
    return {name: tensor.detach().double().numpy() for name, tensor in tensors.items()}


def clipped(d: dict[str, np.ndarray], advantages: np.ndarray) -> np.ndarray:
    ratio = np.exp(d["new"] - d["old"])
    return np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.28) * advantages)


def test_the_default_is_the_clipped_ratio_to_the_old_policy_times_the_truncated_weight() -> None:
    found, sums, output, microbatch = loss_of()
    d = numbers(output, microbatch)
    weight = np.minimum(np.exp(d["old"] - d["behaviour"]), 2)
    assert found == pytest.approx(-(clipped(d, d["advantages"]) * weight * d["weights"]).sum(), rel=1e-5)
    assert sums["importance_weight"].item() == pytest.approx(weight.sum(), rel=1e-5)


def test_kl_and_entropy_are_added_to_the_loss_with_their_coefficients() -> None:
    found, sums, output, microbatch = loss_of(kl_coefficient=0.3, kl_estimate="k2", entropy_coefficient=0.1)
    d = numbers(output, microbatch)
    weight = np.minimum(np.exp(d["old"] - d["behaviour"]), 2)
    divergence = (d["new"] - d["reference"]) ** 2 / 2
    gain = weight * (clipped(d, d["advantages"]) - 0.3 * divergence) + 0.1 * d["entropies"]
    assert found == pytest.approx(-(gain * d["weights"]).sum(), rel=1e-5)
    assert sums["kl_reference"].item() == pytest.approx(divergence.sum(), rel=1e-5)
    assert output.entropies.grad is not None
    np.testing.assert_allclose(output.entropies.grad, -0.1 * d["weights"], rtol=1e-6)


def test_kl_in_the_reward_changes_the_advantage_and_has_no_gradient_of_its_own() -> None:
    found, _, output, microbatch = loss_of(kl_coefficient=0.3, kl_in="reward")
    d = numbers(output, microbatch)
    weight = np.minimum(np.exp(d["old"] - d["behaviour"]), 2)
    advantages = d["advantages"] - 0.3 * (d["old"] - d["reference"])
    assert found == pytest.approx(-(clipped(d, advantages) * weight * d["weights"]).sum(), rel=1e-5)


def test_kl_in_the_loss_is_weighted_if_the_policy_loss_divides_by_the_behaviour_policy() -> None:
    objective = PPOClip(ratio_to="behaviour")
    with_kl, _, output, microbatch = loss_of(objective, kl_coefficient=0.3, kl_estimate="k2")
    without, *_ = loss_of(objective)
    d = numbers(output, microbatch)
    weight = np.minimum(np.exp(d["old"] - d["behaviour"]), 2)
    divergence = (d["new"] - d["reference"]) ** 2 / 2
    assert with_kl - without == pytest.approx((0.3 * weight * divergence * d["weights"]).sum(), rel=1e-4)


def test_tokens_that_decoupled_drops_count_as_clipped() -> None:
    _, sums, output, microbatch = loss_of(DecoupledPPO(behaviour_cap=0.9))
    d = numbers(output, microbatch)
    ratio, rho = np.exp(d["new"] - d["old"]), np.exp(d["old"] - d["behaviour"])
    expected = (ratio < 0.8) | (ratio > 1.2) | (rho > 0.9)
    assert sums["clipped"].item() == expected.sum() > ((ratio < 0.8) | (ratio > 1.2)).sum()


def test_distillation_is_the_divergence_from_the_teacher_with_importance_weights() -> None:
    output, microbatch = made()
    microbatch.columns["teacher"] = microbatch.behaviour_logprobs - 0.3
    settings = LossSettings(kl_coefficient=0.2, kl_estimate="k2", entropy_coefficient=0.1)
    function = loss_function(Distillation(), settings)
    loss, sums = evaluate_loss(function, output, microbatch)
    d = numbers(output, microbatch)
    weight, difference = np.minimum(np.exp(d["old"] - d["behaviour"]), 2), d["new"] - d["teacher"]
    cost = weight * (difference**2 / 2 + 0.2 * (d["new"] - d["reference"]) ** 2 / 2) - 0.1 * d["entropies"]
    assert loss.item() == pytest.approx((cost * d["weights"]).sum(), rel=1e-5)
    assert sums["reverse_kl"].item() == pytest.approx(difference.sum(), rel=1e-5)
    assert set(needed_columns(function)) == {"reference", "teacher"}


TOP = Distillation(top=1, divergence="forward")


def test_the_divergence_over_likely_tokens_is_an_expectation_without_importance_weights() -> None:
    output, microbatch = made()
    d = numbers(output, microbatch)
    count, rho = len(d["new"]), np.exp(d["old"] - d["behaviour"])
    columns = {"teacher": torch.zeros(count), "teacher_id_0": torch.zeros(count)}
    microbatch.columns |= columns | {"teacher_logprob_0": torch.tensor([0.6]).log()}
    output = output._replace(others=torch.full((count, 1), 0.2).log().requires_grad_())
    divergence = 0.6 * np.log(0.6 / 0.2) + 0.4 * np.log(0.4 / 0.8)

    loss, sums = evaluate_loss(loss_function(TOP, LossSettings()), output, microbatch)
    assert loss.item() == pytest.approx(divergence * d["weights"].sum(), rel=1e-4)
    assert sums["top_k_kl"].item() == pytest.approx(divergence * count, rel=1e-4)
    assert rho.max() > rho.min() and sums["importance_weight"] == count

    anchored = LossSettings(kl_coefficient=0.2, kl_estimate="k2", corrections=(TIS(cap=1.2),))
    loss, _ = evaluate_loss(loss_function(TOP, anchored), output, microbatch)
    anchor = np.minimum(rho, 1.2) * (d["new"] - d["reference"]) ** 2 / 2  # an estimate from the sampled token
    assert loss.item() == pytest.approx(((divergence + 0.2 * anchor) * d["weights"]).sum(), rel=1e-4)

    sequences = microbatch.sequences.numpy()
    means = np.asarray([np.log(rho)[sequences == sequence].mean() for sequence in sequences])
    middle = float(np.median(np.unique(means)))
    masked = LossSettings(corrections=(SequenceMask(low=0.0, high=float(np.exp(middle))),))
    loss, sums = evaluate_loss(loss_function(TOP, masked), output, microbatch)
    selected = means <= middle
    assert 0 < selected.sum() < count and sums["importance_weight"] == selected.sum()
    assert loss.item() == pytest.approx(divergence * d["weights"][selected].sum(), rel=1e-4)


def test_settings_that_distillation_does_not_read_are_refused() -> None:
    assert other_token_columns(loss_function(TOP, LossSettings())) == ("teacher_id_0",)
    assert not other_token_columns(loss_function(Distillation(), LossSettings()))
    with pytest.raises(ValueError, match=r"objective\.divergence forward .*objective\.top"):
        Distillation(divergence="forward")
    changes: dict[str, dict[str, Any]] = {
        "positives-only": {"positives_only": True},
        "corrections opsm": {"corrections": (OPSM(),)},
        "kl-in reward": {"kl_coefficient": 0.1, "kl_in": "reward"},
        "overlong-limit": {"overlong_limit": 100},
    }
    for flag, change in changes.items():
        with pytest.raises(ValueError, match=rf"^trainer\.loss\.{flag}: .*\bdistillation\b"):
            loss_function(Distillation(), LossSettings(**change))
    weighed: list[tuple[Correction, ...]] = [(TIS(),), (TIS(cap=3.0),), (SequenceMask(), IcePop())]
    for corrections in weighed:
        loss_function(Distillation(), LossSettings(corrections=corrections))
        with pytest.raises(ValueError, match=r"^trainer\.loss\.corrections (tis|icepop): .*objective\.top"):
            loss_function(TOP, LossSettings(corrections=corrections))


def test_positives_only() -> None:
    _, _, output, microbatch = loss_of(PolicyGradient(), positives_only=True)
    assert output.logprobs.grad is not None
    assert ((output.logprobs.grad != 0) == (microbatch.advantages > 0)).all()


def policy_objectives() -> list[PolicyObjective]:
    """Each objective with its defaults, and with each denominator of its ratio."""
    found = [PolicyObjective.defaults_of(name) for name in PolicyObjective.names()]
    return found + [replace(each, ratio_to="behaviour") for each in found if isinstance(each, RatioObjective)]


CORRECTIONS: dict[str, tuple[Correction, ...] | None] = {"default": None, "none": ()}
CORRECTIONS |= {name: (Correction.defaults_of(name),) for name in Correction.names()}


def label(objective: Objective) -> str:
    """A test's name."""
    return f"{objective.name} to {objective.ratio_to}" if isinstance(objective, RatioObjective) else objective.name


@pytest.mark.parametrize("objective", policy_objectives(), ids=label)
@pytest.mark.parametrize("corrections", CORRECTIONS.values(), ids=CORRECTIONS)
def test_every_combination_trains_or_is_refused_by_the_name_of_a_flag(
    objective: PolicyObjective, corrections: tuple[Correction, ...] | None
) -> None:
    """In float32, and all numbers are finite."""
    settings, output, microbatch = LossSettings(corrections=corrections), *made()
    weighed = any(correction.has_importance_ratio for correction in corrections or ())
    try:
        function = loss_function(objective, settings)
    except ValueError as error:
        assert str(error).startswith("trainer.loss.corrections ") and weighed and objective.has_importance_ratio
        return
    assert not (weighed and objective.has_importance_ratio)
    loss, sums = evaluate_loss(function, output, microbatch)
    loss.backward()
    assert loss.dtype == torch.float32 and output.logprobs.grad is not None and output.logprobs.grad.isfinite().all()
    dropped = SequenceMask() in settings.applied_corrections(objective)
    assert dropped or output.logprobs.grad.abs().sum() > 0
    assert all(value.isfinite().all() for value in sums.values())


def test_an_objective_names_the_columns_and_gradients_that_it_needs() -> None:
    def needed(objective: Objective = PPO_CLIP, **settings: Any) -> set[str]:
        return set(needed_columns(loss_function(objective, LossSettings(**settings))))

    assert needed() == set()
    assert needed(PPOClip(ratio_to="behaviour"), kl_coefficient=0.1) == {"reference"}
    assert not differentiates_entropy(loss_function(PPOClip(), LossSettings()))
    assert differentiates_entropy(loss_function(PPOClip(), LossSettings(entropy_coefficient=0.1)))


def test_without_old_logprobs_the_policy_that_is_updated_is_the_old_one() -> None:
    output, microbatch = made(columns=False)
    (loss, sums), n = (
        evaluate_loss(loss_function(PPOClip(), LossSettings(corrections=())), output, microbatch),
        len(output.logprobs),
    )
    assert loss.item() == pytest.approx(-(microbatch.advantages * microbatch.weights).sum().item(), rel=1e-6)
    assert sums["clipped"] == 0 and sums["tokens"] == n


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"corrections": (TIS(), "none")}, "trainer.loss.corrections must be .*Correction"),
        ({"corrections": (TIS(), IcePop())}, "corrections tis icepop: .*at most one of tis and icepop"),
        ({"corrections": (OPSM(), OPSM(max_kl=0.1))}, "corrections opsm opsm: .*each at most once"),
        ({"overlong_buffer": 5}, "overlong_buffer 5 is more than trainer.loss.overlong-limit 0"),
        (
            {"advantage": "max_rl", "overlong_limit": 100},
            "max_rl needs rewards .* and .*overlong-limit 100",
        ),
        (
            {"advantage": "sequence_distillation", "overlong_limit": 100},
            "overlong-limit 100 .*sequence_distillation",
        ),
        ({"positives_only": True, "corrections": (OPSM(),)}, r"opsm .*trainer\.loss\.positives-only"),
        ({"kl_coefficient": 0.1, "kl_estimate": "k1"}, "kl-estimate k1"),
        ({"kl_in": "reward"}, r"kl-in: .*trainer\.loss\.kl-coefficient\b.*\b0\b"),
        ({"kl_estimate": "k2"}, "kl-estimate: "),
        ({"overlong_penalty": 0.5}, r"LossSettings\.overlong_penalty: .*trainer\.loss\.overlong-limit\b.*\b0\b"),
        ({"aggregation": "token_mean", "max_tokens": 8}, "max-tokens: .*token_mean"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossSettings(**settings)


@pytest.mark.parametrize(
    ("objective", "settings", "message"),
    [
        (
            PPOClip(ratio_to="behaviour"),
            {"corrections": (TIS(),)},
            "corrections tis weights .* so does objective.ratio-to behaviour",
        ),
        (DecoupledPPO(), {"corrections": (IcePop(),)}, "corrections icepop .*so does the objective decoupled"),
        (PPOClip(dual_clip=3.0), {"positives_only": True}, r"^objective\.dual-clip: .*positives-only"),
        (SAPO(tau_negative=2.0), {"positives_only": True}, r"^objective\.tau-negative: .*positives-only"),
    ],
)
def test_settings_that_contradict_the_objective_are_refused(
    objective: Objective, settings: dict[str, Any], message: str
) -> None:
    """When a loss function is built from them, and before that in the settings of a run."""
    loss = LossSettings(**settings)
    with pytest.raises(ValueError, match=message):
        loss_function(objective, loss)
    with pytest.raises(ValueError, match=message):
        RunSettings(objective=objective, trainer=TrainerSettings(loss=loss))


def test_parameters_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^objective\.dual-clip 1\.1 must be above the clip's ceiling, 1\.28"):
        PPOClip(dual_clip=1.1)
    for bounded in (IcePop, SequenceMask):
        with pytest.raises(ValueError, match=rf"{bounded.__name__}\(low=2, high=0\.5\)"):
            bounded(low=2.0, high=0.5)


@pytest.mark.parametrize("objective", [CISPO(), GSPO(), SAPO(), DPPO(), DecoupledPPO()], ids=label)
def test_a_ratio_that_is_1_by_construction_warns(objective: PolicyObjective) -> None:
    (warning,) = loss_warnings(objective, LossSettings(), 1)
    assert f"objective {objective.name}" in warning
    assert loss_warnings(objective, LossSettings(), 2) == []
    if isinstance(objective, RatioObjective):
        assert loss_warnings(replace(objective, ratio_to="behaviour"), LossSettings(), 1) == []
    else:
        assert "behaviour-cap 5" in warning


def test_the_default_objective_warns_of_its_ratio_only_if_a_parameter_of_it_is_given() -> None:
    assert loss_warnings(PPOClip(), LossSettings(), 1) == []
    assert len(loss_warnings(PPOClip(clip_high=0.3), LossSettings(), 1)) == 1


def test_several_updates_without_a_ratio_and_another_estimate_in_the_reward_warn() -> None:
    (warning,) = loss_warnings(PolicyGradient(), LossSettings(), 4)
    assert "pg with 4 updates" in warning and loss_warnings(PolicyGradient(), LossSettings(), 1) == []
    (warning,) = loss_warnings(PPOClip(), LossSettings(kl_coefficient=0.1, kl_in="reward", kl_estimate="k3"), 1)
    assert "kl-estimate k3 with kl-in reward" in warning
    assert loss_warnings(PPOClip(), LossSettings(kl_coefficient=0.1, kl_in="reward"), 1) == []


def test_a_token_level_clip_with_gspo_warns() -> None:
    (warning,) = loss_warnings(GSPO(ratio_to="behaviour", clip_low=0.2, clip_high=0.2), LossSettings(), 1)
    assert "clip-low 0.2 and clip-high 0.2 with gspo" in warning


def test_the_overlong_penalty_lowers_rewards_before_advantages() -> None:
    group = GroupView.of([1.0, 1.0, 0.0], lengths=[10, 18, 20])
    shaped = with_overlong_penalty(group, LossSettings(overlong_limit=20, overlong_penalty=0.5))
    assert shaped.rewards.tolist() == [1.0, 0.75, -0.5]
    assert with_overlong_penalty(group, LossSettings()) is group
    turns = [torch.tensor([10, 8]), torch.tensor([0, 10])]
    branches = GroupView.of(
        [1.0, 1.0], lengths=[18, 10], rollouts=torch.zeros(2), forks=[None, (0, 1)], turn_lengths=turns
    )
    shaped = with_overlong_penalty(branches, LossSettings(overlong_limit=20, overlong_penalty=0.5))
    assert shaped.rewards.tolist() == [0.75, 0.5], "the second is 10 + 10 tokens long"


# -- numbers that are not finite --------------------------------------------------------------------------------------

CAUSES = {
    "log-prob of the trainer": -torch.inf,
    "log-prob of the engine": torch.inf,
    "column 'reference'": torch.nan,
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_number_that_is_not_finite_excludes_only_its_episode(cause: str) -> None:
    settings = LossSettings(kl_coefficient=0.1, entropy_coefficient=0.1)
    output, microbatch = made()
    wrong = int((microbatch.sequences == 2).nonzero()[0])
    logprobs, behaviour, columns = output.logprobs.detach(), microbatch.behaviour_logprobs, microbatch.columns
    of_cause = {
        "log-prob of the trainer": logprobs,
        "log-prob of the engine": behaviour,
        "column 'reference'": columns["reference"],
    }
    others = replace(microbatch, weights=microbatch.weights * (microbatch.sequences != 2))
    expected, _ = loss_function(PPOClip(), settings)(output, others)
    expected.backward()
    assert output.logprobs.grad is not None

    of_cause[cause][wrong] = CAUSES[cause]
    spoiled = output._replace(logprobs=logprobs.requires_grad_())
    chosen, trained, left_out = finite_only(spoiled, microbatch)
    assert left_out.causes == {2: cause} and left_out.tokens == int((microbatch.sequences == 2).sum())
    loss, sums = evaluate_loss(loss_function(PPOClip(), settings), chosen, trained)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert sums["tokens"] == len(logprobs) - left_out.tokens
    assert spoiled.logprobs.grad is not None
    torch.testing.assert_close(spoiled.logprobs.grad, output.logprobs.grad)


def test_an_id_that_is_not_finite_does_not_end_the_forward_pass() -> None:
    """Its column excludes its episode, after the pass."""
    sampled = SampledTokens(torch.arange(4), torch.arange(4), temperature=1.0, sampling_masks=None)
    ids = torch.tensor([3.0, torch.nan, torch.inf, -torch.inf])
    others = sampled.with_others([ids, ids.flip(0)]).others
    assert others is not None and others.tolist() == [[3, 0], [0, 0], [0, 0], [0, 3]]


def test_where_all_is_finite_nothing_is_copied() -> None:
    output, microbatch = made()
    chosen, trained, left_out = finite_only(output, microbatch)
    assert chosen is output and trained is microbatch and not left_out.causes
