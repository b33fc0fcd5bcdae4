"""Checkpoint settings. docs/checkpoints.md describes the content of a checkpoint and what a resumed run restores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from monarch_rl.settings.cli import NotAFlag
from monarch_rl.settings.ranges import FOREVER_S, CheckedSettings, Range


@dataclass(frozen=True)
class CheckpointSettings(CheckedSettings, flags="checkpoint"):
    """When checkpoints are made, from which the run can resume, and which are kept."""

    every_steps: Annotated[int, Range(0, 10**9, "0 is never")] = 0
    """Steps between two checkpoints; 0: no checkpoints by steps. A checkpoint takes three times the size of the float32
    model on disk, and the same again in the trainer ranks' host memory. A step waits only for the copy to host memory;
    the disk is written during training."""
    every_minutes: Annotated[float, Range(0, FOREVER_S, "0 is never")] = 15.0
    """Minutes between two checkpoints; 0: no checkpoints by time. A crash loses the work since the last one. With 0
    here and in every-steps, a checkpoint is made only at a signal and when the run fails, before its last step."""
    keep: Annotated[int, Range(1, 1_000_000)] = 2
    """Number of newest checkpoints to keep on disk."""
    keep_best: NotAFlag[bool] = True
    """Also keep the checkpoint of the version with the best evaluation result, by evaluation.best. A checkpoint is made
    after each evaluation with a new best result, unless every-steps and every-minutes are 0."""
    grace_s: Annotated[float, Range(0, FOREVER_S, "0 saves nothing then")] = 20.0
    """Seconds for a last checkpoint at a signal (SIGTERM, SIGUSR1, Ctrl-C) or when the run fails; ending all
    processes takes up to 20 s more. Schedulers usually give 30 s in total before they kill a preempted run: configure
    more for large models."""
    restarts: Annotated[int, Range(0, 1_000_000, "0 is never")] = 3
    """How often a run that lost an essential process automatically resumes from its last checkpoint; each new
    checkpoint resets the count. Under torchrun, --max-restarts applies instead."""

    @property
    def between_steps(self) -> bool:
        """Whether checkpoints are made regularly during the run."""
        return bool(self.every_steps or self.every_minutes)

    def due(self, steps: int, seconds: float) -> bool:
        """Whether a checkpoint is due ``steps`` steps and ``seconds`` seconds after the last one."""
        by_steps = self.every_steps > 0 and steps >= self.every_steps
        return steps > 0 and (by_steps or 0 < 60 * self.every_minutes <= seconds)
