from __future__ import annotations

import dataclasses
import pickle
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.tasks.reasoning_gym import (
    MAX_SKIPS,
    SPLIT_DISTANCE,
    Split,
    TaskSettings,
    TaskSource,
    extract_answer,
    score,
)
from monarch_rl.tasks.task import Outcome
from tests import patience

SUMS = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}'


def test_items_repeat_and_score_their_own_answer() -> None:
    task = TaskSettings(config=SUMS, template="{expression} =")
    item = TaskSource(task).item(5)
    assert item == TaskSource(pickle.loads(pickle.dumps(task))).item(5) == TaskSource(task).item(5 + task.train_size)
    assert item.prompt == item.entry["metadata"]["expression"] + " ="
    assert score(task, item.entry, item.answer).reward == 1.0
    assert score(task, item.entry, f"I think <answer> {item.answer} </answer>").reward == 1.0
    assert score(task, item.entry, "no idea").reward == 0.0


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31 - 1))
def test_held_out_questions_are_never_trained(seed: int) -> None:
    task = TaskSettings(config=SUMS, seed=seed, train_size=300, held_out_size=100)
    train, held_out = TaskSource(task), TaskSource(task, "held_out")
    held = {held_out.item(i).entry["question"] for i in range(len(held_out))}
    raw = [
        TaskSource(TaskSettings(config=SUMS, seed=seed, train_size=300, held_out_size=1)).item(i) for i in range(300)
    ]
    warm_up = TaskSource(task, "warm_up")
    trained = {source.item(i).entry["question"] for source in (train, warm_up) for i in range(len(train))}
    assert any(item.entry["question"] in held for item in raw)  # they would be trained without the skipping
    assert not held & trained


def test_splits_do_not_overlap() -> None:
    task = TaskSettings(seed=3)
    assert task.train_size * MAX_SKIPS < SPLIT_DISTANCE
    splits: tuple[Split, ...] = ("train", "held_out", "warm_up")
    here = {TaskSource(task, split).item(i).entry["question"] for split in splits for i in range(50)}
    there = {TaskSource(TaskSettings(seed=99), split).item(i).entry["question"] for split in splits for i in range(50)}
    assert len(here | there) > 290  # chance alone repeats a few


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (TaskSettings(name="chain_sums"), "'chain_sums'.* chain_sum"),
        (TaskSettings(name="xyzzy"), "zebra_puzzles"),
        (TaskSettings(config="{"), "not JSON"),
        (TaskSettings(config="[1]"), "chain_sum: allow_negation, max_digits"),
        (TaskSettings(config='{"seed": 1}'), "settings of chain_sum"),
        (TaskSettings(config='{"min_terms": 0}'), "chain_sum: min_terms"),
        (TaskSettings(config='{"min_terms": "two"}'), "settings of chain_sum"),
        (TaskSettings(config="[" * 100_000), "task.config is not JSON"),
        (TaskSettings(config='{"min_terms": [2]}'), "task.config"),
        (TaskSettings("spell_backward", '{"min_word_len": 90, "max_word_len": 99}'), "task.config"),
        (TaskSettings("spell_backward", '{"data_file": "no such file"}'), "task.config"),
        (TaskSettings(template=""), "task.template '' "),
        (TaskSettings(template="Hello"), "task.template 'Hello' "),
        (TaskSettings(template="{question"), r"task.template '\{question' "),
        (TaskSettings(template="{question.x}"), "task.template .* fit chain_sum"),
        (TaskSettings(template="{question[x]}"), "task.template .* fit chain_sum"),
        (TaskSettings(template="{question:d}"), "task.template .* fit chain_sum"),
        (TaskSettings(template="{question:100000000}"), "task.template .* width '100000000'"),
        (TaskSettings(template="{question:{answer}}"), "task.template .* width"),
        (TaskSettings(template="{question.__class__}"), "task.template .* question.__class__ is a type"),
        (TaskSettings(template="{source_dataset}"), "task.template .* 16 different items, 'chain_sum'"),
        (TaskSettings(template="{}"), "task.template '{}' "),
        (TaskSettings(template="{sum} ="), "fit chain_sum.*'sum'.* expression"),
        (TaskSettings(name="products", config='{"max_digits": 1}', held_out_size=500), "hold out fewer"),
    ],
)
def test_errors_of_bad_settings_are_actionable(task: TaskSettings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskSource(task).check()


def test_an_answer_that_a_data_set_does_not_give_is_no_text() -> None:
    assert TaskSource(TaskSettings("rush_hour")).item(0).answer == ""


def test_a_check_returns_the_first_prompts() -> None:
    prompts = TaskSource(TaskSettings(template="{question:200}")).check()
    assert len(set(prompts)) > 1 and all(len(prompt) >= 200 for prompt in prompts)
    assert len(set(TaskSource(TaskSettings(train_size=1)).check())) == 1


@pytest.mark.parametrize(("field", "value"), [("train_size", 0), ("held_out_size", 0), ("seed", -1)])
def test_numbers_out_of_range_are_refused(field: str, value: Any) -> None:
    named = {"train_size": r"TaskSettings\.train_size", "held_out_size": r"task\.held-out-size", "seed": r"task\.seed"}
    with pytest.raises(ValueError, match=f"{named[field]} "):
        dataclasses.replace(TaskSettings(), **{field: value})


def test_composite_mixes_data_sets() -> None:
    config = '{"datasets": [{"name": "lcm", "weight": 1, "config": {}}, {"name": "gcd", "weight": 1, "config": {}}]}'
    task = TaskSettings(name="composite", config=config, train_size=50, held_out_size=5)
    source = TaskSource(task)
    source.check()
    items = [source.item(i) for i in range(20)]
    assert {item.entry["metadata"]["source_dataset"] for item in items} == {"lcm", "gcd"}
    assert all(score(task, item.entry, item.answer).reward == 1.0 for item in items)


def test_a_pass_mark_makes_the_reward_0_or_1_and_keeps_the_score_as_a_part() -> None:
    task = TaskSettings(name="spell_backward", config='{"min_word_len": 4, "max_word_len": 4}')
    item = TaskSource(task).item(0)
    near = f"{item.answer} and more"
    raw = score(task, item.entry, near)
    assert 0 < raw.reward < 1 and not raw.parts
    for pass_mark, reward in ((raw.reward, 1.0), (1.0, 0.0)):
        passed = score(dataclasses.replace(task, pass_mark=pass_mark), item.entry, near)
        assert passed == Outcome(reward, {"score": raw.reward})


@pytest.mark.parametrize(
    ("text", "answer"),
    [(" 12\n", "12"), ("<answer>1</answer> or <answer> 2\n</answer>", "2"), ("<answer>", "<answer>"), ("", "")],
)
def test_extract_answer(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


def test_import_is_light() -> None:
    heavy = "('torch', 'transformers', 'reasoning_gym')"
    code = f"import sys, monarch_rl.tasks.reasoning_gym; print([m for m in {heavy} if m in sys.modules])"
    done = patience.run([sys.executable, "-c", code])
    assert done.stdout.strip() == "[]", done.stderr
