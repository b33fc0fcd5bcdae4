"""The command line of a recipe: settings are flags, and a flag such as ``--objective`` chooses a settings class."""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated, Any, NoReturn, TypeVar, cast, get_args, get_type_hints

import tyro

from monarch_rl.errors import SettingsError, written_by_another_version
from monarch_rl.moved import MOVED_FLAGS
from monarch_rl.settings.other_projects import hint
from monarch_rl.settings.ranges import NamedSettings, from_plain, problems_in, to_plain, unchecked

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
    if _saved:
        default = _read_saved(settings, default, *_saved.pop())
    if strangers := list(filter(None, (_stranger(arg, default) for arg in args))):
        _refuse(strangers)
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
    try:
        with unchecked():  # tyro would stop at the first class that refuses its values
            parsed = tyro.cli(settings, args=args, default=default, description=description)
    except Exception:  # of a recipe's own checks, which may rely on values that the package checks first
        return tyro.cli(settings, args=args, default=default, description=description)
    if problems := problems_in(parsed):
        _refuse(problems)
    return parsed


def _stranger(arg: str, default: Any) -> str | None:
    """What to give in place of a flag that 0.2 has removed, or of another project's setting; None for other arguments,
    and if these settings have a flag of that name."""
    given = arg.partition("=")[0]
    flag = given.removeprefix("--").replace("_", "-")
    flag = re.sub(r"(^|\.)no-(?=[^.]+$)", r"\1", flag)  # `--checkpoint.no-keep-best`
    if _has_flag(default, flag):
        return None
    if given.startswith("--") and flag in MOVED_FLAGS:
        return f"{given} was removed in monarch_rl 0.2: {MOVED_FLAGS[flag]}"
    like_verl = "=" in arg and "." in flag  # `trainer.save_freq=10`
    found = hint(flag.lstrip("+")) if given.startswith("--") or like_verl else None
    return found and f"{given}: {found}"


def _refuse(problems: Sequence[str]) -> NoReturn:
    """Exit with all of these problems."""
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    sys.exit(2)


def _has_flag(default: Any, flag: str) -> bool:
    """Whether the command line of settings with these default values has a flag of this name."""
    value = default
    for part in flag.split("."):
        name = part.replace("-", "_")
        hint = get_type_hints(type(value), include_extras=True).get(name)
        if hint is None or tyro.conf.Suppress in get_args(hint):
            return False
        value = getattr(value, name)
    return True


@contextmanager
def saved_defaults(saved: Mapping[str, Any], writer: str = "") -> Iterator[None]:
    """Within the block, the next :func:`cli` has saved settings as defaults instead of the class's own.

    Args:
        saved: settings in the form of ``settings.json``; those that are left out have the class's values.
        writer: version of this package that saved them, for errors; "" if it is unknown.

    Raises:
        SettingsError: the recipe cannot read the settings, or the block has not parsed a command line by :func:`cli`.
    """
    _saved.append((saved, writer))
    yield
    if _saved:
        _saved.clear()
        raise SettingsError(
            "saved settings cannot be the defaults of a recipe that does not parse its command line by monarch_rl.cli"
        )


_saved: list[tuple[Mapping[str, Any], str]] = []


def _read_saved(settings: type[S], default: Any, saved: Mapping[str, Any], writer: str) -> S:
    """The saved settings, with default values for those that are left out. Raises SettingsError."""
    try:
        return from_plain(cast(Any, settings), _merged(to_plain(default), saved))
    except SettingsError as error:
        problem = f"the run's settings do not fit this recipe ({error}): use the recipe that the run was started with"
        if writer != version("monarch_rl"):
            problem = written_by_another_version("the record of the run's settings", writer, error)
        raise SettingsError(f"{problem}, or give a model folder instead of the run") from error


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
