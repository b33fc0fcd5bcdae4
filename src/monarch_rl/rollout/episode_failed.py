"""Exceptions for failed episodes and missing scores, and the report that the task's author is shown."""

from __future__ import annotations

from typing import Any

from monarch_rl.episode.episode import EpisodeTimes, Turn
from monarch_rl.episode.failure import Failure, shortened
from monarch_rl.errors import EpisodeError, is_infrastructure
from monarch_rl.rollout.tracebacks import describe

QUOTED_CHARACTERS = 300
"""Maximum length of a quoted prompt or answer in a report."""


class EpisodeFailed(EpisodeError):
    """The episode's code, its score or a service that it needs failed, which costs only this episode. ``reason`` is
    short, because failures are counted by it.

    ``place`` and ``report`` are as in :class:`~monarch_rl.episode.failure.Failure`, ``infrastructure`` is as in
    :func:`~monarch_rl.errors.is_infrastructure`.
    """

    def __init__(self, reason: str, place: str = "", report: str = "", infrastructure: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.place, self.report, self.infrastructure = reason, place, report, infrastructure
        self.tokens = 0
        """Tokens sampled before the failure."""
        self.prompt: str | None = None
        """Last user message before the first turn; without one, the first messages given to the policy."""
        self.answer: str | None = None
        """Text of the policy's last turn."""
        self.messages: list[dict[str, Any]] = []
        """The conversation so far, as JSON objects with role and content."""
        self.turns: list[Turn] = []
        """The policy's turns so far, in the conversation of ``messages``."""
        self.times: EpisodeTimes | None = None
        self.index: int | None = None
        """Index of the item."""

    @property
    def failure(self) -> Failure:
        """The failure as its author is shown it: with the item and the policy's last answer."""
        lines = [self.report] if self.report else []
        if self.index is not None:
            prompt = "" if self.prompt is None else f", prompt: {shortened(self.prompt, QUOTED_CHARACTERS)!r}"
            lines.append(f"Item {self.index}{prompt}")
        if self.answer is not None:
            lines.append(f"Answer: {shortened(self.answer, QUOTED_CHARACTERS)!r}")
        return Failure(self.reason, self.place, "\n".join(lines))


def item_failed(error: Exception, index: int) -> EpisodeFailed:
    """The failure of an item that raised ``error`` when it was made."""
    reason = f"item raised {type(error).__name__} when it was made"
    failed = EpisodeFailed(reason, *describe(error), is_infrastructure(error))
    failed.index = index
    return failed


# -- missing scores ---------------------------------------------------------------------------------------------------
