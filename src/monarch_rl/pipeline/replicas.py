"""The generator replicas of a run: which ones are there, which version each serves, and which are lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from monarch_rl.generator.actor import Generator
from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint

logger = logging.getLogger("monarch_rl")

ANSWER_DEADLINE_S = 20.0
"""Seconds in which a living process answers, on a machine with all cores busy."""

UpdateDispatch = Callable[[list[int], list[int]], Awaitable[None]]
"""Tells the rollout workers which replicas take no new requests for now, and which are lost."""


@dataclass(eq=False)
class Replica:
    """One generator process. After a loss, another ``Replica`` takes its index."""

    index: int
    handle: Generator
    hold_s: float
    """Seconds for which its running sequences may hold up a commit."""
    version: int | None = None
    """The version it was last known to serve; None if it serves nothing."""

    @property
    def name(self) -> str:
        return f"generator {self.index}"


class Replicas:
    """The replicas that are there, by index, and the ones that are lost.

    Args:
        update_workers: called whenever the dispatch of requests should change; None calls nothing.
    """

    def __init__(self, update_workers: UpdateDispatch | None = None) -> None:
        self.update_workers = update_workers
        self.lost: dict[int, str] = {}
        """Replicas that were removed, by index, and why."""
        self.on_lost: Callable[[int, str], None] | None = None
        """Called with the index of a removed replica and the reason. While it is set, a run that has lost all replicas
        waits for a new one; without it, that is an error."""
        self._present: dict[int, Replica] = {}

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._present.values()))

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, replica: Replica) -> bool:
        """Whether this very process is there: another one may have taken its index."""
        return self._present.get(replica.index) is replica

    @property
    def handles(self) -> dict[int, Generator]:
        """The replicas that are there, by index."""
        return {replica.index: replica.handle for replica in self}

    def behind(self, version: int) -> list[Replica]:
        """The replicas that do not serve ``version``."""
        return [replica for replica in self if replica.version != version]

    def add(self, replica: Replica) -> None:
        """Add a replica; it takes the place of another one with its index."""
        self._present[replica.index] = replica

    def remove(self, index: int, why: str) -> Replica | None:
        """Take a replica as lost and return it. None if it was removed already."""
        removed = self._present.pop(index, None)
        if removed is None:
            return None
        self.lost[index] = why
        others = ", ".join(f"generator {other}" for other in self._present) or "no generator"
        logger.error("generator %d is lost (%s); left: %s", index, why, others)
        if self.on_lost is not None:
            self.on_lost(index, why)
        return removed

    async def update_dispatch(self) -> None:
        """Tell the rollout workers which replicas to ask.

        A replica that only missed a transfer takes requests: it serves the version before, which is whole.
        """
        if self.update_workers is not None:
            paused = [replica.index for replica in self if replica.version is None]
            await self.update_workers(paused, list(self.lost))  # waits: replica_updates has a deadline


class Answering(Protocol):
    """An actor that can be asked whether it is alive."""

    @concurrent_endpoint
    async def ready(self) -> None:
        """Raise what is wrong with the actor."""


async def answers(name: str, actor: Answering) -> None:
    """Raise if an actor does not answer within ``ANSWER_DEADLINE_S``."""
    await within(ANSWER_DEADLINE_S, actor.ready.call_one(), f"{name} to say that it is there", on=name)


async def silence_of(name: str, actor: Answering) -> str | None:
    """What is wrong with an actor that does not answer within ``ANSWER_DEADLINE_S``; None if it answers."""
    try:
        await answers(name, actor)
    except Exception as error:
        return f"{name} does not answer: {last_line(error)}"
    return None


async def silent(replicas: list[Replica]) -> dict[Replica, str]:
    """Which of these replicas do not answer, and what is wrong with each."""
    reasons = await asyncio.gather(*(silence_of(replica.name, replica.handle) for replica in replicas))
    return {replica: reason for replica, reason in zip(replicas, reasons, strict=True) if reason}
