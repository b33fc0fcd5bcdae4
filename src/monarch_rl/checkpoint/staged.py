"""What trainer ranks answer of a checkpoint. A module of its own: the controller reads it, and need not import what
writes tensors, which takes a third of its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Staged:
    """A copy that is ready to be written."""

    version: int
    optimizer_steps: int
    seconds: float = 0.0
    """That the copy took."""
