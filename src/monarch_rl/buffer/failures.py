"""What workers report of failed episodes, and whether the run does anything but fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from monarch_rl.buffer.waiting import Line
from monarch_rl.episode.failure import KINDS, Failure
from monarch_rl.runtime.deadlines import now
from monarch_rl.runtime.endpoint import lasting_endpoint
from monarch_rl.runtime.lasting_calls import ResilientActor

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

    Some groups fail within milliseconds, while good ones are drawn for minutes. So a dropped group *counts* only once
    no group that was admitted before it is still being played: until then that one may show that the run works.

    Args:
        groups_per_step: groups of a batch.
    """

    def __init__(self, groups_per_step: int) -> None:
        self._enough = max(groups_per_step, MIN_GROUPS)
        self._first: dict[tuple[str, str], Failure] = {}
        self._any_put = False
        self._hopeless: str | None = None
        """Why the groups that were admitted first were dropped, if it is one reason."""
        self._dropped: list[tuple[int, str, float]] = []
        """Groups that do not count yet: id, reason and moment. A heap, so that the one admitted first is next."""
        self._counted: Counter[str] = Counter()
        """Those that count, by reason."""
        self._since, self._until = 0.0, 0.0
        """When the first group was dropped since one was put, and the last of those that count."""
        self._next_id = 0
        """Of the group that came after those admitted until the former."""

    def note(self, failure: Failure) -> None:
        """Keep the first of a kind."""
        if len(self._first) < KINDS:
            self._first.setdefault(failure.kind, failure)

    def note_put(self) -> None:
        """A group has enough episodes to be compared."""
        self._any_put = True
        self._dropped.clear()
        self._counted.clear()

    def note_dropped(self, group_id: int, reason: str, moment: float, next_id: int) -> None:
        """A worker has dropped a group.

        Args:
            group_id: ids count up from 0 in order of admission.
            moment: in seconds.
            next_id: of the next new group.
        """
        if not self._dropped and not self._counted:
            self._since, self._until, self._next_id = moment, moment, next_id
        heappush(self._dropped, (group_id, reason, moment))

    def news(self, known: int, moment: float, patience_s: float, playing: int | None) -> FailureNews:
        """What is new to one who knows the first ``known`` kinds.

        Args:
            moment: now, in seconds.
            patience_s: seconds for which groups may be dropped and none be put, once one has been put.
            playing: the group admitted first of those that are being played; None if there is none.
        """
        self._count(playing)
        return FailureNews(list(self._first.values())[known:], self._verdict(moment, patience_s, playing))

    def _count(self, playing: int | None) -> None:
        while self._dropped and (playing is None or self._dropped[0][0] < playing):
            _, reason, moment = heappop(self._dropped)
            self._counted[reason] += 1
            self._until = max(self._until, moment)
            if self._counted.total() == self._enough and len(self._counted) == 1 and not self._any_put:
                self._hopeless = reason

    def _verdict(self, moment: float, patience_s: float, playing: int | None) -> Failure | None:
        """Why the run only fails: of the groups admitted first, a batch's worth were dropped for one reason; or none
        was put for ``patience_s`` seconds, in which that many were dropped, and all that had been admitted before."""
        if self._hopeless is not None and not self._any_put:
            reason = self._hopeless
            said = f"all of the first {self._enough} groups were dropped for this reason"
            return self._explained(reason, f"{said}, so that there is nothing to train")
        total = self._counted.total()
        seconds = (moment if playing is None else self._until) - self._since
        if total < self._enough or seconds < patience_s or (playing is not None and playing < self._next_id):
            return None
        reason, count = self._counted.most_common(1)[0]
        others = f", {total - count} for others" if count < total else ""
        return self._explained(reason, f"for {seconds:.0f} s only groups were dropped: {count} for this reason{others}")

    def _explained(self, reason: str, said: str) -> Failure:
        first = next((failure for failure in self._first.values() if failure.reason == reason), Failure(reason))
        return Failure(f"{reason}: {said}", first.place, first.report)


class FailureReports(ResilientActor):
    """The part of the buffer that hears of failures from workers, and tells the controller.

    Args:
        groups_per_step: groups of a batch.
        first_playing: gives the id of the group admitted first of those that are being played; None if there is none.
    """

    def __init__(self, groups_per_step: int, first_playing: Callable[[], int | None]) -> None:
        self._failures, self._news = FailureLog(groups_per_step), Line()
        self._first_playing = first_playing

    @lasting_endpoint
    async def note_failure(self, failure: Failure) -> None:
        """Take note of the first failure of a kind; whoever asks for :meth:`failures` is told."""
        self._failures.note(failure)
        self._news.serve()

    @lasting_endpoint
    async def failures(self, known: int, patience_s: float) -> FailureNews:
        """Wait until there are more kinds of failures than ``known``, or until the run does nothing but fail.

        Args:
            known: kinds that the caller has been told of.
            patience_s: seconds for which groups may be dropped and none be put, once one has been put.
        """
        news = FailureNews()

        def served() -> bool:
            nonlocal news
            news = self._failures.news(known, now(), patience_s, self._first_playing())
            return bool(news.failures) or news.verdict is not None

        await self._news.wait(served, None)  # waits: as long as the run; the caller's end cancels it
        return news

    def note_dropped(self, group_id: int, reason: str, next_id: int) -> None:
        """A worker has dropped a group; ``next_id`` is that of the next new one."""
        self._failures.note_dropped(group_id, reason, now(), next_id)
        self._news.serve()
