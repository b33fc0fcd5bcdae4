"""What processes that neither train nor generate import: each of these packages takes seconds of their start."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ["torch", "torchtitan", "sglang", "transformers", "triton", "torch.distributed.checkpoint"]
MODULES = {
    "controller": ("monarch_rl.pipeline.run", ["torch"]),
    "host": ("monarch_rl.runtime.host", []),
    "supervisor": ("monarch_rl.runtime.supervisor", []),
    "buffer": ("monarch_rl.buffer.actor", []),
    "worker": ("monarch_rl.rollout.worker", []),
}
"""What each process imports first, and which of :data:`HEAVY` it may have."""


@pytest.mark.parametrize("process", MODULES)
def test_light_processes_import_nothing_heavy(process: str) -> None:
    module, allowed = MODULES[process]
    program = f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == allowed
