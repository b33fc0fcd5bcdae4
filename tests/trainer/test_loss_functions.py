"""Advantages and objectives as code: how they are sent, what they see, what they may return."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.algorithms.advantages import ADVANTAGES, dr_grpo, gae, grpo, max_rl
from monarch_rl.algorithms.distillation import distillation, sequence_distillation, top_columns
from monarch_rl.algorithms.functions import (
    differentiates_entropy,
    entropy_gradient,
    needed_columns,
    needs,
    of_batch,
    other_token_columns,
    other_tokens,
)
from monarch_rl.algorithms.group_view import GroupView, PerToken, PerTurn, Values
from monarch_rl.algorithms.objectives import CISPO, GSPO, Distillation, Objective, PPOClip
from monarch_rl.episode.episode import Group, Turn
from monarch_rl.episode.sampling import Completion
from monarch_rl.episode.shard import PackedShard
from monarch_rl.errors import SettingsError
from monarch_rl.observe.registry import METRICS, OBJECTIVE
from monarch_rl.trainer.advantages import advantages_of, fingerprint, flat, group_views
from monarch_rl.trainer.batch import MicroBatch, pack, pack_shard
from monarch_rl.trainer.functions import (
    LoadedFunctions,
    TrainingFunctions,
    check_columns,
    check_that_columns_are_read,
    check_unread_objective,
    equal_rewards_warning,
)
from monarch_rl.trainer.loss_settings import CriticSettings, LossSettings
from monarch_rl.trainer.objective import Sums, evaluate_loss, loss_function, supervised
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.trainer.token_logprobs import TokenLogprobs
from monarch_rl.user_code import place_of
from tests.trainer.batches import MAX_NEW_TOKENS, batch, shard

DEVICE = torch.device("cpu")
HERE = r"\(.*test_loss_functions\.py:\d+\)"


def leave_one_out(group: GroupView, scale: float) -> torch.Tensor:
    rewards = group.rewards
    return scale * (rewards - (rewards.sum() - rewards) / (len(rewards) - 1))


def scaled(factor: float, output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
    loss, sums = supervised(output, batch)
    return factor * loss, sums | {"factor": torch.tensor(factor)}


def sent(advantage: Any, objective: Any, loss: LossSettings | None = None) -> TrainingFunctions:
    """As a trainer rank receives them."""
    made = TrainingFunctions.of(advantage, objective, loss or LossSettings())
    received: TrainingFunctions = pickle.loads(pickle.dumps(made))
    return received


def packed(part: PackedShard, advantage: Any) -> list[MicroBatch]:
    advantages = advantages_of(group_views(part), advantage)
    (microbatches,) = pack_shard(part, advantages, "token_mean", MAX_NEW_TOKENS, DEVICE)
    return microbatches


def test_a_recipes_own_advantage_applies_to_every_token() -> None:
    advantage = sent(partial(leave_one_out, scale=3.0), supervised).advantage.load()
    part = shard(batch(0), 0, 0, 1, tokens_per_microbatch=50)
    microbatches = packed(part, advantage)
    assert len(microbatches) > 1
    for found, places, episodes in zip(microbatches, part.places, part.deserialize(), strict=True):
        expected = []
        for (group, place, _), episode in zip(places, episodes, strict=True):
            rewards = part.rewards[group]
            others = np.delete(rewards, place)
            expected += [3.0 * (rewards[place] - others.mean())] * episode.num_trainable
        np.testing.assert_allclose(found.advantages.numpy(), expected, atol=1e-6)


def test_a_recipes_own_objective_is_differentiated() -> None:
    def doubled(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:  # as a script would have it
        return scaled(2.0, output, batch)

    loss, sums = evaluate_loss(sent(dr_grpo, doubled).objective.load(), *one_microbatch())
    assert loss.item() == 2.0 * supervised(*one_microbatch())[0].item()
    assert float(sums["factor"]) == 2.0


@pytest.mark.parametrize("name", ADVANTAGES)
def test_names_resolve_to_functions(name: str) -> None:
    loss = LossSettings(advantage=name, corrections=())
    for functions in (sent(name, PPOClip(), loss), TrainingFunctions.of_settings(loss)):
        assert place_of(functions.advantage.load()) == place_of(ADVANTAGES[name]())
        output, made = one_microbatch()
        found, _ = functions.objective.load()(output, made)
        assert float(found) == float(-(made.advantages * made.weights).sum())  # ratio and weights are 1


def test_an_unknown_name_is_refused_with_all_names() -> None:
    with pytest.raises(ValueError, match="advantage 'grp'.* dr_grpo, grpo"):
        TrainingFunctions.of("grp", supervised, LossSettings())
    with pytest.raises(ValueError, match=r"trainer\.loss\.advantage .*grpo.*'grp'"):
        LossSettings(advantage="grp")


def test_an_advantage_of_the_settings_that_the_recipe_replaces_is_refused() -> None:
    message = r"trainer\.loss\.advantage grpo: .* advantage "
    replacing: list[tuple[Any, str]] = [("rloo", "rloo"), (leave_one_out, "leave_one_out ")]
    for advantage, name in replacing:
        with pytest.raises(ValueError, match=message + name):
            TrainingFunctions.of(advantage, supervised, LossSettings(advantage="grpo"))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_ready_made_partial_is_recognised_as_itself_and_not_as_its_function(name: str) -> None:
    """`sequence_distillation` is a partial of `distillation`, which is another advantage."""
    for other in ADVANTAGES:
        made: Any = ADVANTAGES[other]()
        for advantage in (other, made, partial(made)):
            if other == name or name == LossSettings().advantage:
                assert TrainingFunctions.of(advantage, supervised, LossSettings(advantage=name))
            else:
                with pytest.raises(ValueError, match=rf"advantage {name}: .* advantage {other}\b"):
                    TrainingFunctions.of(advantage, supervised, LossSettings(advantage=name))


def test_an_advantage_given_as_a_function_refuses_the_flags_that_its_name_refuses() -> None:
    lowered = LossSettings(overlong_limit=100)
    refusing: dict[str, tuple[Any, ...]] = {
        r"\bmax_rl\b": ("max_rl", max_rl, partial(max_rl)),
        "advantage distillation ": ("distillation", partial(distillation, discount=0.5)),
        "advantage sequence_distillation ": (sequence_distillation, partial(distillation, discount=1)),
    }
    for message, advantages in refusing.items():
        for advantage in advantages:
            with pytest.raises(ValueError, match=message):
                TrainingFunctions.of(advantage, supervised, lowered)
    assert TrainingFunctions.of(dr_grpo, PPOClip(), lowered)


def test_the_objective_supervised_refuses_flags_that_it_does_not_read() -> None:
    changes: list[dict[str, Any]] = [
        {"kl_coefficient": 0.1},
        {"entropy_coefficient": 0.1},
        {"lag_discount": 0.5},
        {"overlong_limit": 8},
        {"corrections": ()},
    ]
    for change in changes:
        (name,) = change
        named = {"lag_discount": "LossSettings.lag_discount", "corrections": "trainer.loss.corrections"}
        flag = re.escape(named.get(name, f"trainer.loss.{name.replace('_', '-')}"))
        with pytest.raises(ValueError, match=rf"{flag}: .*\bsupervised\b"):
            TrainingFunctions.of("grpo", supervised, LossSettings(**change))
    assert TrainingFunctions.of("grpo", supervised, LossSettings(advantage="grpo", max_tokens=8))
    assert TrainingFunctions.of("grpo", supervised, LossSettings(aggregation="token_mean"))


def test_all_that_does_not_fit_is_refused_together() -> None:
    discounted: Any = partial(gae, gamma=0.5)
    loss = LossSettings(advantage="rloo", kl_coefficient=0.1)
    with pytest.raises(ValueError, match="^3 problems") as refused:
        TrainingFunctions.of(discounted, supervised, loss, CriticSettings(lr=1e-3, gamma=1.0))
    for culprit in ("trainer.loss.advantage", "trainer.critic.gamma", "trainer.loss.kl-coefficient"):
        assert culprit in str(refused.value)
    functions = TrainingFunctions.of("distillation", PPOClip(), LossSettings())
    with pytest.raises(ValueError, match="^4 problems") as refused:
        check_columns(functions, {"reference": "mine"}, reference=True, critic=True)
    for culprit in ("--trainer.reference", "trainer.reference: ", "trainer.critic.lr", "'teacher'"):
        assert culprit in str(refused.value)


def test_an_objective_of_the_settings_that_the_recipe_replaces_is_refused() -> None:
    gspo, default = GSPO(ratio_to="behaviour"), PPOClip()
    for trained, name in ((supervised, "supervised"), (CISPO(), "cispo"), (default, "ppo_clip")):
        with pytest.raises(ValueError, match=rf"^objective gspo: .*objective {name}\b.*s\.objective"):
            check_unread_objective(gspo, default, trained)
        check_unread_objective(default, default, trained)
    for read in (gspo, GSPO(clip_high=0.1), scaled):  # a function of the recipe's may read it
        check_unread_objective(gspo, default, read)  # type: ignore[arg-type]
    for trained in (supervised, PPOClip()):
        with pytest.raises(ValueError, match="^objective ppo_clip: "):
            check_unread_objective(PPOClip(clip_low=0.1), default, trained)
    check_unread_objective(PPOClip(clip_low=0.1), default, PPOClip(clip_low=0.1, clip_high=0.5))


def test_functions_that_cannot_be_sent_are_refused_before_anything_is_spawned() -> None:
    factors = (factor for factor in (1.0, 2.0))

    def guarded(group: GroupView) -> torch.Tensor:
        return next(factors) * group.rewards

    with pytest.raises(TypeError, match=rf"advantage guarded {HERE}"):
        TrainingFunctions.of(guarded, supervised, LossSettings())


def one_microbatch() -> tuple[TokenLogprobs, MicroBatch]:
    """Synthetic episodes, and log-probs that a model might assign to them."""
    made = pack(batch(1)[0].episodes, torch.arange(4.0), torch.full((4,), 0.5), 1, DEVICE)
    logprobs = (made.behaviour_logprobs - 0.1).requires_grad_()
    return TokenLogprobs(logprobs, torch.ones_like(logprobs), torch.ones_like(logprobs)), made


# ---- what an advantage sees ----------------------------------------------------------------------------------


def conversation(rng: np.random.Generator, turns: int) -> Turn | list[Turn]:
    made = []
    for _ in range(turns):
        n = int(rng.integers(1, 5))
        sampled = Completion(rng.integers(0, 50, n), rng.normal(-2, 1, n), rng.integers(0, 3, n), "stop")
        turn = Turn.from_completion(rng.integers(0, 50, int(rng.integers(1, 4))).tolist(), sampled)
        turn.reward = None if rng.random() < 0.5 else float(rng.integers(0, 9))
        made.append(turn)
    return made


def groups_of_turns(seed: int, columns: tuple[str, ...] = ()) -> list[Group]:
    """Groups whose episodes have several turns, seats, rollouts and columns."""
    rng, groups = np.random.default_rng(seed), batch(seed, groups=2, size=3)
    for number, group in enumerate(groups):
        group.task, group.task_index = f"task {number}", 7 + number
        for place, episode in enumerate(group.episodes):
            made = conversation(rng, int(rng.integers(1, 4)))
            assert isinstance(made, list)
            episode.turns, episode.seat, episode.rollout = made, f"seat {place % 2}", place // 2
            episode.parts = {"format": float(place)}
            for name in columns:
                episode.fill_column(name, rng.normal(size=episode.num_tokens))
    return groups


@given(st.integers(0, 2**16))
def test_a_view_shows_the_group(seed: int) -> None:
    groups = groups_of_turns(seed, columns=("value", "other"))
    part = shard(groups, 0, 0, 1, 500, ("value",))
    for view, group in zip(group_views(part), groups, strict=True):
        assert (view.task, view.item, len(view)) == (group.task, group.task_index, len(group.episodes))
        assert list(view.columns) == ["value"]
        for place, episode in enumerate(group.episodes):
            assert view.rewards.dtype == torch.float32 and float(view.rewards[place]) == episode.reward
            assert (view.seats[place], int(view.rollouts[place])) == (episode.seat, episode.rollout)
            assert view.parts[place] == episode.parts
            assert int(view.lengths[place]) == episode.num_trainable == int(view.turn_lengths[place].sum())
            assert view.turn_lengths[place].tolist() == [turn.trainable.sum() for turn in episode.turns]
            assert view.turn_rewards[place].tolist() == [turn.reward or 0.0 for turn in episode.turns]
            assert view.columns["value"][place].tolist() == episode.column("value")[episode.trainable].tolist()


def test_an_advantage_that_writes_into_its_view_leaves_the_batch_as_it_was() -> None:
    group = groups_of_turns(1, columns=("value",))[0]
    part = shard([group], 0, 0, 1, 500, ("value",))
    (view,) = group_views(part)
    for written in (view.rewards, view.lengths, view.rollouts, *view.columns["value"], *view.turn_rewards):
        written -= 7
    for lists in (view.seats, view.forks, view.parts):
        lists[0] = None  # type: ignore[index, call-overload]
    view.parts[1]["format"] = -7.0
    assert part.rewards[0].tolist() == [episode.reward for episode in group.episodes]
    assert part.seats[0] == [episode.seat for episode in group.episodes] and part.forks[0] == [None] * len(view)
    assert part.parts[0] == [episode.parts for episode in group.episodes]
    (changed,) = group_views(part)
    assert (changed.lengths == view.lengths + 7).all() and (changed.rollouts == view.rollouts + 7).all()
    for after, before in zip(changed.columns["value"], view.columns["value"], strict=True):
        assert torch.allclose(after, before + 7)


@given(st.integers(0, 2**16), st.none() | st.integers(0, 2))
def test_advantages_of_turns_and_tokens_stay_aligned_with_their_tokens(seed: int, oldest: int | None) -> None:
    """Also where tokens are masked for their lag after they got an advantage."""
    groups = groups_of_turns(seed, columns=("value",))

    def of_turns(group: GroupView) -> Values:
        return PerTurn(
            [rewards + 10 * int(rollout) for rewards, rollout in zip(group.turn_rewards, group.rollouts, strict=True)]
        )

    def of_tokens(group: GroupView) -> Values:
        return PerToken([2 * values for values in group.columns["value"]])

    part = replace(shard(groups, 0, 0, 1, 64, ("value",)), oldest=oldest)
    for advantage in (of_turns, of_tokens):
        for found, episodes in zip(packed(part, advantage), part.deserialize(), strict=True):
            expected: list[float] = []
            for episode in episodes:
                for turn in episode.turns:
                    of_turn = np.full(len(turn.token_ids), (turn.reward or 0.0) + 10 * episode.rollout)
                    values = of_turn if advantage is of_turns else 2 * turn.columns["value"]
                    expected += values[turn.trainable].tolist()
            assert found.advantages.tolist() == expected


@of_batch
def normalised(groups: list[GroupView]) -> list[torch.Tensor]:
    rewards = torch.cat([group.rewards for group in groups])
    return [(group.rewards - rewards.mean()) / rewards.std() for group in groups]


def test_an_advantage_may_see_the_whole_batch() -> None:
    part = shard(batch(0), 0, 0, 1, tokens_per_microbatch=500)
    found = np.concatenate(flat(advantages_of(group_views(part), partial(normalised))))
    rewards = np.concatenate(part.rewards)
    np.testing.assert_allclose(found, (rewards - rewards.mean()) / rewards.std(ddof=1), atol=1e-6)


def test_a_sequence_with_a_column_that_is_not_finite_is_neither_shown_nor_trained() -> None:
    """Nor are branches that share its beginning."""
    sizes: list[list[int]] = []

    @needs("value")
    def of_tokens(group: GroupView) -> Values:
        sizes.append(group.lengths.tolist())
        return PerToken([values + group.rewards.mean() for values in group.columns["value"]])

    branched = GroupView.of(
        [1.0, 2.0, 4.0, 8.0],
        lengths=[1, 1, 1, 2],
        rollouts=torch.tensor([0, 1, 1, 1]),
        forks=[None, None, (0, 1), None],
        turn_lengths=[torch.tensor(lengths) for lengths in ([1], [1], [0, 1], [2])],
        turn_rewards=[torch.zeros(2)] * 4,
        columns={"value": [torch.tensor([5.0]), torch.tensor([torch.nan]), torch.zeros(1), torch.tensor([6.0, 7.0])]},
    )
    spoiled = GroupView.of([1.0], columns={"value": [torch.tensor([torch.inf])]})
    whole = GroupView.of([1.0], columns={"value": [torch.tensor([3.0])]})
    first, second, third = advantages_of([branched, spoiled, whole], of_tokens)
    assert sizes == [[1, 2], [1]]
    assert [values.tolist() for values in (first[0], first[3], third[0])] == [[9.5], [10.5, 11.5], [4.0]]
    assert all(values.isnan() for values in (first[1], first[2], second[0]))
    of_all = of_batch(lambda groups: [group.rewards for group in groups])
    assert [len(of_group) for of_group in advantages_of([spoiled, whole], of_all)] == [1, 1]
    assert advantages_of([spoiled], of_all)[0][0].isnan()


class RunningMean:
    """A baseline with state."""

    def __init__(self) -> None:
        self.mean = 0.0

    def __call__(self, group: GroupView) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * float(group.rewards.mean())
        return group.rewards - self.mean

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


def test_a_function_with_state_resumes_from_it_and_is_equal_on_all_ranks() -> None:
    views = [GroupView.of([0.0, 1.0]), GroupView.of([3.0, 3.0, 1.0])]
    ranks = [RunningMean(), RunningMean()]
    first = [fingerprint(advantages_of(views, advantage)) for advantage in ranks]
    assert first[0] == first[1]
    resumed = RunningMean()
    saved = LoadedFunctions(ranks[0], supervised).state_dict()
    assert saved == {"advantage": {"mean": ranks[0].mean}}
    LoadedFunctions(resumed, supervised).load_state_dict(saved)
    second = [fingerprint(advantages_of(views, advantage)) for advantage in (ranks[1], resumed)]
    assert second[0] == second[1] != first[0]
    wrapped: Any = partial(partial(resumed))
    assert LoadedFunctions(wrapped, supervised).state_dict() == {"advantage": {"mean": resumed.mean}}
    with pytest.raises(ValueError, match=r"\['advantage'\].*\{\}"):
        LoadedFunctions(grpo, supervised).load_state_dict(saved)


# ---- what is refused -----------------------------------------------------------------------------------------

WRONG: dict[str, Any] = {
    "one too few": (lambda group: group.rewards[1:], "each sequence"),
    "a matrix": (lambda group: group.rewards[:, None], "each sequence"),
    "a number": (lambda group: 1.0, r"returned 1\.0 "),
    "NaN": (lambda group: group.rewards / 0 * 0, "nan for sequence 0"),
    "turns that are not there": (lambda group: PerTurn([torch.zeros(2)] * 3), "each turn"),
    "too few tokens": (lambda group: PerToken([torch.zeros(0)] * 3), "each sampled token"),
    "a batch of another size": (of_batch(lambda groups: groups[1:]), "batch of 1 "),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_advantage_with_an_invalid_result_is_refused_with_its_location(what: str) -> None:
    advantage, message = WRONG[what]
    with pytest.raises(ValueError, match=rf"advantage <lambda> {HERE}") as caught:
        advantages_of([GroupView.of([1.0, 0.0, 1.0])], advantage)
    assert re.search(message, str(caught.value))


WRONG_OBJECTIVES: dict[str, Any] = {
    "only a loss": (lambda loss, sums: loss, "pair"),
    "a loss for each token": (
        lambda loss, sums: (loss * torch.ones(3), sums),
        r"loss of shape \[3\]",
    ),
    "a float": (lambda loss, sums: (float(loss), sums), "loss -?[0-9.]+: "),
    "without gradient": (lambda loss, sums: (loss.detach(), sums), "without gradient"),
    "no count of tokens": (lambda loss, sums: (loss, {"kl": loss}), r"\['kl'\].*'tokens'"),
    "a vector": (
        lambda loss, sums: (loss, sums | {"kl": torch.ones(4)}),
        r"kl of shape \[4\]",
    ),
    "a metric of the trainer's": (
        lambda loss, sums: (loss, sums | {"grad_norm": torch.ones(())}),
        r"\['grad_norm'\].*trainer's own",
    ),
    "a metric of the trainer's by its whole name": (
        lambda loss, sums: (loss, sums | {"trainer/grad_norm": loss}),
        r"\['trainer/grad_norm'\].*full names",
    ),
    "a metric of the batch": (
        lambda loss, sums: (loss, sums | {"reward/mean": loss, "mine": loss}),
        r"\['reward/mean'\].*full names",
    ),
}


@pytest.mark.parametrize("what", WRONG_OBJECTIVES)
def test_an_objective_with_an_invalid_result_is_refused_with_its_location(what: str) -> None:
    change, message = WRONG_OBJECTIVES[what]

    def changed(output: TokenLogprobs, batch: MicroBatch) -> Any:
        return change(*supervised(output, batch))

    with pytest.raises(ValueError, match=rf"objective changed {HERE} .*{message}"):
        evaluate_loss(changed, *one_microbatch())


def test_sums_may_not_have_names_of_the_runs_own_metrics() -> None:
    """Except metrics that ready-made objectives sum, which a recipe's own may sum, too."""
    summed = {"tokens", "kl_reference", "reverse_kl", "top_k_kl", "clipped", "importance_weight"}
    names = [metric.name.removeprefix("trainer/") for metric in METRICS if metric.name != OBJECTIVE]
    assert summed < set(names)
    for name in ["choices_of_a_layer", *(name for name in names if name not in summed)]:

        def objective(output: TokenLogprobs, batch: MicroBatch, name: str = name.replace("*", "x")) -> Any:
            loss, sums = supervised(output, batch)
            return loss, sums | {name: loss}

        with pytest.raises(ValueError, match=rf"\['.*{re.escape(name.split('*')[0])}.*'\]"):
            evaluate_loss(objective, *one_microbatch())


