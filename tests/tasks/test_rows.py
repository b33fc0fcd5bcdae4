"""The same row from every source; rows that are typed, incomplete or unusable."""

from __future__ import annotations

import datetime
import json
import tempfile
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from monarch_rl.model.messages import as_messages
from monarch_rl.tasks.questions import Questions, prompt_of
from monarch_rl.tasks.rows import data_set, jsonl, parquet
from monarch_rl.tasks.template import as_text, fill

Colour = Enum("Colour", {"RED": "red"}, type=str)
Share = Enum("Share", {"HALF": 0.5}, type=float)
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6)
NUMBER = st.integers(-(2**53), 2**53) | st.floats(-1e300, 1e300).filter(lambda number: number != int(number))


def optional(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Mappings of which each key may be missing."""
    return st.fixed_dictionaries({}, optional=values)


ARGUMENTS = optional(count=NUMBER, city=TEXT, where=optional(street=TEXT, number=NUMBER))
CALL = st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": TEXT, "arguments": ARGUMENTS})})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": TEXT},
    optional={"name": TEXT, "tool_calls": st.lists(CALL, max_size=2)},
)
PARAMETER = optional(type=TEXT, description=TEXT, minimum=NUMBER, enum=st.lists(TEXT, max_size=2))
TOOL = st.fixed_dictionaries({"name": TEXT}, optional={"parameters": optional(a=PARAMETER, b=PARAMETER)})
ROW = st.fixed_dictionaries(
    {"question": TEXT, "number": NUMBER, "messages": st.lists(MESSAGE, min_size=1, max_size=3)},
    optional={
        "hint": TEXT | st.none(),
        "tools": st.lists(TOOL, max_size=2),
        "extra": optional(level=NUMBER, unit=TEXT),
    },
)
FUNCTION = {"name": "f", "arguments": {"count": 0, "city": "Oslo", "where": {"street": "a", "number": 1}}}
SCHEMA = {"type": "integer", "description": "a", "minimum": 0, "enum": ["a"]}
WHOLE: dict[str, Any] = {
    "question": "1+1",
    "number": 2.5,
    "hint": "two",
    "messages": [{"role": "user", "content": "?", "name": "me", "tool_calls": [{"function": FUNCTION}]}],
    "tools": [{"name": "add", "parameters": {"a": SCHEMA, "b": SCHEMA}}],
    "extra": {"level": 1, "unit": "m"},
}
"""Has all columns and keys: pyarrow takes the columns of the first row, and parquet has no type without keys."""


@settings(max_examples=15, deadline=None, phases=[Phase.generate])  # shrinking would write files for minutes
@given(st.lists(ROW, min_size=1, max_size=3))
def test_a_row_is_the_same_from_every_source(rows: list[dict[str, Any]]) -> None:
    """Prompt, messages and tools, and so the reward."""
    rows = [WHOLE, WHOLE | {"number": -(2**53)}, *rows]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
        written = list(jsonl(folder / "rows.jsonl"))
        for source in parquet(folder / "rows.parquet"), Dataset.from_list(rows):
            task = Questions(source, lambda row, answer: 0.0, held_out={"all": source})
            for index, one in enumerate(written):
                other = task.held_out_items()[index]
                assert set(one) == set(other) == set(WHOLE)
                for column in WHOLE:  # the order of keys is the source's
                    assert json.dumps(one[column], sort_keys=True) == json.dumps(other[column], sort_keys=True)
                assert prompt_of("{number}: {question}", one) == prompt_of("{number}: {question}", other)
                assert prompt_of("{messages}", one) == prompt_of("{messages}", other) == as_messages(other["messages"])
    assert written[0] == WHOLE


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00001, "0.00001"),
        (2.5e-05, "0.000025"),
        (1e16, "10000000000000000"),
        (1e22, "10000000000000000000000"),
        (3.0, "3"),
        (-0.0, "0"),
        (0.1, "0.1"),
        (np.float64(0.1), "0.1"),
        (np.float32(0.1), "0.1"),
        (np.int64(3), "3"),
        (np.str_("a"), "a"),
        (np.bool_(True), "True"),
        (np.array(7), "7"),
        (Decimal("1.50"), "1.50"),
        (Decimal("1E-7"), "0.0000001"),
        (Fraction(1, 3), "1/3"),
        (datetime.date(2026, 5, 1), "2026-05-01"),
        (True, "True"),
        (Colour.RED, "red"),
        (Share.HALF, "0.5"),
        ("1e-05", "1e-05"),
    ],
    ids=repr,
)
def test_the_text_of_a_value_is_what_a_person_would_write(value: Any, text: str) -> None:
    assert as_text(value) == text == fill("{value}", {"value": value})


@given(st.floats(allow_nan=False, allow_infinity=False) | st.decimals(allow_nan=False, allow_infinity=False))
def test_the_text_of_a_number_gives_the_same_number_without_an_exponent(number: float | Decimal) -> None:
    text = as_text(number)
    assert type(number)(text) == number and set(text) <= set("-.0123456789")


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (2.5e-05, ">10", "  0.000025"),
        (2.5e-05, ".1e", "2.5e-05"),
        (1 / 3, ".2f", "0.33"),
        (0.5, "%", "50.000000%"),
        (1e6, ",", "1,000,000"),
        (pd.Timestamp("2026-05-01 10:00"), "%d.%m.%Y", "01.05.2026"),
        (np.datetime64("2026-05-01T10:00", "ns"), "%H:%M", "10:00"),
        (np.int64(3), "03d", "003"),
        (True, ">6", "  True"),
        (np.True_, "6", "True  "),
        (True, "d", "1"),
        (datetime.date(2026, 5, 1), ">12", "  2026-05-01"),
        (Fraction(1, 3), ">4", " 1/3"),
    ],
)
def test_a_format_specification_is_pythons(value: Any, form: str, text: str) -> None:
    assert fill(f"{{value:{form}}}", {"value": value}) == text


@pytest.mark.parametrize(
    "value",
    [
        *(None, float("nan"), np.float32("nan"), Decimal("nan"), pd.NA, pd.NaT, np.datetime64("NaT")),
        *("", "  \n", float("inf"), [1], {"a": 1}, b"a", np.array([1]), NotImplemented, int, "half \ud83d"),
        *(datetime.datetime(2026, 5, 1), pd.Timestamp("2026-05-01"), np.datetime64("2026-05-01", "ns")),
        datetime.timedelta(1),
    ],
    ids=ascii,
)
def test_a_value_that_is_no_text_is_refused_in_a_prompt(value: Any) -> None:
    for template in ("{value}", "Q: {value}\nA:"):
        with pytest.raises(ValueError) as raised:
            fill(template, {"value": value, "other": "x"})
        assert str(raised.value).isascii()
    assert fill("{other}", {"value": value, "other": "x"}) == "x"


def test_one_empty_field_among_others_is_no_fault() -> None:
    assert fill("{task}\n{input}", {"task": "Add.", "input": ""}) == "Add.\n"


def test_numbers_of_single_precision_are_those_that_were_written(tmp_path: Path) -> None:
    kinds = {"x": pyarrow.float32(), "xs": pyarrow.list_(pyarrow.float32()), "y": pyarrow.float64()}
    written = {"x": 0.1, "xs": [2.5e-05, 0.3], "y": float(np.float32(0.1))}
    table = pyarrow.Table.from_pylist([written, {"x": None}], pyarrow.schema(kinds))
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    rows = parquet(tmp_path / "rows.parquet")
    assert rows[0] == written and rows[1]["x"] is None
    task = Questions(Dataset(table), reward, template="{x}")
    assert written in (task.items(0), task.items(1))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pyarrow.float16(), 0.1),
        (pyarrow.dictionary(pyarrow.int8(), pyarrow.float32()), 0.1),
        (pyarrow.list_(pyarrow.float32()), [0.1]),
        (pyarrow.struct({"one": pyarrow.float32(), "two": pyarrow.float64()}), {"one": 0.1, "two": 0.123456789012}),
        (pyarrow.struct({"double": pyarrow.list_(pyarrow.float32())}), {"double": [0.1]}),
        (pyarrow.map_(pyarrow.string(), pyarrow.float32()), {"a": 0.1}),
    ],
    ids=str,
)
def test_each_number_of_a_column_has_its_own_precision(kind: Any, value: Any, tmp_path: Path) -> None:
    given = list(value.items()) if pyarrow.types.is_map(kind) else value
    of = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    column = pyarrow.array([given], of)
    table = pyarrow.table({"x": column.dictionary_encode() if of != kind else column})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert parquet(tmp_path / "rows.parquet")[0] == {"x": value}


def test_a_mapping_with_a_key_twice_is_refused_with_its_file(tmp_path: Path) -> None:
    kind = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    pyarrow.parquet.write_table(
        pyarrow.table({"limits": pyarrow.array([[("a", 1), ("a", 2)]], kind)}), tmp_path / "rows.parquet"
    )
    with pytest.raises(ValueError, match=r"rows\.parquet .*'a'"):
        len(parquet(tmp_path / "rows.parquet"))


class Numbered:
    """Makes a row for any number, and says how many there are, as data sets of PyTorch do."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: Any) -> Any:
        assert index < 9
        return {"question": f"{index} + 1 ="}


def test_rows_that_never_end_are_as_many_as_they_say() -> None:
    assert len(Questions(Numbered(), reward).check()) == 5  # type: ignore[arg-type]


def test_text_of_a_parquet_file_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    texts = pyarrow.array([b"1+1=", b"caf\xe9"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"number": [1, 2], "question": texts}), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"rows\.parquet .* row 2 .*column question"):
        Questions(parquet(tmp_path / "rows.parquet"), reward).check()


