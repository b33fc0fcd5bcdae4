"""The user's settings of checkpoints. docs/checkpoints.md says what is in one and what a resumed run has exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from monarch_rl.settings.ranges import FOREVER_S, CheckedSettings, Range


@dataclass(frozen=True)
class CheckpointSettings(CheckedSettings, flags="checkpoint"):
    """When the run is saved so that it can go on, and which checkpoints are kept."""

    every_steps: Annotated[int, Range(0, 10**9, "0 is never")] = 0
    """Steps between two checkpoints; 0 counts no steps. A checkpoint is three times the model in float32 on disk, and
    once in the memory of the trainer ranks' machine; a step pays for the copy there, the disk is written meanwhile."""
    every_minutes: Annotated[float, Range(0, FOREVER_S, "0 is never")] = 15.0
    """Minutes between two checkpoints, 0 counts none; what is lost with a process is what came after the last one.
    With 0 here and in every-steps there are only those at a signal and when the run fails, before its last step."""
    keep: Annotated[int, Range(1, 1_000_000)] = 2
    """Newest checkpoints that stay on disk."""
    keep_best: bool = True
    """The checkpoint of the version that was the best in an evaluation, by evaluation.best, stays, too. One is made
    after each evaluation that is better than all before, unless every-steps and every-minutes are 0."""
    grace_s: Annotated[float, Range(0, FOREVER_S, "0 saves nothing then")] = 20.0
    """Seconds for a last checkpoint at a signal (SIGTERM, SIGUSR1, SIGHUP, Ctrl-C) or when the run fails; ending all
    processes takes up to 20 s more. What preempts runs gives 30 s in all as a rule: have it give more where a model is
    large."""
    restarts: Annotated[int, Range(0, 1_000_000, "0 is never")] = 3
    """How often a run that has lost a process which it cannot do without goes on from its last checkpoint by itself; a
    newer checkpoint counts anew. Under torchrun --max-restarts says so."""

    @property
    def between_steps(self) -> bool:
        """Whether any are made while the run goes on."""
        return bool(self.every_steps or self.every_minutes)

    def due(self, steps: int, seconds: float) -> bool:
        """Whether a checkpoint is due, ``steps`` and ``seconds`` after the last one."""
        by_steps = self.every_steps > 0 and steps >= self.every_steps
        return steps > 0 and (by_steps or 0 < 60 * self.every_minutes <= seconds)
