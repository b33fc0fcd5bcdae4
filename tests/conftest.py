"""For all tests: what must be said before torch and Monarch are first imported."""

from __future__ import annotations

import os

# The processes of a test share few cores: one thread each is much faster than several.
os.environ["OMP_NUM_THREADS"] = "1"

from hypothesis import settings  # noqa: E402

import monarch_rl.runtime  # noqa: E402,F401  before monarch: it sets how often Monarch looks for dead processes

# How long an example takes says more about what else runs on the machine than about the example.
settings.register_profile("shared cores", deadline=None)
settings.load_profile("shared cores")

pytest_plugins = ["tests.plugin"]
