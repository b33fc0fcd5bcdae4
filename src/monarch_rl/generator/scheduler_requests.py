"""The requests that are in SGLang's scheduler: they are sent to it, and what it reports of them is read.

SGLang's own way (``TokenizerManager.generate_request``) takes a message to the scheduler, several tasks and lists of
tuples for each request. Here the requests of one turn of the event loop are one message, such as the episodes of a
group, which the scheduler then admits together; and what it reports is read into arrays at once.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from monarch_rl.episode.sampling import Completion, GenerationError, Sampling
from monarch_rl.generator.answers import ExpertRouteFormat, SideChannel, read_reason, take_side_channel, to_part
from monarch_rl.generator.clock import BusyClock
from monarch_rl.generator.parts import UNFINISHED, PartStream, join_parts
from monarch_rl.generator.request_format import RequestFormat
from monarch_rl.generator.sglang_engine import EngineStopped, SglangEngine, io_structs
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.wait_registry import Wait


@dataclass(eq=False, slots=True)
class _Draw:
    """A request that is in SGLang, or is to be sent to it."""

    prompt_ids: list[int]
    sampling: Sampling
    stream: PartStream
    answer: asyncio.Future[Completion]
    since: float = field(default_factory=time.monotonic)
    parts: list[Completion] = field(default_factory=list)
    """What SGLang has reported."""
    error: GenerationError | None = None
    """The first one in what it has reported: raised when SGLang is done with the request."""
    interrupted: bool = False
    """A commit has ended it, and it is to be resumed."""


ANOTHER_TRAINER = "the trainer whose policy was asked is lost"
"""Why requests fail when versions begin anew."""
KEPT_COMMITS = 2
"""Commits between which no turn uses a conversation's prefix until it is forgotten: a tool may take that long."""


