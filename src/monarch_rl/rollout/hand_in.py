"""The way of a group that was played: through the stages into the buffer, or dropped; and what failed is shown."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from monarch_rl.episode.episode import Group, Ticket
from monarch_rl.episode.failure import KINDS, Failure
from monarch_rl.episode.serialization import pack_group
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.handles import BUFFER_DEADLINE_S, BufferHandle
from monarch_rl.rollout.outbox import Outbox
from monarch_rl.rollout.stages import Stage, StageFailed, Stages
from monarch_rl.rollout.statistics import Statistics
from monarch_rl.rollout.transcripts import Transcripts
from monarch_rl.runtime import presence
from monarch_rl.runtime.deadlines import within

INLINE_TOKENS = 8192
"""Tokens of a group that is packed on the event loop: that takes a millisecond or two, and a thread costs a part of it
and holds up the loop likewise."""


class HandIn:
    """Of one worker, by its name.

    Args:
        slot_deadline_s: seconds to wait for room in the buffer.
        transcripts: keeps what was said in the groups that are put; None keeps nothing.
    """

    def __init__(
        self,
        buffer: BufferHandle,
        worker: str,
        slot_deadline_s: float,
        stages: Sequence[Stage],
        statistics: Statistics,
        transcripts: Transcripts | None = None,
    ) -> None:
        self._buffer = buffer
        self._transcripts = transcripts
        self._outbox = Outbox(buffer, worker, slot_deadline_s)
        self._stages = Stages(stages, statistics.add_stage)
        self._statistics = statistics
        self._known_failures: set[tuple[str, str]] = set()
        """Kinds of failures of which the buffer has the first."""

    @property
    def places(self) -> int:
        """Groups that may be in stages at a time."""
        return self._stages.places

    async def put(self, ticket: Ticket, item: Any, group: Group) -> None:
        """Put a group that passes the stages; drop one that a stage leaves out or fails at."""
        try:
            await self._stages.run(item, group)
        except StageFailed as failed:
            if failed.failure is not None:
                await self.note(failed.failure)
            await self.drop(ticket, failed.reason, sum(episode.num_trainable for episode in group.episodes))
            return
        small = sum(episode.num_tokens for episode in group.episodes) <= INLINE_TOKENS
        data = pack_group(group) if small else await asyncio.to_thread(pack_group, group)
        if self._transcripts is not None:
            self._transcripts.add(group)
        await self._outbox.put(group.group_id, group.attempt, data)
        self._statistics.add_put()
        presence.progress("group put")

    async def drop(self, ticket: Ticket, reason: str, tokens: int) -> None:
        """Drop a group for which ``tokens`` were drawn."""
        drop = self._buffer.drop.call_one(ticket.group_id, reason, tokens, ticket.attempt)
        await within(BUFFER_DEADLINE_S, drop, f"the buffer to drop group {ticket.group_id}", on="buffer")
        self._statistics.add_dropped()  # it is no progress: a run that only drops groups does not go on

    async def reported(self, failed: EpisodeFailed) -> EpisodeFailed:
        """The same, once it is sure that the first failure of its kind is shown."""
        await self.note(failed.failure)
        return failed

    async def note(self, failure: Failure) -> None:
        """Have the first failure of its kind shown."""
        if failure.kind not in self._known_failures and len(self._known_failures) < KINDS:
            self._known_failures.add(failure.kind)
            noted = self._buffer.note_failure.call_one(failure)
            await within(BUFFER_DEADLINE_S, noted, "the buffer to take note of a failure", on="buffer")
