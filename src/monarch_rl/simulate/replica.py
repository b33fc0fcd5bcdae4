"""A simulated generator replica: a latency model of continuous batching, computed in spans of equal steps.

Between two events (a sequence joins or ends, a commit) every decoding step takes the same time, so the model processes
these events but not single tokens. Replaces both :class:`monarch_rl.generator.actor.Generator` and a dispatcher's
:class:`~monarch_rl.generator.connection.ReplicaConnection` to it.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.commit import CommitReport
from monarch_rl.generator.connection import OnAnswer, Request
from monarch_rl.generator.settings import InFlight
from monarch_rl.simulate.costs import Costs

ALMOST = 1e-6
"""Tolerance in steps for the end of a sequence, because the clock is rounded."""


@dataclass(eq=False, slots=True)
class _Sequence:
    group: int
    length: int
    answer: asyncio.Future[Completion]
    began: float = 0.0
    """The replica's step count when the sequence joined."""


class SimulatedReplica:
    """One replica.

    Args:
        costs: latencies of the run.
        grain: number of real tokens per simulated token.
        in_flight: treatment of running sequences at a commit (:class:`GeneratorSettings`).
        devices: number of devices of the replica.
    """

    def __init__(self, costs: Costs, grain: int, in_flight: InFlight, devices: int) -> None:
        self._costs = costs
        self._grain = grain
        self._in_flight = in_flight
        self._devices = devices
        self._prompt = max(1, round(costs.prompt_tokens / grain))
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[tuple[float, int, _Sequence]] = []
        """A heap of (step count at its end, order of joining, sequence)."""
        self._joined = 0
        self._kv = 0
        self._cached: set[int] = set()
        """Groups whose prompt was computed under the served version."""
        self._steps = 0.0
        """Number of decoding steps so far."""
        self._at = self._stalled_until = 0.0
        """When steps were last counted, and until when decoding is paused."""
        self._timer: asyncio.TimerHandle | None = None
        self._commit: asyncio.Future[None] | None = None
        """Set while a commit is in progress; with ``drain``, the commit waits for it."""
        self._pausing = False
        self._marks: list[tuple[float, int]] = [(-math.inf, 0)]
        """(step count, version) from which a version samples."""
        self._tokens = self._prefilled = 0
        self._busy_s = self._request_s = 0.0

    # -- for a dispatcher ----------------------------------------------------------------------------------------------

    def ask(self, requests: Sequence[Request], on_answer: OnAnswer) -> asyncio.Future[None]:
        """Like ``ReplicaConnection.ask``."""
        answers = [self.begin(*request) for request in requests]
        for place, answer in enumerate(answers):
            answer.add_done_callback(partial(_pass_on, on_answer, place))
        return asyncio.ensure_future(_all_done(answers))

    def begin(self, prompt_ids: list[int], sampling: Sampling) -> asyncio.Future[Completion]:
        """Begin one sequence. The prompt's first token ID identifies the group; the seed, which is required, identifies
        the episode."""
        group = prompt_ids[0]
        tokens = self._costs.length.draw(group, sampling.seed)
        length = min(max(1, round(tokens / self._grain)), sampling.max_new_tokens)
        sequence = _Sequence(group, length, self._loop.create_future())
        self._count()
        self._waiting.append(sequence)
        self._turn()
        return sequence.answer

    def cancel_requests(self, why: str) -> None:
        """Raises RuntimeError: ``ReplicaConnection.cancel_requests`` is for lost replicas, which are not simulated."""
        raise RuntimeError(f"requests of a simulated replica were cancelled: {why}")

    # -- for the publisher and the observer ------------------------------------------------------------------------

    async def weights_setup(self, manifest: Any, settings: Any) -> float:
        """Does nothing. Returns 0: the deadline of a transfer covers running sequences, too."""
        return 0.0

    async def weights_connect(self, addresses: list[bytes], position: int, receivers: int) -> None:
        """Does nothing."""

    async def ready(self) -> None:
        """Returns at once: a simulated replica is always ready."""

    async def block_until_lost(self) -> None:
        """Never returns: simulated replicas are not lost."""
        await asyncio.Event().wait()  # waits: for the whole run

    async def receive(self, version: int, snapshot: int) -> int:
        """Simulate the transfer; decoding continues meanwhile."""
        await asyncio.sleep(self._costs.transfer_s)
        return 1

    async def commit(self, version: int, snapshot: int, checksums: np.ndarray) -> CommitReport:
        """Pause decoding for the copy, then sample with ``version``."""
        self._count()
        self._commit = self._loop.create_future()
        if self._in_flight == "drain" and self._running:
            await self._commit  # waits: for sequences of this replica, which all end
        self._pausing = True
        pause = self._costs.commit_s
        if self._in_flight in ("recompute", "resume"):
            held = sum(self._prompt + self._steps - one.began for _, _, one in self._running)
            pause += held * self._grain * self._costs.decode.prefill_token_s
        self._stall(pause)
        self._marks.append((self._steps, version))
        self._cached.clear()
        await asyncio.sleep(pause)
        self._count()
        self._commit, self._pausing = None, False
        self._turn()
        return CommitReport(version, 1, pause, pause, pause, 0.0)

    async def stats(self) -> dict[str, Any]:
        """The entries of ``Generator.stats`` that the observer reads."""
        self._count()
        return {
            "pid": os.getpid(),
            "generated_tokens": self._tokens * self._grain,
            "turn_prompt_tokens": 0,
            "turn_cached_tokens": 0,
            "turn_reread_tokens": 0,
            "busy_seconds": self._busy_s,
            "request_seconds": self._request_s,
            "devices": self._devices,
        }

    # -- the model -------------------------------------------------------------------------------------------------

    @property
    def _step_s(self) -> float:
        """Seconds in which every running sequence gets one simulated token."""
        decode = self._costs.decode
        return self._grain * (decode.step_s + decode.sequence_s * len(self._running))

    def _count(self) -> None:
        """Count steps and busy time since the last call. Must be called before every change of running sequences."""
        now = self._loop.time()
        requests = len(self._running) + len(self._waiting)
        if requests and not self._pausing:
            self._busy_s += now - self._at
            self._request_s += requests * (now - self._at)
        decoded_s = now - max(self._at, self._stalled_until)
        if self._running and decoded_s > 0:
            self._steps += decoded_s / self._step_s
        self._at = now

    def _stall(self, seconds: float) -> None:
        self._stalled_until = max(self._stalled_until, self._at) + seconds

    def _turn(self) -> None:
        """After ``_count``: end complete sequences, start those that fit, and set the timer to the next change."""
        while self._running and self._running[0][0] <= self._steps + ALMOST:
            self._end(heapq.heappop(self._running)[2])
        if self._commit is not None and not self._running and not self._commit.done():
            self._commit.set_result(None)  # drained
        if self._at >= self._stalled_until:
            self._admit()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._at < self._stalled_until:
            self._timer = self._loop.call_at(self._stalled_until, self._wake)
        elif self._running:
            left = max(self._running[0][0] - self._steps, 0.0)
            self._timer = self._loop.call_at(self._at + left * self._step_s, self._wake)

    def _wake(self) -> None:
        self._count()
        self._turn()

    def _admit(self) -> None:
        """Start all requests that fit: their prompts are computed together, and then decoding continues."""
        decode, computed = self._costs.decode, 0
        while self._waiting and self._commit is None and len(self._running) < decode.max_running:
            one = self._waiting[0]
            needed = self._prompt + one.length
            if self._running and (self._kv + needed) * self._grain > decode.kv_tokens:
                break
            self._waiting.popleft()
            self._kv += needed
            if one.group not in self._cached:
                self._cached.add(one.group)
                computed += self._prompt
            one.began = self._steps
            self._joined += 1
            heapq.heappush(self._running, (self._steps + one.length, self._joined, one))
        if computed and decode.prefill_token_s:
            self._stall(computed * self._grain * decode.prefill_token_s)

    def _end(self, one: _Sequence) -> None:
        self._kv -= self._prompt + one.length
        self._tokens += one.length
        if one.answer.done():  # the requesting worker was cancelled
            return
        n = one.length
        completion = Completion(np.zeros(n, np.int32), np.zeros(n, np.float32), self._versions(one), "stop")
        one.answer.set_result(completion)

    def _versions(self, one: _Sequence) -> np.ndarray:
        """The version that sampled each token."""
        first = bisect_right(self._marks, one.began, key=lambda mark: mark[0]) - 1
        marks = self._marks[first:]
        starts = [0, *(min(one.length, max(0, math.ceil(at - one.began - ALMOST))) for at, _ in marks[1:]), one.length]
        return np.repeat(np.asarray([version for _, version in marks], np.int32), np.diff(starts))


def _pass_on(on_answer: OnAnswer, place: int, answer: asyncio.Future[Completion]) -> None:
    if not answer.cancelled():
        on_answer(place, answer.result())  # waits: it is done


async def _all_done(answers: Sequence[asyncio.Future[Completion]]) -> None:
    await asyncio.gather(*answers)  # waits: for a simulated engine
