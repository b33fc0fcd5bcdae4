"""Sends requests to SGLang's scheduler and reads its outputs.

SGLang's own path (``TokenizerManager.generate_request``) costs a message to the scheduler, several tasks and lists of
tuples per request. Here all requests of one iteration of the event loop, such as the episodes of a group, travel in one
message, so that the scheduler admits them together, and outputs are read directly into arrays.
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

from monarch_rl.episode.sampling import Completion, Sampling, SamplingMasks
from monarch_rl.errors import EngineStopped, GenerationError, SamplingMaskMissing
from monarch_rl.generator.parts import UNFINISHED, OnPart, PartStream, finish_reason_of, join_parts, settle
from monarch_rl.generator.settings import recipe_flags
from monarch_rl.generator.sglang_engine import SglangEngine, io_structs
from monarch_rl.model.folder import num_experts, sparse_layers
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.wait_registry import Wait


@dataclass(eq=False, slots=True)
class _Request:
    """A request in SGLang, or waiting to be sent to it."""

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


ANOTHER_TRAINER = "the trainer whose policy was asked is lost"
"""Error of requests that are in flight when another trainer connects."""
KEPT_COMMITS = 2
"""Number of commits for which a conversation's unused prefix stays in the cache, because a tool may take that long."""


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


class SchedulerRequests:
    """Sends requests to SGLang's scheduler and reads its outputs.

    Args:
        sglang: the engine.
        route_format: format of the model's expert routes; None if the engine does not report routes.
        seeds: source of seeds for requests without one; None leaves these requests unseeded.
    """

    def __init__(
        self, sglang: SglangEngine, route_format: ExpertRouteFormat | None, seeds: random.Random | None
    ) -> None:
        self._sglang = sglang
        self._route_format = route_format
        self._seeds = seeds
        self._unsent: list[_Request] = []
        """Requests for the next message."""
        self._running: dict[str, _Request] = {}
        """Requests in SGLang, by SGLang's request id."""
        self.idle = asyncio.Event()
        """Set while no request is in SGLang."""
        self.idle.set()
        self.serving = True
        """False while requests are held back for a commit."""
        self.version = 0
        """The served version, or the one that was being loaded when a commit failed."""
        self.resets = 0
        """Number of calls of :meth:`reset_versions`. After each, a version number may stand for other weights."""
        self.keeps_conversations = False
        """Whether a turn may start from keys and values that older weights computed for its conversation."""
        self.turn_reads = TurnReads()
        self._used_tokens: deque[int] = deque([0], maxlen=KEPT_COMMITS)
        """Tokens of the requests that ended between two commits; the last entry counts since the last commit."""
        self.clock = BusyClock()
        self.format = RequestFormat(sglang.manager)
        manager = sglang.manager
        manager._handle_batch_output = partial(self._on_output, manager._handle_batch_output)
        manager._result_dispatcher = partial(self._on_result, manager._result_dispatcher)
        self._end = asyncio.ensure_future(self._fail_at_end())

    def __len__(self) -> int:
        """Number of requests in SGLang."""
        return len(self._running)

    def interrupt(self) -> None:
        """Have SGLang end all running requests; their completions are ``UNFINISHED``."""
        for request in self._running.values():
            request.interrupted = True
        self._sglang.manager.abort_request(abort_all=True)

    def reset_versions(self) -> None:
        """Fail all requests and start over at version 0: later versions come from another trainer."""
        self.version, self.resets = 0, self.resets + 1
        for request in [*self._unsent, *self._running.values()]:
            self._drop(request)
            settle(request.answer, GenerationError(ANOTHER_TRAINER))

    def waits(self) -> list[Wait]:
        """What the oldest requests wait for; may be called on any thread."""
        name, found = self._sglang.replica, []
        for request in list(self._running.values())[: wait_registry.WAITS_PER_PROCESS]:
            what = f"new tokens after {len(request.prompt_ids)} prompt tokens"
            found.append(Wait(name, what, self._sglang.name, request.since, math.inf))
        for request in list(self._unsent)[:1]:
            found.append(Wait(name, "a commit to end", self._sglang.name, request.since, math.inf))
        return found

    async def generate(self, prompt_ids: list[int], sampling: Sampling, stream: PartStream) -> Completion:
        """Send a request to SGLang, with all others of this iteration of the event loop, and await its completion.

        The completion is ``UNFINISHED`` if a commit ended the request.
        """
        self._sglang.check()
        loop = asyncio.get_running_loop()
        request = _Request(prompt_ids, sampling, stream, loop.create_future())
        if not self._unsent and self.serving:
            loop.call_soon(self.send)
        self._unsent.append(request)
        try:
            # waits: for SGLang or its end; the caller of this replica keeps the deadline and knows how long it is
            return await request.answer
        except asyncio.CancelledError:
            self._drop(request)
            raise

    def send(self) -> None:
        """Send the waiting requests."""
        # The version in a request's cache salt must be that of the weights, so a commit holds requests back.
        if not self.serving:
            return
        unsent, self._unsent = self._unsent, []
        batch = []
        for request in unsent:
            request_id = uuid.uuid4().hex
            seed = request.sampling.seed
            if seed is None and self._seeds is not None:
                seed = self._seeds.getrandbits(63)
            try:
                salt = f"{self.resets}/{self._cache_version(request.sampling)}"
                batch.append(self.format.tokenized(request_id, request.prompt_ids, request.sampling, seed, salt))
            except Exception as error:  # concerns this request alone
                settle(request.answer, error)
                continue
            self._running[request_id] = request
            self.clock.enter()
        if not batch:
            return
        self.idle.clear()
        try:
            self.format.send(batch)
        except Exception as error:  # this is a callback of the event loop, which would only log the error
            for tokenized in batch:
                settle(self._leave(tokenized.rid).answer, error)

    def _cache_version(self, sampling: Sampling) -> int:
        """The version whose part of the prefix cache a request uses. Requests of different versions share no prefix."""
        began = sampling.conversation_version
        # A conversation that moved here from another replica may have begun under a version that this replica has yet
        # to load. Conversations that begin under that version must not find keys and values of older weights.
        return self.version if began is None or not self.keeps_conversations else min(began, self.version)

    def next_retained_tokens(self) -> int:
        """How many tokens of the prefix cache, the most recently used ones, the commit that starts now retains.

        They include every entry that was used within the last :data:`KEPT_COMMITS` commits. 0 if conversations do not
        continue from keys and values of older weights, or none has had a second turn yet.
        """
        retained = sum(self._used_tokens) if self.keeps_conversations and self.turn_reads.prompt_tokens else 0
        self._used_tokens.append(0)
        return retained

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


