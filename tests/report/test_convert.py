"""Conversions of a run's files, through the command line."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import run


def monarch_rl(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "monarch_rl.cli", *arguments])


def test_metrics_become_a_table(tmp_path: Path) -> None:
    lines: list[dict[str, float | None]] = [
        {"step": 1, "seconds": 2.5, "reward/mean": 0.25, "trainer/loss": None},
        {"step": 1, "seconds": 2.75, "held_out/accuracy": 0.5},
        {"step": 2, "seconds": 4.0, "reward/mean": 1e-07},
    ]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)
        file.write('{"step": 3, "sec')  # the run was killed
    done = monarch_rl("convert", tmp_path, "--to", "csv", "-o", tmp_path / "out.csv")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0])[:2] == ["step", "seconds"]
    read = [{name: float(value) for name, value in row.items() if value} for row in table]
    assert read == [{name: value for name, value in line.items() if value is not None} for line in lines]


@pytest.mark.parametrize("missing", ["run", "output"])
def test_what_cannot_be_read_or_written_is_named(tmp_path: Path, missing: str) -> None:
    if missing == "output":
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "seconds": 1.0}\n')
    culprit = tmp_path / ("metrics.jsonl" if missing == "run" else "none/out.csv")
    done = monarch_rl("convert", tmp_path, "--to", "csv", "-o", tmp_path / "none/out.csv")
    assert done.returncode == 2
    assert str(culprit) in done.stderr and "Traceback" not in done.stderr
