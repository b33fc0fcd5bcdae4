"""The requests that are in SGLang's scheduler: they are sent to it, and what it reports of them is read.

SGLang's own way (``TokenizerManager.generate_request``) takes a message to the scheduler, several tasks and lists of
tuples for each request. Here the requests of one turn of the event loop are one message, such as the episodes of a
group, which the scheduler then admits together; and what it reports is read into arrays at once.
"""

from __future__ import annotations

import asyncio
import copy
import math
import random
import time
import uuid
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from monarch_rl.episode.sampling import Completion, GenerationError, Sampling, SamplingMaskMissing, SamplingMasks
from monarch_rl.generator.parts import UNFINISHED, OnPart, PartStream, finish_reason_of, join_parts
from monarch_rl.generator.settings import recipe_flags
from monarch_rl.generator.sglang_engine import EngineStopped, SglangEngine, io_structs
from monarch_rl.model.folder import num_experts, sparse_layers
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.wait_registry import Wait


@dataclass(eq=False, slots=True)
class _Request:
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
        self._unsent: list[_Request] = []
        """Those that the next message takes."""
        self._running: dict[str, _Request] = {}
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

    def reset_versions(self) -> None:
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
        draw = _Request(prompt_ids, sampling, stream, loop.create_future())
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

    def next_mask_tokens(self) -> int:
        """Tokens of the prefix cache to keep in the commit that comes now.

        No entry that has been used within :data:`KEPT_COMMITS` commits is among the others, which were used longer ago.
        0 if conversations do not keep what was read, or none has had a second turn yet.
        """
        kept = sum(self._used_tokens) if self.keeps_conversations and self.turn_reads.prompt_tokens else 0
        self._used_tokens.append(0)
        return kept

    def _forget(self, draw: _Request) -> None:
        """Nobody waits for it any more: have SGLang end it."""
        if draw in self._unsent:
            self._unsent.remove(draw)
        for request_id in [known for known, running in self._running.items() if running is draw]:
            self._leave(request_id)
            self._sglang.manager._dispatch_to_scheduler(io_structs().AbortReq(rid=request_id))

    def _leave(self, request_id: str) -> _Request:
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

    def _take(self, output: Any, index: int, request_id: str, draw: _Request, side: SideChannel) -> None:
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

    def _add_part(self, part: Completion, draw: _Request, last: bool) -> None:
        if draw.sampling.truncated and len(part.token_ids) and part.sampling_masks is None:
            raise GenerationError("SGLang reported no kept sets, though it was asked for them")
        draw.parts.append(part)
        if not last and len(part.token_ids):
            draw.stream.send(part)

    def _finish(self, draw: _Request, side: SideChannel) -> None:
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
        _settle(draw, draw.error or join_parts(draw.parts or [_nothing_sampled()], unfinished))


def _nothing_sampled() -> Completion:
    return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), UNFINISHED)


def _settle(draw: _Request, outcome: Completion | Exception) -> None:
    if draw.answer.done():  # who waited for it was cancelled
        return
    if isinstance(outcome, Exception):
        draw.answer.set_exception(outcome)
    else:
        draw.answer.set_result(outcome)


# -- what SGLang answers to a request, and to parts of it, as completions ---------------------------------------------

LOST_SETS = ("outside its captured sampling support", "Sampling support exceeds")
"""In SGLang's messages where its sampler and its record of the kept set did not agree, or ties made the set too large:
both may happen to any token on a GPU."""


@dataclass(slots=True)
class SideChannel:
    """What SGLang's scheduler reports of one request beside its tokens, message by message.

    It is taken out of the messages, because SGLang would write it as base64 and as lists of Python's integers.
    """

    sampling_masks: list[SamplingMasks] = field(default_factory=list)
    """Of the tokens of each message."""
    logprobs: list[np.ndarray] = field(default_factory=list)
    """float32: of the tokens of each message among their kept sets."""
    expert_routes: np.ndarray | None = None
    """int32 [tokens read, all layers, k]; comes with the last message."""
    error: GenerationError | None = None
    """The first error in a message."""


