"""For all tests: settings that must precede the first import of torch and Monarch."""

from __future__ import annotations

import os

# The processes of a test share few cores: one thread each is much faster than several.
os.environ["OMP_NUM_THREADS"] = "1"

from hypothesis import HealthCheck, settings  # noqa: E402

import monarch_rl.runtime  # noqa: E402,F401  before monarch: it sets how often Monarch polls for dead processes

# The time of an example depends more on the load of the machine than on the example; and the same commit should try
# the same examples. `./tools/test --all` tries others, and prints their seed.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "random", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("repeatable")

pytest_plugins = ["tests.plugin"]
