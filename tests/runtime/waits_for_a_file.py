"""A module that takes long to import: until there is the file that the environment names."""

from __future__ import annotations

import os
import time
from pathlib import Path

while not Path(os.environ["IMPORT_WHEN_THERE_IS"]).exists():
    time.sleep(0.01)