def test_keys_of_a_map_are_those_of_a_json_object(tmp_path: Path) -> None:
    kind = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    table = pyarrow.table({"limits": pyarrow.array([[("a", 1), ("b", None)]], kind)})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert parquet(tmp_path / "rows.parquet")[0] == {"limits": {"a": 1}}


ROWS = [{"question": f"{number} + 1 =", "answer": str(number + 1)} for number in range(16)]


def reward(row: Any, answer: str) -> float:
    return float(answer == row["answer"])


@pytest.mark.parametrize("missing", [None, float("nan"), ""], ids=repr)
def test_rows_without_a_question_are_counted_and_numbered_before_the_run(missing: Any, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [*ROWS[:8], *({"question": missing, "answer": "0"} for _ in range(8))]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for source in rows, jsonl(tmp_path / "rows.jsonl"):
        for more in ({}, {"held_out": 4}, {"template": "Q: {question} A:"}):
            with pytest.raises(ValueError, match=r"^8 of 16 rows.*\b9, 10, 11, 12, 13, \.\.\.") as raised:
                Questions(source, reward, **more).check()  # type: ignore[arg-type]
            assert (str(tmp_path / "rows.jsonl") in str(raised.value)) == (source is not rows)
    with pytest.raises(ValueError, match=r"8 of 16 .*'hard'"):
        Questions(ROWS, reward, held_out={"hard": rows}).check()
    assert Questions([row for row in rows if row["answer"] != "0"], reward).check()


def test_one_row_of_300_without_a_column_is_named_by_its_number_and_file(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"word": "cab", "letter": "a", "count": 1}] * 300
    rows[206] = {"word": "cab", "count": 1}
    with pytest.raises(ValueError, match=r"1 of 300 rows .*row 207: .*'letter'.* count, word\b"):
        Questions(rows, reward, template="{letter} in {word}: ").check()
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"1 of 300 rows of .*/rows\.jsonl .*row 207: letter is null"):
        Questions(jsonl(tmp_path / "rows.jsonl"), reward, template="{letter} in {word}: ").check()


