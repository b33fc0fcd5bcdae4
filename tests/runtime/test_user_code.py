"""Naming the code behind a user's callable (``user_code.py``)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from monarch_rl.user_code import definition, place_of


def score(scale: float = 1.0) -> float:
    return scale


def traced(function: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> float:
        return function(*args)

    return wrapper


class Traced:
    def __init__(self, function: Callable[..., float]) -> None:
        functools.update_wrapper(self, function)

    def __call__(self) -> float:
        return 0.0


class Base:
    def __call__(self) -> float:
        return 1.0

    def method(self) -> float:
        return 1.0


class Derived(Base):
    pass


HERE = {
    "function": (score, "score", score),
    "partial of a partial": (functools.partial(functools.partial(score), 2.0), "score", score),
    "decorated": (traced(score), "score", score),
    "partial of a decorated": (functools.partial(traced(score), 2.0), "score", score),
    "decorated by a class": (Traced(score), "score", score),
    "cached": (functools.cache(score), "score", score),
    "partial of a cached": (functools.partial(functools.cache(score), 2.0), "score", score),
    "object": (Derived(), "Derived", Base.__call__),
    "bound method": (Base().method, "Base.method", Base.method),
}


@pytest.mark.parametrize("kind", HERE)
def test_a_callable_is_named_with_the_line_of_its_own_code(kind: str) -> None:
    function, name, code = HERE[kind]
    place = f"{__file__}:{code.__code__.co_firstlineno}"
    assert definition(function) == (name, place)
    assert place_of(function) == f"{name} ({place})"


@pytest.mark.parametrize("function", [max, functools.partial(max, 1), dict])
def test_a_callable_without_python_code_has_no_place(function: Any) -> None:
    assert definition(function)[1] == "" and place_of(function) == str(function)
