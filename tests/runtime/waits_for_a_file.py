"""A module with a slow import: it ends when the file named in the environment exists."""

from __future__ import annotations

import os
import time
from pathlib import Path

while not Path(os.environ["IMPORT_WHEN_THERE_IS"]).exists():
    time.sleep(0.01)
