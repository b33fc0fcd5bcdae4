from __future__ import annotations

from tests.runtime.conftest import start as start