def test_sums_are_detached_and_may_be_plain_numbers() -> None:
    def own(output: TokenLogprobs, batch: MicroBatch) -> Any:
        loss, sums = supervised(output, batch)
        return loss, sums | {"with_gradient": output.logprobs.sum(), "plain": 3}

    _, sums = evaluate_loss(own, *one_microbatch())
    assert not any(value.requires_grad for value in sums.values()) and float(sums["plain"]) == 3.0


@needs("teacher")
def distilled(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
    loss, sums = supervised(output, batch)
    return loss + (output.logprobs - batch.columns["teacher"]).sum(), sums


def test_an_unfilled_column_is_refused_before_anything_is_spawned() -> None:
    functions = sent(grpo, partial(distilled))
    message = rf"objective distilled {HERE} .*'teacher'.*\(filled are old\)"
    with pytest.raises(ValueError, match=message):
        check_columns(functions, {})
    ready = r"\(filled are old, value\).*stages=\[teacher\("
    with pytest.raises(ValueError, match=ready):
        check_columns(functions, {"value": "critic"})
    check_columns(functions, {"teacher": "teacher"})
    by_column = needs("value")(lambda group: PerToken(group.columns["value"]))
    with pytest.raises(SettingsError) as refused:  # all at once
        check_columns(sent(by_column, partial(distilled)), {})
    assert len(refused.value.problems) == 2
    assert sent(by_column, supervised).advantage_columns == needed_columns(by_column) == ("value",)
    with pytest.raises(ValueError, match="advantage <lambda> .*'value'"):
        check_columns(sent(by_column, supervised), {"teacher": "teacher"})


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_dropping_groups_of_equal_rewards_is_refused_or_warns_where_they_have_a_gradient(advantage: str) -> None:
    """Where equal rewards have advantages of zero in a batch in which others do not, and nowhere else."""
    functions = sent(advantage, PPOClip())
    if advantage in ("distillation", "sequence_distillation"):
        with pytest.raises(ValueError, match=f"drop-equal-rewards: .*advantage {advantage} "):
            equal_rewards_warning(functions)
        return
    views = [GroupView.of(rewards, columns={"value": [torch.full((1,), 0.25)] * 2}) for rewards in ([1, 1], [0, 1])]
    # A copy: the process loads only one, and seat_baselines has state.
    of_equal, _ = advantages_of(views, copy.deepcopy(functions.advantage.load()))
    warning = equal_rewards_warning(functions)
    assert any(values.any() for values in of_equal) == bool(warning)
    assert not warning or re.search(f"drop-equal-rewards: .*advantage {advantage} ", warning)


def test_dropping_groups_by_rewards_is_refused_where_the_objective_reads_none() -> None:
    with_entropy = LossSettings(entropy_coefficient=0.1)
    for name in Objective.names():
        objective = Objective.defaults_of(name)
        given = [sent(grpo, objective, with_entropy), sent(grpo, loss_function(objective, with_entropy))]
        for functions in given:
            if name == "distillation":
                with pytest.raises(ValueError, match="drop-equal-rewards: .*objective distillation "):
                    equal_rewards_warning(functions)
            else:
                assert equal_rewards_warning(functions) == ""
    with pytest.raises(ValueError, match="drop-equal-rewards: .*objective supervised "):
        equal_rewards_warning(sent(grpo, supervised))
    assert equal_rewards_warning(sent(leave_one_out, scaled)) == ""  # nothing is known about a recipe's own


class OfBatch:
    """An advantage whose ``__call__`` is decorated."""

    @needs("value")
    @of_batch
    def __call__(self, groups: list[GroupView]) -> list[torch.Tensor]:
        return [group.rewards + len(groups) for group in groups]


class Inherited(OfBatch):
    pass


class Judged:
    """An objective whose ``__call__`` is decorated."""

    @entropy_gradient
    @other_tokens(["id"])
    def __call__(self, output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        return supervised(output, batch)


@pytest.mark.parametrize("kind", [OfBatch, Inherited])
@pytest.mark.parametrize("wrapped", [lambda function: function, partial])
def test_decorators_of_a_class_apply_to_its_objects(kind: Any, wrapped: Any) -> None:
    functions = sent(wrapped(kind()), wrapped(Judged()))
    assert functions.advantage_columns == ("value",)
    with pytest.raises(ValueError, match=rf"advantage {kind.__name__} {HERE} .*'value'"):
        check_columns(functions, {})
    with pytest.raises(ValueError, match=rf"objective Judged {HERE} .*'id'"):
        check_columns(functions, {"value": "judge"})
    loaded = functions.load()
    views = [GroupView.of([0.0, 1.0], columns={"value": [torch.zeros(1)] * 2})] * 3
    assert [of_group[1].item() for of_group in advantages_of(views, loaded.advantage)] == [4.0] * 3
    assert differentiates_entropy(loaded.objective) and other_token_columns(loaded.objective) == ("id",)
    own: Any = kind()
    own.needed_columns = ("mine",)
    assert needed_columns(own) == ("mine",)


def test_the_reference_has_one_source_and_every_group_its_engines_logprobs() -> None:
    functions = TrainingFunctions.of("distillation", PPOClip(), LossSettings(kl_coefficient=0.1))
    assert functions.advantage_columns == ("teacher", "behaviour")
    check_columns(functions, {"teacher": "teacher", "reference": "reference"})
    check_columns(functions, {"teacher": "teacher"}, reference=True)
    message = r"'reference' .*--trainer\.reference\b.*'mine'"
    with pytest.raises(ValueError, match=message):
        check_columns(functions, {"teacher": "teacher", "reference": "mine"}, reference=True)
    with pytest.raises(ValueError, match=r"trainer\.reference: "):
        check_columns(TrainingFunctions.of_settings(LossSettings()), {}, reference=True)


@pytest.mark.parametrize(
    ("objective", "loss", "columns", "message"),
    [
        (PPOClip(), {}, ["reference"], r"'reference'.* trainer\.loss\.kl-coefficient\b"),
        (PPOClip(), {}, ["teacher"], "'teacher'.*@needs"),
        (PPOClip(), {"kl_coefficient": 0.1}, ["reference"], ""),
        (Distillation(top=2), {}, ["teacher", *sum(top_columns(3), [])], r"'teacher_id_2', .*top=s\.objective\.top"),
        (Distillation(top=2), {}, ["teacher", *sum(top_columns(2), [])], ""),
        (PPOClip(), {}, sum(top_columns(4), []), r"'teacher_id_0', .*top=s\.objective\.top"),
        (supervised, {}, sum(top_columns(4), []), r"'teacher_id_0', .*top=s\.objective\.top"),
    ],
)
def test_a_computed_column_that_nothing_reads_is_refused(
    objective: Any, loss: dict[str, Any], columns: list[str], message: str
) -> None:
    functions = TrainingFunctions.of("grpo", objective, LossSettings(**loss))
    if message:
        with pytest.raises(ValueError, match=message):
            check_that_columns_are_read(functions, columns)
    else:
        check_that_columns_are_read(functions, columns)
    check_that_columns_are_read(TrainingFunctions.of("distillation", supervised, LossSettings()), ["teacher"])


def test_an_undeclared_column_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"'teacher'.*@needs\('teacher'\)"):
        evaluate_loss(distilled, *one_microbatch())
    with pytest.raises(ValueError, match="'value'.*other"):
        _ = GroupView.of([1.0], columns={"other": [torch.zeros(1)]}).columns["value"]


def test_an_objective_reads_columns_aligned_with_its_logprobs() -> None:
    groups = batch(0)
    for group in groups:
        for episode in group.episodes:
            episode.fill_column("teacher", episode.logprobs - 1.0)
    part = shard(groups, 0, 0, 1, tokens_per_microbatch=50)
    for made in packed(part, dr_grpo):
        logprobs = made.behaviour_logprobs.clone().requires_grad_()
        output = TokenLogprobs(logprobs, torch.ones_like(logprobs), torch.ones_like(logprobs))
        loss, _ = evaluate_loss(distilled, output, made)
        torch.testing.assert_close(loss, supervised(output, made)[0] + len(logprobs))


def test_an_objective_and_the_shared_settings_become_one_loss_function() -> None:
    loss = LossSettings(lag_discount=0.5)
    output, made = one_microbatch()
    named, _ = sent("grpo", PPOClip(), loss).objective.load()(output, made)
    torch.testing.assert_close(named, loss_function(PPOClip(), loss)(output, made)[0])


def test_gae_is_refused_unless_a_critic_or_a_stage_fills_its_values() -> None:
    functions = TrainingFunctions.of_settings(LossSettings(advantage="gae"))
    assert functions.advantage_columns == ("value",)
    with pytest.raises(ValueError, match=r"advantage gae .*'value'.*recipes/ppo\.py"):
        check_columns(functions, {})
    check_columns(functions, {"value": "of a recipe"})
    settings = TrainerSettings(loss=LossSettings(advantage="gae"), critic=CriticSettings(lr=1e-5, gamma=0.9, lam=0.8))
    functions = TrainingFunctions.of_settings(settings.loss, settings.critic)
    by_function = TrainingFunctions.of(gae, supervised, settings.loss, settings.critic)  # type: ignore[arg-type]
    assert functions.advantage_columns == (), "the buffer is not asked for what the trainer fills"
    check_columns(functions, {}, critic=True)
    view = GroupView.of([1.0, 0.0], lengths=[2, 2], columns={"value": [torch.tensor([0.5, 0.2]), torch.zeros(2)]})
    for of_run in (functions, by_function):
        found: Any = of_run.load().advantage([view])  # type: ignore[arg-type]
        for one, other in zip(found[0].values, gae([view], 0.9, 0.8)[0].values, strict=True):
            torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match="'value' .*stage judge\\b.*critic"):
        check_columns(functions, {"value": "judge"}, critic=True)
    with pytest.raises(ValueError, match=r"trainer\.critic\.lr: "):
        check_columns(TrainingFunctions.of_settings(LossSettings()), {}, critic=True)


