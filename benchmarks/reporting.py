"""Shared code of benchmarks: starting them, and rounding their numbers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import tyro

from monarch_rl.runtime.scratch import temporary_directory

S = TypeVar("S")


def short(value: Any) -> Any:
    """Round floats to four significant digits, also in dicts and lists; other values are unchanged."""
    if isinstance(value, dict):
        return {name: short(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [short(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def run_benchmark(main: Callable[[S], None], settings: type[S], description: str | None) -> None:
    """Call ``main`` with the settings of the command line; a ValueError is reported as a wrong setting."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        given = tyro.cli(settings, description=description)
        with temporary_directory():
            main(given)
    except ValueError as error:
        sys.exit(f"error: {error}")
