"""Why there is no score."""

from __future__ import annotations


class ScoringFailed(Exception):
    """One score could not be computed; ``reason`` is short, without details, so that failures can be counted by it.

    ``place`` and ``report`` are as in :class:`~monarch_rl.episode.failure.Failure`.
    """

    def __init__(self, reason: str, detail: str = "", place: str = "", report: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.place, self.report = reason, place, report


class ScorerBroken(RuntimeError):
    """No score can be computed any more: the scoring processes do not start. The worker is lost."""
