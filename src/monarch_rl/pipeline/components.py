"""The components of a run whose actors have started."""

from __future__ import annotations

from dataclasses import dataclass

from monarch_rl.observe.console import Console
from monarch_rl.observe.disk_thread import answers
from monarch_rl.observe.metrics import Metrics
from monarch_rl.pipeline.checkpoints import Checkpoints, ControllerState
from monarch_rl.pipeline.evaluation import BestResult, Evaluations
from monarch_rl.pipeline.failures import Failures
from monarch_rl.pipeline.observer import FrozenMeter, Observer
from monarch_rl.pipeline.publishing import Publisher
from monarch_rl.pipeline.recovery import Recovery
from monarch_rl.pipeline.rollout_log import RolloutLog
from monarch_rl.pipeline.start import Actors
from monarch_rl.watch.watch import Watch


@dataclass(frozen=True)
class RunComponents:
    """The components of a run whose actors have started."""

    actors: Actors
    publisher: Publisher
    observer: Observer
    recovery: Recovery
    failures: Failures
    frozen: FrozenMeter
    watch: Watch | None
    metrics: Metrics | None
    rollouts: RolloutLog | None
    console: Console | None
    evaluations: Evaluations
    checkpoints: Checkpoints | None
    """None if the run writes no files."""

    def note(self, text: str) -> None:
        """Print a line on the console."""
        if self.console is not None:
            self.console.note(text)

    def controller_state(self, best: BestResult, limit_s: float | None = None) -> ControllerState:
        """The controller's current state. Flushes the run's files to disk first. Raises OSError.

        Args:
            best: the best result so far.
            limit_s: seconds for the flush; None is the short limit for a flush that delays a step.
        """
        if self.metrics is None or self.rollouts is None:
            return ControllerState()
        names = self.metrics.path.name, self.rollouts.lines.path.name
        sizes = answers([self.metrics.position(), self.rollouts.position()], limit_s)
        files = dict(zip(names, sizes, strict=True))
        return ControllerState(self.metrics.seconds, files, self.observer.counters(), best.best)

    @property
    def lost_lines(self) -> float:
        """Lines of the run's files that could not be written."""
        refused = [] if self.metrics is None or self.rollouts is None else [self.metrics.lines, self.rollouts.lines]
        return float(sum(file.lost for file in refused))
