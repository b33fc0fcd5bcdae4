"""A user's own rows: which are used, in which order, and how they are rewarded."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lines import ROOT, TASKS, statement_lines
from monarch_rl.model.messages import as_messages, system, user
from monarch_rl.tasks.questions import Questions
from monarch_rl.tasks.rows import data_set, jsonl, parquet
from monarch_rl.tasks.task import Outcome, Task, as_outcome

ROWS: list[dict[str, Any]] = [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(20)]


def reward(row: dict[str, Any], answer: str) -> float:
    return float(answer.strip() == row["answer"])


def held_out_rows(task: Questions) -> list[Any]:
    items = task.held_out_items()
    return [items[index] for index in range(len(items))]


def cursors(task: Questions, count: int) -> list[str]:
    return [task.items(cursor)["question"] for cursor in range(count)]


@given(rows=st.integers(2, 30), share=st.floats(0, 0.9), seed=st.integers(0, 3))
def test_each_row_that_is_not_held_out_is_used_once_per_epoch(rows: int, share: float, seed: int) -> None:
    count = int(rows * share)
    task = Questions(ROWS[:rows] if rows <= 20 else ROWS, reward, held_out=min(count, 19), seed=seed)
    used = ROWS[: min(rows, 20)]
    held_out = {row["question"] for row in held_out_rows(task)} if count else set()
    size = len(used) - len(held_out)
    first, second = cursors(task, 2 * size)[:size], cursors(task, 2 * size)[size:]
    assert set(first) == set(second) == {row["question"] for row in used} - held_out
    assert len(set(first)) == len(first) == size
    assert task.epoch is not None and task.epoch() == size
    again = cloudpickle.loads(cloudpickle.dumps(task))
    assert cursors(again, 2 * size) == first + second  # in every process


def test_the_number_of_held_out_rows_may_be_a_numpy_integer() -> None:
    assert len(held_out_rows(Questions(ROWS, reward, held_out=np.int64(3)))) == 3  # type: ignore[arg-type]


def test_the_order_differs_by_epoch_and_by_seed() -> None:
    task, other = Questions(ROWS, reward), Questions(ROWS, reward, seed=1)
    assert len({tuple(cursors(task, 60)[i : i + 20]) for i in (0, 20, 40)} | {tuple(cursors(other, 20))}) == 4


def test_no_row_with_a_held_out_prompt_is_trained() -> None:
    doubled = [*ROWS, *({**row, "number": 2} for row in ROWS)]
    task = Questions(doubled, reward, held_out=5)
    held_out = {row["question"] for row in held_out_rows(task)}
    assert held_out and not held_out & set(cursors(task, 40))
    assert task.epoch is not None and task.epoch() == 40 - 2 * len(held_out)
    named = Questions(ROWS, reward, held_out={"easy": ROWS[:2], "hard": ROWS[5:6]})
    assert list(named.held_out) == ["easy", "hard"] and len(set(cursors(named, 17))) == 17
    assert named.held_out_items()[1] == ROWS[1] and named.held_out_items("hard")[0] == ROWS[5]
    with pytest.raises(ValueError, match="'other'.* easy, hard"):
        named.held_out_items("other")


def test_rows_come_from_files_and_from_datasets(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    splits = DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:2])})
    splits.save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "files").mkdir()
    shutil.copy(tmp_path / "rows.jsonl", tmp_path / "files" / "train.jsonl")
    sources = [
        ROWS,
        jsonl(tmp_path / "rows.jsonl"),
        parquet(tmp_path / "rows.parquet"),
        Dataset.from_list(ROWS),
        data_set(tmp_path / "saved"),
        data_set(tmp_path / "splits"),
        data_set(tmp_path / "files", cache_dir=str(tmp_path / "cache")),
    ]
    orders = [cursors(Questions(rows, reward, held_out=3), 34) for rows in sources]
    assert all(order == orders[0] for order in orders)
    assert len(data_set(tmp_path / "splits", split="test")) == 2
    for stored in (sources[1], sources[2], *sources[4:]):
        assert len(pickle.dumps(stored)) < 1000  # only the location is pickled
        assert pickle.loads(pickle.dumps(stored))[3] == ROWS[3]


def test_a_data_set_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "saved"
    splits = DatasetDict({"train": Dataset.from_list(ROWS)})
    splits.save_to_disk(str(saved))
    with pytest.raises(ValueError, match=f"{saved}, split test "):
        Questions(data_set(saved, split="test"), reward).check()
    with pytest.raises(ValueError, match=r"/none \(main\), split train "):
        Questions(data_set(f"{tmp_path}/none", "main"), reward).check()
    travelling = data_set(saved)
    assert len(travelling) == 20
    travelled = pickle.dumps(travelling)
    shutil.rmtree(saved)
    DatasetDict({"train": Dataset.from_list(ROWS[:5])}).save_to_disk(str(saved))
    with pytest.raises(ValueError, match=" 5 rows, .* 20 "):
        len(pickle.loads(travelled))
    shutil.rmtree(saved)
    DatasetDict({"train": Dataset.from_list([*ROWS[:19], ROWS[19] | {"answer": "other"}])}).save_to_disk(str(saved))
    with pytest.raises(ValueError, match="other rows"):
        len(pickle.loads(travelled))
    shutil.rmtree(saved)
    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(str(saved))  # the same rows, written again
    assert len(pickle.loads(travelled)) == 20
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install datasets"):
        data_set(saved)


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        ([], {}, "no rows"),
        (ROWS, {"template": "{question"}, "not a valid template"),
        (ROWS, {"template": "{word}"}, "answer, question"),
        (ROWS, {"template": "hello"}, "no field"),
        (ROWS, {"held_out": 20}, "none to train on"),
        (ROWS, {"held_out": -1}, "none to train on"),
        (ROWS, {"held_out": 0.1}, "got 0.1"),
        (ROWS, {"held_out": {"all": ROWS}}, "left to train on"),
    ],
)
def test_errors_of_bad_rows_are_actionable(rows: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Questions(rows, reward, **more).check()


def test_a_column_that_is_not_text_is_refused_in_a_template(tmp_path: Path) -> None:
    """It would be trained on as the repr of a list."""
    chats = [
        {"prompt": [{"role": "user", "content": f"{i} + 1 ="}], "extra": {"level": i}, "answer": str(i)}
        for i in range(3)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), tmp_path / "chats.parquet")
    for rows in (chats, parquet(tmp_path / "chats.parquet"), Dataset.from_list(chats)):
        for template, column in (("{prompt[0]}", r"prompt\[0\]"), ("{extra:>9}", "extra"), ("Q: {prompt}", "prompt")):
            with pytest.raises(ValueError, match=f"3 of 3 rows .*: {column} is "):
                Questions(rows, reward, template=template).check()
        named = Questions(rows, reward, template="{prompt[0][content]} {extra[level]:>2} {answer}").check()
        assert sorted(named) == [f"{i} + 1 =  {i} {i}" for i in range(3)]
        written = Questions(rows, reward, template="{prompt!r}").check()
        assert sorted(written) == [repr(row["prompt"]) for row in chats]
    with pytest.raises(ValueError, match=" bytes, not text"):
        Questions([{"question": b"2 + 2"}], reward).check()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}\n[1]\n", "line 2 is not a JSON object"),
        ("{}\n{", "line 2 is not JSON in UTF-8, from byte 3 "),
        ("{}\n" + "[" * 10**5, "line 2 "),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=f"{file}.*{message}"):
        Questions(jsonl(file), reward).check()


@pytest.mark.parametrize("read_before", [False, True])
def test_a_file_that_changes_in_a_run_is_refused(tmp_path: Path, read_before: bool) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROWS[0]))
    rows = jsonl(file)
    if read_before:
        assert len(rows) == 1
    travelled = pickle.dumps(rows)
    assert list(pickle.loads(travelled)) == ROWS[:1]
    for other in (ROWS[10], ROWS[1]):  # of another size, and of the same one
        file.write_text(json.dumps(other))
        with pytest.raises(ValueError, match="has changed"):
            len(pickle.loads(travelled))


class Policy:
    """Answers "12"."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    async def reply(self, messages: Any) -> Any:
        self.given += as_messages(messages)
        return type("Reply", (), {"text": "12"})

    async def in_scorer(self, function: Any, *args: Any) -> Outcome:
        self.given.append(function)
        return as_outcome(function(*args))


