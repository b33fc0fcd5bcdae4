"""Rows of prompt and answer: which ones a step has, and how ranks share them. Their gradient is in test_policy.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.episode.shard import SupervisedShard
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.trainer.supervised import SupervisedPlan, SupervisedRows, check_rows, mixed, pack_rows
from tests.trainer.batches import batch, shard
from tests.trainer.test_loss_functions import packed

CPU, BUDGET = torch.device("cpu"), 20
LENGTHS = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=9)


def rows_of(lengths: list[tuple[int, int]], count: int, ranks: int = 1, share: float = 1.0) -> SupervisedRows:
    """Each row's tokens are its number."""
    rows = [{"prompt": [n] * prompt, "answer": [n] * answer} for n, (prompt, answer) in enumerate(lengths)]
    plan = SupervisedPlan(ByValue(rows), count, share)
    return SupervisedRows(plan, lambda row: (row["prompt"], row["answer"]), BUDGET, ranks)


def taken(part: SupervisedShard) -> list[int]:
    """The numbers of the rows of a rank's shard."""
    numbers, start = [], 0
    for tokens, _ in (row for rows in part.lengths for row in rows):
        numbers.append(int(part.token_ids[start]))
        start += tokens
    return numbers


@given(LENGTHS, st.integers(1, 12), st.integers(1, 3), st.integers(1, 3), st.integers(0, 30))
def test_ranks_share_the_rows_of_a_step_and_have_equally_many_microbatches(
    lengths: list[tuple[int, int]], count: int, ranks: int, minibatches: int, cursor: int
) -> None:
    minibatches = min(minibatches, count)
    rows = rows_of(lengths, count, ranks)
    parts = [rows.take(cursor, rank, minibatches) for rank in range(ranks)]
    (alone,) = [rows_of(lengths, count).take(cursor, 0, minibatches)]
    assert all([place for of_microbatch in part.rows for place in of_microbatch] == taken(part) for part in parts)
    assert sorted(number for part in parts for number in taken(part)) == sorted(taken(alone))
    assert {tuple(part.minibatches) for part in parts} == {tuple(parts[0].minibatches)}
    assert sum(rows for _, _, rows in parts[0].minibatches) == count
    packed_parts = [pack_rows(part, CPU) for part in parts]
    for number, (microbatches, tokens, _) in enumerate(parts[0].minibatches):
        own = [of_rank[number] for of_rank in packed_parts]
        assert {len(of_rank) for of_rank in own} == {microbatches}
        assert all(each.num_tokens <= BUDGET and each.supervised for of_rank in own for each in of_rank)
        assert sum(len(each.weights) for of_rank in own for each in of_rank) == tokens, "only tokens of answers"
        weight = sum(float(each.weights.sum()) for of_rank in own for each in of_rank)
        assert weight == pytest.approx(1)


@given(LENGTHS, st.integers(1, 12), st.integers(0, 5))
def test_the_cursor_suffices_to_resume(lengths: list[tuple[int, int]], count: int, steps: int) -> None:
    """In each pass every row occurs once, in another order."""
    whole, resumed = rows_of(lengths, count), rows_of(lengths, count)
    for step in range(steps):
        whole.take(step * count, 0)
    for step in range(steps, 9):
        assert taken(whole.take(step * count, 0)) == taken(resumed.take(step * count, 0))
    size, one_by_one = len(lengths), rows_of(lengths, 1)
    order = [number for cursor in range(3 * size) for number in taken(one_by_one.take(cursor, 0))]
    assert all(sorted(order[start : start + size]) == list(range(size)) for start in range(0, 3 * size, size))


def test_rows_mixed_into_a_batch_have_their_share_of_the_weights() -> None:
    from monarch_rl.algorithms.advantages import dr_grpo

    batches = packed(shard(batch(0), 0, 0, 1, tokens_per_microbatch=50), dr_grpo)
    before = sum(float(each.weights.sum()) for each in batches)
    (together,) = mixed([batches], rows_of([(3, 4), (2, 5)], 4, share=0.25).take(0, 0), CPU)
    assert [each.supervised for each in together] == sorted(each.supervised for each in together)
    assert sum(float(each.weights.sum()) for each in together if not each.supervised) == pytest.approx(0.75 * before)
    assert sum(float(each.weights.sum()) for each in together if each.supervised) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": [1], "answer": [2] * BUDGET},
            rf"\b{BUDGET + 1} tokens.*tokens-per-microbatch\b.*\b{BUDGET}\b",
        ),
        ({"prompt": [], "answer": [2]}, "prompt"),
        ({"prompt": [1]}, "'answer'"),
    ],
)
def test_a_row_that_cannot_be_trained_is_named(row: dict[str, Any], message: str) -> None:
    rows = SupervisedRows(SupervisedPlan(ByValue([row]), 1), lambda row: (row["prompt"], row["answer"]), BUDGET, 1)
    with pytest.raises(ValueError, match=f"supervised row 1 .*{message}"):
        rows.take(0, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no supervised rows"),
        ([None], "row 1: .*mapping"),
        ([{"question": "1+1?", "answer": "2"}], "question, answer"),
        ([{"prompt": "1+1?", "answer": ["2"]}], r"row 1: answer is a list\b.*'2'"),
        (
            [{"prompt": "1+1?", "answer": "2"}] * 3
            + [{"prompt": "1+1?", "answer": None}, {"prompt": None, "answer": ""}],
            "2 of 5 .* row 4: answer is null; row 5: prompt is null",
        ),
        (
            [{"prompt": [{"role": "user", "content": None}], "answer": "2"}],
            r"row 1: prompt .*message 0 \(user\): .* None",
        ),
        ([{"prompt": "1+1?", "answer": "half \ud83d"}], "row 1: column answer .*Unicode"),
    ],
)
def test_rows_of_another_kind_are_refused_before_they_are_sent(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rows(rows)
