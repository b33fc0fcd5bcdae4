"""The command line of a recipe: settings are flags, and a flag such as ``--objective`` chooses a settings class."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import tyro

from monarch_rl.errors import SettingsError
from monarch_rl.settings.ranges import NamedSettings, RecipeOnly, from_plain, to_plain

S = TypeVar("S")
T = TypeVar("T")
NotAFlag = Annotated[T, RecipeOnly, tyro.conf.Fixed, tyro.conf.Suppress]
"""A setting that a recipe sets in its file, and that its command line leaves out."""


def cli(settings: type[S], *, description: str | None = None, args: Sequence[str] | None = None) -> S:
    """Settings from the command line, with the class's own values as defaults. Exits with a message if they are wrong.

    A field whose type is a :class:`~monarch_rl.settings.ranges.NamedSettings`, such as ``objective``, has a flag of its
    own name, which chooses its class: ``--objective gspo``. The command line then has that class's flags.

    Args:
        settings: a dataclass in which every field has a default.
        description: text at the top of ``--help``; None: the class's docstring.
        args: the arguments; None: those of this process.
    """
    args = sys.argv[1:] if args is None else list(args)
    default: Any = settings()
    if _saved:
        default = from_plain(cast(Any, settings), _merged(to_plain(default), _saved.pop()))
    hints = get_type_hints(settings)
    for field in dataclasses.fields(cast(Any, settings)):
        family = hints[field.name]
        if not (isinstance(family, type) and issubclass(family, NamedSettings)):
            continue
        name = _given(args, f"--{field.name}".replace("_", "-"))
        # A wrong name is left to tyro, whose message lists the names.
        if name in family.names() and name != getattr(default, field.name).name:
            # Not by replace(), which checks: other arguments may remove a contradiction with the defaults.
            default = copy.copy(default)
            object.__setattr__(default, field.name, family.defaults_of(name))
    return tyro.cli(settings, args=args, default=default, description=description)


@contextmanager
def saved_defaults(saved: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, the next :func:`cli` has saved settings as defaults instead of the class's own.

    Args:
        saved: settings in the form of ``settings.json``; those that are left out have the class's values.

    Raises:
        SettingsError: the block has not parsed a command line by :func:`cli`.
    """
    _saved.append(saved)
    yield
    if _saved:
        _saved.clear()
        raise SettingsError(
            "saved settings cannot be the defaults of a recipe that does not parse its command line by monarch_rl.cli"
        )


_saved: list[Mapping[str, Any]] = []


def _merged(default: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved values over the default ones. Settings of another name are replaced as a whole."""
    merged = dict(default)
    for name, value in saved.items():
        inner = default.get(name)
        if isinstance(value, dict) and isinstance(inner, dict) and value.get("name") == inner.get("name"):
            value = _merged(inner, value)
        merged[name] = value
    return merged


def _given(args: Sequence[str], flag: str) -> str:
    """The last value that the arguments give to a flag; "" if they give none."""
    found = ""
    for place, arg in enumerate(args):
        if arg == flag and place + 1 < len(args):
            found = args[place + 1]
        elif arg.startswith(f"{flag}="):
            found = arg.partition("=")[2]
    return found
