"""Allowed values of settings: declared with each field, and checked when the settings are created.

    @dataclass(frozen=True)
    class TrainerSettings(CheckedSettings, flags="trainer"):
        lr_min_factor: Annotated[float, Range(0, 1)] = 1.0

``TrainerSettings(lr_min_factor=math.nan)`` raises ``ValueError: trainer.lr-min-factor must be a finite number, got nan:
give 0 to 1``, also if it is created from the command line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro

from monarch_rl.errors import SettingsError, raise_together


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from ``low`` to ``high``, both included; without ``low`` if ``above`` is set."""

    low: float
    high: float
    note: str = ""
    """Meaning of a special value, for messages: "0 is off"."""
    above: bool = False
    """Whether ``low`` itself is refused."""

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'above ' if self.above else ''}{plain(self.low)} to {plain(self.high)}"

    def complaint(self, value: float) -> str:
        """What is wrong with a number outside the range; follows the setting's name in a message."""
        if value > self.high:
            complaint = f"must be at most {plain(self.high)}"
        elif self.low == 0:
            complaint = "must be positive" if self.above else "must not be negative"
        else:
            complaint = f"must be {'above' if self.above else 'at least'} {plain(self.low)}"
        return f"{complaint} ({self.note})" if self.note else complaint


FOREVER_S = 1e9
"""Longest deadline in seconds: 30 years."""
SEED = Range(0, 2**31 - 1)
"""Seeds that numpy, torch and SGLang all accept."""


class Automatic(int):
    """A default that a launch may replace by one for its machine. A number that a flag or a recipe gives is a plain
    int, even if it is the same."""

    def __hash__(self) -> int:
        return hash((Automatic, int(self)))  # tyro caches by hash, and would return another flag's plain 2


TWO = Automatic(2)


class _Field(NamedTuple):
    """What a field may be: its type, the range of its numbers, and its strings; empty if it allows any string."""

    hint: Any
    allowed: Range | None
    words: tuple[str, ...]
    is_flag: bool


class CheckedSettings:
    """Base class of settings dataclasses. A derived class yields what is wrong with a combination of its values in
    :meth:`contradictions`; one with a ``__post_init__`` must call this one's first.

    Checks that every value has its field's type, including values passed in Python; that every float is finite; that
    numbers lie in the :class:`Range` of their field, if it has one; and that strings are among those of their
    ``Literal``. A class that redeclares a field keeps the range of its base, unless it declares another.
    """

    _flags: ClassVar[str] = ""
    _fields: ClassVar[dict[str, _Field]]

    def __init_subclass__(cls, flags: str | None = None) -> None:
        """``flags``: prefix of the field names on a recipe's command line."""
        super().__init_subclass__()
        if flags is not None:
            cls._flags = flags

    def __post_init__(self) -> None:
        """Raises ValueError with the flag of each wrong setting, the value, and the allowed values."""
        if not _UNCHECKED.get():
            raise_together([SettingsError(problem) for problem in self.wrong_values() or self.contradictions()])

    def wrong_values(self) -> list[str]:
        """What is wrong with each value by itself, as messages."""
        found = []
        for name, (hint, allowed, words, _) in _fields(type(self)).items():
            value = getattr(self, name)
            parts = value if isinstance(value, tuple) else (value,)
            problems = (_problem(part, allowed, words) for part in parts)
            problem = next(filter(None, problems), None) or _wrong_type(value, hint, allowed)
            if problem:
                found.append(f"{self.flag(name)} {problem}")
        return found

    def contradictions(self) -> Iterable[str]:
        """What is wrong with values that are allowed by themselves, as messages."""
        return ()

    @classmethod
    def flag(cls, name: str) -> str:
        """A field's name in messages: its flag without the leading dashes; in Python, if it has no flag."""
        field = _fields(cls).get(name)
        if field is not None and not field.is_flag:
            return f"{cls.__name__}.{name}"
        return f"{cls._flags}.{name}".lstrip(".").replace("_", "-")


