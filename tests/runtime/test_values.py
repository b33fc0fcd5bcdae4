"""Values of users' data and tools become JSON values, or are refused by their place and type."""

from __future__ import annotations

import enum
import json
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.values import lone_surrogate, plain

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))


@settings(deadline=None)
@given(JSON)
def test_json_values_are_unchanged(value: Any) -> None:
    assert json.dumps(plain(value), allow_nan=False) == json.dumps(value, allow_nan=False)


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclass
class Place:
    name: str
    at: np.ndarray


class Weather(pydantic.BaseModel):
    day: date
    degrees: list[float]


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.float32(0.25), 0.25),
        (np.float64(0.1), 0.1),
        (np.float32(0.1), 0.1),
        (np.array([[0.1], [0.2]], np.float32), [[0.1], [0.2]]),
        (np.longdouble(0.5), 0.5),
        (np.str_("é"), "é"),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (np.array(7), 7),
        (np.array([np.int8(1), None, "a"], dtype=object), [1, None, "a"]),
        (np.datetime64("2026-03-04T05:06:07.123456789"), "2026-03-04T05:06:07.123456789"),
        (np.array(["2026-03-04"], dtype="M8[ns]"), ["2026-03-04T00:00:00.000000000"]),
        (pd.Series([1, 2]), [1, 2]),
        (pd.Series(pd.to_datetime(["2026-03-04"])), ["2026-03-04T00:00:00"]),
        (pd.Timestamp("2026-03-04 05:06"), "2026-03-04T05:06:00"),
        (pd.Index(["a", "b"]), ["a", "b"]),
        (pd.Series(["x"], dtype="category"), ["x"]),
        (date(2026, 3, 4), "2026-03-04"),
        (datetime(2026, 3, 4, 5, 6, tzinfo=UTC), "2026-03-04T05:06:00+00:00"),
        (time(5, 6), "05:06:00"),
        (Decimal("1.10"), "1.10"),
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        ((1, (2.5,)), [1, [2.5]]),
        (Pair(1, np.int64(2)), [1, 2]),
        (OrderedDict(count=np.int64(3)), {"count": 3}),
        (Place("Oslo", np.array([59.9, 10.7])), {"name": "Oslo", "at": [59.9, 10.7]}),
        (Weather(day=date(2026, 3, 4), degrees=[-1.5]), {"day": "2026-03-04", "degrees": [-1.5]}),
    ],
    ids=repr,
)
def test_values_of_other_types_have_a_json_form(value: Any, expected: Any) -> None:
    """Within other values, too, and with Python's own types alone, which ``json`` and ``repr`` show alike."""
    assert repr(plain(value)) == repr(expected)
    assert repr(plain({"in": [value]})) == repr({"in": [expected]})


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (np.float32("nan"), "nan"),
        (np.longdouble("inf"), "inf"),
        (np.array([1.0, np.nan]), "nan"),
        (pd.Series([1, None], dtype="Int64"), "NA"),
        (pd.NaT, "NaT"),
        (np.datetime64("NaT"), "NaT"),
        (np.timedelta64(3, "ns"), "timedelta64"),
        (timedelta(seconds=3), "timedelta"),
        (Decimal("NaN"), "NaN"),
        (1j, "complex"),
        (np.complex64(1), "complex"),
        (b"abc", "bytes"),
        (np.bytes_(b"abc"), "bytes"),
        ({"a"}, "set"),
        pytest.param(object(), "object", id="object"),
        (Path("a"), "Path"),
        (ValueError("a"), "ValueError"),
        (Weather, "ModelMetaclass"),
        ({1: 2}, "int"),
        ({np.int64(1): 2}, "int64"),
        ({None: 2}, "NoneType"),
        ("half \ud83d", r"\ud83d"),
        ({"half \ud83d": 1}, r"\ud83d"),
    ],
    ids=ascii,
)
def test_other_values_are_refused_by_their_place_and_type(value: Any, kind: str) -> None:
    with pytest.raises(ValueError) as caught:
        plain(value)
    assert kind in str(caught.value)
    with pytest.raises(ValueError, match=r"rows\[1\]\.a") as caught:
        plain({"rows": [0, {"a": value}]})
    assert kind in str(caught.value)
    str(caught.value).encode()  # so that the message itself can be shown and encoded


def test_a_value_that_contains_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="list is nested too deeply"):
        plain(ITSELF)


@settings(deadline=None)
@given(st.text("aé\ud83d\ude00🙂", max_size=4))
def test_only_text_that_utf_8_cannot_encode_has_a_lone_surrogate(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        assert lone_surrogate(text)
    else:
        assert not lone_surrogate(text)
