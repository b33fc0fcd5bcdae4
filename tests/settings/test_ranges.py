"""What a setting may be, declared beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.settings.ranges import CheckedSettings, Range, plain


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


@dataclass(frozen=True)
class Derived(Sample):
    """As a recipe derives its settings: other defaults, without a thought of ranges."""

    share: float = 0.1
    above: Annotated[float, Range(0, 20)] = 0.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"share": -0.1}, "a.b.share must not be negative, got -0.1: give 0 to 1"),
        ({"share": 1.5}, "a.b.share must be at most 1, got 1.5: give 0 to 1"),
        ({"some_count": 0}, "a.b.some-count must be at least 1 (1 is alone), got 0: give 1 to 9,000"),
        ({"some_count": 10**400}, "a.b.some-count must be at most 9,000 (1 is alone), got 1000"),
        ({"above": 0.0}, "a.b.above must be positive, got 0.0: give above 0 to 10"),
        ({"pair": (2.5, 4.0)}, "a.b.pair must be at most 3, got 4.0: give 2 to 3"),
        ({"window": 6}, "a.b.window must be at most 5, got 6: give 0 to 5"),
        ({"window": "some"}, "a.b.window must be one of auto, greedy, got 'some'"),
        ({"share": "some"}, "a.b.share must be a number, got 'some': give 0 to 1"),
        ({"kind": "z"}, "a.b.kind must be one of x, y, got 'z'"),
        ({"free": math.nan}, "a.b.free must be a finite number, got nan"),
        ({"share": -math.inf}, "a.b.share must be a finite number, got -inf: give 0 to 1"),
    ],
)
def test_the_message_has_flag_value_and_what_to_give(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        Sample(**change)
    assert str(caught.value).startswith(said)
    with pytest.raises(ValueError):
        replace(Sample(), **change)


def test_a_field_that_is_declared_anew_keeps_its_range_unless_it_has_another() -> None:
    with pytest.raises(ValueError, match=r"a\.b\.share must be at most 1"):
        Derived(share=2.0)
    assert Derived(above=0.0).above == 0.0
    with pytest.raises(ValueError, match=r"a\.b\.above must be at most 20"):
        Derived(above=21)


@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(), st.booleans())
def test_a_number_is_refused_exactly_if_it_is_outside(low: float, high: float, value: float, above: bool) -> None:
    inside = low <= value <= high and not (above and value == low)
    assert (value in Range(low, high, above=above)) == inside


@given(st.integers(-(10**9), 10**9), st.floats(1e-6, 1, exclude_max=True))
def test_a_number_is_written_as_it_is_read(count: int, share: float) -> None:
    assert int(plain(count).replace(",", "")) == count
    assert math.isclose(float(plain(share)), share, rel_tol=1e-5)
