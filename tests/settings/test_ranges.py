"""Allowed values of a setting, declared at its field."""

from __future__ import annotations

import math
import subprocess
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.settings.ranges import CheckedSettings, Range, plain


@dataclass(frozen=True)
class Inner:
    """Settings within settings."""


@dataclass(frozen=True)
class Sample(CheckedSettings, flags="a.b"):
    share: Annotated[float, Range(0, 1)] = 0.5
    some_count: Annotated[int | None, Range(1, 9000, "1 is alone")] = None
    above: Annotated[float, Range(0, 10, above=True)] = 1.0
    pair: Annotated[tuple[float, float], Range(2, 3)] = (2.0, 3.0)
    window: Annotated[int | Literal["auto", "greedy"], Range(0, 5)] = "auto"
    kind: Literal["x", "y"] = "x"
    free: float = 0.0
    text: str = ""
    many: tuple[str, ...] = ()
    switch: bool = False
    folder: Path = Path()
    inner: Inner = Inner()


@dataclass(frozen=True)
class Derived(Sample):
    """As a recipe derives its settings: other defaults, and ranges only where they change."""

    share: float = 0.1
    above: Annotated[float, Range(0, 20)] = 0.0


@pytest.mark.parametrize(
    ("change", "flag", "message_parts"),
    [
        ({"share": -0.1}, "a.b.share", ["got -0.1", "give 0 to 1"]),
        ({"share": 1.5}, "a.b.share", ["at most 1", "got 1.5", "give 0 to 1"]),
        ({"some_count": 0}, "a.b.some-count", ["at least 1", "got 0", "give 1 to 9,000"]),
        ({"some_count": 10**400}, "a.b.some-count", ["at most 9,000"]),
        ({"above": 0.0}, "a.b.above", ["got 0.0", "give above 0 to 10"]),
        ({"pair": (2.5, 4.0)}, "a.b.pair", ["at most 3", "got 4.0", "give 2 to 3"]),
        ({"window": 6}, "a.b.window", ["at most 5", "got 6", "give 0 to 5"]),
        ({"window": "some"}, "a.b.window", ["one of auto, greedy", "got 'some'"]),
        ({"share": "some"}, "a.b.share", ["got 'some'", "give 0 to 1"]),
        ({"kind": "z"}, "a.b.kind", ["one of x, y", "got 'z'"]),
        ({"free": math.nan}, "a.b.free", ["got nan"]),
        ({"share": -math.inf}, "a.b.share", ["got -inf", "give 0 to 1"]),
        ({"share": np.float32(math.nan)}, "a.b.share", ["got nan", "give 0 to 1"]),
        ({"share": None}, "a.b.share", ["got None", "give 0 to 1"]),
        ({"share": True}, "a.b.share", ["got True", "give 0 to 1"]),
        ({"share": [0.5]}, "a.b.share", ["got [0.5]", "give 0 to 1"]),
        ({"some_count": 2.5}, "a.b.some-count", ["whole number", "got 2.5", "give 1 to 9,000"]),
        ({"pair": (2.5,)}, "a.b.pair", ["2 values", "got (2.5,)", "give 2 to 3"]),
        ({"pair": [2.5, 2.5]}, "a.b.pair", ["2 values", "got [2.5, 2.5]", "give 2 to 3"]),
        ({"window": None}, "a.b.window", ["whole number", "got None", "give 0 to 5"]),
        ({"kind": 1}, "a.b.kind", ["one of x, y", "got 1"]),
        ({"free": "some"}, "a.b.free", ["got 'some'"]),
        ({"text": None}, "a.b.text", ["got None"]),
        ({"many": ("a", 1)}, "a.b.many", ["got ('a', 1)"]),
        ({"switch": 1}, "a.b.switch", ["got 1"]),
        ({"folder": "runs"}, "a.b.folder", ["got 'runs'"]),
        ({"inner": None}, "a.b.inner", ["got None"]),
    ],
)
def test_the_error_names_the_flag_the_value_and_the_allowed_range(
    change: dict[str, Any], flag: str, message_parts: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        Sample(**change)
    message = str(caught.value)
    assert message.startswith(f"{flag} ") and [part for part in message_parts if part not in message] == []
    with pytest.raises(ValueError):
        replace(Sample(), **change)


def test_values_of_compatible_types_are_accepted() -> None:
    """Integers in fields of floats, and NumPy numbers."""
    settings = Sample(share=1, some_count=np.int64(3), pair=(2, np.float32(2.5)), window="greedy", many=("a", "b"))  # type: ignore[arg-type]
    assert settings.share == 1 and Sample(window=3, switch=True, folder=Path("a"), inner=Inner()).switch


def test_a_redeclared_field_keeps_its_range_unless_it_declares_another() -> None:
    with pytest.raises(ValueError, match=r"a\.b\.share must be at most 1"):
        Derived(share=2.0)
    assert Derived(above=0.0).above == 0.0
    with pytest.raises(ValueError, match=r"a\.b\.above must be at most 20"):
        Derived(above=21)


RECIPE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Annotated
from monarch_rl.settings.ranges import CheckedSettings, Range

@dataclass(frozen=True)
class Inner(CheckedSettings, flags="inner"):
    share: Annotated[float, Range(0, 1)] = 0.5

@dataclass(frozen=True)
class Outer(CheckedSettings, flags="outer"):
    inner: Inner = Inner()
    count: int | None = None
"""
ELSEWHERE = """
import pickle, sys
from dataclasses import replace
settings = pickle.load(sys.stdin.buffer)
print(replace(settings, count=3))
for wrong in ({"count": "some"}, {"inner": 1}):
    try:
        replace(settings, **wrong)
    except ValueError as error:
        print(error)
"""


def test_a_recipes_own_class_is_checked_in_a_process_without_its_module() -> None:
    recipe = types.ModuleType("some_recipe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, recipe.__name__, recipe)
        exec(RECIPE, vars(recipe))
        cloudpickle.register_pickle_by_value(recipe)
        try:
            data = cloudpickle.dumps(recipe.Outer())
        finally:
            cloudpickle.unregister_pickle_by_value(recipe)
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], input=data, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr.decode()
    whole, count, inner = done.stdout.decode().splitlines()
    assert whole == "Outer(inner=Inner(share=0.5), count=3)"
    assert count.startswith("outer.count must ") and inner.startswith("outer.inner must be an instance of Inner")


@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(), st.booleans())
def test_a_number_is_refused_exactly_outside_its_range(low: float, high: float, value: float, above: bool) -> None:
    inside = low <= value <= high and not (above and value == low)
    assert (value in Range(low, high, above=above)) == inside


@given(st.integers(-(10**9), 10**9), st.floats(1e-6, 1, exclude_max=True))
def test_a_printed_number_is_parsed_to_the_same_value(count: int, share: float) -> None:
    assert int(plain(count).replace(",", "")) == count
    assert math.isclose(float(plain(share)), share, rel_tol=1e-5)
