"""Failures that workers report, and the verdict whether every group of the run fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from monarch_rl.buffer.waiting import WaitQueue
from monarch_rl.episode.failure import KINDS, Failure
from monarch_rl.runtime.deadlines import now
from monarch_rl.runtime.endpoint import persistent_endpoint
from monarch_rl.runtime.persistent_calls import ResilientActor

MIN_GROUPS = 8
"""Minimum failed groups before the run counts as failing: with fewer groups per step, chance would fail a step's groups
too often."""


@dataclass(frozen=True, slots=True)
class FailureNews:
    """What the controller has not been told yet."""

    failures: list[Failure] = field(default_factory=list)
    """First failure of each new kind."""
    verdict: Failure | None = None
    """Why every group fails; None if the run may still work."""


class FailureLog:
    """The first failure of each kind, over all workers, and the groups dropped since a group was last submitted.

    Some groups fail within milliseconds, while good ones take minutes to generate. So a dropped group *counts* only
    once no group admitted before it is in progress: until then, an earlier group may show that the run works.

    Args:
        groups_per_step: groups per batch.
    """

    def __init__(self, groups_per_step: int) -> None:
        self._enough = max(groups_per_step, MIN_GROUPS)
        self._first: dict[tuple[str, str], Failure] = {}
        self._any_submitted = False
        self._hopeless: str | None = None
        """Why the first groups of the run were all dropped, if for the same reason."""
        self._dropped: list[tuple[int, str, float]] = []
        """Dropped groups that do not count yet: id, reason and time. A heap, earliest-admitted group first."""
        self._counted: Counter[str] = Counter()
        """Number of dropped groups that count, by reason."""
        self._since, self._until = 0.0, 0.0
        """Time of the first drop since a group was submitted, and of the last drop that counts."""
        self._next_id = 0
        """Id of the next new group at the time of that first drop: lower ids had been admitted by then."""

    def note(self, failure: Failure) -> None:
        """Store the failure if it is the first of its kind."""
        if len(self._first) < KINDS:
            self._first.setdefault(failure.kind, failure)

    def note_submitted(self) -> None:
        """A group was submitted, so enough of its episodes succeeded."""
        self._any_submitted = True
        self._dropped.clear()
        self._counted.clear()

    def note_dropped(self, group_id: int, reason: str, moment: float, next_id: int) -> None:
        """A worker has dropped a group.

        Args:
            group_id: id of the group; ids count up from 0 in order of admission.
            moment: current time in seconds.
            next_id: id of the next new group.
        """
        if not self._dropped and not self._counted:
            self._since, self._until, self._next_id = moment, moment, next_id
        heappush(self._dropped, (group_id, reason, moment))

    def news(self, known: int, moment: float, patience_s: float, first_in_progress: int | None) -> FailureNews:
        """Failures after the first ``known`` kinds, and the verdict.

        Args:
            known: number of kinds that the caller has been told.
            moment: current time in seconds.
            patience_s: seconds that groups may be dropped without any submission, after the first submission.
            first_in_progress: id of the earliest-admitted group in progress; None if there is none.
        """
        self._count(first_in_progress)
        return FailureNews(list(self._first.values())[known:], self._verdict(moment, patience_s, first_in_progress))

    def _count(self, first_in_progress: int | None) -> None:
        while self._dropped and (first_in_progress is None or self._dropped[0][0] < first_in_progress):
            _, reason, moment = heappop(self._dropped)
            self._counted[reason] += 1
            self._until = max(self._until, moment)
            if self._counted.total() == self._enough and len(self._counted) == 1 and not self._any_submitted:
                self._hopeless = reason

    def _verdict(self, moment: float, patience_s: float, first_in_progress: int | None) -> Failure | None:
        """Why every group fails, in one of two cases. Either the first batch's worth of groups (at least
        :data:`MIN_GROUPS`) were all dropped for one reason. Or no group was submitted for ``patience_s`` seconds, in
        which that many were dropped, and so were all groups admitted before the first of these drops."""
        if self._hopeless is not None and not self._any_submitted:
            reason = self._hopeless
            evidence = f"all of the first {self._enough} groups were dropped for this reason"
            return self._explained(reason, f"{evidence}, so there is nothing to train")
        total = self._counted.total()
        seconds = (moment if first_in_progress is None else self._until) - self._since
        waits_for_earlier = first_in_progress is not None and first_in_progress < self._next_id
        if total < self._enough or seconds < patience_s or waits_for_earlier:
            return None
        reason, count = self._counted.most_common(1)[0]
        others = f", {total - count} for other reasons" if count < total else ""
        evidence = f"for {seconds:.0f} s every finished group was dropped: {count} for this reason{others}"
        return self._explained(reason, evidence)

    def _explained(self, reason: str, evidence: str) -> Failure:
        first = next((failure for failure in self._first.values() if failure.reason == reason), Failure(reason))
        return Failure(f"{reason}: {evidence}", first.place, first.report)


class FailureReports(ResilientActor):
    """The buffer's endpoints for failures: workers report them, and the controller waits for them.

    Args:
        groups_per_step: groups per batch.
        first_in_progress: returns the id of the earliest-admitted group in progress; None if there is none.
    """

    def __init__(self, groups_per_step: int, first_in_progress: Callable[[], int | None]) -> None:
        self._failures, self._news = FailureLog(groups_per_step), WaitQueue()
        self._first_in_progress = first_in_progress

    @persistent_endpoint
    async def note_failure(self, failure: Failure) -> None:
        """Store the first failure of each kind, and notify callers of :meth:`failures`."""
        self._failures.note(failure)
        self._news.serve()

    @persistent_endpoint
    async def failures(self, known: int, patience_s: float) -> FailureNews:
        """Wait until there are more kinds of failures than ``known``, or until every group of the run fails.

        Args:
            known: number of kinds that the caller has been told.
            patience_s: seconds that groups may be dropped without any submission, after the first submission.
        """
        news = FailureNews()

        def has_news() -> bool:
            nonlocal news
            news = self._failures.news(known, now(), patience_s, self._first_in_progress())
            return bool(news.failures) or news.verdict is not None

        await self._news.wait(has_news, None)  # waits: as long as the run; the caller's end cancels it
        return news

    def note_dropped(self, group_id: int, reason: str, next_id: int) -> None:
        """A worker has dropped a group; ``next_id``: id of the next new group."""
        self._failures.note_dropped(group_id, reason, now(), next_id)
        self._news.serve()
