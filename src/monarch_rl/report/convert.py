"""Converts a run's files for other programs."""

from __future__ import annotations

import csv
import logging
from pathlib import Path

from monarch_rl.errors import SettingsError
from monarch_rl.observe.lines import read_rows

logger = logging.getLogger("monarch_rl")

METRICS = "metrics.jsonl"


def to_csv(run: Path, output: Path) -> int:
    """Write a run's metrics as a CSV table: a row per line of ``metrics.jsonl``, a column per metric, ``step`` and
    ``seconds`` first. A metric that a line does not have, or whose value is null, is an empty cell.

    Returns:
        The number of rows.

    Raises:
        SettingsError: the run has no readable metrics, or ``output`` cannot be written.
    """
    try:
        rows, damage = read_rows(run / METRICS)
    except OSError as error:
        raise SettingsError(
            f"{run / METRICS} cannot be read ({error.strerror or error}): give a run's folder"
        ) from error
    for line in damage:
        logger.warning("%s: left out", line)
    names = sorted({name for row in rows for name in row} - {"step", "seconds"})
    try:
        with output.open("w", newline="") as file:
            table = csv.DictWriter(file, ["step", "seconds", *names], restval="")
            table.writeheader()
            table.writerows(rows)
    except OSError as error:
        raise SettingsError(f"{output} cannot be written ({error.strerror or error})") from error
    return len(rows)