def test_different_faults_are_listed_with_their_rows() -> None:
    rows: list[dict[str, Any]] = [
        {"question": None},
        {"question": "1+1"},
        {"question": [1]},
        {"question": [2]},
        {"text": ""},
    ]
    with pytest.raises(ValueError, match=r"4 of 5 rows .*row 1: .*null; rows 3, 4: .*list.*; row 5: .*'question'"):
        Questions(rows, reward).check()


def test_a_reward_may_check_the_rows_before_the_run() -> None:
    class Checked:
        def __call__(self, row: Any, answer: str) -> float:
            return 1.0

        def check_row(self, row: Any) -> None:
            if row["answer"] == "3":
                raise ValueError("no threes")

    with pytest.raises(ValueError, match="1 of 16 rows .*row 3: no threes"):
        Questions(ROWS, Checked()).check()
    assert Questions(ROWS[3:], Checked()).check()


@pytest.mark.parametrize("line", [rb'{"question": "half \ud83d", "answer": "2"}', b'{"question": "caf\xe9"}'])
def test_a_line_that_is_not_unicode_is_named(line: bytes, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"question": "1+1=", "answer": "\\ud83d\\ude00"}\n' + line)
    with pytest.raises(ValueError, match=f"{file}.* line 2 ") as raised:
        Questions(jsonl(file), reward).check()
    str(raised.value).encode()
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().splitlines()[0])  # a byte order mark is none of the text
    assert jsonl(file)[0] == {"question": "1+1=", "answer": "\U0001f600"}