def test_a_function_runs_in_a_scoring_process_and_a_coroutine_in_the_worker() -> None:
    async def own(row: dict[str, Any], answer: str) -> dict[str, float]:
        return {"right": reward(row, answer), "short": 0.5}

    def run_episode(task: Questions, row: dict[str, Any], policy: Policy) -> Any:
        async def episode() -> Any:
            return await task.episode(row, policy)

        return asyncio.run(episode())

    policy = Policy()
    outcome = run_episode(Questions(ROWS, reward, system="Be brief."), ROWS[11], policy)
    assert outcome == Outcome(1.0) and policy.given == [system("Be brief."), user("11 + 1 ="), reward]
    policy = Policy()
    outcome = run_episode(Questions(ROWS, own, template="Q: {question}"), ROWS[3], policy)
    assert outcome == Outcome(0.5, {"right": 0.0, "short": 0.5}) and policy.given == [user("Q: 3 + 1 =")]


def test_a_column_of_messages_is_given_to_the_policy_as_messages() -> None:
    """As TRL stores them."""
    row: dict[str, Any] = {
        "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "11 + 1 ="}],
        "answer": "12",
    }

    async def play(task: Questions, policy: Policy) -> Any:
        return await task.episode(row, policy)

    policy = Policy()
    assert asyncio.run(play(Questions([row], reward, template="{prompt}"), policy)) == Outcome(1.0)
    assert policy.given == [*as_messages(row["prompt"]), reward]
    others = [row | {"prompt": [*row["prompt"], {"role": "user", "content": str(number)}]} for number in range(3)]
    task = Questions([*others, row], reward, template="{prompt}", held_out={"test": [row, others[1]]})
    assert [task.items(cursor) for cursor in range(2)] in ([others[0], others[2]], [others[2], others[0]])


