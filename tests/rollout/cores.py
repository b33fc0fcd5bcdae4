"""Scoring processes as on a machine with enough cores, however slow the test machine is."""

from __future__ import annotations

import time

import pytest

from monarch_rl.rollout import scoring
from monarch_rl.runtime import starvation
from monarch_rl.runtime.starvation import CoreTime, Look

AMPLE_S = 600.0
"""Deadline of calls that must succeed: no standstill of the machine exhausts it."""


def with_cores(patch: pytest.MonkeyPatch) -> None:
    """No score is repeated for lack of cores, and new processes may take long to start."""
    patch.setattr(starvation, "look", lambda: Look(time.monotonic(), {1: CoreTime(0.0, 0.0)}))
    patch.setattr(scoring, "STUCK_S", AMPLE_S)
