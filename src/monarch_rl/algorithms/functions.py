"""Declarations on advantages and objectives (decorators), their digests, and looking them up by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, TypeVar

from monarch_rl.user_code import call_of, code_behind

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_NEEDS, _OF_BATCH, _ENTROPY, _OTHERS = "needed_columns", "of_batch", "entropy_gradient", "other_tokens"


def needs(*columns: str) -> Callable[[F], F]:
    """Decorator of an advantage or an objective that declares the columns it reads. Whether they are filled is checked
    before anything is spawned.

    For a callable object decorate ``__call__``, as with all decorators here, or give the object an attribute
    ``needed_columns``, which takes precedence.
    """

    def mark(function: F) -> F:
        setattr(function, _NEEDS, (*needed_columns(function), *columns))
        return function

    return mark


def of_batch(function: F) -> F:
    """Decorator of an advantage that is called once with the views of all groups of a batch, not once per group."""
    setattr(function, _OF_BATCH, True)
    return function


def entropy_gradient(function: F) -> F:
    """Decorator of an objective whose loss contains the entropies. Only then do they have a gradient, because it takes
    memory and time."""
    setattr(function, _ENTROPY, True)
    return function


def other_tokens(names: Sequence[str]) -> Callable[[F], F]:
    """Decorator of an objective that reads ``output.others``, the policy's log-probs of further tokens at the place of
    each sampled token. Their ids are in the columns ``names``, which are added to the needed columns."""

    def mark(function: F) -> F:
        setattr(function, _OTHERS, tuple(names))
        return needs(*names)(function)

    return mark


def other_token_columns(function: object) -> tuple[str, ...]:
    """The columns with the ids of further tokens whose log-probs an objective reads."""
    found: tuple[str, ...] = getattr(_inner(function, _OTHERS), _OTHERS, ())
    return found


def needed_columns(function: object) -> tuple[str, ...]:
    """The columns that a function, or the function of a ``functools.partial``, declares to read."""
    found: tuple[str, ...] = getattr(_inner(function, _NEEDS), _NEEDS, ())
    return found


def is_of_batch(function: object) -> bool:
    """Whether an advantage is called with all groups of a batch at once."""
    return bool(getattr(_inner(function, _OF_BATCH), _OF_BATCH, False))


def differentiates_entropy(function: object) -> bool:
    """Whether an objective's loss contains the entropies."""
    return bool(getattr(_inner(function, _ENTROPY), _ENTROPY, False))


def _inner(function: object, attribute: str) -> object:
    """The decorated function: the function of a partial, or the ``__call__`` of an object's class."""
    while not hasattr(function, attribute) and hasattr(function, "func"):
        function = function.func
    return function if hasattr(function, attribute) else call_of(function)


def code_of(function: object) -> str:
    """A digest of the code of a function (:func:`~monarch_rl.user_code.code_behind`), including nested functions, not
    functions that it calls. It depends on the version of Python."""
    code = code_behind(function)
    return "" if code is None else hashlib.sha256(_text_of(code).encode()).hexdigest()


def _text_of(constant: object) -> str:
    """A text of a code constant that is the same in every process."""
    # repr() is not: sets have no fixed order, and the repr of code contains its address.
    if isinstance(constant, CodeType):
        return f"{constant.co_code.hex()} {constant.co_names} {_text_of(constant.co_consts)}"
    if isinstance(constant, tuple):
        return f"({', '.join(map(_text_of, constant))})"
    return f"{sorted(map(_text_of, constant))}" if isinstance(constant, frozenset) else repr(constant)


class Columns(dict[str, T]):
    """Columns by name. Reading a missing one raises ValueError, which states what to do."""

    def __missing__(self, name: str) -> T:
        available = f"only {', '.join(sorted(self))}" if self else "and no other one"
        raise ValueError(
            f"there is no column {name!r}, {available}. Decorate the function that reads it with @needs({name!r}) "
            "(from monarch_rl), and give run.start() a stage that fills it"
        )


# -- functions by their names in the settings -------------------------------------------------------------------------


def named(registry: Mapping[str, T], name: str, kind: str) -> T:
    """The entry ``name``. Raises ValueError, listing all names, if there is none.

    Args:
        kind: what the registry holds, for the message.
    """
    if name not in registry:
        raise ValueError(f"there is no {kind} {name!r}: give one of {', '.join(registry)}, or a function")
    return registry[name]
