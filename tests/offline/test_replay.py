"""The functions and settings with which updates are replayed: no ranks are started. tests/recipe/test_recipe.py
replays a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from monarch_rl.algorithms.advantages import SeatBaselines
from monarch_rl.algorithms.group_view import GroupView
from monarch_rl.algorithms.objectives import PolicyGradient, PPOClip
from monarch_rl.checkpoint.journal import JournalReader, JournalWriter, files_of
from monarch_rl.offline.replay import ReplayedStep, functions_of, generation_of
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.trainer.advantages import advantages_of, fingerprint
from monarch_rl.trainer.functions import TrainingFunctions
from monarch_rl.trainer.loss_settings import LossSettings
from monarch_rl.trainer.objective import LossFunction, evaluate_loss, supervised
from monarch_rl.trainer.plan import TrainerPlan, write_plan
from monarch_rl.trainer.settings import TrainerSettings
from tests.checkpoint.test_journal import append, bounds, shards
from tests.trainer.test_objective import made
from tools.replay import exit_code, objective_of, verdict


def plan_of(functions: TrainingFunctions | None = None, loss: LossSettings | None = None) -> TrainerPlan:
    return TrainerPlan(Path("model"), TrainerSettings(loss=loss or LossSettings()), 1, 1.0, 8, functions)


def test_a_replay_resumes_from_the_functions_state() -> None:
    """Also where another objective replaces the run's."""
    # A decay of its own: a process has one object per pickle, so the default's state would reach other tests.
    functions = TrainingFunctions.of(SeatBaselines(decay=0.9), PPOClip(), LossSettings())
    run, groups = functions.load(), [GroupView.of([1.0, 3.0])]
    advantages_of(groups, run.advantage)
    saved = run.state_dict()
    expected = fingerprint(advantages_of(groups, run.advantage))
    other: ByValue[LossFunction] = ByValue(supervised, "the objective")
    for objective in (None, other):
        replayed = functions_of(plan_of(functions), objective, saved)
        assert fingerprint(advantages_of(groups, replayed.advantage)) == expected
    begun = functions_of(plan_of(functions), None, {})
    assert fingerprint(advantages_of(groups, begun.advantage)) != expected


def test_a_replay_takes_objectives_by_name() -> None:
    loss_settings = LossSettings(corrections=())
    plan = plan_of(TrainingFunctions.of("dr_grpo", PolicyGradient(), loss_settings), loss_settings)

    def loss(name: str | None) -> float:
        chosen = None if name is None else objective_of(name, plan)
        return evaluate_loss(functions_of(plan, chosen, {}).objective, *made())[0].item()

    assert loss(None) == loss("pg") != loss("gspo")
    assert functions_of(plan, objective_of("supervised", plan), {}).objective is supervised
    with pytest.raises(ValueError, match="'gsp'"):
        objective_of("gsp", plan)


def test_steps_without_checksums_are_not_reported_as_equal() -> None:
    equal, unknown, other = (ReplayedStep(7, is_equal, {}, {}) for is_equal in (True, None, False))
    assert "checksums" in verdict([unknown]) and "bit for bit" not in verdict([unknown])
    assert exit_code([unknown]) == exit_code([]) == 2
    assert (
        verdict([equal, unknown]).startswith("the weights after 1 of 1 steps are") and exit_code([equal, unknown]) == 0
    )
    assert "the first difference is at step 7" in verdict([equal, other]) and exit_code([other, unknown]) == 1


def test_steps_of_another_recipe_are_not_mixed_with_those_after_it(tmp_path: Path) -> None:
    for generation, versions in enumerate((range(3), range(3, 6))):
        write_plan(tmp_path, replace(plan_of(), generation=generation))
        writer = JournalWriter(tmp_path, 0, 10**6, {"generation": generation, "functions_as": f"recipe {generation}"})
        for version in versions:
            writer.batch(shards(version, 1)[0])
        writer.close()
    reader = JournalReader(tmp_path, 0)
    assert generation_of(tmp_path, reader, 3, 6) == 1
    with pytest.raises(ValueError, match="step 3 .*objective.* step 6"):
        generation_of(tmp_path, reader, 0, 6)


def test_steps_before_a_resume_with_other_ranks_are_not_mixed_with_those_after_it(tmp_path: Path) -> None:
    """Two ranks make steps 1 to 4; the run resumes after step 3, on one rank, and later on one again, with another
    learning rate, which a replay follows."""
    for generation, (ranks, versions) in enumerate(((2, range(4)), (1, range(3, 6)), (1, range(6, 8)))):
        settings = TrainerSettings(ranks=ranks, lr=1e-5 if generation == 2 else 1e-6)
        plan = TrainerPlan(Path("model"), settings, 1, 1.0, 8, generation=generation)
        write_plan(tmp_path, plan)
        writer = JournalWriter(tmp_path, 0, 10**6, {"generation": generation})
        for version in versions:
            writer.batch(shards(version, ranks)[0])
        writer.close()
    reader = JournalReader(tmp_path, 0)
    assert generation_of(tmp_path, reader, 0, 3) == 0
    assert generation_of(tmp_path, reader, 3, 8) == 2
    with pytest.raises(ValueError, match=r"step 3 .* step 5 \(trainer.ranks 2 and 1\)"):
        generation_of(tmp_path, reader, 0, 5)
    with pytest.raises(ValueError, match="step 9"):
        generation_of(tmp_path, reader, 3, 9)


def test_a_damaged_batch_is_named_with_the_steps_that_can_be_replayed(tmp_path: Path) -> None:
    write_plan(tmp_path, plan_of())
    writer = JournalWriter(tmp_path, 0, 10**6, {"generation": 0})
    for version in range(6):
        append(writer, shards(version, 1)[0])
    writer.close()
    (file,) = files_of(tmp_path / "rank0")
    content = bytearray(file.read_bytes())
    place = bounds(file)[1][4][0] + 60  # record 0 describes the writer
    content[place] ^= 1
    file.write_bytes(content)
    reader = JournalReader(tmp_path, 0)
    with pytest.raises(ValueError, match=rf"lacks step 4; it has steps 1 to 3 and 5 to 6\. {file}: record 4, at byte"):
        generation_of(tmp_path, reader, 0, 6)
    assert generation_of(tmp_path, reader, 0, 3) == generation_of(tmp_path, reader, 4, 6) == 0