class ExpertRouteFormat:
    """How expert routes of a model are kept: only of layers with experts, in as few bytes as an expert's index needs.

    Args:
        config: the model's ``config.json``.

    Raises:
        ValueError: the model has no experts.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.layers = sparse_layers(config)
        if not self.layers:
            raise ValueError("expert routes are asked for, but the model has no experts")
        self.experts = num_experts(config)
        self.dtype = np.dtype(np.uint8 if self.experts <= 256 else np.uint16)

    def read(self, expert_routes: np.ndarray, rows: int) -> np.ndarray:
        """Convert expert routes as SGLang reports them, int32 [tokens, all layers, k].

        Raises GenerationError if they are not of ``rows`` tokens, or not k experts of this model: then they belong to
        another sequence, or were not recorded.
        """
        routes = expert_routes[:, self.layers]
        if len(routes) != rows:
            raise GenerationError(f"SGLang reported expert routes of {len(routes)} tokens, of {rows} were asked for")
        if routes.size and not 0 <= routes.min() <= routes.max() < self.experts:
            raise GenerationError(
                f"SGLang reported routes by experts {routes.min()} to {routes.max()}, the model has {self.experts}"
            )
        ordered = np.sort(routes, -1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise GenerationError("SGLang reported a route that has an expert twice: it did not record all layers")
        return routes.astype(self.dtype)


def take_side_channel(output: Any) -> list[SideChannel]:
    """Take what is reported beside the tokens out of a message of SGLang's scheduler: one for each of its requests.

    An error of one request is in its ``error``: if it was raised here, SGLang would end this process.
    """
    masks, expert_routes = output.output_token_sampling_mask, output.routed_experts
    output.output_token_sampling_mask = output.routed_experts = None
    sides = [SideChannel() for _ in output.rids]
    for side, mask in zip(sides, masks or [], strict=False):
        if mask is not None:
            try:
                sampling_masks = SamplingMasks(np.asarray(mask.lengths, np.int32), np.asarray(mask.token_ids, np.int32))
                side.sampling_masks.append(sampling_masks)
            except ValueError as error:
                side.error = GenerationError(f"SGLang reported {error}")
            side.logprobs.append(np.asarray(mask.logprobs, np.float32))
    for side, routes in zip(sides, expert_routes or [], strict=False):
        side.expert_routes = None if routes is None else routes.numpy()
    return sides


def read_reason(reason: dict[str, Any] | None, interrupted: bool = False) -> str:
    """Read why SGLang ended a request; ``UNFINISHED`` if it did not.

    Args:
        reason: SGLang's finish reason.
        interrupted: the request was aborted on purpose, and is ``UNFINISHED`` too.

    Raises DrawLost if a token's kept set was not recorded, GenerationError if the request was aborted otherwise.
    """
    if reason is None or (reason["type"] == "abort" and interrupted):
        return UNFINISHED
    if reason["type"] in ("stop", "length"):
        return str(reason["type"])
    lost = any(words in str(reason.get("message")) for words in LOST_SETS)
    said = recipe_flags(f"the engine ended the request with {reason}")
    raise (SamplingMaskMissing if lost else GenerationError)(said)


def to_part(output: Any, index: int, side: SideChannel, reason: str = UNFINISHED) -> Completion:
    """Read what one request drew since the last message of SGLang's scheduler; see ``report_versions``.

    Args:
        output: the message.
        index: of the request in it.
        side: of this message.
        reason: of :func:`read_reason`.

    Raises GenerationError if a token has no log-prob, version or kept set.
    """
    tokens = np.array(output.output_ids[index], np.int32)
    # An aborted request may come with a log-prob and no token.
    logprobs = np.array(output.output_token_logprobs_val[index] if len(tokens) else (), np.float32)
    if len(logprobs) != len(tokens):
        raise GenerationError(f"SGLang reported log-probs of {len(logprobs)} tokens, {len(tokens)} were drawn")
    count = output.completion_tokens[index]
    first = count - len(tokens)
    versions = np.full(len(tokens), -1, np.int32)
    spans = output.weight_versions[index] if output.weight_versions is not None and len(tokens) else None
    for span in spans or ():
        versions[max(0, span.start - first) : max(0, span.end - first)] = int(span.version)
    if len(tokens) and versions.min() < 0:
        raise GenerationError(f"SGLang gave no version for some of {len(tokens)} tokens: {spans}")
    return _completion(tokens, logprobs, versions, reason, side)


def _completion(
    tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, reason: str, side: SideChannel | None
) -> Completion:
    """With kept sets, log-probs are those among them: that is how the tokens were drawn."""
    if side is None or not side.sampling_masks:
        return Completion(tokens, logprobs, versions, reason)
    sampling_masks, logprobs = SamplingMasks.join(side.sampling_masks), np.concatenate(side.logprobs)
    _check_sampling_masks(tokens, sampling_masks)
    return Completion(tokens, logprobs, versions, reason, sampling_masks)


def _check_sampling_masks(tokens: Sequence[int] | np.ndarray, sampling_masks: SamplingMasks) -> None:
    if len(sampling_masks.counts) != len(tokens):
        raise GenerationError(
            f"SGLang reported sampling masks of {len(sampling_masks.counts)} tokens, but sampled {len(tokens)}"
        )
    matches = sampling_masks.ids == np.repeat(tokens, sampling_masks.counts)
    if matches.sum() != len(tokens):  # ids of a set differ, so each has one match at most
        raise GenerationError("SGLang reported kept sets without the token that was drawn from them")


# -- how long an engine was busy --------------------------------------------------------------------------------------


class BusyClock:
    """Seconds in which at least one request was in the engine and no commit was going on."""

    def __init__(self) -> None:
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
        """Those seconds, each counted once for every request that was in the engine."""
        self._count()
        return self._request_seconds

    def enter(self) -> None:
        self._count()
        self._requests += 1

    def leave(self) -> None:
        self._count()
        self._requests -= 1

    def pause(self) -> None:
        self._count()
        self._paused = True

    def resume(self) -> None:
        self._count()
        self._paused = False

    def _count(self) -> None:
        """Add the time since the last call, in which nothing has changed."""
        now = time.perf_counter()
        if not self._paused and self._requests:
            self._total += now - self._since
            self._request_seconds += self._requests * (now - self._since)
        self._since = now


# -- requests in the form that SGLang's scheduler takes, made with less work than SGLang's own ------------------------
# SGLang turns a request into that form in some twenty steps, most of them for features that are not used here. Here
# it does so once for each kind of sampling; a later request of the kind is a copy of that one with its own ids,
# tokens, seed and length. The checks that depend on a request's length are still SGLang's.

MAX_KINDS = 64
"""Kinds of sampling that are remembered; a run has two or three."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the requests of one kind of sampling have in common."""

    request: Any
    """SGLang's ``GenerateReqInput``, for its checks."""
    tokenized: Any
    """SGLang's ``TokenizedGenerateReqInput``, to be copied."""