class NamedSettings(CheckedSettings):
    """Base class of a family of settings classes, of which a name chooses one: on the command line
    (``settings/cli.py``) and in JSON. Each class has a field ``name``, whose default is its name.

    ``flags`` of the family's base is the flag that takes the name, and the prefix of all other fields.
    """

    name: Any

    def wrong_values(self) -> list[str]:
        found = super().wrong_values()
        if not found and self.name != type(self).own_name():
            found.append(
                f"{self.flag('name')} {self.name}: these are the parameters of {self.own_name()}. In Python, use "
                f"{self._family().of_name(self.name).__name__}; parse a command line with monarch_rl.cli()"
            )
        return found

    @classmethod
    def own_name(cls) -> str:
        """The name of this class; "" for the base of a family."""
        default = cls.__dict__.get("name", "")
        return default if isinstance(default, str) else ""

    @classmethod
    def _family(cls) -> type[NamedSettings]:
        return next(base for base in cls.__mro__ if NamedSettings in base.__bases__)

    @classmethod
    def names(cls) -> list[str]:
        """The names of all classes derived from this one, in the order of their definition."""
        found = [cls.own_name()] if cls.own_name() else []
        return [*found, *(name for derived in cls.__subclasses__() for name in derived.names())]

    @classmethod
    def of_name(cls, name: str) -> type[Self]:
        """The derived class of this name.

        Raises:
            ValueError: there is none; lists the names.
        """
        if name and cls.own_name() == name:
            return cls
        for derived in cls.__subclasses__():
            if name in derived.names():
                return derived.of_name(name)
        raise SettingsError(f"{cls._flags} must be one of {', '.join(cls.names())}, got {name!r}")

    @classmethod
    def defaults_of(cls, name: str) -> Self:
        """Settings of this name, with their default values. Raises ValueError as :meth:`of_name`."""
        return cls.of_name(name)()

    @classmethod
    def flag(cls, name: str) -> str:
        return cls._flags if name == "name" else super().flag(name)


def limits(settings: type) -> dict[str, tuple[Range | None, tuple[str, ...]]]:
    """For each field: the range of its numbers, None if any number is allowed, and its allowed strings, empty if any
    string is allowed."""
    allowed: dict[str, Range] = {}
    for base in settings.__mro__:
        if dataclasses.is_dataclass(base):
            for name, hint in get_type_hints(base, include_extras=True).items():
                found = next((extra for extra in _extras(hint) if isinstance(extra, Range)), None)
                if found is not None:
                    allowed.setdefault(name, found)
    hints = get_type_hints(settings)
    return {field.name: (allowed.get(field.name), _words(hints[field.name])) for field in dataclasses.fields(settings)}


def _fields(settings: type[CheckedSettings]) -> dict[str, _Field]:
    # Remembered by the class itself: one that a recipe defines is pickled by value, and in another process the names in
    # its annotations cannot be resolved.
    if "_fields" not in vars(settings):
        hints, annotated = get_type_hints(settings), get_type_hints(settings, include_extras=True)
        settings._fields = {
            name: _Field(hints[name], *allowed, is_flag=tyro.conf.Suppress not in _extras(annotated[name]))
            for name, allowed in limits(settings).items()
        }
    return settings._fields


_UNCHECKED: ContextVar[bool] = ContextVar("monarch_rl_unchecked", default=False)


@contextmanager
def unchecked() -> Iterator[None]:
    """Within the block, settings are created without checks: :func:`problems_in` finds all problems afterwards."""
    token = _UNCHECKED.set(True)
    try:
        yield
    finally:
        _UNCHECKED.reset(token)


def problems_in(value: Any) -> list[str]:
    """What is wrong with settings, and with the settings in them, as messages. Contradictions are looked for only where
    all values are allowed."""
    if isinstance(value, tuple):
        return [problem for part in value for problem in problems_in(part)]
    if not dataclasses.is_dataclass(value):
        return []
    settings: Any = value
    found = [problem for field in dataclasses.fields(value) for problem in problems_in(getattr(value, field.name))]
    if isinstance(settings, CheckedSettings):
        found = [*settings.wrong_values(), *found]
        found += () if found else settings.contradictions()
    return found


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of settings as :func:`to_plain` gives them: ``("trainer.lr", 1e-6)``."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


C = TypeVar("C", bound=CheckedSettings)