# -- converting SGLang's outputs to completions -----------------------------------------------------------------------

MASK_LOST = ("outside its captured sampling support", "Sampling support exceeds")
"""Parts of SGLang's messages when its sampler and the mask that it recorded disagree, or ties made the mask too large.
On a GPU either may happen to any token."""


@dataclass(slots=True)
class SideChannel:
    """Everything but the tokens that SGLang's scheduler reports about one request, message by message.

    It is taken out of the messages because SGLang would encode it as base64 and as lists of Python integers.
    """

    sampling_masks: list[SamplingMasks] = field(default_factory=list)
    """Sampling masks of the tokens in each message."""
    logprobs: list[np.ndarray] = field(default_factory=list)
    """float32: log-probs, within their sampling masks, of the tokens in each message."""
    expert_routes: np.ndarray | None = None
    """int32 [tokens read, all layers, k]; comes with the last message."""
    error: GenerationError | None = None
    """The first error in a message."""


class ExpertRouteFormat:
    """Compact form of a model's expert routes: only layers with experts, in the smallest dtype for an expert's index.

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
        """Convert expert routes from SGLang's form, int32 [tokens, all layers, k].

        Raises GenerationError if they do not cover ``rows`` tokens with k distinct experts of this model each: then
        they belong to another sequence, or were not recorded.
        """
        routes = expert_routes[:, self.layers]
        if len(routes) != rows:
            raise GenerationError(f"SGLang reported expert routes of {len(routes)} tokens, but {rows} were requested")
        if routes.size and not 0 <= routes.min() <= routes.max() < self.experts:
            raise GenerationError(
                f"SGLang reported expert indices from {routes.min()} to {routes.max()}, but the model has "
                f"{self.experts} experts"
            )
        ordered = np.sort(routes, -1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise GenerationError(
                "SGLang reported the same expert twice for one token and layer: it did not record all layers"
            )
        return routes.astype(self.dtype)


def take_side_channel(output: Any) -> list[SideChannel]:
    """Remove everything but the tokens from a message of SGLang's scheduler; returns it for each request.

    Errors are stored in :attr:`SideChannel.error`: if they were raised here, SGLang would end this process.
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
    """Convert SGLang's finish reason; ``UNFINISHED`` if the request is still running or was interrupted.

    Args:
        reason: SGLang's finish reason; None while the request is running.
        interrupted: whether a commit aborted the request on purpose.

    Raises SamplingMaskMissing if a token's sampling mask was not recorded, GenerationError if the request was aborted
    for another reason.
    """
    if reason is None or (reason["type"] == "abort" and interrupted):
        return UNFINISHED
    if reason["type"] in ("stop", "length"):
        return str(reason["type"])
    lost = any(words in str(reason.get("message")) for words in MASK_LOST)
    message = recipe_flags(f"the engine ended the request with {reason}")
    raise (SamplingMaskMissing if lost else GenerationError)(message)


