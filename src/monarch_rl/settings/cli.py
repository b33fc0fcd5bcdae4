"""The command line of a recipe: settings are flags, and a flag such as ``--objective`` chooses a settings class."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import tyro

from monarch_rl.settings.ranges import NamedSettings

S = TypeVar("S")
T = TypeVar("T")
NotAFlag = Annotated[T, tyro.conf.Fixed, tyro.conf.Suppress]
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
    hints = get_type_hints(settings)
    for field in dataclasses.fields(cast(Any, settings)):
        family = hints[field.name]
        if not (isinstance(family, type) and issubclass(family, NamedSettings)):
            continue
        name = _given(args, f"--{field.name}".replace("_", "-"))
        # A wrong name is left to tyro, whose message lists the names.
        if name in family.names() and name != getattr(default, field.name).name:
            # Not by replace(), which checks: the arguments may change what the default settings contradict it in.
            default = copy.copy(default)
            object.__setattr__(default, field.name, family.defaults_of(name))
    return tyro.cli(settings, args=args, default=default, description=description)


def _given(args: Sequence[str], flag: str) -> str:
    """The last value that the arguments give to a flag; "" if they give none."""
    found = ""
    for place, arg in enumerate(args):
        if arg == flag and place + 1 < len(args):
            found = args[place + 1]
        elif arg.startswith(f"{flag}="):
            found = arg.partition("=")[2]
    return found
