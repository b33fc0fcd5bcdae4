"""Which steps of a journal a rank replays after a checkpoint. tests/recipe/test_resume.py has runs that do."""

from __future__ import annotations

import logging
import os
import resource
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from monarch_rl.algorithms.objectives import PPOClip
from monarch_rl.checkpoint import journal as journal_module
from monarch_rl.checkpoint.journal import JournalBatch, JournalWriter, Made
from monarch_rl.pipeline.replayed_steps import common_batches, replay_summary
from monarch_rl.trainer import step_journal
from monarch_rl.trainer.functions import TrainingFunctions
from monarch_rl.trainer.loss_settings import LossSettings
from monarch_rl.trainer.plan import TrainerPlan, read_plan, trained_as, write_plan
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.trainer.step_journal import EarlierSteps, StepJournal
from tests import patience
from tests.checkpoint.test_journal import shards

PLAN = TrainerPlan(Path("model"), TrainerSettings(ranks=1), 1, 1.0, 8, generation=2)
WEIGHTS = np.arange(3)
"""Checksums of the rank's weights."""
RANK: Any = SimpleNamespace(rank=0, settings=SimpleNamespace(tp=1))


@pytest.fixture(autouse=True)
def weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_journal, "weights_checksums", lambda policy: WEIGHTS)
    monkeypatch.setattr(journal_module, "END_S", 600.0)  # wait for a slow disk


def journal(folder: Path, *generations: tuple[TrainerPlan, list[int]], made: np.ndarray = WEIGHTS) -> Path:
    """By generation: its plan, and the versions whose batch it has; the steps of negative ones did not end."""
    for generation, (plan, versions) in enumerate(generations):
        write_plan(folder, replace(plan, generation=generation))
        writer = JournalWriter(folder, 0, 10**6, {"generation": generation, "trained_as": trained_as(plan)})
        for version in versions:
            patience.wait_until(writer._waiting.empty, "room for a batch", every_s=0.001)
            writer.batch(shards(abs(version), 1)[0])
            if version >= 0:
                writer.made(version, Made(made, {}))
        writer.close()
    return folder


def versions(folder: Path, checkpoint: int, generation: int) -> list[int]:
    return [batch.version for batch in EarlierSteps(folder, PLAN, RANK, checkpoint, generation).replayable]


def test_batches_that_follow_the_checkpoint_without_a_gap_are_replayable(tmp_path: Path) -> None:
    """A run that was resumed from version 4, after it had made version 6."""
    folder = journal(tmp_path, (PLAN, [0, 1, 2, 3, 4, 5, 6]), (PLAN, [4, 5, 7]))
    assert versions(folder, 2, 0) == versions(folder, 2, 0) == [2, 3, 4, 5]
    assert versions(folder, 4, 1) == [4, 5] and versions(folder, 6, 1) == []
    assert versions(folder, 3, 1) == [], "generation 0 took that batch after another version 3"
    earlier = EarlierSteps(folder, PLAN, RANK, 2, 0)
    assert earlier.batch(5).version == 5 and earlier.equal(5) is True


def test_a_journal_of_other_weights_is_not_replayed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = journal(tmp_path, (PLAN, [0, 1, 2]), made=WEIGHTS + 1)
    with caplog.at_level(logging.WARNING):
        assert versions(folder, 2, 0) == [] and versions(folder, 0, 0) == [0, 1, 2]
    assert "other weights" in caplog.text