class RequestFormat:
    """Makes requests for the scheduler of one engine.

    Args:
        manager: SGLang's tokenizer manager.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._kinds: dict[tuple[Any, ...], _Kind] = {}
        self.lora: tuple[str, str] | None = None
        """SGLang's name and id of the LoRA adapter that requests ask for, if they do."""

    def tokenized(
        self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling, seed: int | None, salt: str
    ) -> Any:
        """A request as the scheduler takes it.

        Args:
            request_id: unique among those that are under way.
            prompt_ids: at least one.
            sampling: how to draw; its own seed is not looked at.
            seed: of the draws; None draws freely.
            salt: requests with different ones share no prefix of the cache.

        Raises GenerationError with SGLang's words if it refuses the request.
        """
        try:
            kind = self._kind(prompt_ids, sampling)
            kind.request.sampling_params["max_new_tokens"] = sampling.max_new_tokens
            self._manager._validate_one_request(kind.request, prompt_ids)
            tokenized = copy.copy(kind.tokenized)
            tokenized.sampling_params = params = copy.copy(kind.tokenized.sampling_params)
            params.max_new_tokens, params.sampling_seed = sampling.max_new_tokens, seed
            params.verify(self._manager.model_config.vocab_size)
        except ValueError as error:
            raise GenerationError(str(error)) from error
        tokenized.rid, tokenized.input_ids, tokenized.cache_salt = request_id, array("q", prompt_ids), salt
        tokenized.routed_experts_start_len = sampling.expert_routes_from or 0
        return tokenized

    def send(self, batch: list[Any]) -> None:
        """Send requests to the scheduler in one message."""
        self._manager.auto_create_handle_loop()
        self._manager._dispatch_to_scheduler(self._manager.batch_tokenized_generate_req_type(batch=batch))

    def _kind(self, prompt_ids: Sequence[int], sampling: Sampling) -> _Kind:
        routes = sampling.expert_routes_from is not None
        key = (sampling.temperature, sampling.stop_token_ids, sampling.top_k, sampling.top_p, sampling.min_p, routes)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
            kind = self._kinds[key] = self._make_kind(list(prompt_ids), sampling)
        return kind

    def _make_kind(self, prompt_ids: list[int], sampling: Sampling) -> _Kind:
        """Have SGLang make the first request of a kind, as its ``generate_request`` does."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        manager = self._manager
        request = GenerateReqInput(
            input_ids=prompt_ids,
            sampling_params=sampling_params(sampling),
            return_logprob=True,
            return_sampling_mask=sampling.truncated,
            return_routed_experts=sampling.expert_routes_from is not None,
            lora_path=self.lora[0] if self.lora is not None else None,
        )
        request.normalize_batch_and_arguments()
        manager._set_default_priority(request)
        if self.lora is not None:
            request.lora_id = self.lora[1]
        manager._init_req_state(request)
        try:
            tokenized = manager._create_tokenized_object(request, None, prompt_ids)
        finally:
            del manager.rid_to_state[request.rid]
        tokenized.time_stats = None  # of this request alone; the scheduler makes its own
        return _Kind(request, tokenized)


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """SGLang's sampling parameters of a request, but for its seed."""
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": list(sampling.stop_token_ids),
        # SGLang switches all stop tokens on or off at once. With them on, the model's own end token stops too.
        "ignore_eos": not sampling.stop_token_ids,
    }
    if sampling.truncated:
        params |= {"top_k": sampling.top_k or -1, "top_p": sampling.top_p, "min_p": sampling.min_p}
    return params


