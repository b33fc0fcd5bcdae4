"""Reports failed episodes to the task's author: each kind is shown once, and a run in which all episodes fail ends."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from monarch_rl.buffer.actor import Buffer
from monarch_rl.episode.failure import KINDS, Failure
from monarch_rl.errors import EpisodesFail
from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.pipeline.observer import Observer
from monarch_rl.rollout.evaluation import Evaluation
from monarch_rl.rollout.worker import NO_TURN
from monarch_rl.watch.watch import STUCK_FACTOR

logger = logging.getLogger("monarch_rl")

MIN_ITEMS = 8
"""If all of at least this many held-out items fail, the run ends; with fewer, it may be chance."""


class Failures:
    """Reports and counts failures.

    Args:
        buffer: receives the workers' failure reports.
        stall_s: the run ends if for twice this many seconds groups are dropped and none is submitted.
    """

    def __init__(self, buffer: Buffer, stall_s: float) -> None:
        self._buffer = buffer
        self._patience_s = STUCK_FACTOR * stall_s
        self._held_out: Counter[str] = Counter()

    async def follow(self) -> None:
        """Log the first failure of each kind as it arrives, until the buffer ends.

        Raises:
            EpisodesFail: the run only drops groups.
        """
        received = 0
        while True:
            try:
                # waits: as long as the run; its end cancels this, and a lost buffer fails the call
                news = await self._buffer.failures.call_one(received, self._patience_s)
            except Exception as error:  # the loss of the buffer ends the run, and is reported by the training loop
                logger.warning("failures are no longer reported: %s", last_line(error))
                return
            received += len(news.failures)
            for failure in news.failures:
                logger.warning("%s failed, the first failure of this kind: %s", failure.what, failure)
            if news.failures and received == KINDS:
                logger.warning("%d kinds of failures were shown: further kinds are only counted", KINDS)
            if news.verdict is not None:
                raise EpisodesFail(str(news.verdict))

    def counted(self, result: Evaluation, steps: int) -> Evaluation:
        """Count the held-out items of ``result`` that failed; returns ``result``.

        Args:
            steps: training steps done so far.

        Raises:
            EpisodesFail: all items failed, or ended without a turn of the policy, and either no step has been trained
                yet or there are at least ``MIN_ITEMS``.
        """
        self._held_out.update(result.failed)
        if result.failed and sum(result.failed.values()) == result.rewards.size:
            reason, count = Counter(result.failed).most_common(1)[0]
            first = result.first[reason]
            share = f"{count} of {result.rewards.size} held-out items failed for this reason, and none completed"
            failure = Failure(f"{reason}: {share}", first.place, first.report)
            if steps == 0 or result.rewards.size >= MIN_ITEMS:
                raise EpisodesFail(str(failure))
            logger.warning("all held-out items failed, too few of them to end the run: %s", failure)
        elif (count := result.without_turn) + sum(result.failed.values()) == result.rewards.size:
            failure = Failure(f"{NO_TURN.reason}: {count} of {result.rewards.size} held-out ones", "", NO_TURN.report)
            if steps == 0 or result.rewards.size >= MIN_ITEMS:
                raise EpisodesFail(str(failure))
            logger.warning("no held-out episode had a turn of the policy, too few of them to end the run: %s", failure)
        return result

    @asynccontextmanager
    async def summary_at_end(self, observer: Observer, note: Callable[[str], None]) -> AsyncIterator[None]:
        """After the block, unless it raises, pass ``note`` a line that counts the run's failures by reason, if any."""
        yield
        failed = {"episodes": await observer.failed(), "held-out items": self._held_out}
        parts = [
            f"{count:,} {kind}: {reason}" for kind, counts in failed.items() for reason, count in counts.most_common()
        ]
        if parts:
            note(f"failed: {'; '.join(parts)}")