@pytest.mark.parametrize("column", ["question", "answer"])
def test_rows_in_memory_that_are_not_unicode_are_numbered(column: str) -> None:
    with pytest.raises(ValueError, match=f"row 17: column {column} .*Unicode"):
        Questions([*ROWS, ROWS[0] | {column: "half \ud83d"}], reward).check()
    for value in (["half \ud83d"], {"half \ud83d": 1}, ({"a": "half \ud83d"},)):
        with pytest.raises(ValueError, match="row 17: column choices .*Unicode"):
            Questions([*ROWS, ROWS[0] | {"choices": value}], reward, template="{question}").check()
    with pytest.raises(ValueError, match=r"row 17: column half \\ud83d .*Unicode") as raised:
        Questions([*ROWS, ROWS[0] | {"half \ud83d": 1}], reward).check()
    str(raised.value).encode()


def test_other_things_than_rows_are_refused_with_the_way_out() -> None:
    frame = pd.DataFrame(ROWS)
    with pytest.raises(ValueError, match="to_dict"):
        Questions(frame, reward)  # type: ignore[arg-type]
    assert Questions(frame.to_dict("records"), reward).check()
    for path_or_splits in ("rows.jsonl", Path("rows.jsonl"), DatasetDict({"train": Dataset.from_list(ROWS)})):
        with pytest.raises(ValueError, match="jsonl.*split"):
            Questions(path_or_splits, reward)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="streamed"):
        Questions((row for row in ROWS), reward)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="streaming="):
        data_set("rows", streaming=True)
    with pytest.raises(ValueError, match="system message .*Unicode"):
        Questions(ROWS, reward, system="half \ud83d").check()
    with pytest.raises(ValueError, match="2 of 2 rows .*str, not a mapping"):
        Questions(["1 + 1", "2 + 2"], reward).check()  # type: ignore[list-item]


