"""A plan is restored unchanged, with functions that compute the same, whatever module defines them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.algorithms.advantages import ADVANTAGES, SeatBaselines, gae, grpo, rloo
from monarch_rl.algorithms.distillation import top_columns
from monarch_rl.algorithms.functions import Columns
from monarch_rl.algorithms.objectives import GSPO, TIS, DecoupledPPO, Distillation, Objective, PPOClip, SequenceMask
from monarch_rl.checkpoint.folders import read_checked, write_checked
from monarch_rl.errors import SettingsError
from monarch_rl.model.lora import LoraSettings
from monarch_rl.trainer.functions import TrainingFunctions
from monarch_rl.trainer.loss_settings import LossSettings
from monarch_rl.trainer.objective import LossFunction, evaluate_loss, loss_function, made_from, supervised
from monarch_rl.trainer.plan import TrainerPlan, read_plan, trained_as, write_plan
from monarch_rl.trainer.settings import TrainerSettings
from tests.trainer.test_objective import made

LOSS = LossSettings(corrections=(TIS(cap=4.0), SequenceMask()), lag_discount=0.9)
PPO_CLIP = PPOClip()
SETTINGS = TrainerSettings(ranks=2, lr=1e-3, loss=LOSS, lora=LoraSettings(rank=4))


def plan(advantage: Any = "grpo", objective: Objective | LossFunction = PPO_CLIP, generation: int = 0) -> TrainerPlan:
    functions = TrainingFunctions.of(advantage, objective, LossSettings())
    return TrainerPlan(Path("a model"), SETTINGS, 7, 0.5, 8, functions, generation=generation)


def written(folder: Path, of: TrainerPlan) -> dict[str, Any]:
    write_plan(folder, of)
    values: dict[str, Any] = json.loads((folder / f"plan-{of.generation}.json").read_text())
    return values


def test_settings_survive_a_round_trip(tmp_path: Path) -> None:
    before = replace(plan(generation=3), functions=None)
    write_plan(tmp_path, before)
    assert read_plan(tmp_path, 3) == before


@pytest.mark.parametrize("advantage", [*ADVANTAGES, pytest.param(partial(gae, gamma=0.9), id="partial")])
def test_advantages_of_the_package_are_stored_by_name(tmp_path: Path, advantage: Any) -> None:
    before = plan(advantage)
    values = written(tmp_path, before)
    assert values["functions"]["advantage"]["name"] in ADVANTAGES
    assert "monarch_rl." not in json.dumps(values), "no module's path"
    assert trained_as(read_plan(tmp_path)) == trained_as(before)


def test_changed_code_of_the_package_counts_as_different_training(monkeypatch: pytest.MonkeyPatch) -> None:
    of = plan(grpo)
    before = trained_as(of)
    monkeypatch.setattr(grpo, "__code__", rloo.__code__)
    assert trained_as(of) != before


GIVEN: dict[str, Objective | LossFunction] = {name: Objective.defaults_of(name) for name in Objective.names()}
GIVEN |= {
    "own parameters": DecoupledPPO(clip_low=0.1, behaviour_cap=3.0),
    "the teacher's likely tokens": Distillation(top=3, divergence="forward"),
    "own settings": loss_function(GSPO(clip_high=0.3), LOSS),
    "cross-entropy": supervised,
}


@pytest.mark.parametrize("name", GIVEN)
def test_objectives_of_the_package_are_stored_by_name_and_settings(tmp_path: Path, name: str) -> None:
    before = plan("distillation" if name == "distillation" else "grpo", GIVEN[name])
    values = written(tmp_path, before)
    assert "cloudpickle" not in values["functions"]["objective"] and "monarch_rl." not in json.dumps(values)
    assert trained_as(read_plan(tmp_path)) == trained_as(before)
    after = read_plan(tmp_path)
    assert before.functions is not None and after.functions is not None
    made_of, given = made_from(before.functions.objective.load()), made_from(after.functions.objective.load())
    assert made_of == given and (given is not None) == (name != "cross-entropy")
    output, batch = made()
    teacher = batch.columns["old"] - 0.5
    ids, logprobs = top_columns(3)
    likely = dict.fromkeys([*ids, *logprobs], torch.full_like(teacher, 0.2).log())
    batch = replace(batch, columns=Columns({**batch.columns, "teacher": teacher, **likely}))
    if name == "the teacher's likely tokens":
        output = output._replace(others=torch.full((len(teacher), 3), 0.1).log().requires_grad_())
    losses = [evaluate_loss(each.objective.load(), output, batch)[0] for each in (before.functions, after.functions)]
    assert torch.equal(*losses)


def test_functions_of_a_recipe_are_stored_by_value(tmp_path: Path) -> None:
    own, inner, bias = SeatBaselines(0.5), loss_function(GSPO(clip_high=0.3), LOSS), 2.0

    @wraps(inner)
    def wrapper(*arguments: Any) -> Any:
        loss, sums = inner(*arguments)
        return loss + bias, sums

    before = plan(own, wrapper)
    values = written(tmp_path, before)["functions"]
    assert "name" not in values["advantage"] and not {"name", "objective"} & set(values["objective"])
    after = read_plan(tmp_path).functions
    assert after is not None
    advantage: Any = after.advantage.load()
    assert advantage.decay == 0.5
    assert torch.equal(evaluate_loss(after.objective.load(), *made())[0], evaluate_loss(inner, *made())[0] + bias)


def test_an_unreadable_plan_names_the_version_that_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "plan-0.json"
    written(tmp_path, plan())
    values = read_checked(path) | {"monarch_rl": "0.9.7"}
    wrongs: list[dict[str, Any]] = [{"format": 99}, {"settings": {"gone": 1}}, {"functions": {}}]
    for wrong in wrongs:
        write_checked(path, values | wrong)
        with pytest.raises(ValueError, match="0.9.7"):
            read_plan(tmp_path)
    path.write_text(json.dumps({key: value for key, value in values.items() if key != "normaliser_tokens"}))
    with pytest.raises(ValueError, match="0.9.7.*normaliser_tokens"):
        read_plan(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="plan-0.json.*--journal.mib"):
        read_plan(tmp_path)
    (tmp_path / "rank0").mkdir()
    with pytest.raises(ValueError, match="plan-0.json is missing"):  # there is a journal
        read_plan(tmp_path)
    (tmp_path / "plan-0.pickle").touch()
    with pytest.raises(ValueError, match="plan-0.pickle.*0.1"):
        read_plan(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    write_plan(folder, plan())
    return folder


@given(st.data())
def test_a_damaged_plan_is_named_and_never_read_as_another_one(whole: Path, data: st.DataObject) -> None:
    path = whole / "plan-0.json"
    content = path.read_bytes()
    spoilt = bytearray(content)
    spoilt[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(spoilt)
    try:
        found = read_plan(whole)
    except SettingsError as error:
        assert str(path) in str(error)
    else:  # of white space, or of the checksum's name
        assert trained_as(found) == trained_as(plan()) and found.total_steps == plan().total_steps
    finally:
        path.write_bytes(content)
