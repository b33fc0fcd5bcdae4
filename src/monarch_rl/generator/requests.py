"""The requests of one engine that generate tokens: admission, SGLang's scheduler, answers, and commits in between.

SGLang's own path (``TokenizerManager.generate_request``) costs a message to the scheduler, several tasks and lists of
tuples per request. Here all requests of one iteration of the event loop, such as the episodes of a group, travel in one
message, so that the scheduler admits them together, and outputs are read directly into arrays
(``sglang_format.py``).

A request continues across commits, and each of its tokens carries the version that sampled it. Each version has its
own part of the prefix cache, so a conversation that begins after a commit never starts from keys and values of older
weights. One that began just before the commit may, like a sequence that was already running. Where running sequences
keep their keys and values across commits (``continue``), so do conversations between their turns: later turns use the
part of the version of the first turn. Otherwise their keys and values are computed again.
"""

from __future__ import annotations

import asyncio
import itertools
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

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import EngineStopped, GenerationError
from monarch_rl.generator.parts import UNFINISHED, OnPart, PartStream, finish_reason_of, join_parts, settle
from monarch_rl.generator.sglang_engine import SglangEngine, io_structs
from monarch_rl.generator.sglang_format import (
    ExpertRouteFormat,
    RequestFormat,
    SideChannel,
    read_reason,
    take_side_channel,
    to_part,
)
from monarch_rl.runtime import timeline, wait_registry
from monarch_rl.runtime.wait_registry import Wait

ANOTHER_TRAINER = "the trainer whose policy was asked is lost"
"""Error of requests that are in flight when another trainer connects."""
KEPT_COMMITS = 2
"""Number of commits for which a conversation's unused prefix stays in the cache, because a tool may take that long."""


@dataclass(eq=False, slots=True)
class _Request:
    """A request in SGLang, or waiting to be sent to it. One that a commit interrupts is resumed as another one."""

    prompt_ids: list[int]
    sampling: Sampling
    stream: PartStream
    answer: asyncio.Future[Completion]
    since: float = field(default_factory=time.monotonic)
    parts: list[Completion] = field(default_factory=list)
    """Outputs reported by SGLang so far."""
    error: GenerationError | None = None
    """The first error in these outputs; raised when SGLang has finished the request."""
    interrupted: bool = False
    """A commit ended the request, and it will be resumed."""


@dataclass(slots=True)
class TurnReads:
    """Prompt tokens of turns that continue a conversation."""

    prompt_tokens: int = 0
    """Tokens of their prompts: the conversation so far and the new messages."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    reread_tokens: int = 0
    """Prompt tokens missing in the prefix cache, in conversations that began under older weights."""

    def add(self, prompt_tokens: int, cached_tokens: int, older: bool) -> None:
        """Count a turn. ``older``: its conversation began under older weights."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.reread_tokens += (prompt_tokens - cached_tokens) * older


class BusyClock:
    """Counts the seconds in which at least one request was in the engine and no commit was in progress.

    Args:
        lane: lane of the timeline that shows these seconds; empty shows them nowhere.
    """

    def __init__(self, lane: str = "") -> None:
        self._lane = lane
        self._busy = False
        self._requests = 0
        self._paused = False
        self._since = 0.0
        self._total = 0.0
        self._request_seconds = 0.0

    @property
    def requests(self) -> int:
        return self._requests

    @property
    def seconds(self) -> float:
        self._count()
        return self._total

    @property
    def request_seconds(self) -> float:
        """Busy seconds, each multiplied by the number of requests in the engine."""
        self._count()
        return self._request_seconds

    def enter(self) -> None:
        self._count()
        self._requests += 1
        self._show()

    def leave(self) -> None:
        self._count()
        self._requests -= 1
        self._show()

    def pause(self) -> None:
        self._count()
        self._paused = True
        self._show()

    def resume(self) -> None:
        self._count()
        self._paused = False
        self._show()

    def _show(self) -> None:
        busy = self._requests > 0 and not self._paused
        if busy == self._busy or not self._lane:
            return
        self._busy = busy
        if busy:
            timeline.begin(self._lane, "work", "generation")
        else:
            timeline.end(self._lane, "work")

    def _count(self) -> None:
        """Add the time since the last call. The number of requests was constant in it."""
        now = time.perf_counter()
        if not self._paused and self._requests:
            self._total += now - self._since
            self._request_seconds += self._requests * (now - self._since)
        self._since = now