# -- the requests of one engine: tokens in, tokens out with log-probs and versions, across commits --------------------
# A request keeps going across a commit, and each of its tokens carries the version that drew it. The prefix cache is
# separate for each version: a conversation that begins after a commit never starts from keys and values of older
# weights. One that began in the last moment before the commit may, like a sequence that was running already. Where
# running sequences keep their keys and values across commits, conversations do between their turns: later turns
# belong to the version of the first one. Elsewhere they are read anew.


class EngineRequests:
    """Passes on what requests draw, and holds new ones back while a commit goes on.

    Args:
        sglang: the engine.
        places: requests in SGLang at once; None is as many as it decodes at once. Others wait here and not in SGLang,
            where one that waits across a commit would start from the prefix cache of the version at which it came.
        route_format: of the model's expert routes, if the engine reports them.
        keeps_conversations: turns after a commit may start from what older weights have read of their conversation.
        seeds: for requests without one; None leaves them without.
    """

    def __init__(
        self,
        sglang: SglangEngine,
        places: int | None,
        keeps_conversations: bool,
        route_format: ExpertRouteFormat | None = None,
        seeds: random.Random | None = None,
    ) -> None:
        self._sglang = sglang
        self._places = asyncio.Semaphore(sglang.running_requests if places is None else places)
        self._route_format = route_format
        self._seeds = seeds
        self._scheduler = SchedulerRequests(sglang, route_format, seeds)
        self._scheduler.keeps_conversations = keeps_conversations
        self.generated_tokens = self.prompt_tokens = 0
        self.finished_requests = 0

    @property
    def version(self) -> int:
        """The version that draws, or that was being loaded when a commit failed."""
        return self._scheduler.version

    @version.setter
    def version(self, version: int) -> None:
        self._scheduler.version = version

    @property
    def clock(self) -> BusyClock:
        """How long requests were in SGLang."""
        return self._scheduler.clock

    @property
    def turn_reads(self) -> TurnReads:
        """What was read for turns that continue a conversation, since the start."""
        return self._scheduler.turn_reads

    def use_lora(self, name: str, lora_id: str) -> None:
        """From now on ask for a LoRA adapter, by SGLang's name and id of it."""
        self._scheduler.format.lora = name, lora_id

    def waits(self) -> list[Wait]:
        """What the oldest requests wait for; may be called on any thread."""
        return self._scheduler.waits()

    async def generate(self, prompt_ids: list[int], sampling: Sampling, on_part: OnPart) -> Completion:
        """See :meth:`monarch_rl.generator.engine.Engine.generate`."""
        self._check_sampling(sampling)
        stream = PartStream(on_part)
        parts: list[Completion] = []
        sampled_ids: list[int] = []
        rest, beginnings = sampling, self._scheduler.beginnings
        async with self._places:
            while True:
                if self._scheduler.beginnings != beginnings:
                    raise GenerationError(ANOTHER_TRAINER)
                part = await self._scheduler.draw(prompt_ids + sampled_ids if sampled_ids else prompt_ids, rest, stream)
                parts.append(part)
                self.generated_tokens += len(part.token_ids)
                reason: str | None = part.finish_reason
                if reason == UNFINISHED:
                    sampled_ids += part.token_ids.tolist()
                    # The step that ended it may have drawn its last token.
                    reason = finish_reason_of(sampled_ids, sampling, self._stop_ids(sampling))
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

    # ---- for commits -------------------------------------------------------------------------------------------------

    def next_mask_tokens(self) -> int:
        """Tokens of the prefix cache to keep in the commit that comes now: what requests have used of late."""
        return self._scheduler.next_mask_tokens()

    @property
    def running(self) -> int:
        """Requests in SGLang."""
        return len(self._scheduler)

    def hold_new(self) -> None:
        """Send no request to SGLang until :meth:`serve`."""
        self._scheduler.serving = False

    def serve(self) -> None:
        """Send requests to SGLang again."""
        self._scheduler.serving = True
        self._scheduler.send()

    def reset_versions(self) -> None:
        """Versions to come are another trainer's: see :meth:`monarch_rl.generator.engine.Engine.reset_versions`."""
        self._scheduler.reset_versions()

    def interrupt_running(self) -> None:
        """Tell SGLang to end the running requests; each is resumed from what it drew once requests are sent again."""
        self._scheduler.interrupt()

    async def wait_until_idle(self) -> None:
        """Return when no request is in SGLang."""
        await self._scheduler.idle.wait()  # waits: the commit has a deadline for it

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def _check_sampling(self, sampling: Sampling) -> None:
        """Refuse what SGLang would end its scheduler for, or ignore."""
        if sampling.expert_routes_from is not None and self._route_format is None:
            raise GenerationError("expert routes are asked for, but the engine was not started to report them")
        if sampling.min_p and (sampling.seed is not None or self._seeds is not None):
            raise GenerationError("SGLang draws with min_p only without a seed")

    def _stop_ids(self, sampling: Sampling) -> set[int]:
        """The ids that end a request, as ``sampling_params`` asks SGLang for it."""
        if not sampling.stop_token_ids:
            return set()
        return set(sampling.stop_token_ids) | self._sglang.manager.model_config.hf_eos_token_id
