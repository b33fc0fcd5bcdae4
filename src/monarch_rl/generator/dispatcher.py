"""Which replica draws an episode: the one with the fewest requests in flight from here when its group began.

A group stays with its replica, whose prefix cache then holds the prompt once for all its episodes and turns. What a
lost replica owes is asked of another one; while there is none, it waits for the controller to start a new one or to
end the run. The parts of an answer that had arrived by then are kept, and the other replica goes on from there.
The dispatcher is no actor: every rollout worker carries its own copy, and asks no other process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from monarch_rl.episode.sampling import Completion, GenerationError, Sampling
from monarch_rl.generator.connection import ReplicaConnection, ReplicaHandle, ReplicaLost
from monarch_rl.generator.parts import finish_reason_of, join_parts
from monarch_rl.runtime.deadlines import DeadlineClock, ProcessLost, within

logger = logging.getLogger("monarch_rl")
T = TypeVar("T")

REMEMBERED_GROUPS = 4096
"""Groups whose replica is remembered, the last used ones; many times what one worker plays at once."""


class Dispatcher:
    """Hands requests to replicas. Picklable; each copy counts its own requests."""

    def __init__(
        self,
        replicas: Sequence[ReplicaHandle],
        deadline_s: float,
        kind: str = "generator",
        flag: str = "rollout.generate-deadline-s",
        losses: int | None = None,
    ) -> None:
        """
        Args:
            replicas: handles of one :class:`Replica` each.
            deadline_s: seconds a request may take, with the replicas that it outlives.
            kind: what messages call a replica.
            flag: the setting that ``deadline_s`` comes from.
            losses: replicas that a request may outlive; None is any number, where a controller replaces them.
        """
        if not replicas:
            raise ValueError("a dispatcher needs at least one replica")
        self._replicas = list(replicas)
        self._deadline_s, self._kind, self._flag, self._losses = deadline_s, kind, flag, losses
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
        settings = {"deadline_s": self._deadline_s, "kind": self._kind, "flag": self._flag, "losses": self._losses}
        return {"replicas": self._replicas} | settings

    def __setstate__(self, state: dict[str, Any]) -> None:
        Dispatcher.__init__(self, **state)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Requests from here that each replica has not answered yet."""
        return tuple(self._in_flight)

    def update_replicas(self, paused: Sequence[int], lost: Sequence[int]) -> None:
        """Send no new requests to the ``paused`` replicas, and ask others for what the ``lost`` ones owe.

        Every replica that is in neither takes requests (again).
        """
        for replica in lost:  # one known to be lost may still have requests that nothing has ended
            self._connections[replica].cancel_requests(f"{self._kind} {replica} was removed")
        removed = "the controller removed it"
        self._paused, self._lost = set(paused), {replica: self._lost.get(replica, removed) for replica in lost}
        self._changed.set()

    def replace(self, replica: int, handle: ReplicaHandle) -> None:
        """Put the replica behind ``handle`` in its place; if it was lost, it stays so until :meth:`update_replicas`."""
        self._connections[replica].cancel_requests(f"{self._kind} {replica} was replaced")
        self._replicas[replica] = handle
        self._connections[replica] = ReplicaConnection(handle)

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        """One turn of an episode of ``group``. If its replica is lost meanwhile, another one goes on from what arrived.

        The versions of its tokens may then go down once: the other replica may serve an older one.

        Raises:
            GenerationError: the engine refused the request.
            DeadlineExceeded: the request was not answered in time. The message names the replica that it was asked of
                last, or lists those that are lost, and why, if none took requests.
            ReplicaLost: the last of more replicas than a request may outlive.
        """
        parts: list[Completion] = []
        sampled_ids: list[int] = []
        reason: str | None = None
        clock = DeadlineClock(self._deadline_s, f"a request of group {group}")
        for losses in itertools.count(1):
            # Expert routes come with an answer alone: if only they are missing, a replica reads all tokens and draws
            # one more, which is dropped.
            rest, rest_sampling = prompt_ids, sampling
            if sampled_ids:
                remaining = 1 if reason is not None else sampling.max_new_tokens - len(sampled_ids)
                rest, rest_sampling = prompt_ids + sampled_ids, replace(sampling, max_new_tokens=remaining)
            try:
                answer = await self._ask(rest, rest_sampling, group, clock)
            except ReplicaLost as error:
                if self._losses is not None and losses > self._losses:
                    raise
                if reason is not None:
                    continue
                parts += error.parts
                sampled_ids += [token for part in error.parts for token in part.token_ids.tolist()]
                # Lost between its last token and the answer. A replica knows more stop tokens, which are in no part.
                reason = finish_reason_of(sampled_ids, sampling, sampling.stop_token_ids)
                if reason is not None and sampling.expert_routes_from is None:
                    return join_parts(parts, reason)
            else:
                if reason is None:
                    return join_parts([*parts, answer], answer.finish_reason)
                routes = answer.expert_routes
                return replace(join_parts(parts, reason), expert_routes=None if routes is None else routes[:-1])
        raise AssertionError("a request is asked until it is answered")

    async def call(self, group: int, what: str, call: Callable[[Any], Awaitable[T]]) -> T:
        """What ``call(handle)`` of the group's replica returns: something that an endpoint other than ``generate``
        answers. If the replica is lost meanwhile, another one is asked. Raises as :meth:`generate` does.

        Args:
            what: completes "frozen judge 0 to ...".
        """

        async def ask(replica: int) -> T:
            try:
                return await call(self._replicas[replica])  # waits: _of_replica has a deadline
            except (ActorError, SupervisionError) as error:
                refused = getattr(error, "exception", None)
                raise refused if isinstance(refused, GenerationError) else ReplicaLost(str(error)) from error

        clock = DeadlineClock(self._deadline_s, f"a request of group {group}")
        for losses in itertools.count(1):
            try:
                return await self._of_replica(group, what, ask, clock)
            except ReplicaLost:
                if self._losses is not None and losses > self._losses:
                    raise
        raise AssertionError("a request is asked until it is answered")

    async def _ask(self, prompt_ids: list[int], sampling: Sampling, group: int, clock: DeadlineClock) -> Completion:
        what = (
            f"answer a request of group {group} ({len(prompt_ids)} prompt tokens, at most {sampling.max_new_tokens} "
            "new ones)"
        )

        def ask(replica: int) -> asyncio.Future[Completion]:
            return self._connections[replica].ask(prompt_ids, sampling)

        return await self._of_replica(group, what, ask, clock)

    async def _of_replica(self, group: int, what: str, ask: Callable[[int], Awaitable[T]], clock: DeadlineClock) -> T:
        """Ask the group's replica, once there is one. Raises ReplicaLost; the replica then takes no more requests.

        Args:
            clock: of the request, which replicas that are lost have taken a part of.
        """
        while (replica := self._replica_of(group)) is None:
            self._changed.clear()
            losses = "".join(f"; {self._kind} {index} was lost: {why}" for index, why in sorted(self._lost.items()))
            missing = f"a {self._kind} that takes requests of group {group}{losses}"
            await within(clock, self._changed.wait(), missing, on="controller", flag=self._flag)
        connection = self._connections[replica]
        self._in_flight[replica] += 1
        try:
            name = f"{self._kind} {replica}"
            return await within(clock, ask(replica), f"{name} to {what}", on=name, flag=self._flag)
        except (ReplicaLost, ProcessLost) as error:
            if replica not in self._lost and self._connections[replica] is connection:
                logger.warning("%s %d takes no requests: %s", self._kind, replica, error)
                self._lost[replica] = str(error)
            if isinstance(error, ReplicaLost):
                raise
            raise ReplicaLost(str(error)) from error  # in the controller, which may hear of it before the call fails
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
