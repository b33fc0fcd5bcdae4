"""Everything about Monarch and processes: hosts, process meshes, torchrun, deadlines, the watch, a clean end."""

import os
import sys

from monarch_rl.runtime import process

_POLL = "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY"

MONARCH_CAME_FIRST = _POLL not in os.environ and "monarch._rust_bindings" in sys.modules
"""Monarch was imported first, before its polling interval for dead processes was set: it is 10 s instead of 2 s."""

os.environ.setdefault(_POLL, "2s")  # every poll asks for each mesh: at 1 s that was 2 % of a core

if "monarch._rust_bindings" not in sys.modules:  # else Monarch's own exit handler would come after this one
    process.wait_at_exit()
