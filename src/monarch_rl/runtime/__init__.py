"""Monarch behind one door: hosts, process meshes, the torchrun hand-over, deadlines, a clean end."""

import os

# Monarch reads this when it is imported. Its default finds a dead process only after up to 10 s.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
