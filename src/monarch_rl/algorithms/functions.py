"""What advantages and objectives declare about themselves, and how they are looked up and named in messages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_NEEDS, _OF_BATCH, _ENTROPY, _OTHERS = "needed_columns", "of_batch", "entropy_gradient", "other_tokens"


def needs(*columns: str) -> Callable[[F], F]:
    """Decorator of an advantage or an objective: the columns that it reads. That somebody fills them is checked before
    anything is spawned. Of an object ``__call__`` is decorated, as with all decorators here; or it has the attribute
    ``needed_columns``, which then counts alone."""

    def mark(function: F) -> F:
        setattr(function, _NEEDS, (*needed_columns(function), *columns))
        return function

    return mark


def of_batch(function: F) -> F:
    """Decorator of an advantage: it is called once with the views of all groups of a batch, not once for each group."""
    setattr(function, _OF_BATCH, True)
    return function


def entropy_gradient(function: F) -> F:
    """Decorator of an objective: its loss contains the entropies, which have a gradient then. That takes memory and
    time, so without it they have none."""
    setattr(function, _ENTROPY, True)
    return function


def other_tokens(names: Sequence[str]) -> Callable[[F], F]:
    """Decorator of an objective: it reads ``output.others``, the policy's log-probs of further tokens in the place of
    each that was drawn. Columns of these ``names``, which it needs, too, hold their ids."""

    def mark(function: F) -> F:
        setattr(function, _OTHERS, tuple(names))
        return needs(*names)(function)

    return mark


def other_token_columns(function: object) -> tuple[str, ...]:
    """The columns that hold the ids of further tokens whose log-probs an objective reads."""
    found: tuple[str, ...] = getattr(_inner(function, _OTHERS), _OTHERS, ())
    return found


def needed_columns(function: object) -> tuple[str, ...]:
    """The columns that a function has said to read; those of what a ``functools.partial`` calls, too."""
    found: tuple[str, ...] = getattr(_inner(function, _NEEDS), _NEEDS, ())
    return found


def is_of_batch(function: object) -> bool:
    """Whether an advantage takes all groups of a batch at once."""
    return bool(getattr(_inner(function, _OF_BATCH), _OF_BATCH, False))


def differentiates_entropy(function: object) -> bool:
    """Whether an objective's loss contains the entropies."""
    return bool(getattr(_inner(function, _ENTROPY), _ENTROPY, False))


def _inner(function: object, attribute: str) -> object:
    """The function that was decorated: of partials what they call, of an object its class's ``__call__``."""
    while not hasattr(function, attribute) and hasattr(function, "func"):
        function = function.func
    return function if hasattr(function, attribute) else _call_of(function)


def place_of(function: object) -> str:
    """Name, file and line of a function, of what a partial calls, or of an object's ``__call__``; its text where these
    are not known."""
    function, code = _called(function)
    name = getattr(function, "__name__", type(function).__name__)
    return str(function) if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def code_of(function: object) -> str:
    """A digest of the same function's code, with that of functions in it, not of those that it calls. Another version
    of Python gives another one."""
    _, code = _called(function)
    return "" if code is None else hashlib.sha256(_text_of(code).encode()).hexdigest()


def _called(function: Any) -> tuple[object, CodeType | None]:
    while hasattr(function, "func"):
        function = function.func
    called = function if hasattr(function, "__code__") else _call_of(function)
    return function, getattr(called, "__code__", None)


def _call_of(function: object) -> object:
    """What an object's class, or one that it inherits from, does when the object is called."""
    return next((vars(each)["__call__"] for each in type(function).__mro__ if "__call__" in vars(each)), None)


def _text_of(constant: object) -> str:
    """The same in every process: sets have no order, and code has an address."""
    if isinstance(constant, CodeType):
        return f"{constant.co_code.hex()} {constant.co_names} {_text_of(constant.co_consts)}"
    if isinstance(constant, tuple):
        return f"({', '.join(map(_text_of, constant))})"
    return f"{sorted(map(_text_of, constant))}" if isinstance(constant, frozenset) else repr(constant)


class Columns(dict[str, T]):
    """Columns by name. One that is not there is refused with what to do."""

    def __missing__(self, name: str) -> T:
        here = f"here are {', '.join(sorted(self))}" if self else "there are none here"
        raise ValueError(
            f"there is no column {name!r}, {here}. Decorate the function that reads it with @needs({name!r}) "
            "(from monarch_rl), and give run.start() a stage that fills it"
        )


# -- functions by the names that settings give them -------------------------------------------------------------------


def named(registry: Mapping[str, T], name: str, kind: str) -> T:
    """What has this name. Raises ValueError, with all names, if nothing has; ``kind``: what it is."""
    if name not in registry:
        raise ValueError(f"there is no {kind} {name!r}: give one of {', '.join(registry)}, or a function")
    return registry[name]
