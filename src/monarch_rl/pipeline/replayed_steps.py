"""Replay of the steps after a checkpoint from the journal, in a resumed run: no journaled batch is lost.

trainer ranks    start from the checkpoint, and find the later batches that all of their journals have
each batch       is trained again in the same way: on a CPU the weights are identical, bit for bit
the buffer       marks the batch's groups as trained; other groups since the checkpoint are restarted
generators       are sent the last of the replayed versions, and generate nothing before
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import takewhile

from monarch_rl.buffer.ledger import Counts
from monarch_rl.checkpoint.journal import JournalBatch, StepReplay
from monarch_rl.pipeline.resume import Resumed
from monarch_rl.pipeline.start import Actors
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, disk_limit_s, within

OnReplayed = Callable[[int, list[dict[str, float]], Counts], Awaitable[None]]
"""Called with each replayed step: its number, its metrics by trainer rank, and the buffer's counts after it."""


async def replay_steps(
    actors: Actors, resumed: Resumed, journal_bytes: int, most: int, limit_s: float, on_replayed: OnReplayed
) -> AsyncIterator[str]:
    """Replay all journaled steps after the checkpoint; yields a message before and after, none if there are no steps.

    Args:
        journal_bytes: maximum size of a rank's journal.
        most: the run's number of steps; later ones are not replayed.
        limit_s: seconds for a step.

    Raises the errors of updates.
    """
    first, equal = resumed.version, list[bool | None]()
    looking = actors.trainer.replayable_batches.call(resumed.manifest.generation, resumed.journal_since)
    what = "trainer ranks to read their journals"
    found = await within(disk_limit_s(journal_bytes) + CALL_DEADLINE_S, looking, what, on="the disk")
    last = min(first + common_batches(list(found.values())), most)
    if last <= first:
        return
    steps = f"step {last}" if last == first + 1 else f"steps {first + 1} to {last}"
    yield f"replaying {steps} from the journal"
    for version in range(first, last):
        call, step = actors.trainer.replay_step.call(version, version + 1 == last), version + 1
        what = f"trainer ranks to replay step {step} from the journal"
        replayed: list[StepReplay] = list((await within(limit_s, call, what, on="trainer ranks")).values())
        noting = actors.buffer.note_replayed.call_one(step, replayed[0].group_ids, replayed[0].lag_counts)
        counts = await within(CALL_DEADLINE_S, noting, "the buffer to note the step", on="buffer")
        of_ranks = [rank.equal for rank in replayed]
        equal.append(None if None in of_ranks else all(of_ranks))
        # waits: its calls have deadlines
        await on_replayed(step, [rank.metrics for rank in replayed], counts)
    yield replay_summary(steps, equal)


def common_batches(by_rank: Sequence[Sequence[JournalBatch]]) -> int:
    """Number of leading batches that are the same for all ranks. The ranks of a run that was lost several times may
    have journaled different last batches."""
    together = zip(*by_rank, strict=False)
    return sum(1 for _ in takewhile(lambda of_ranks: len(set(of_ranks)) == 1, together))


def replay_summary(steps: str, equal: Sequence[bool | None]) -> str:
    """Whether the weights after the replayed steps equal those of the original run; None where it is unknown."""
    compared = [one for one in equal if one is not None]
    if not compared:
        found = "the journal has no checksums to compare the weights with"
    elif all(compared):
        found = f"the weights are identical, bit for bit, after all {len(compared)} that can be compared"
    else:
        found = f"the weights differ after {compared.count(False)} of {len(compared)} that can be compared"
    return f"{steps} replayed from the journal; {found}"
