"""For all tests: what must be said before torch and Monarch are first imported."""

from __future__ import annotations

import os

# The processes of a test share few cores: one thread each is much faster than several.
os.environ["OMP_NUM_THREADS"] = "1"

from hypothesis import HealthCheck, settings  # noqa: E402

import monarch_rl.runtime  # noqa: E402,F401  before monarch: it sets how often Monarch looks for dead processes

# How long an example takes says more about what else runs on the machine than about the example; and the same commit
# is to try the same examples. `./tools/test --all` tries others, and prints their seed.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "random", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("repeatable")

pytest_plugins = ["tests.plugin"]