def to_part(output: Any, index: int, side: SideChannel, reason: str = UNFINISHED) -> Completion:
    """The tokens that one request sampled since the last message of SGLang's scheduler; see ``report_versions``.

    Args:
        output: the message.
        index: the request's index in the message.
        side: the rest of what this message reports about the request.
        reason: the result of :func:`read_reason`.

    Raises GenerationError if a token has no log-prob, version or sampling mask.
    """
    tokens = np.array(output.output_ids[index], np.int32)
    # An aborted request may come with a log-prob and no token.
    logprobs = np.array(output.output_token_logprobs_val[index] if len(tokens) else (), np.float32)
    if len(logprobs) != len(tokens):
        raise GenerationError(f"SGLang reported log-probs of {len(logprobs)} tokens, but sampled {len(tokens)}")
    count = output.completion_tokens[index]
    first = count - len(tokens)
    versions = np.full(len(tokens), -1, np.int32)
    spans = output.weight_versions[index] if output.weight_versions is not None and len(tokens) else None
    for span in spans or ():
        versions[max(0, span.start - first) : max(0, span.end - first)] = int(span.version)
    if len(tokens) and versions.min() < 0:
        raise GenerationError(f"SGLang reported no version for some of {len(tokens)} tokens: {spans}")
    return _completion(tokens, logprobs, versions, reason, side)


def _completion(
    tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, reason: str, side: SideChannel | None
) -> Completion:
    # With sampling masks, log-probs are those within the masks: the tokens were sampled from that distribution.
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
    if matches.sum() != len(tokens):  # the ids of a mask are distinct, so each mask has one match at most
        raise GenerationError("SGLang reported a sampling mask that does not contain the sampled token")


# -- the busy time of an engine ---------------------------------------------------------------------------------------


class BusyClock:
    """Counts the seconds in which at least one request was in the engine and no commit was in progress."""

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
        """Busy seconds, each multiplied by the number of requests in the engine."""
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
        """Add the time since the last call. The number of requests was constant in it."""
        now = time.perf_counter()
        if not self._paused and self._requests:
            self._total += now - self._since
            self._request_seconds += self._requests * (now - self._since)
        self._since = now


# -- converting requests to the form of SGLang's scheduler ------------------------------------------------------------
# SGLang converts a request in some twenty steps, most of them for features that are not used here. Here SGLang
# converts only the first request with given sampling settings. Later ones copy it and set their own id, tokens, seed
# and length. The checks that depend on a request's length are still SGLang's.

MAX_KINDS = 64
"""Cached kinds of requests (distinct sampling settings); a run has two or three."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """The template for requests with the same sampling settings."""

    request: Any
    """SGLang's ``GenerateReqInput``, for SGLang's checks."""
    tokenized: Any
    """SGLang's ``TokenizedGenerateReqInput``, which is copied for each request."""


class RequestFormat:
    """Builds requests for the scheduler of one engine.

    Args:
        manager: SGLang's tokenizer manager.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._kinds: dict[tuple[Any, ...], _Kind] = {}
        self.lora: tuple[str, str] | None = None
        """SGLang's name and id of the LoRA adapter that requests use; None without LoRA."""

    def tokenized(
        self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling, seed: int | None, salt: str
    ) -> Any:
        """A request in the form that SGLang's scheduler takes.

        Args:
            request_id: unique among the requests in flight.
            prompt_ids: at least one id.
            sampling: sampling settings; their seed is ignored in favour of ``seed``.
            seed: seed of the sampling noise; None samples without a seed.
            salt: requests with different salts share no prefix in the cache.

        Raises GenerationError with SGLang's message if SGLang refuses the request.
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
        """Have SGLang convert the first request of a kind, as its ``generate_request`` does."""
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
        tokenized.time_stats = None  # belongs to this request alone; the scheduler creates its own
        return _Kind(request, tokenized)


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """SGLang's sampling parameters of a request, without the seed."""
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": list(sampling.stop_token_ids),
        # SGLang can only switch all stop tokens on or off. With them on, the model's own end tokens stop, too.
        "ignore_eos": not sampling.stop_token_ids,
    }
    if sampling.truncated:
        params |= {"top_k": sampling.top_k or -1, "top_p": sampling.top_p, "min_p": sampling.min_p}
    return params


