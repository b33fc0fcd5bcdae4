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
from monarch_rl.runtime import presence
from monarch_rl.runtime.presence import Wait


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

    def waits(self) -> list[Wait]:
        """What the oldest requests wait for; may be called on any thread."""
        name, found = f"generator {self._sglang.replica}", []
        for draw in list(self._running.values())[: presence.WAITS_PER_PROCESS]:
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
                salt = str(self.version)
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
        sides = take_side_channel(output)
        for index, request_id in enumerate(output.rids):
            draw = self._running.get(request_id)
            if draw is not None:
                self._take(output, index, request_id, draw, sides[index])
        presence.progress("tokens drawn")
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
