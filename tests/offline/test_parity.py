"""The processes of each side of a comparison never outlive it."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from monarch_rl.errors import SideFailed
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.offline import parity
from monarch_rl.offline.parity import run_ranks
from monarch_rl.runtime.forking.fork_client import ADDRESS_VARIABLE
from monarch_rl.runtime.forking.fork_server import Preload
from monarch_rl.trainer.settings import TrainerSettings
from tests.forking import forking
from tools.memory import MODELS


def fail_or_hang(rank: int) -> None:
    if rank == 1:
        sys.exit(3)
    time.sleep(600)


def write_parent(rank: int, folder: Path) -> None:
    (folder / str(rank)).write_text(str(os.getppid()))


def test_ranks_are_forked_where_there_is_a_fork_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with forking([Preload("small", ("json",))]) as (name, server):
        monkeypatch.setenv(ADDRESS_VARIABLE, name)
        run_ranks(write_parent, (tmp_path,), 1, 600.0, "the rank", "small")
        stages = {child.pid for child in psutil.Process(server.pid).children(recursive=True)}
    assert int((tmp_path / "0").read_text()) in stages


@pytest.mark.slow
def test_a_side_that_fails_or_hangs_is_ended() -> None:
    before = multiprocessing.active_children()  # started by other tests
    with pytest.raises(SideFailed, match="the sides: .* ended with 3"):
        run_ranks(fail_or_hang, (), 2, 600.0, "the sides")
    assert set(multiprocessing.active_children()) <= set(before)
    with pytest.raises(SideFailed, match="waited 0.5 s for the side"):
        run_ranks(fail_or_hang, (), 1, 0.5, "the side")
    assert set(multiprocessing.active_children()) <= set(before)


def test_an_engine_has_20_more_seconds_to_start_per_gb_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both in the process that starts it, and until the process is killed; a value that the user sets overrides it."""
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["Qwen3-8B"].raw, "dtype": "bfloat16"}))
    limits: list[tuple[float, float | None]] = []

    def run(work: object, arguments: tuple[Any, ...], ranks: int, limit_s: float, *_: str) -> None:
        limits.append((limit_s, arguments[2].start_deadline_s))
        raise SideFailed("only the limits matter")

    monkeypatch.setattr(parity, "run_ranks", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for generator in (GeneratorSettings(), GeneratorSettings(start_deadline_s=77.0)):
        with pytest.raises(SideFailed):
            parity.compare(tmp_path, tmp_path, generator, TrainerSettings(), [], experts=False, deadline_s=100.0)
    needed_s = 1200 + 20 * 2 * 8.19
    assert limits == [
        (pytest.approx(needed_s + 100 + parity.END_S, abs=1), pytest.approx(needed_s, abs=1)),
        (77 + 100 + parity.END_S, 77),
    ]
