"""Assigns each group to a replica: the one with the fewest requests in flight from this dispatcher at that time.

A group stays with its replica, whose prefix cache then holds the prompt once for all episodes and turns of the group.
If a replica is lost, its unanswered requests are sent to another one (:meth:`Dispatcher._retried`). If there is none,
they wait until the controller starts a new replica or ends the run. Parts of an answer that have arrived are reused:
the other replica continues after them (:class:`_PartialAnswer`). Engines of frozen models are used in the same way.
The dispatcher is not an actor: every rollout worker has its own copy, and asks no other process.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import GenerationError, ProcessLost
from monarch_rl.generator.connection import ReplicaConnection, ReplicaHandle, ReplicaLost, Request
from monarch_rl.generator.parts import finish_reason_of, join_parts, settle
from monarch_rl.runtime.deadlines import DeadlineClock, now, retrieve, within
from monarch_rl.runtime.gathered_calls import GatheredCalls

logger = logging.getLogger("monarch_rl")
T = TypeVar("T")

REMEMBERED_GROUPS = 4096
"""Most recently used groups whose replica is remembered; many times the groups that one worker rolls out at once."""


class Dispatcher:
    """Sends requests to replicas. Picklable; each copy counts its own requests."""

    def __init__(
        self,
        replicas: Sequence[ReplicaHandle],
        deadline_s: float,
        kind: str = "generator",
        flag: str = "patience",
        max_losses: int | None = None,
    ) -> None:
        """
        Args:
            replicas: handle of each :class:`Replica`.
            deadline_s: seconds that a request may take, including retries on other replicas.
            kind: name of a replica in messages.
            flag: the setting that ``deadline_s`` comes from.
            max_losses: how many replicas may be lost during a request before it fails. None is unlimited, for replicas
                that a controller replaces.
        """
        if not replicas:
            raise ValueError("a dispatcher needs at least one replica")
        self._replicas = list(replicas)
        self._deadline_s, self._kind, self._flag, self._max_losses = deadline_s, kind, flag, max_losses
        self._connections = [ReplicaConnection(handle) for handle in self._replicas]
        self._in_flight = [0] * len(self._replicas)
        self._groups: OrderedDict[int, int] = OrderedDict()
        """The replica of each group, least recently used group first."""
        self._paused: set[int] = set()
        """Replicas that take no new requests."""
        self._lost: dict[int, str] = {}
        """Lost replicas, and why they were lost."""
        self._changed = asyncio.Event()
        self._gathered = GatheredCalls(self._complete_or_fail)
        """By group: what its episodes ask for at once, such as their first turns. One request is awaited for all."""

    def __getstate__(self) -> dict[str, Any]:
        return {
            "replicas": self._replicas,
            "deadline_s": self._deadline_s,
            "kind": self._kind,
            "flag": self._flag,
            "max_losses": self._max_losses,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        Dispatcher.__init__(self, **state)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """For each replica, the number of its unanswered requests from this dispatcher."""
        return tuple(self._in_flight)

    def update_replicas(self, paused: Sequence[int], lost: Sequence[int]) -> None:
        """Send no new requests to ``paused`` replicas, and retry the requests of ``lost`` ones elsewhere.

        All other replicas take requests (again).
        """
        for replica in lost:  # also replicas that were lost before: they may still have requests
            self._connections[replica].cancel_requests(f"{self._kind} {replica} was removed")
        removed = "the controller removed it"
        self._paused, self._lost = set(paused), {replica: self._lost.get(replica, removed) for replica in lost}
        self._changed.set()

    def replace(self, replica: int, handle: ReplicaHandle) -> None:
        """Replace a replica by the one behind ``handle``. If it was lost, it stays so until :meth:`update_replicas`."""
        self._connections[replica].cancel_requests(f"{self._kind} {replica} was replaced")
        self._replicas[replica] = handle
        self._connections[replica] = ReplicaConnection(handle)

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        """Generate one turn of an episode of ``group``.

        If the replica is lost meanwhile, another one continues from the tokens that have arrived. The versions of the
        tokens may then decrease once, because the other replica may serve an older version.

        Raises:
            GenerationError: the engine refused the request.
            DeadlineExceeded: the request was not answered in time. The message names the last replica that was asked,
                or, if none took requests, lists the lost replicas with reasons.
            ReplicaLost: more replicas were lost during the request than ``max_losses`` allows.
        """
        answer = _PartialAnswer(prompt_ids, sampling)
        completion: Completion = await self._gathered.result(group, answer)  # waits: _complete_all has a deadline
        return completion

    async def generate_group(
        self, prompt_ids: list[int], samplings: Sequence[Sampling], group: int
    ) -> list[Completion | Exception]:
        """Generate several turns after one prompt, in one message to one replica.

        Returns, for each sampling, the completion or the error of this request alone. Raises as :meth:`generate` does.
        """
        answers = [_PartialAnswer(prompt_ids, sampling) for sampling in samplings]
        await self._complete_all(answers, group)
        wholes = [answer.whole for answer in answers if answer.whole is not None]
        assert len(wholes) == len(answers)
        return wholes

    async def _complete_or_fail(self, group: int, answers: list[_PartialAnswer]) -> None:
        try:
            await self._complete_all(answers, group)
        except Exception as error:
            for answer in answers:
                answer.fail(error)

    async def _complete_all(self, answers: list[_PartialAnswer], group: int) -> None:
        clock = DeadlineClock(self._deadline_s, f"a request of group {group}")
        await self._retried(lambda: self._complete(answers, group, clock))

    async def call(self, group: int, what: str, call: Callable[[Any], Awaitable[T]]) -> T:
        """Call an endpoint other than ``generate`` of the group's replica; returns its result.

        If the replica is lost meanwhile, another one is called. Raises the same errors as :meth:`generate`.

        Args:
            group: the group that the request belongs to.
            what: completes "frozen judge 0 to ..." in messages.
            call: calls the endpoint on a replica's handle.
        """

        async def ask(replica: int) -> T:
            try:
                return await call(self._replicas[replica])  # waits: _of_replica has a deadline
            except (ActorError, SupervisionError) as error:
                refused = getattr(error, "exception", None)
                raise refused if isinstance(refused, GenerationError) else ReplicaLost(str(error)) from error

        clock = DeadlineClock(self._deadline_s, f"a request of group {group}")
        return await self._retried(lambda: self._of_replica(group, what, ask, clock))

    async def _retried(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Result of ``attempt``, which is repeated when it raises ReplicaLost, up to ``max_losses`` times."""
        losses = 0
        while True:
            try:
                return await attempt()  # waits: _of_replica has a deadline
            except ReplicaLost:
                losses += 1
                if self._max_losses is not None and losses > self._max_losses:
                    raise
                # Retried at once: a lost replica is not asked again, and without others _of_replica waits for one.

    async def _complete(self, answers: list[_PartialAnswer], group: int, clock: DeadlineClock) -> None:
        """Ask the group's replica for what ``answers`` lack. If it is lost, they keep what it sent."""
        missing = [answer for answer in answers if answer.is_awaited]
        requests = [answer.missing() for answer in missing]
        count, prompt = len(requests), max(len(prompt_ids) for prompt_ids, _ in requests)
        tokens = f"{prompt} prompt tokens, at most {max(each.max_new_tokens for _, each in requests)} new tokens"
        what = f"answer {'a request' if count == 1 else f'{count} requests'} of group {group} ({tokens})"

        def ask(replica: int) -> asyncio.Future[None]:
            def take(place: int, whole: Completion | Exception) -> None:
                self._in_flight[replica] -= 1
                missing[place].complete(whole)

            for answer in missing:
                answer.replica = replica
            return self._connections[replica].ask(requests, take)

        try:
            await self._of_replica(group, what, ask, clock, lambda: sum(each.whole is None for each in missing))
        except ReplicaLost as error:
            for answer, parts in zip(missing, error.parts, strict=False):
                answer.extend(parts)
            if any(answer.is_awaited for answer in answers):
                raise

    async def _of_replica(
        self,
        group: int,
        what: str,
        ask: Callable[[int], Awaitable[T]],
        clock: DeadlineClock,
        unanswered: Callable[[], int] = lambda: 1,
    ) -> T:
        """Ask the group's replica, waiting for one if necessary.

        Args:
            group: the group that the request belongs to.
            what: completes "generator 0 to ..." in messages.
            ask: sends the request to a replica, given by its index.
            clock: deadline of the whole request, including earlier attempts on lost replicas.
            unanswered: number of requests that count as in flight, whose answers are counted by ``ask``.

        Raises:
            ReplicaLost: the replica is lost, and takes no more requests.
        """
        while (replica := self._replica_of(group)) is None:
            self._changed.clear()
            lost = "".join(f"; {self._kind} {index} was lost: {why}" for index, why in sorted(self._lost.items()))
            missing = f"a {self._kind} that takes requests of group {group}{lost}"
            await within(clock, self._changed.wait(), missing, on="controller", flag=self._flag)
        connection = self._connections[replica]
        self._in_flight[replica] += unanswered()
        try:
            name = f"{self._kind} {replica}"
            return await within(clock, ask(replica), f"{name} to {what}", on=name, flag=self._flag)
        except (ReplicaLost, ProcessLost) as error:
            if replica not in self._lost and self._connections[replica] is connection:
                logger.warning("%s %d takes no requests: %s", self._kind, replica, error)
                self._lost[replica] = str(error)
            if isinstance(error, ReplicaLost):
                raise
            # ProcessLost: the controller noticed the loss before the call itself failed.
            raise ReplicaLost(str(error)) from error
        finally:
            self._in_flight[replica] -= unanswered()

    def _replica_of(self, group: int) -> int | None:
        """The group's replica, or a new one if that takes no requests; None if no replica takes requests."""
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