def to_plain(settings: CheckedSettings) -> dict[str, Any]:
    """Settings as JSON types: tuples become lists, paths become strings."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(cast(Any, settings)), default=str))
    return values


def from_plain(settings: type[C], values: Mapping[str, Any]) -> C:
    """The inverse of :func:`to_plain`. Raises ValueError for fields that ``settings`` does not have, and for invalid
    values."""
    if issubclass(settings, NamedSettings) and not settings.own_name():
        settings = settings.of_name(values.get("name", ""))
    names = {field.name for field in dataclasses.fields(cast(Any, settings))}
    if unknown := sorted(values.keys() - names):
        raise SettingsError(f"{settings.__name__} has no {unknown[0]}")
    fields = _fields(settings)
    return settings(**{name: _from_plain(fields[name].hint, value) for name, value in values.items()})


def _from_plain(hint: Any, value: Any) -> Any:
    for member in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        if isinstance(value, dict) and isinstance(member, type) and issubclass(member, CheckedSettings):
            return from_plain(member, value)
        if isinstance(value, str) and member is Path:
            return Path(value)
        if isinstance(value, list) and get_origin(member) is tuple:
            return tuple(_from_plain(get_args(member)[0], each) for each in value)
    return tuple(value) if isinstance(value, list) else value


def plain(number: float) -> str:
    """A number in plain notation: 8,192 or 0.99."""
    return f"{int(number):,}" if number == int(number) and abs(number) < 1e15 else f"{number:g}"


def _extras(hint: Any) -> tuple[Any, ...]:
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def _words(hint: Any) -> tuple[str, ...]:
    """The allowed strings of a type, or of each element of a tuple type; empty if it allows any string."""
    if get_origin(hint) is tuple:
        return _words(get_args(hint)[0])
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if str in members:
        return ()
    return tuple(word for member in members if get_origin(member) is Literal for word in get_args(member))


def _problem(value: Any, allowed: Range | None, words: tuple[str, ...]) -> str | None:
    """What is wrong with one value, and the allowed values; None if it is valid."""
    give = f": give {allowed}" if allowed is not None else ""
    if isinstance(value, str):
        if value in words or not (words or allowed):
            return None
        return f"must be {'one of ' + ', '.join(words) if words else 'a number'}, got {value!r}{give}"
    if isinstance(value, bool) or not isinstance(value, int | float | numbers.Real):
        return None
    real: Any = value
    number = float(max(-(2**1000), min(int(real), 2**1000)) if isinstance(value, numbers.Integral) else real)
    if not math.isfinite(number):
        problem = "must be a finite number"
    elif allowed is not None and number not in allowed:
        problem = allowed.complaint(number)
    else:
        return None
    return f"{problem}, got {value}{give}"


_KINDS: dict[Any, tuple[type, str]] = {
    float: (numbers.Real, "a number"),
    int: (numbers.Integral, "a whole number"),
    bool: (bool, "true or false"),
    str: (str, "a string"),
    Path: (Path, "a Path"),
    types.NoneType: (types.NoneType, "None"),
}
"""By field type: the type of allowed values, and its name in messages."""


def _wrong_type(value: Any, hint: Any, allowed: Range | None) -> str | None:
    """What is wrong with a value that does not have its field's type, and the allowed values; None if it does."""
    if _fits(value, hint):
        return None
    give = f": give {allowed}" if allowed is not None else ""
    return f"must be {_name(hint)}, got {value!r}{give}"


def _fits(value: Any, hint: Any) -> bool:
    members = get_args(hint)
    if get_origin(hint) is Annotated:
        return _fits(value, members[0])
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, member) for member in members)
    if get_origin(hint) is Literal:
        return value in members
    if get_origin(hint) is tuple:
        of_any_length = members[-1] is Ellipsis
        hints = members[:1] * len(value) if of_any_length and isinstance(value, tuple) else members
        return isinstance(value, tuple) and len(value) == len(hints) and all(map(_fits, value, hints))
    if hint in _KINDS:
        return isinstance(value, _KINDS[hint][0]) and (hint is bool or not isinstance(value, bool))
    return isinstance(value, hint) if isinstance(hint, type) and dataclasses.is_dataclass(hint) else True


def _name(hint: Any) -> str:
    """Name of a type, to follow "must be" in a message."""
    members = get_args(hint)
    if get_origin(hint) is Annotated:
        return _name(members[0])
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_name, members))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, members))}"
    if get_origin(hint) is tuple:
        count = "" if members[-1] is Ellipsis else f"{len(members)} "
        return f"a tuple of {count}values, each {_name(members[0])}"
    return _KINDS[hint][1] if hint in _KINDS else f"an instance of {getattr(hint, '__name__', hint)}"
