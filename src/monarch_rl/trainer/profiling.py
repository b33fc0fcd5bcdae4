"""Profiler traces of a few steps: ``trainer.profile_steps``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

logger = logging.getLogger("monarch_rl")


class StepProfiler:
    """Profiles consecutive steps of one rank, and writes their trace to ``rank<rank>.json.gz``.

    Used on one thread only, the one that computes: the profiler records the operators of the thread that starts it.

    Args:
        first: first step to profile.
        last: last step to profile, after which the trace is written.
        folder: folder of the trace, created for it.
    """

    def __init__(self, first: int, last: int, folder: Path, rank: int, device: torch.device) -> None:
        self._first, self._last = first, last
        self._path = folder / f"rank{rank}.json.gz"
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._activities = activities
        self._profile: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the block, which is step ``number``, if it is one of the chosen steps.

        A run that resumes between them profiles the rest. A trace that cannot be written is logged, and lost.
        """
        if not self._first <= number <= self._last:
            yield
            return
        if self._profile is None:
            self._profile = profile(activities=self._activities, record_shapes=True)
            self._profile.start()
        with record_function(f"step {number}"):
            yield
        if number == self._last:
            self._write()

    def _write(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        try:
            self._path.parent.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))
            logger.info("wrote the profile of steps %d to %d: %s", self._first, self._last, self._path)
        except (OSError, RuntimeError) as error:  # the run is worth more than its profile
            logger.error("the profile %s cannot be written: %s", self._path, error)
        self._profile = None
