"""Monarch behind one door: hosts, process meshes, the torchrun hand-over, deadlines, a clean end."""

import os
import sys

_POLL = "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY"

MONARCH_CAME_FIRST = _POLL not in os.environ and "monarch._rust_bindings" in sys.modules
"""Monarch read its environment before we could set how often it looks for dead processes: every 10 s, not every 1 s."""

os.environ.setdefault(_POLL, "1s")
