"""Why an episode or a stage failed, described for the author of the environment or reward."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = 20
"""Kinds of failures that are shown in full; an error raised at ever new places must not fill the console."""
UNUSABLE = "returned an unusable value"
"""End of the reason if a function returned a value that is not a reward."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure. Failures of the same :attr:`kind` are shown once and counted."""

    reason: str
    """Short, because failures are counted by reason: ``"score raised KeyError"``."""
    place: str = ""
    """File and line, ``"reward.py:12"``, if known."""
    report: str = ""
    """All details, as lines: the traceback, what to change, the item."""
    what: str = "an episode"
    """What failed, for the sentence that reports it."""

    @property
    def kind(self) -> tuple[str, str]:
        """Reason and place."""
        return self.reason, self.place

    def __str__(self) -> str:
        return f"{self.reason}\n{self.report}" if self.report else self.reason


def shortened(text: str, characters: int) -> str:
    """``text``, with its middle left out if it is longer than ``characters``."""
    left_out = len(text) - characters
    if left_out <= 0:
        return text
    half = characters // 2
    return f"{text[:half]} [... {left_out:,} characters ...] {text[-half:]}"
