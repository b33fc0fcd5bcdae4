"""Failed episodes on their way to the author of the task: each kind is shown once, and a run that only fails ends."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from monarch_rl.buffer.actor import Buffer
from monarch_rl.episode.failure import KINDS, Failure
from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.pipeline.observer import Observer
from monarch_rl.rollout.evaluation import Evaluation
from monarch_rl.watch.watch import STUCK_FACTOR

logger = logging.getLogger("monarch_rl")

MIN_ITEMS = 8
"""Held-out items that show that nothing works any more, at least; that one of fewer fails may be chance."""


class EpisodesFail(RuntimeError):
    """No episode can be used. The message begins with the reason and ends with the first traceback."""


class Failures:
    """Shows failures and counts them.

    Args:
        buffer: workers report to it.
        stall_s: twice this may groups be dropped, and none be put, until the run ends.
    """

    def __init__(self, buffer: Buffer, stall_s: float) -> None:
        self._buffer = buffer
        self._patience_s = STUCK_FACTOR * stall_s
        self._held_out: Counter[str] = Counter()

    async def follow(self) -> None:
        """Show the first failure of each kind as it comes. Ends with the buffer.

        Raises:
            EpisodesFail: the run does nothing but drop groups.
        """
        known = 0
        while True:
            try:
                # waits: as long as the run; its end cancels this, and a lost buffer fails the call
                news = await self._buffer.failures.call_one(known, self._patience_s)
            except Exception as error:  # the loss of the buffer ends the run: whoever trains says so
                logger.warning("failures are no longer shown: %s", last_line(error))
                return
            known += len(news.failures)
            for failure in news.failures:
                logger.warning("%s failed, the first one in this way: %s", failure.what, failure)
            if news.failures and known == KINDS:
                logger.warning("these were %d kinds of failures: further ones are counted, but not shown", KINDS)
            if news.verdict is not None:
                raise EpisodesFail(str(news.verdict))

    def counted(self, result: Evaluation, steps: int) -> Evaluation:
        """``result``, once the held-out items that failed are counted.

        Args:
            steps: optimiser steps made so far.

        Raises:
            EpisodesFail: all failed, and that is no chance: no step has been made, or there are many items.
        """
        self._held_out.update(result.failed)
        if result.failed and sum(result.failed.values()) == result.rewards.size:
            reason, count = Counter(result.failed).most_common(1)[0]
            first = result.first[reason]
            said = (
                f"{count} of {result.rewards.size} held-out items failed for this reason, and none was played through"
            )
            failure = Failure(f"{reason}: {said}", first.place, first.report)
            if steps == 0 or result.rewards.size >= MIN_ITEMS:
                raise EpisodesFail(str(failure))
            logger.warning("too few to end the run for it: %s", failure)
        return result

    @asynccontextmanager
    async def summed_up(self, observer: Observer, note: Callable[[str], None]) -> AsyncIterator[None]:
        """Once the block has ended well, ``note`` one line with what failed in the run, by reason, if anything did."""
        yield
        counted = {"episodes": await observer.failed(), "held-out items": self._held_out}
        parts = [
            f"{count:,} {of}: {reason}" for of, counts in counted.items() for reason, count in counts.most_common()
        ]
        if parts:
            note(f"failed: {'; '.join(parts)}")