@dataclass(slots=True)
class TurnReads:
    """What was read for turns that continue a conversation."""

    prompt_tokens: int = 0
    """Tokens of their prompts: of the conversation so far, and of what is new in the turn."""
    cached_tokens: int = 0
    """Of those, tokens that the prefix cache had."""
    reread_tokens: int = 0
    """Those that it had not, of conversations that began under older weights."""

    def add(self, prompt_tokens: int, cached_tokens: int, older: bool) -> None:
        """Count a turn; ``older``: its conversation began under older weights."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.reread_tokens += (prompt_tokens - cached_tokens) * older


class SchedulerRequests:
    """Sends requests to SGLang's scheduler and reads its reports.

    Args:
        sglang: the engine.
        route_format: of the model's expert routes, if the engine reports them.
        seeds: for requests without one; None leaves them without.
    """

    def __init__(
        self, sglang: SglangEngine, route_format: ExpertRouteFormat | None, seeds: random.Random | None
    ) -> None:
        self._sglang = sglang
        self._route_format = route_format
        self._seeds = seeds
        self._unsent: list[_Draw] = []
        """Those that the next message takes."""
        self._running: dict[str, _Draw] = {}
        """Those in SGLang, by its id."""
        self.idle = asyncio.Event()
        """Set while none is running."""
        self.idle.set()
        self.serving = True
        """Requests are sent."""
        self.version = 0
        """The version that draws, or that was being loaded when a commit failed."""
        self.beginnings = 0
        """How often versions have begun anew: the weights of a number may be others since."""
        self.keeps_conversations = False
        """A turn may start from what older weights have read of its conversation."""
        self.turn_reads = TurnReads()
        self._used_tokens: deque[int] = deque([0], maxlen=KEPT_COMMITS)
        """Tokens of the requests that ended between two commits; the last are those since the last commit."""
        self.clock = BusyClock()
        self.format = RequestFormat(sglang.manager)
        manager = sglang.manager
        manager._handle_batch_output = partial(self._on_output, manager._handle_batch_output)
        manager._result_dispatcher = partial(self._on_result, manager._result_dispatcher)
        self._end = asyncio.ensure_future(self._fail_at_end())

    def __len__(self) -> int:
        """Requests in SGLang."""
        return len(self._running)

    def interrupt(self) -> None:
        """Tell SGLang to end the running requests: what they drew is ``UNFINISHED``."""
        for draw in self._running.values():
            draw.interrupted = True
        self._sglang.manager.abort_request(abort_all=True)

    def begin_anew(self) -> None:
        """Versions to come are another trainer's. End all requests: nobody wants what they draw any more."""
        self.version, self.beginnings = 0, self.beginnings + 1
        for draw in [*self._unsent, *self._running.values()]:
            self._forget(draw)
            _settle(draw, GenerationError(ANOTHER_TRAINER))

    def waits(self) -> list[Wait]:
        """What the oldest requests wait for; may be called on any thread."""
        name, found = self._sglang.replica, []
        for draw in list(self._running.values())[: wait_registry.WAITS_PER_PROCESS]:
            what = f"tokens after {len(draw.prompt_ids)} others"
            found.append(Wait(name, what, self._sglang.name, draw.since, math.inf))
        for draw in list(self._unsent)[:1]:
            found.append(Wait(name, "a commit to end", self._sglang.name, draw.since, math.inf))
        return found

    async def draw(self, prompt_ids: list[int], sampling: Sampling, stream: PartStream) -> Completion:
        """Send one request to SGLang with all others of this turn; returns what it drew, maybe ``UNFINISHED``."""
        self._sglang.check()
        loop = asyncio.get_running_loop()
        draw = _Draw(prompt_ids, sampling, stream, loop.create_future())
        if not self._unsent and self.serving:
            loop.call_soon(self.send)
        self._unsent.append(draw)
        try:
            # waits: for SGLang or its end; the caller of this replica keeps the deadline and knows how long it is
            return await draw.answer
        except asyncio.CancelledError:
            self._forget(draw)
            raise

    def send(self) -> None:
        """Send the requests that wait. The cache's version must be that of the weights, so a commit holds them back."""
        if not self.serving:
            return
        unsent, self._unsent = self._unsent, []
        batch = []
        for draw in unsent:
            request_id = uuid.uuid4().hex
            seed = draw.sampling.seed
            if seed is None and self._seeds is not None:
                seed = self._seeds.getrandbits(63)
            try:
                salt = f"{self.beginnings}/{self._cache_version(draw.sampling)}"
                batch.append(self.format.tokenized(request_id, draw.prompt_ids, draw.sampling, seed, salt))
            except Exception as error:  # of this request alone
                _settle(draw, error)
                continue
            self._running[request_id] = draw
            self.clock.enter()
        if not batch:
            return
        self.idle.clear()
        try:
            self.format.send(batch)
        except Exception as error:  # a callback of the event loop has nobody to raise it to
            for request in batch:
                _settle(self._leave(request.rid), error)

    def _cache_version(self, sampling: Sampling) -> int:
        """The version whose part of the prefix cache a request uses: requests of different ones share nothing.

        A conversation that has moved here from another replica may have begun under a version that comes later here: no
        conversation that then begins may find what older weights have read.
        """
        began = sampling.conversation_version
        return self.version if began is None or not self.keeps_conversations else min(began, self.version)

    def next_kept_tokens(self) -> int:
        """Tokens of the prefix cache to keep in the commit that comes now.

        No entry that has been used within :data:`KEPT_COMMITS` commits is among the others, which were used longer ago.
        0 if conversations do not keep what was read, or none has had a second turn yet.
        """
        kept = sum(self._used_tokens) if self.keeps_conversations and self.turn_reads.prompt_tokens else 0
        self._used_tokens.append(0)
        return kept

    def _forget(self, draw: _Draw) -> None:
        """Nobody waits for it any more: have SGLang end it."""
        if draw in self._unsent:
            self._unsent.remove(draw)
        for request_id in [known for known, running in self._running.items() if running is draw]:
            self._leave(request_id)
            self._sglang.manager._dispatch_to_scheduler(io_structs().AbortReq(rid=request_id))

    def _leave(self, request_id: str) -> _Draw:
        draw = self._running.pop(request_id)
        self.clock.leave()
        if not self._running:
            self.idle.set()
        return draw

    async def _fail_at_end(self) -> None:
        """When the engine ends, fail all requests: SGLang would leave them waiting forever."""
        reason = await self._sglang.ended()  # waits: as long as the engine lives
        draws, self._unsent = [*self._unsent, *self._running.values()], []
        for request_id in list(self._running):
            self._leave(request_id)
        for draw in draws:
            _settle(draw, EngineStopped(reason))

    # ---- what SGLang reports -----------------------------------------------------------------------------------------

    async def _on_output(self, handle: Callable[[Any], Awaitable[None]], output: Any) -> None:
        """Take what SGLang's scheduler reports of requests from here; ``handle`` is SGLang's own way, for any others.

        SGLang's own streaming would send and handle the first token of every request by itself.
        """
        if self._running:  # else all are SGLang's own, maybe of another form
            sides = take_side_channel(output)
            for index, request_id in enumerate(output.rids):
                draw = self._running.get(request_id)
                if draw is not None:
                    self._take(output, index, request_id, draw, sides[index])
        wait_registry.progress("tokens drawn")
        if self._sglang.manager.rid_to_state:
            await handle(output)  # waits: for nothing but the event loop

    def _take(self, output: Any, index: int, request_id: str, draw: _Draw, side: SideChannel) -> None:
        """Read one request's share of a message. Its error is its own: SGLang would end this process for it."""
        finished = output.finished_reasons[index]
        try:
            if side.error is not None and draw.error is None:
                draw.error = side.error
            reason = read_reason(finished, draw.interrupted)
            if draw.error is None:
                self._add_part(to_part(output, index, side, reason), draw, finished is not None)
        except GenerationError as error:
            draw.error = draw.error or error
        if finished is not None:
            began = draw.sampling.conversation_version
            self._used_tokens[-1] += len(draw.prompt_ids) + output.completion_tokens[index]
            if began is not None:
                cached_tokens = min(output.cached_tokens[index], len(draw.prompt_ids))
                self.turn_reads.add(len(draw.prompt_ids), cached_tokens, began < self.version)
            self._finish(self._leave(request_id), side)

    def _add_part(self, part: Completion, draw: _Draw, last: bool) -> None:
        if draw.sampling.truncated and len(part.token_ids) and part.kept_sets is None:
            raise GenerationError("SGLang reported no kept sets, though it was asked for them")
        draw.parts.append(part)
        if not last and len(part.token_ids):
            draw.stream.send(part)

    def _finish(self, draw: _Draw, side: SideChannel) -> None:
        """SGLang is done with a request."""
        if draw.error is not None:
            _settle(draw, draw.error)
            return
        completion = join_parts(draw.parts, draw.parts[-1].finish_reason)
        routes_from = draw.sampling.expert_routes_from
        if self._route_format is not None and routes_from is not None and side.expert_routes is not None:
            rows = len(draw.prompt_ids) + len(completion.token_ids) - 1 - routes_from
            try:
                completion = replace(completion, expert_routes=self._route_format.read(side.expert_routes, rows))
            except GenerationError as error:
                _settle(draw, error)
                return
        _settle(draw, completion)

    def _on_result(self, dispatch: Callable[[Any], None], result: Any) -> None:
        """Take the end of a request that SGLang aborts in its own queue, where it has drawn nothing new."""
        if not isinstance(result, io_structs().AbortReq) or result.rid not in self._running:
            dispatch(result)
            return
        draw = self._leave(result.rid)
        reason = result.finished_reason or {"type": "abort", "message": result.abort_message}
        try:
            unfinished = read_reason(reason, draw.interrupted)
        except GenerationError as error:
            _settle(draw, draw.error or error)
            return
        _settle(draw, draw.error or join_parts(draw.parts or [_nothing_drawn()], unfinished))


def _nothing_drawn() -> Completion:
    return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), UNFINISHED)


def _settle(draw: _Draw, outcome: Completion | Exception) -> None:
    if draw.answer.done():  # who waited for it was cancelled
        return
    if isinstance(outcome, Exception):
        draw.answer.set_exception(outcome)
    else:
        draw.answer.set_result(outcome)