# -- the requests of one engine, across commits -----------------------------------------------------------------------
# A request continues across commits, and each of its tokens carries the version that sampled it. Each version has its
# own part of the prefix cache, so a conversation that begins after a commit never starts from keys and values of older
# weights. One that began just before the commit may, like a sequence that was already running. Where running sequences
# keep their keys and values across commits (``continue``), so do conversations between their turns: later turns use the
# part of the version of the first turn. Otherwise their keys and values are computed again.


class EngineRequests:
    """Answers the requests of one engine, and holds new ones back during commits.

    Args:
        sglang: the engine.
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
        slots: int | None,
        keeps_conversations: bool,
        route_format: ExpertRouteFormat | None = None,
        seeds: random.Random | None = None,
    ) -> None:
        self._sglang = sglang
        self._slots = asyncio.Semaphore(sglang.running_requests if slots is None else slots)
        self._route_format = route_format
        self._seeds = seeds
        self._scheduler = SchedulerRequests(sglang, route_format, seeds)
        self._scheduler.keeps_conversations = keeps_conversations
        self.generated_tokens = self.prompt_tokens = 0
        self.finished_requests = 0

    @property
    def version(self) -> int:
        """The served version, or the one that was being loaded when a commit failed."""
        return self._scheduler.version

    @version.setter
    def version(self, version: int) -> None:
        self._scheduler.version = version

    @property
    def clock(self) -> BusyClock:
        """Busy time of the engine."""
        return self._scheduler.clock

    @property
    def turn_reads(self) -> TurnReads:
        """Prompt tokens of turns that continue a conversation, since the start."""
        return self._scheduler.turn_reads

    def use_lora(self, name: str, lora_id: str) -> None:
        """Use a LoRA adapter, given by SGLang's name and id, for all further requests."""
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
        rest, resets = sampling, self._scheduler.resets
        async with self._slots:
            while True:
                if self._scheduler.resets != resets:
                    raise GenerationError(ANOTHER_TRAINER)
                part = await self._scheduler.generate(
                    prompt_ids + sampled_ids if sampled_ids else prompt_ids, rest, stream
                )
                parts.append(part)
                self.generated_tokens += len(part.token_ids)
                reason: str | None = part.finish_reason
                if reason == UNFINISHED:
                    sampled_ids += part.token_ids.tolist()
                    # The step that ended the request may have sampled its last token.
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

    def next_retained_tokens(self) -> int:
        """See :meth:`SchedulerRequests.next_retained_tokens`."""
        return self._scheduler.next_retained_tokens()

    @property
    def running(self) -> int:
        """Number of requests in SGLang."""
        return len(self._scheduler)

    def hold_new(self) -> None:
        """Send no requests to SGLang until :meth:`serve`."""
        self._scheduler.serving = False

    def serve(self) -> None:
        """Send requests to SGLang again."""
        self._scheduler.serving = True
        self._scheduler.send()

    def reset_versions(self) -> None:
        """See :meth:`monarch_rl.generator.engine.Engine.reset_versions`."""
        self._scheduler.reset_versions()

    def interrupt_running(self) -> None:
        """Have SGLang end the running requests; each resumes from its sampled tokens after :meth:`serve`."""
        self._scheduler.interrupt()

    async def wait_until_idle(self) -> None:
        """Wait until no request is in SGLang."""
        await self._scheduler.idle.wait()  # waits: the commit has a deadline for it

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def _check_sampling(self, sampling: Sampling) -> None:
        """Refuse settings that SGLang would ignore, or for which it would end its scheduler."""
        if sampling.expert_routes_from is not None and self._route_format is None:
            raise GenerationError("expert routes are asked for, but the engine was not started to report them")
        if sampling.min_p and (sampling.seed is not None or self._seeds is not None):
            raise GenerationError("SGLang supports min_p only without a seed: leave out one of the two")

    def _stop_ids(self, sampling: Sampling) -> set[int]:
        """All ids that end a request with the parameters of :func:`sampling_params`."""
        if not sampling.stop_token_ids:
            return set()
        return set(sampling.stop_token_ids) | self._sglang.manager.model_config.hf_eos_token_id
