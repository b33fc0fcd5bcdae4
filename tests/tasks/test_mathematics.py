"""Mathematical answers, judged by the real library."""

from __future__ import annotations

import asyncio
import importlib.util

import cloudpickle
import pytest

from monarch_rl.errors import ScoringFailed
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.tasks.mathematics import MathReward, are_equal
from monarch_rl.tasks.questions import Questions
from tests.patience import patiently
from tests.rollout.cores import AMPLE_S, with_cores


@pytest.mark.parametrize(
    ("right", "answer", "equal"),
    [
        ("1/2", r"So it is \boxed{\frac{1}{2}}.", True),
        (r"\frac{1}{2}", "The answer is 0.5", True),
        (r"$\frac{3}{6}$", "1/2", True),
        ("12", r"First 10, then \boxed{12}", True),
        ("12", r"\boxed{13}, not 12", False),
        (r"2\sqrt{3}", r"$\sqrt{12}$", True),
        (r"2\sqrt{3}", r"$\sqrt{13}$", False),
        ("x^2 + 2x + 1", r"\boxed{(x+1)^2}", True),
        (r"\{1, 2, 3\}", r"\boxed{\{3, 1, 2\}}", True),
        ("(0, 1]", r"\boxed{(0, 1]}", True),
        ("(0, 1]", r"\boxed{(0, 1)}", False),
        ("1000", "It costs 1,000", True),
        ("5", "I do not know", False),
        ("5", "", False),
    ],
)
def test_answers_are_compared_mathematically(
    right: str, answer: str, equal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert are_equal(right, answer) is equal
    assert not caplog.text  # no warning in every process that time-outs are off


def test_a_row_without_a_mathematical_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="'see text.'"):
        are_equal("see text.", "5")


def test_it_runs_in_a_scoring_process_where_endless_evaluation_fails_only_its_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_cores(monkeypatch)
    reward = cloudpickle.loads(cloudpickle.dumps(MathReward("solution")))
    row = {"problem": "?", "solution": "8"}
    task = Questions([row], MathReward("solution"), template="{problem}")
    assert task.warm_up is not None

    async def scores() -> tuple[float, str, float]:
        scorer = Scorer(1, AMPLE_S, warm_up=task.warm_up)
        try:
            first = await scorer.score(reward, row, r"\boxed{2^3}")
            scorer.deadline_s = 2.0
            with pytest.raises(ScoringFailed) as raised:
                await scorer.score(reward, row, r"\boxed{9^{9^{9^{9}}}}")
            scorer.deadline_s = AMPLE_S
            last = await scorer.score(reward, row, r"\boxed{7}")
        finally:
            await asyncio.to_thread(scorer.close)
        return first.reward, raised.value.reason, last.reward

    assert asyncio.run(patiently(scores(), "the scores", 400)) == (1.0, "score took over 2 s", 0.0)


def test_without_the_library_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="math-verify"):
        MathReward()
