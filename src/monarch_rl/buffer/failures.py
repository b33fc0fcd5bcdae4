"""What workers report of failed episodes, and whether the run does anything but fail."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from monarch_rl.buffer.waiting import Line
from monarch_rl.episode.failure import KINDS, Failure
from monarch_rl.runtime.deadlines import now
from monarch_rl.runtime.endpoint import concurrent_endpoint
from monarch_rl.runtime.resilient import ResilientActor

MIN_GROUPS = 8
"""Groups that show that nothing works, at least; in a run with fewer a step chance would show it too often."""


@dataclass(frozen=True, slots=True)
class FailureNews:
    """What the controller has not heard yet."""

    failures: list[Failure] = field(default_factory=list)
    """The first of each new kind."""
    verdict: Failure | None = None
    """Why the run only fails, if it does."""


class FailureLog:
    """The first failure of each kind, of all workers, and the groups that were dropped since one was put.

    Args:
        groups_per_step: groups of one optimiser step.
    """

    def __init__(self, groups_per_step: int) -> None:
        self._enough = max(groups_per_step, MIN_GROUPS)
        self._first: dict[tuple[str, str], Failure] = {}
        self._any_put = False
        self._dropped: Counter[str] = Counter()
        """By reason, since a group was put."""
        self._since = 0.0
        """When the first of these was dropped."""

    def note(self, failure: Failure) -> None:
        """Keep the first of a kind."""
        if len(self._first) < KINDS:
            self._first.setdefault(failure.kind, failure)

    def note_put(self) -> None:
        """A group has enough episodes to be compared."""
        self._any_put = True
        self._dropped.clear()

    def note_dropped(self, reason: str, moment: float) -> None:
        """A worker has dropped a group; ``moment`` in seconds."""
        if not self._dropped:
            self._since = moment
        self._dropped[reason] += 1

    def news(self, known: int, moment: float, patience_s: float) -> FailureNews:
        """What is new to one who knows the first ``known`` kinds."""
        return FailureNews(list(self._first.values())[known:], self._verdict(moment, patience_s))

    def _verdict(self, moment: float, patience_s: float) -> Failure | None:
        """Why the run only fails: a batch's worth of groups were dropped and none was put, either from its start on and
        all for one reason, or for ``patience_s`` seconds."""
        total = self._dropped.total()
        if total < self._enough:
            return None
        reason, count = self._dropped.most_common(1)[0]
        seconds = moment - self._since
        if not self._any_put and count == total:
            said = f"all of the first {total} groups were dropped for this reason, so that there is nothing to train"
        elif seconds >= patience_s:
            others = f", {total - count} for others" if count < total else ""
            said = f"for {seconds:.0f} s only groups were dropped: {count} for this reason{others}"
        else:
            return None
        first = next((failure for failure in self._first.values() if failure.reason == reason), Failure(reason))
        return Failure(f"{reason}: {said}", first.place, first.report)


class FailureReports(ResilientActor):
    """The part of the buffer that hears of failures from workers, and tells the controller.

    Args:
        groups_per_step: groups of one optimiser step.
    """

    def __init__(self, groups_per_step: int) -> None:
        self._failures, self._news = FailureLog(groups_per_step), Line()

    @concurrent_endpoint
    async def note_failure(self, failure: Failure) -> None:
        """Take note of the first failure of a kind; whoever asks for :meth:`failures` is told."""
        self._failures.note(failure)
        self._news.serve()

    @concurrent_endpoint
    async def failures(self, known: int, patience_s: float) -> FailureNews:
        """Wait until there are more kinds of failures than ``known``, or until the run does nothing but fail.

        Args:
            known: kinds that the caller has been told of.
            patience_s: seconds for which groups may be dropped and none be put, once one has been put.
        """
        news = FailureNews()

        def served() -> bool:
            nonlocal news
            news = self._failures.news(known, now(), patience_s)
            return bool(news.failures) or news.verdict is not None

        await self._news.wait(served, None)  # waits: as long as the run; the caller's end cancels it
        return news

    def note_dropped(self, reason: str) -> None:
        """A worker has dropped a group."""
        self._failures.note_dropped(reason, now())
        self._news.serve()
