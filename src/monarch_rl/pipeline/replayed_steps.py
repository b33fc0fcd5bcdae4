"""Steps after a checkpoint, made again by a run that goes on: no batch that its journal has is lost.

trainer ranks    are at the checkpoint; which later batches have all of them in their journals?
each batch       is trained as it was: on a CPU the weights are those of before, bit for bit
the buffer       knows its groups as trained; what else had come since the checkpoint is begun anew
generators       are sent the last of these versions, and have drawn nothing before
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import takewhile

from monarch_rl.buffer.ledger import Counts
from monarch_rl.pipeline.resume import Resumed
from monarch_rl.pipeline.start import Actors
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, disk_limit_s, within
from monarch_rl.trainer.known_steps import JournalBatch, StepReplay

Shown = Callable[[int, list[dict[str, float]], Counts], Awaitable[None]]
"""What is done with each step: its number, its metrics by trainer rank, and the buffer's counts after it."""


async def make_again(
    actors: Actors, resumed: Resumed, journal_bytes: int, most: int, limit_s: float, shown: Shown
) -> AsyncIterator[str]:
    """Make the versions after the checkpoint again, as many as there are; yields what to say of them, before and after.

    Args:
        journal_bytes: of a rank's journal, at most.
        most: steps of the run.
        limit_s: seconds for a step.

    Raises what an update raises.
    """
    first, equal = resumed.version, list[bool | None]()
    looking = actors.trainer.journaled.call(resumed.manifest.generation, resumed.journal_since)
    what = "trainer ranks to read their journals"
    found = await within(disk_limit_s(journal_bytes) + CALL_DEADLINE_S, looking, what, on="the disk")
    last = min(first + common(list(found.values())), most)
    if last <= first:
        return
    steps = f"step {last}" if last == first + 1 else f"steps {first + 1} to {last}"
    yield f"making {steps} again from the journal"
    for version in range(first, last):
        call, step = actors.trainer.make_again.call(version, version + 1 == last), version + 1
        what = f"trainer ranks to make step {step} again from the journal"
        made: list[StepReplay] = list((await within(limit_s, call, what, on="trainer ranks")).values())
        noting = actors.buffer.note_replayed.call_one(step, made[0].group_ids, made[0].lag_counts)
        counts = await within(CALL_DEADLINE_S, noting, "the buffer to note the step", on="buffer")
        of_ranks = [rank.equal for rank in made]
        equal.append(None if None in of_ranks else all(of_ranks))
        # waits: its calls have deadlines
        await shown(step, [rank.metrics for rank in made], counts)
    yield said_of(steps, equal)


def common(by_rank: Sequence[Sequence[JournalBatch]]) -> int:
    """How many batches all ranks have, from the first on. Ranks of a run that was lost several times may have taken
    different ones at last."""
    together = zip(*by_rank, strict=False)
    return sum(1 for _ in takewhile(lambda of_ranks: len(set(of_ranks)) == 1, together))


def said_of(steps: str, equal: Sequence[bool | None]) -> str:
    """What is known of the weights after each of these steps."""
    known = [one for one in equal if one is not None]
    if not known:
        found = "there is nothing to compare the weights with"
    elif all(known):
        found = f"the weights are those of before, bit for bit, after all {len(known)} that can be compared"
    else:
        found = f"the weights are others than before, after {known.count(False)} of {len(known)} that can be compared"
    return f"{steps} made again from the journal; {found}"