def test_messages_in_memory_are_those_of_a_file_with_the_same_content() -> None:
    """With the null keys, floats and arrays that datasets and pandas add."""
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages: Any = [{"role": "user", "content": "1+1"}, {"role": "assistant", "tool_calls": [call]}]
    padded = {"function": {"name": "add", "arguments": {"a": np.float64(1), "b": None}}, "id": None}
    stored = [
        {"role": "user", "content": "1+1", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": np.array([padded])},
    ]
    for kind in (list, tuple, np.array):
        assert prompt_of("{prompt}", {"prompt": kind(stored)}) == as_messages(messages)


@pytest.mark.parametrize("name", ["numpy", "torch", "pandas", "arrow"])
def test_the_format_of_a_data_set_does_not_change_its_rows(name: str) -> None:
    row = WHOLE | {"hint": None}
    formatted = Dataset.from_list([WHOLE, row]).with_format(name)
    assert held_out_rows_of(formatted) == [WHOLE, row]
    upper = formatted.with_transform(lambda rows: {"question": [text.upper() for text in rows["question"]]})
    assert held_out_rows_of(upper) == [{"question": WHOLE["question"].upper()}] * 2


def held_out_rows_of(rows: Any) -> list[Any]:
    items = Questions(rows, reward, held_out={"all": rows}).held_out_items()
    return [items[index] for index in range(len(items))]


def test_python_notation_is_the_same_for_typed_values() -> None:
    import torch

    typed = {"count": np.float32(0.1), "day": datetime.date(2026, 5, 1)}
    assert fill("{count}", {"count": torch.tensor(0.1)}) == fill("{count!r}", {"count": torch.tensor(0.1)}) == "0.1"
    assert fill("{extra!r}", {"extra": typed}) == fill("{extra!r}", {"extra": {"count": 0.1, "day": "2026-05-01"}})


@pytest.mark.parametrize(
    ("value", "culprit"),
    [
        ({"n": np.int64(3), "seen": {1}}, "seen"),
        ({"n": [1.0, float("nan")]}, r"n\[1\].* nan"),
        ({"n": pd.NA}, "NA"),
        (Path("a"), "Path"),
        (Fraction(1, 3), "Fraction"),
    ],
    ids=repr,
)
def test_python_notation_of_other_objects_is_refused(value: Any, culprit: str) -> None:
    with pytest.raises(ValueError, match=f"extra .*{culprit}"):
        fill("{extra!r}", {"extra": value})
    assert fill("{extra!r}", {"extra": {1: "a", "b": b"c"}}) == "{1: 'a', 'b': b'c'}"


def test_a_timestamp_with_a_width_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="at is a timestamp"):
        fill("{at:>30}", {"at": datetime.datetime(2026, 5, 1)})


def test_a_method_of_a_text_is_no_part_of_a_prompt() -> None:
    with pytest.raises(ValueError, match=r"book\.title is a builtin"):
        fill("{book.title}", {"book": "Ulysses"})


def test_null_is_refused_in_python_notation_too() -> None:
    with pytest.raises(ValueError, match="row 2: question is null"):
        Questions([ROWS[0], {"question": None}], reward, template="{question!r}").check()


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "user", "content": None}], "message 0"),
        ([{"role": "user", "content": "1"}, {"role": "tool", "content": "half \ud83d"}], "message 1 .*surrogate"),
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1"}], "system message"),
        ([{"from": "user", "value": "1"}], "prompt is a list"),
        ([], "prompt is a list"),
        ([{"role": "user", "content": " "}], "empty"),
        ([{"role": "user", "content": float("nan")}], "message 0 .*content is nan"),
        ([{"role": "user", "content": "1", "name": "half \ud83d"}], "message 0 .*surrogate"),
        ([{"role": "human", "content": "1"}], "message 0: .*human"),
        ([{"role": "user", "content": 3}], "message 0 .*3"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 0 .*image"),
        ([SimpleNamespace(role="user", content=None)], "message 0 .*None"),
    ],
    ids=ascii,
)
def test_messages_that_cannot_be_a_prompt_are_refused_with_their_row(messages: Any, problem: str) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{number} + 1"}]} for number in range(4)]
    assert sorted(Questions(rows, reward, template="{prompt}", system="Help.").check()) == [
        f"{n} + 1" for n in range(4)
    ]
    with pytest.raises(ValueError, match=f"1 of 5 rows .*row 5: .*{problem}"):
        Questions([*rows, {"prompt": messages}], reward, template="{prompt}", system="Help.").check()