def test_a_plan_that_the_disk_refuses_costs_neither_the_run_nor_a_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy: Any = SimpleNamespace(rank=0, world_size=1, settings=SimpleNamespace(tp=1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        begun = StepJournal.begin(tmp_path, 10**6, replace(PLAN, generation=1), policy)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    begun.took(shards(2, 1)[0])
    begun.made(2, {})
    begun.close()
    assert "plan-1.json" in caplog.text and begun.lost == 0
    assert versions(tmp_path, 2, 1) == [2]
    with pytest.raises(ValueError, match=r"plan-1\.json"):
        read_plan(tmp_path, 1)


def test_a_batch_whose_step_never_ended_is_replayed_once(tmp_path: Path) -> None:
    """It may have ended the run."""
    once = journal(tmp_path / "once", (PLAN, []), (PLAN, [2, 3, -4]))
    assert versions(once, 2, 1) == [2, 3, 4]
    twice = journal(tmp_path / "twice", (PLAN, [2, 3, -4]), (PLAN, []))
    assert versions(twice, 2, 0) == [2, 3]


def test_batches_for_other_ranks_or_functions_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    two = replace(PLAN, settings=TrainerSettings(ranks=2))
    own = replace(PLAN, functions=TrainingFunctions.of(lambda group: group.rewards, PPOClip(), LossSettings()))
    folder = journal(tmp_path, (two, [0, 1]), (PLAN, [2, 3]))
    with caplog.at_level(logging.WARNING):
        assert versions(folder, 1, 0) == [] and versions(folder, 2, 0) == [2, 3]
    assert "step 2 is not replayed" in caplog.text
    assert len({trained_as(plan) for plan in (PLAN, two, own, replace(own, total_steps=9))}) == 3


CODE = """
import sys
from monarch_rl.algorithms.functions import code_of
exec(compile(sys.argv[1], "recipe.py", "exec"))
print(code_of(objective))
"""


def test_an_objective_edited_in_place_counts_as_another_one() -> None:
    """The same objective has the same code in every process, whatever its hash seed."""

    def code(body: str, seed: int) -> str:
        text = f"def objective(batch):\n    return [{body} for column in batch if column in {{'a', 'b', 'c', 'd'}}]"
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        command = [sys.executable, "-c", CODE, text]
        done = patience.run(command, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = code("2 * column", 1)
    assert len(first) > 32 and first == code("2 * column", 2) == code("2 * column", 3) != code("3 * column", 1)


def test_checksums_from_before_a_rollback_are_not_compared(tmp_path: Path) -> None:
    """For a rank that writes no batches, like a tensor-parallel neighbour, nothing shows that they were replaced."""
    folder = journal(tmp_path, (PLAN, [0, 1, 2]), made=WEIGHTS + 1)
    assert versions(folder, 2, 1) == [], "the batch is of generation 0"
    assert EarlierSteps(folder, PLAN, RANK, 2, 1)._is_equal(1, 1) is None


def test_batches_from_before_a_resume_without_the_journal_do_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint's own weights are compared nevertheless."""
    folder = journal(tmp_path / "equal", (PLAN, [0, 1, 2, 3]))
    assert versions(folder, 2, 0) == [2, 3]
    with caplog.at_level(logging.WARNING):
        assert EarlierSteps(folder, PLAN, RANK, 2, 0, since=1).replayable == [] and not caplog.text
        other = journal(tmp_path / "other", (PLAN, [0, 1, 2]), made=WEIGHTS + 1)
        assert EarlierSteps(other, PLAN, RANK, 2, 0, since=1).replayable == []
    assert "other weights" in caplog.text


def test_ranks_replay_the_batches_that_all_of_them_have() -> None:
    first, second, other = JournalBatch(4, 0, 11), JournalBatch(5, 0, 12), JournalBatch(5, 1, 13)
    assert common_batches([[first, second], [first, second]]) == 2
    assert common_batches([[first, second], [first, other]]) == 1, "each took another batch as its last one"
    assert common_batches([[first, second], [first]]) == 1 and common_batches([[first], []]) == 0


def test_the_replay_summary_reports_the_comparison_of_weights() -> None:
    assert replay_summary("step 3", [None]).endswith("; the journal has no checksums to compare the weights with")
    assert replay_summary("steps 3 to 5", [True, True, None]).endswith("bit for bit, after all 2 that can be compared")
    assert replay_summary("steps 3 to 5", [True, False, None]).endswith("differ after 1 of 2 that can be compared")
