"""Which replica draws an episode: the one with the fewest requests in flight from here when its group began.

A group stays with its replica, whose prefix cache then holds the prompt once for all its episodes and turns. What a
lost replica owes is asked of another one; while there is none, it waits for the controller to start a new one or to
end the run. The parts of an answer that had arrived by then are kept, and the other replica goes on from there.
The dispatcher is no actor: every rollout worker carries its own copy, and asks no other process.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.connection import ReplicaConnection, ReplicaHandle, ReplicaLost
from monarch_rl.generator.parts import finish_reason_of, join_parts
from monarch_rl.runtime.deadlines import within

logger = logging.getLogger("monarch_rl")

REMEMBERED_GROUPS = 4096
"""Groups whose replica is remembered, the last used ones; many times what one worker plays at once."""


class Dispatcher:
    """Hands requests to replicas. Picklable; each copy counts its own requests."""

    def __init__(self, replicas: Sequence[ReplicaHandle], deadline_s: float) -> None:
        """``replicas``: handles of one :class:`Generator` each. ``deadline_s``: seconds a request may take."""
        if not replicas:
            raise ValueError("a dispatcher needs at least one replica")
        self._replicas = list(replicas)
        self._deadline_s = deadline_s
        self._connections = [ReplicaConnection(handle) for handle in self._replicas]
        self._in_flight = [0] * len(self._replicas)
        self._groups: OrderedDict[int, int] = OrderedDict()
        """The replica of each group."""
        self._paused: set[int] = set()
        """Replicas that take no new requests."""
        self._lost: dict[int, str] = {}
        """Replicas that take no requests, and why."""
        self._changed = asyncio.Event()

    def __getstate__(self) -> dict[str, Any]:
        return {"replicas": self._replicas, "deadline_s": self._deadline_s}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Dispatcher.__init__(self, state["replicas"], state["deadline_s"])

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Requests from here that each replica has not answered yet."""
        return tuple(self._in_flight)

    def update_replicas(self, paused: Sequence[int], lost: Sequence[int]) -> None:
        """Send no new requests to the ``paused`` replicas, and ask others for what the ``lost`` ones owe.

        Every replica that is in neither takes requests (again).
        """
        for replica in lost:  # one known to be lost may still have requests that nothing has ended
            self._connections[replica].cancel_requests(f"generator {replica} was removed")
        removed = "the controller removed it"
        self._paused, self._lost = set(paused), {replica: self._lost.get(replica, removed) for replica in lost}
        self._changed.set()

    def replace(self, replica: int, handle: ReplicaHandle) -> None:
        """Put the replica behind ``handle`` in its place; if it was lost, it stays so until :meth:`update_replicas`."""
        self._connections[replica].cancel_requests(f"generator {replica} was replaced")
        self._replicas[replica] = handle
        self._connections[replica] = ReplicaConnection(handle)

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        """One turn of an episode of ``group``. If its replica is lost meanwhile, another one goes on from what arrived.

        The versions of its tokens may then go down once: the other replica may serve an older one.

        Raises:
            GenerationError: the engine refused the request.
            DeadlineExceeded: the replica did not answer in time (the message names it), or no replica took requests in
                time (the message lists those that are lost, and why).
        """
        parts: list[Completion] = []
        drawn_ids: list[int] = []
        reason: str | None = None
        while True:
            # Expert routes come with an answer alone: if only they are missing, a replica reads all tokens and draws
            # one more, which is dropped.
            rest, rest_sampling = prompt_ids, sampling
            if drawn_ids:
                remaining = 1 if reason is not None else sampling.max_new_tokens - len(drawn_ids)
                rest, rest_sampling = prompt_ids + drawn_ids, replace(sampling, max_new_tokens=remaining)
            try:
                answer = await self._ask(rest, rest_sampling, group)
            except ReplicaLost as error:
                if reason is not None:
                    continue
                parts += error.parts
                drawn_ids += [token for part in error.parts for token in part.token_ids.tolist()]
                # Lost between its last token and the answer. A replica knows more stop tokens, which are in no part.
                reason = finish_reason_of(drawn_ids, sampling, sampling.stop_token_ids)
                if reason is not None and sampling.expert_routes_from is None:
                    return join_parts(parts, reason)
            else:
                if reason is None:
                    return join_parts([*parts, answer], answer.finish_reason)
                routes = answer.expert_routes
                return replace(join_parts(parts, reason), expert_routes=None if routes is None else routes[:-1])

    async def _ask(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        """Ask the group's replica, once there is one. Raises ReplicaLost; the replica then takes no more requests."""
        while (replica := self._replica_of(group)) is None:
            self._changed.clear()
            losses = "".join(f"; generator {index} was lost: {why}" for index, why in sorted(self._lost.items()))
            what = f"a generator that takes requests of group {group}{losses}"
            await within(
                self._deadline_s, self._changed.wait(), what, on="controller", flag="rollout.generate-deadline-s"
            )
        connection = self._connections[replica]
        self._in_flight[replica] += 1
        try:
            return await within(
                self._deadline_s,
                connection.ask(prompt_ids, sampling),
                f"generator {replica} to answer a request of group {group} "
                f"({len(prompt_ids)} prompt tokens, at most {sampling.max_new_tokens} new ones)",
                on=f"generator {replica}",
                flag="rollout.generate-deadline-s",
            )
        except ReplicaLost as error:
            if replica not in self._lost and self._connections[replica] is connection:
                logger.warning("generator %d takes no requests: %s", replica, error)
                self._lost[replica] = str(error)
            raise
        finally:
            self._in_flight[replica] -= 1

    def _replica_of(self, group: int) -> int | None:
        """The group's replica, a new one if that one takes no requests, None if none does."""
        replica = self._groups.get(group)
        unavailable = self._paused | self._lost.keys()
        if replica is None or replica in unavailable:
            available = [index for index in range(len(self._replicas)) if index not in unavailable]
            if not available:
                return None
            replica = min(available, key=self._load)
            self._groups[group] = replica
        self._groups.move_to_end(group)
        if len(self._groups) > REMEMBERED_GROUPS:
            self._groups.popitem(last=False)
        return replica

    def _load(self, replica: int) -> int:
        return self._in_flight[replica]
