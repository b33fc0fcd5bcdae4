"""Where a run comes from: command, recipe, git commit and versions, for its ``run.json``.

No value of an environment variable is recorded, and what looks like a key is removed (``observe/redact.py``).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from monarch_rl.observe.redact import redact, redact_command
from monarch_rl.runtime.machine import program_output

logger = logging.getLogger("monarch_rl")

PACKAGE = "monarch_rl"
RECIPE_BYTES = 2**20
"""The text of a larger recipe is not copied: it is a program of another kind."""
HELD_OUT = re.compile(r"held_out/(?:[^/]+/)?(?:accuracy|reward)")


def command() -> list[str]:
    """The command line of this process."""
    return redact_command(sys.orig_argv)


def recipe() -> Path | None:
    """The file that was started; None if it is no file (``python -c``)."""
    path = Path(sys.argv[0]).absolute()
    return path if sys.argv[0] and path.is_file() else None


def read_recipe(path: Path) -> tuple[dict[str, str], str | None]:
    """Path and SHA-256 of the recipe's file, and its text without keys; None instead of the text if it has none.

    Raises OSError.
    """
    content = path.read_bytes()
    text = None
    if len(content) <= RECIPE_BYTES:
        with suppress(UnicodeDecodeError):  # a zipped application
            text = redact(content.decode())
    return {"path": str(path), "sha256": hashlib.sha256(content).hexdigest()}, text


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit that is checked out in ``folder``, and whether files that git tracks differ from it; None outside a
    repository, before its first commit, and without git."""
    git = ["git", "-C", str(folder)]
    commit = program_output([*git, "rev-parse", "--verify", "HEAD"])
    changed = program_output([*git, "status", "--porcelain", "--untracked-files=no"])
    if not commit or changed is None:
        return None
    return {"commit": commit.strip(), "dirty": bool(changed)}


def versions() -> dict[str, str]:
    """Versions of the installed packages that this package declares, also for its extras, by name."""
    found = {}
    with suppress(metadata.PackageNotFoundError):  # run from a source tree that is not installed
        for requirement in metadata.requires(PACKAGE) or ():
            name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
            with suppress(metadata.PackageNotFoundError):  # of another extra
                found[name] = metadata.version(name)
    return dict(sorted(found.items()))


def own_version() -> str:
    """The version of this package."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return "unknown"


def results(metrics: Path, best: str = "") -> dict[str, Any]:
    """The last step in ``metrics.jsonl``, and the first and last value of the held-out metric, with their versions.
    Arguments and errors are those of :func:`read_ending`."""
    ending = read_ending(metrics, best)
    first, last = ([row["step"], row[ending.metric]] if row else None for row in (ending.first, ending.last))
    held_out = {"metric": ending.metric, "first": first, "last": last} if first else None
    return {"steps": ending.newest.get("step"), "held_out": held_out}


class Ending(NamedTuple):
    """What ``metrics.jsonl`` says about a whole run."""

    newest: dict[str, Any]
    """The last line; empty if there is none."""
    metric: str
    """The held-out metric; empty without evaluations."""
    first: dict[str, Any]
    last: dict[str, Any]
    """The lines of the first and of the last evaluation that has it; empty without evaluations."""


def read_ending(metrics: Path, best: str = "") -> Ending:
    """Read the whole lines of ``metrics.jsonl``.

    Args:
        metrics: the file; it may be missing.
        best: name of the metric (``evaluation.best``); empty: the first accuracy, or reward, of an evaluation.

    Raises OSError.
    """
    first, last, newest = dict[str, Any](), dict[str, Any](), b""
    if metrics.exists():
        with metrics.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):  # being written, or the run was killed while it was
                    break
                newest = line
                if b'"held_out/' in line and (row := _row(line)) and row.get(name := best or _metric(row)) is not None:
                    best, last = name, row
                    first = first or row
    return Ending(_row(newest) or {}, best if first else "", first, last)


def _row(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError):  # damaged: readers of the file report it
        row = json.loads(line)
        return row if isinstance(row, dict) and "step" in row else None
    return None


def _metric(row: dict[str, Any]) -> str:
    names = [name for name in row if HELD_OUT.fullmatch(name)]
    return min(names, key=lambda name: (not name.endswith("accuracy"), name.count("/")), default="")
