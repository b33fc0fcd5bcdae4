"""Imports of processes that neither train nor generate: each of these packages would delay their start by seconds."""

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
"""The first import of each process, and the modules of :data:`HEAVY` that it may load."""


@pytest.mark.parametrize("process", MODULES)
def test_light_processes_import_nothing_heavy(process: str) -> None:
    module, allowed = MODULES[process]
    program = f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == allowed
