"""Processes of a side of a comparison never outlive it."""

from __future__ import annotations

import multiprocessing
import sys
import time

import pytest

from monarch_rl.pipeline.parity import SideFailed, run_ranks


def fail_or_hang(rank: int) -> None:
    if rank == 1:
        sys.exit(3)
    time.sleep(600)


def test_a_side_that_fails_or_hangs_is_ended() -> None:
    before = multiprocessing.active_children()  # of other tests
    with pytest.raises(SideFailed, match="waited for the sides: a process ended with 3"):
        run_ranks(fail_or_hang, (), 2, 120.0, "the sides")
    assert set(multiprocessing.active_children()) <= set(before)
    with pytest.raises(SideFailed, match="waited 0.5 s for the side: killed"):
        run_ranks(fail_or_hang, (), 1, 0.5, "the side")
    assert set(multiprocessing.active_children()) <= set(before)
