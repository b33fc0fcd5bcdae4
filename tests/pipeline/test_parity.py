"""Processes of a side of a comparison never outlive it."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from monarch_rl.pipeline.parity import SideFailed, run_ranks
from monarch_rl.runtime.fork_client import ADDRESS_VARIABLE
from monarch_rl.runtime.fork_server import Preload
from tests.forking import forking


def fail_or_hang(rank: int) -> None:
    if rank == 1:
        sys.exit(3)
    time.sleep(600)


def tell_parent(rank: int, folder: Path) -> None:
    (folder / str(rank)).write_text(str(os.getppid()))


def test_ranks_are_forked_where_there_is_a_fork_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with forking([Preload("small", ("json",))]) as (name, server):
        monkeypatch.setenv(ADDRESS_VARIABLE, name)
        run_ranks(tell_parent, (tmp_path,), 1, 120.0, "the rank", "small")
        stages = {child.pid for child in psutil.Process(server.pid).children(recursive=True)}
    assert int((tmp_path / "0").read_text()) in stages


def test_a_side_that_fails_or_hangs_is_ended() -> None:
    before = multiprocessing.active_children()  # of other tests
    with pytest.raises(SideFailed, match="waited for the sides: a process ended with 3"):
        run_ranks(fail_or_hang, (), 2, 120.0, "the sides")
    assert set(multiprocessing.active_children()) <= set(before)
    with pytest.raises(SideFailed, match="waited 0.5 s for the side: killed"):
        run_ranks(fail_or_hang, (), 1, 0.5, "the side")
    assert set(multiprocessing.active_children()) <= set(before)