def test_gae_discounts_like_the_critic_wherever_its_parameters_come_from() -> None:
    loss, critic = LossSettings(), CriticSettings(lr=1e-5, gamma=0.9, lam=0.8)
    view = GroupView.of([1.0, 0.0], lengths=[2, 2], columns={"value": [torch.tensor([0.5, 0.2]), torch.zeros(2)]})
    expected = gae([view], 0.9, 0.8, eps=1.0)[0].values
    parameters: list[dict[str, Any]] = [{}, {"gamma": 0.9}, {"gamma": 0.9, "lam": 0.8}]
    for own in parameters:
        advantage: Any = partial(gae, eps=1.0, **own)
        found: Any = TrainingFunctions.of(advantage, supervised, loss, critic).load().advantage([view])  # type: ignore[arg-type]
        for one, other in zip(found[0].values, expected, strict=True):
            torch.testing.assert_close(one, other)
    other_lam: Any = partial(gae, lam=0.95)
    with pytest.raises(ValueError, match=r"lam 0\.95\b.*trainer\.critic\.lam 0\.8\b"):
        TrainingFunctions.of(other_lam, supervised, loss, critic)
    by_stage: Any = TrainingFunctions.of(other_lam, supervised, loss).load().advantage
    assert by_stage.keywords == {"lam": 0.95}, "a stage's values are discounted with the recipe's parameters"


def test_settings_of_a_critic_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer\.critic\.clip 0\.5: .*trainer\.critic\.lr"):
        CriticSettings(clip=0.5)
    with pytest.raises(ValueError, match=r"trainer\.critic\.lr: .*trainer\.tp\b"):
        TrainerSettings(tp=2, critic=CriticSettings(lr=1e-5))


def test_help_and_docs_explain_each_advantage() -> None:
    helped = inspect.getsource(LossSettings)
    documented = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    table = documented.split("## Advantages")[1].split("\n\n")[2].splitlines()  # ends at an empty line
    for name in ADVANTAGES:
        assert f"`{name}`: " in helped and any(line.startswith(f"| `{name}` ") for line in table), name
