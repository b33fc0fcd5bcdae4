from __future__ import annotations

import monarch_rl.runtime  # noqa: F401  before monarch: it sets how often Monarch looks for dead processes
from tests.runtime.conftest import start as start