class Requests:
    """Answers the requests of one engine, and holds new ones back during commits.

    Args:
        sglang: the engine.
        version: the served version.
        slots: most requests in SGLang at once; None is as many as it decodes at once. Further requests wait here and
            not in SGLang, where a request that waits across a commit would use the prefix cache of the version under
            which it arrived.
        keeps_conversations: whether turns after a commit may start from keys and values that older weights computed for
            their conversation.
        route_format: format of the model's expert routes; None if the engine does not report routes.
        seeds: source of seeds for requests without one; None leaves these requests unseeded.
    """

    def __init__(
        self,
        sglang: SglangEngine,
        version: int,
        slots: int | None,
        keeps_conversations: bool,
        route_format: ExpertRouteFormat | None = None,
        seeds: random.Random | None = None,
    ) -> None:
        self._sglang = sglang
        self._slots = asyncio.Semaphore(sglang.running_requests if slots is None else slots)
        self._route_format = route_format
        self._seeds = seeds
        self.version = version
        """Version of the last commit that began to load; before any, that of the model's own weights. If loading
        failed, the engine is paused and serves nothing."""
        self.keeps_conversations = keeps_conversations
        self.format = RequestFormat(sglang.manager)
        """Converts requests to SGLang's form; names the LoRA adapter that they use."""
        self.generated_tokens = 0
        """Tokens generated since the start."""
        self.finished_requests = 0
        """Number of requests answered since the start."""
        self.prompt_tokens = 0
        """Prompt tokens of the answered requests."""
        self.turn_reads = TurnReads()
        """Prompt tokens of turns that continue a conversation, since the start."""
        self.clock = BusyClock(sglang.replica)
        """Busy time of the engine."""
        self.idle = asyncio.Event()
        """Set while no request is in SGLang."""
        self.idle.set()
        self._serving = True
        """False while requests are held back for a commit."""
        self._resets = 0
        """Number of calls of :meth:`reset_versions`. After each, a version number may stand for other weights."""
        self._id, self._numbers = uuid.uuid4().hex, itertools.count()
        """A request's id is made of both; SGLang's own ids are random, too."""
        self._unsent: list[_Request] = []
        """Requests for the next message."""
        self._running: dict[str, _Request] = {}
        """Requests in SGLang, by SGLang's request id."""
        self._used_tokens: deque[int] = deque([0], maxlen=KEPT_COMMITS)
        """Tokens of the requests that ended between two commits; the last entry counts since the last commit."""
        manager = sglang.manager
        manager._handle_batch_output = partial(self._on_output, manager._handle_batch_output)
        manager._result_dispatcher = partial(self._on_result, manager._result_dispatcher)
        self._end = asyncio.ensure_future(self._fail_at_end())

    @property
    def running(self) -> int:
        """Number of requests in SGLang."""
        return len(self._running)

    def waits(self) -> list[Wait]:
        """What the oldest requests wait for; may be called on any thread."""
        name, found = self._sglang.replica, []
        for request in list(self._running.values())[: wait_registry.WAITS_PER_PROCESS]:
            what = f"new tokens after {len(request.prompt_ids)} prompt tokens"
            found.append(Wait(name, what, self._sglang.name, request.since, math.inf))
        for request in list(self._unsent)[:1]:
            found.append(Wait(name, "a commit to end", self._sglang.name, request.since, math.inf))
        return found

    async def generate(self, prompt_ids: list[int], sampling: Sampling, on_part: OnPart) -> Completion:
        """See :meth:`monarch_rl.generator.engine.Engine.generate`."""
        self._check_sampling(sampling)
        stream = PartStream(on_part)
        parts: list[Completion] = []
        sampled_ids: list[int] = []
        rest, resets = sampling, self._resets
        async with self._slots:
            while True:
                if self._resets != resets:
                    raise GenerationError(ANOTHER_TRAINER)
                part = await self._run(prompt_ids + sampled_ids if sampled_ids else prompt_ids, rest, stream)
                parts.append(part)
                self.generated_tokens += len(part.token_ids)
                reason: str | None = part.finish_reason
                if reason == UNFINISHED:
                    sampled_ids += part.token_ids.tolist()
                    # The step that ended the request may have sampled its last token.
                    reason = finish_reason_of(sampled_ids, sampling, self.format.stop_ids(sampling))
                if reason is not None:
                    self.finished_requests += 1
                    self.prompt_tokens += len(prompt_ids)
                    return join_parts(parts, reason)
                routes_from = rest.expert_routes_from
                if routes_from is not None and part.expert_routes is not None:
                    routes_from += len(part.expert_routes)
                remaining = sampling.max_new_tokens - len(sampled_ids)
                rest = replace(sampling, max_new_tokens=remaining, expert_routes_from=routes_from)
                stream.send_rest(parts)

    def _check_sampling(self, sampling: Sampling) -> None:
        """Refuse settings that SGLang would ignore, or for which it would end its scheduler."""
        if sampling.expert_routes_from is not None and self._route_format is None:
            raise GenerationError("expert routes are asked for, but the engine was not started to report them")
        if sampling.min_p and (sampling.seed is not None or self._seeds is not None):
            raise GenerationError("SGLang supports min_p only without a seed: leave out one of the two")

    # ---- for commits -------------------------------------------------------------------------------------------------

    def hold_new(self) -> None:
        """Send no requests to SGLang until :meth:`serve`."""
        self._serving = False

    def serve(self) -> None:
        """Send requests to SGLang again."""
        self._serving = True
        self._send()

    def interrupt_running(self) -> None:
        """Have SGLang end the running requests; each resumes from its sampled tokens after :meth:`serve`."""
        for request in self._running.values():
            request.interrupted = True
        self._sglang.manager.abort_request(abort_all=True)

    def next_retained_tokens(self) -> int:
        """How many tokens of the prefix cache, the most recently used ones, the commit that starts now retains.

        They include every entry that was used within the last :data:`KEPT_COMMITS` commits. 0 if conversations do not
        continue from keys and values of older weights, or none has had a second turn yet.
        """
        retained = sum(self._used_tokens) if self.keeps_conversations and self.turn_reads.prompt_tokens else 0
        self._used_tokens.append(0)
        return retained

    def reset_versions(self) -> None:
        """Prepare for versions of another trainer: fail all requests, start over at version 0, and never reuse cached
        prefixes of older weights.

        The other trainer may have resumed from an earlier version, so version numbers may repeat with other weights.
        """
        self.version, self._resets = 0, self._resets + 1
        for request in [*self._unsent, *self._running.values()]:
            self._drop(request)
            settle(request.answer, GenerationError(ANOTHER_TRAINER))

    # ---- requests to SGLang ------------------------------------------------------------------------------------------

    async def _run(self, prompt_ids: list[int], sampling: Sampling, stream: PartStream) -> Completion:
        """Send a request to SGLang, with all others of this iteration of the event loop, and await its completion.

        The completion is ``UNFINISHED`` if a commit ended the request.
        """
        self._sglang.check()
        loop = asyncio.get_running_loop()
        request = _Request(prompt_ids, sampling, stream, loop.create_future())
        if not self._unsent and self._serving:
            loop.call_soon(self._send)
        self._unsent.append(request)
        try:
            # waits: for SGLang or its end; the caller of this replica keeps the deadline and knows how long it is
            return await request.answer
        except asyncio.CancelledError:
            self._drop(request)
            raise

    def _send(self) -> None:
        """Send the waiting requests in one message."""
        # The version in a request's cache salt must be that of the weights, so a commit holds requests back.
        if not self._serving:
            return
        unsent, self._unsent = self._unsent, []
        batch = []
        for request in unsent:
            request_id = f"{self._id}-{next(self._numbers)}"
            seed = request.sampling.seed
            if seed is None and self._seeds is not None:
                seed = self._seeds.getrandbits(63)
            try:
                salt = f"{self._resets}/{self._cache_version(request.sampling)}"
                batch.append(self.format.tokenized(request_id, request.prompt_ids, request.sampling, seed, salt))
            except Exception as error:  # concerns this request alone
                settle(request.answer, error)
                continue
            self._running[request_id] = request
            self.clock.enter()
        if not batch:
            return
        self.idle.clear()
        manager = self._sglang.manager
        try:
            manager.auto_create_handle_loop()
            manager._dispatch_to_scheduler(manager.batch_tokenized_generate_req_type(batch=batch))
        except Exception as error:  # this is a callback of the event loop, which would only log the error
            for tokenized in batch:
                settle(self._leave(tokenized.rid).answer, error)

    def _cache_version(self, sampling: Sampling) -> int:
        """The version whose part of the prefix cache a request uses. Requests of different versions share no prefix."""
        began = sampling.conversation_version
        # A conversation that moved here from another replica may have begun under a version that this replica has yet
        # to load. Conversations that begin under that version must not find keys and values of older weights.
        return self.version if began is None or not self.keeps_conversations else min(began, self.version)

    def _drop(self, request: _Request) -> None:
        """Remove a request that nobody waits for any more, and have SGLang end it."""
        if request in self._unsent:
            self._unsent.remove(request)
        for request_id in [key for key, running in self._running.items() if running is request]:
            self._leave(request_id)
            self._sglang.manager._dispatch_to_scheduler(io_structs().AbortReq(rid=request_id))

    def _leave(self, request_id: str) -> _Request:
        request = self._running.pop(request_id)
        self.clock.leave()
        if not self._running:
            self.idle.set()
        return request

    async def _fail_at_end(self) -> None:
        """When the engine ends, fail all requests: SGLang would leave them waiting forever."""
        reason = await self._sglang.ended()  # waits: as long as the engine lives
        requests, self._unsent = [*self._unsent, *self._running.values()], []
        for request_id in list(self._running):
            self._leave(request_id)
        for request in requests:
            settle(request.answer, EngineStopped(reason))

    # ---- outputs of SGLang -------------------------------------------------------------------------------------------

    async def _on_output(self, handle: Callable[[Any], Awaitable[None]], output: Any) -> None:
        """Read a message of SGLang's scheduler about requests sent from here.

        Args:
            handle: SGLang's own handler, for all other requests. Its streaming would send and handle the first token of
                every request separately.
            output: the message.
        """
        if self._running:  # else all requests are SGLang's own, and the message may have another form
            sides = take_side_channel(output)
            for index, request_id in enumerate(output.rids):
                request = self._running.get(request_id)
                if request is not None:
                    self._take(output, index, request_id, request, sides[index])
        wait_registry.progress("tokens sampled")
        if self._sglang.manager.rid_to_state:
            await handle(output)  # waits: for nothing but the event loop

    def _take(self, output: Any, index: int, request_id: str, request: _Request, side: SideChannel) -> None:
        """Read one request's share of a message. An error fails this request only: if it were raised, SGLang would end
        this process."""
        finished = output.finished_reasons[index]
        try:
            if side.error is not None and request.error is None:
                request.error = side.error
            reason = read_reason(finished, request.interrupted)
            if request.error is None:
                self._add_part(to_part(output, index, side, reason), request, finished is not None)
        except GenerationError as error:
            request.error = request.error or error
        if finished is not None:
            began = request.sampling.conversation_version
            self._used_tokens[-1] += len(request.prompt_ids) + output.completion_tokens[index]
            if began is not None:
                cached_tokens = min(output.cached_tokens[index], len(request.prompt_ids))
                self.turn_reads.add(len(request.prompt_ids), cached_tokens, began < self.version)
            self._finish(self._leave(request_id), side)

    def _add_part(self, part: Completion, request: _Request, last: bool) -> None:
        if request.sampling.truncated and len(part.token_ids) and part.sampling_masks is None:
            raise GenerationError("SGLang reported no sampling masks, although the request asked for them")
        request.parts.append(part)
        if not last and len(part.token_ids):
            request.stream.send(part)

    def _finish(self, request: _Request, side: SideChannel) -> None:
        """Answer a request that SGLang has finished."""
        if request.error is not None:
            settle(request.answer, request.error)
            return
        completion = join_parts(request.parts, request.parts[-1].finish_reason)
        routes_from = request.sampling.expert_routes_from
        if self._route_format is not None and routes_from is not None and side.expert_routes is not None:
            rows = len(request.prompt_ids) + len(completion.token_ids) - 1 - routes_from
            try:
                completion = replace(completion, expert_routes=self._route_format.read(side.expert_routes, rows))
            except GenerationError as error:
                settle(request.answer, error)
                return
        settle(request.answer, completion)

    def _on_result(self, dispatch: Callable[[Any], None], result: Any) -> None:
        """Answer a request that SGLang aborted in its own queue, where no new tokens were sampled for it."""
        if not isinstance(result, io_structs().AbortReq) or result.rid not in self._running:
            dispatch(result)
            return
        request = self._leave(result.rid)
        reason = result.finished_reason or {"type": "abort", "message": result.abort_message}
        try:
            unfinished = read_reason(reason, request.interrupted)
        except GenerationError as error:
            settle(request.answer, request.error or error)
            return
        settle(request.answer, request.error or join_parts(request.parts or [_nothing_sampled()], unfinished))


def _nothing_sampled() -> Completion:
    return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), UNFINISHED)