class _PartialAnswer:
    """The answer to a request, as far as lost replicas have sent it.

    Args:
        prompt_ids: tokens of the request's prompt.
        sampling: how the request is sampled.
    """

    def __init__(self, prompt_ids: list[int], sampling: Sampling) -> None:
        self._prompt_ids, self._sampling = prompt_ids, sampling
        self._parts: list[Completion] = []
        self._sampled_ids: list[int] = []
        self._finish_reason: str | None = None
        """None while tokens are missing."""
        self._since = now()
        self.replica: int | None = None
        """The replica that was asked last."""
        self.whole: Completion | Exception | None = None
        """The answer, or the error of this request; None while something is missing."""
        self.done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    @property
    def is_awaited(self) -> bool:
        """Whether something is missing, and its episode still waits for it."""
        return self.whole is None and not self.done.cancelled()

    def missing(self) -> Request:
        """A request for what is missing."""
        if not self._sampled_ids:
            return self._prompt_ids, self._sampling
        # If only expert routes are missing, a replica reads all tokens and samples one more, which is dropped.
        finished = self._finish_reason is not None
        remaining = 1 if finished else self._sampling.max_new_tokens - len(self._sampled_ids)
        return self._prompt_ids + self._sampled_ids, replace(self._sampling, max_new_tokens=remaining)

    def extend(self, parts: Sequence[Completion]) -> None:
        """Take the parts that a replica sent of its answer to :meth:`missing` before it was lost."""
        if self.whole is not None or self._finish_reason is not None:
            return
        self._parts.extend(parts)
        self._sampled_ids.extend(token for part in parts for token in part.token_ids.tolist())
        # The replica may have been lost between the last token and the answer. Only the request's own stop tokens are
        # checked here: the replica has more of them, but sends no part that ends with one.
        self._finish_reason = finish_reason_of(self._sampled_ids, self._sampling, self._sampling.stop_token_ids)
        # Expert routes come only with a whole answer: until then, they are missing.
        if self._finish_reason is not None and self._sampling.expert_routes_from is None:
            self._settle(join_parts(self._parts, self._finish_reason))

    def complete(self, rest: Completion | Exception) -> None:
        """Take a replica's answer to :meth:`missing`, or the error of this request."""
        if isinstance(rest, Exception):
            self.fail(rest)
        elif self._finish_reason is None:
            self._settle(join_parts([*self._parts, rest], rest.finish_reason))
        else:
            routes = rest.expert_routes
            joined = join_parts(self._parts, self._finish_reason)
            self._settle(replace(joined, expert_routes=None if routes is None else routes[:-1]))

    def fail(self, error: Exception) -> None:
        """End it with an error, unless it has ended."""
        if self.whole is None:
            self._settle(error)

    def _settle(self, whole: Completion | Exception) -> None:
        if isinstance(whole, Completion):
            whole = replace(whole, seconds=now() - self._since, replica=self.replica)
        self.whole = whole
        settle(self.done, whole)
        self.done.add_done_callback(retrieve)  # in a group that runs as a unit, nobody awaits it
