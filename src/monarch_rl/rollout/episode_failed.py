"""Why an episode failed or a score is missing, as exceptions and then as what the task's author is shown."""

from __future__ import annotations

from typing import Any

from monarch_rl.episode.failure import Failure, shortened
from monarch_rl.rollout.tracebacks import describe

QUOTED_CHARACTERS = 300
"""Of a prompt and of an answer in a report."""


class EpisodeFailed(Exception):
    """The episode's code or its score failed; costs this episode only. ``reason`` is short, so that it can be counted.

    ``place`` and ``report`` are as in :class:`~monarch_rl.episode.failure.Failure`.
    """

    def __init__(self, reason: str, place: str = "", report: str = "") -> None:
        super().__init__(reason)
        self.reason, self.place, self.report = reason, place, report
        self.tokens = 0
        """Drawn before it failed."""
        self.prompt: str | None = None
        """What the policy was given first."""
        self.answer: str | None = None
        """The policy's last turn."""
        self.messages: list[dict[str, Any]] = []
        """All that was said, as JSON objects with role and content."""
        self.index: int | None = None
        """Which item was played."""

    @property
    def failure(self) -> Failure:
        """What its author is shown: with the item, and with what the policy answered."""
        lines = [self.report] if self.report else []
        if self.index is not None:
            prompt = "" if self.prompt is None else f", prompt: {shortened(self.prompt, QUOTED_CHARACTERS)!r}"
            lines.append(f"Item {self.index}{prompt}")
        if self.answer is not None:
            lines.append(f"Answer: {shortened(self.answer, QUOTED_CHARACTERS)!r}")
        return Failure(self.reason, self.place, "\n".join(lines))


def item_failed(error: Exception, index: int) -> EpisodeFailed:
    """Why an item that cannot be made is not played."""
    failed = EpisodeFailed(f"item raised {type(error).__name__} when it was made", *describe(error))
    failed.index = index
    return failed


# -- why there is no score --------------------------------------------------------------------------------------------


class ScoringFailed(Exception):
    """One score could not be computed; ``reason`` is short, without details, so that failures can be counted by it.

    ``place`` and ``report`` are as in :class:`~monarch_rl.episode.failure.Failure`.
    """

    def __init__(self, reason: str, detail: str = "", place: str = "", report: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.place, self.report = reason, place, report


class ScorerBroken(RuntimeError):
    """No score can be computed any more: the scoring processes do not start. The worker is lost."""