async def not_awaited(*row: Any) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"system": None}, "system"),
        ({"template": None}, "template"),
        ({"warm_up": not_awaited}, "not_awaited"),
        ({"warm_up": lambda device: None}, "warm_up"),
        ({"check_row": lambda row, index: None}, "check_row"),
        ({"check_row": not_awaited}, "not_awaited"),
        ({"items": [1, 2]}, "items"),
        ({"items": lambda: 1}, "items"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_by_name(wrong: dict[str, Any], named: str) -> None:
    def graded(row: dict[str, Any], answer: str) -> float:
        return 1.0

    async def episode(item: Any, policy: Any) -> float:
        return 1.0

    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=named):
        if name == "items":
            Task(value, episode)
        if name in ("warm_up", "check_row"):
            setattr(graded, name, value)
            wrong = {}
        Questions([{"question": "1"}], graded, **wrong)


def test_an_unawaited_coroutine_is_refused_as_a_reward() -> None:
    async def judged(row: dict[str, Any], answer: str) -> float:
        return 1.0

    reward: Any = lambda row, answer: judged(row, answer)  # noqa: E731  so it does not look like a coroutine
    with pytest.raises(TypeError, match="async def"):
        as_outcome(reward({}, ""))


def test_a_recipe_with_its_own_data_and_reward_has_20_lines() -> None:
    """Statements, without imports and docstrings. benchmarks/README.md has the counts of other libraries."""
    counts = {task: [len(statement_lines(program)) for _, program in programs] for task, programs in TASKS.items()}
    assert counts["rows and a reward of one's own"][0] <= 20
    assert len(statement_lines(ROOT / "recipes" / "own_data.py")) <= 20 + 10, "a warm start in ten lines more"
    table = (ROOT / "benchmarks" / "README.md").read_text()
    for task, (ours, trl, verifiers) in counts.items():
        assert f"| {task} | {ours} | {trl} | {verifiers} |" in table
