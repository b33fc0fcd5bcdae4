"""Which replica draws an episode: the one with the fewest requests in flight from here when its group began.

A group stays with its replica, whose prefix cache then holds the prompt once for all its episodes and turns.
The router is no actor: every rollout worker carries its own copy, and asks no one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from monarch_rl.episode import Completion, Sampling
from monarch_rl.generator.link import Link
from monarch_rl.runtime.deadlines import within

REMEMBERED_GROUPS = 4096
"""Groups whose replica is remembered, the last used ones; many times what one worker plays at once."""


class Router:
    """Hands requests to replicas. Picklable; each copy counts its own requests."""

    def __init__(self, replicas: Sequence[Any], deadline_s: float) -> None:
        """``replicas``: handles of one :class:`Generator` each. ``deadline_s``: seconds a request may take."""
        if not replicas:
            raise ValueError("a router needs at least one replica")
        self._replicas = list(replicas)
        self._deadline_s = deadline_s
        self._links = [Link(replica, deadline_s) for replica in self._replicas]
        self._in_flight = [0] * len(self._replicas)
        self._groups: OrderedDict[int, int] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"replicas": self._replicas, "deadline_s": self._deadline_s}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Router.__init__(self, state["replicas"], state["deadline_s"])

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Requests from here that each replica has not answered yet."""
        return tuple(self._in_flight)

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        """One turn of an episode of ``group``.

        Raises GenerationError if the engine refused the request or is gone, Monarch's SupervisionError or ActorError
        if the replica is, or DeadlineExceeded naming it.
        """
        replica = self._replica_of(group)
        self._in_flight[replica] += 1
        try:
            return await within(
                self._deadline_s,
                self._links[replica].ask(prompt_ids, sampling),
                f"generator {replica} to answer a request of group {group} "
                f"({len(prompt_ids)} prompt tokens, at most {sampling.max_new_tokens} new ones)",
            )
        finally:
            self._in_flight[replica] -= 1

    def _replica_of(self, group: int) -> int:
        replica = self._groups.get(group)
        if replica is None:
            replica = min(range(len(self._replicas)), key=self._load)
            self._groups[group] = replica
        self._groups.move_to_end(group)
        if len(self._groups) > REMEMBERED_GROUPS:
            self._groups.popitem(last=False)
        return replica

    def _load(self, replica: int) -> int:
        return self._in_flight[replica]
