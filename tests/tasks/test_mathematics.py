"""Mathematical answers, judged by the real library."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from fractions import Fraction
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pytest

from monarch_rl.errors import ScoringFailed
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.tasks import mathematics
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
        ("2", r"\boxed{1}. No, wait. \boxed{2}", True),
        ("1, 2", r"\boxed{1}. No, wait. \boxed{2}", False),
        ("2", r"$\boxed{1}$, $\boxed{2}$", True),
        ("2", r"\boxed{1} and \boxed{\text{so } \boxed{2}}", True),
        ("1, 2", r"\boxed{1, 2}", True),
        (r"\{1, 2\}", r"\boxed{3}, \boxed{\{2, 1\}}", True),
        ("2", r"\boxed{2}, or \boxed{", False),  # cut off
        ("2", r"2 \boxed{}", False),
        (r"We add: \boxed{1}, then \boxed{2}.", r"\boxed{2}", True),
        ("1e-05", r"\boxed{0.00001}", True),
        ("0.00002", "It is 2e-5.", True),
        ("1e16", r"\boxed{10^{16}}", True),
        ("0.0000001", r"\boxed{2 \times 10^{-7}}", False),
        (r"2 \times 10^{-7}", "0.0000003", False),
        ("0.333333", r"\frac{1}{3}", True),
        (r"\$18.90", r"\boxed{\$18.90}", True),
        (r"\$32,\!348", r"\boxed{32348}", True),
        (r"\$18.90", r"\boxed{\$18.09}", False),
        ("42", r"So \fbox{42}. I checked it for 7.", True),
        (r"So $x + 1 = 6$ and \fbox{5}.", r"\boxed{5}", True),
        (r"So $x + 1 = 6$ and \fbox{5}.", r"\boxed{6}", False),
        ("5", r"\boxed {5}", True),
        ("5", r"\boxed 5", True),
        ("5", r"\boxed{5.}", True),
        ("1, 2", r"\boxed{1, 2.}", True),
        ("1234567", r"\boxed{1\,234\,567}", True),
        (r"1\,234", r"\boxed{235}", False),  # 1 + 234
        ("(1, 200)", r"\boxed{(1,\,200)}", True),
    ],
)
def test_answers_are_compared_mathematically(
    right: str, answer: str, equal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert are_equal(right, answer) is equal
    assert not caplog.text  # no warning in every process that time-outs are off


def test_the_last_box_of_many_that_are_not_closed_is_found_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    class Braces:
        read = 0

        def finditer(self, text: str, start: int = 0) -> Iterator[re.Match[str]]:
            for brace in re.finditer(r"\\[{}\\]|[{}]", text[start:]):
                Braces.read += 1
                yield brace

    monkeypatch.setattr(mathematics, "_BRACE", Braces())
    assert are_equal("5", r"\boxed{" * 1000 + r"\boxed{5}")
    assert not are_equal("5", r"\boxed{" * 1000)
    assert Braces.read < 10_000


def test_a_row_without_a_mathematical_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="'see text.'"):
        are_equal("see text.", "5")
    with pytest.raises(ValueError, match=r"column solution\b.*'see text.'"):
        MathReward("solution")({"solution": "see text."}, "5")


@pytest.mark.parametrize(
    ("right", "answer", "reward"),
    [
        (0.00001, r"\boxed{0.00001}", 1.0),
        (0.00001, r"\boxed{0.00002}", 0.0),
        (2.5e-05, r"\boxed{2.5 \times 10^{-5}}", 1.0),
        (1e16, r"\boxed{10^{16}}", 1.0),
        (1 / 3, r"\boxed{\frac{1}{3}}", 1.0),
        (5, "5.0", 1.0),
        (np.int64(5), "5", 1.0),
        (np.float32(0.1), r"\frac{1}{10}", 1.0),
        (Decimal("1.50"), "3/2", 1.0),
        (Fraction(1, 3), r"\frac{1}{3}", 1.0),
    ],
    ids=repr,
)
def test_the_right_answer_may_be_a_number(right: Any, answer: str, reward: float) -> None:
    MathReward("solution").check_row({"solution": right})
    assert MathReward("solution")({"solution": right}, answer) == reward


@pytest.mark.parametrize(
    "right",
    [
        None,
        float("nan"),
        float("inf"),
        pd.NA,
        np.float32("nan"),
        Decimal("sNaN"),
        np.True_,
        "<NA>",
        "",
        " ",
        "nan",
        r"So \boxed{None}.",
        True,
        ["5"],
        date(2026, 5, 1),
    ],
    ids=repr,
)
def test_a_row_without_a_right_answer_is_refused_before_the_run_and_by_the_reward(right: Any) -> None:
    """It is a fault of the row: no answer is equal to it, whatever its text."""
    rows = [{"problem": "2 + 3 =", "solution": 5}, {"problem": "5 =", "solution": right}]
    for answer in (r"\boxed{5}", rf"\boxed{{{right}}}", "2016"):
        with pytest.raises(ValueError, match="column solution"):
            MathReward("solution")(rows[1], answer)
    with pytest.raises(ValueError, match="1 of 2 rows .*row 2: .*column solution"):
        Questions(rows, MathReward("solution"), template="{problem}").check()
    with pytest.raises(ValueError, match=r"column solution\b.* problem"):
        MathReward("solution").check_row({"problem": "5 ="})


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
