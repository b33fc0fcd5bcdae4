"""Monarch and processes: hosts, process meshes, torchrun, deadlines, process reports, clean shutdown."""

import os
import sys

from monarch_rl.runtime import process

process.open_standard_streams()  # Monarch opens files when it is imported

_POLL = "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY"

MONARCH_CAME_FIRST = _POLL not in os.environ and "monarch._rust_bindings" in sys.modules
"""True if Monarch was imported before its polling interval for dead processes could be set: 10 s instead of 2 s."""

os.environ.setdefault(_POLL, "2s")  # each poll queries every mesh: at 1 s that took 2 % of a core

# Exit handlers run last in, first out: with Monarch imported already, its handler would run after this one.
if "monarch._rust_bindings" not in sys.modules:
    process.wait_at_exit()
