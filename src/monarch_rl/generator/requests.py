"""The requests of one engine: tokens in, tokens out with log-probs and versions, across commits.

A request keeps going across a commit, and each of its tokens carries the version that drew it. The prefix cache is
separate for each version: a request that comes after a commit never starts from keys and values of older weights. One
that came in the last moment before the commit may, like a sequence that was running already.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from monarch_rl.episode.sampling import Completion, GenerationError, Sampling
from monarch_rl.generator.answers import ExpertRouteFormat, SideChannel, take_side_channel, to_completion, to_part
from monarch_rl.generator.clock import BusyClock
from monarch_rl.generator.parts import UNFINISHED, OnPart, PartStream, finish_reason_of, join_parts
from monarch_rl.generator.sglang_engine import SglangEngine, io_structs
from monarch_rl.runtime import presence


@dataclass(eq=False, slots=True)
class _RunningRequest:
    """A request in SGLang."""

    stream: PartStream
    side: SideChannel = field(default_factory=SideChannel)
    interrupted: bool = False
    """A commit has ended it, and it is to be resumed."""


class EngineRequests:
    """Sends requests to SGLang, passes on what they draw, and holds new ones back while a commit goes on.

    Args:
        sglang: the engine.
        places: requests in SGLang at once; others wait here and not in SGLang, where one that waits across a commit
            would start from the prefix cache of the version at which it came.
        lora_name: SGLang's name of the LoRA adapter that requests ask for, if they do.
        route_format: of the model's expert routes, if the engine reports them.
        seeds: for requests without one; None leaves them without.
    """

    def __init__(
        self,
        sglang: SglangEngine,
        places: int,
        lora_name: str | None = None,
        route_format: ExpertRouteFormat | None = None,
        seeds: random.Random | None = None,
    ) -> None:
        self._sglang = sglang
        self._places = asyncio.Semaphore(places)
        self._lora_name = lora_name
        self._route_format = route_format
        self._seeds = seeds
        self._serving = asyncio.Event()
        self._serving.set()
        self._running: dict[str, _RunningRequest] = {}
        """By SGLang's id."""
        self._idle = asyncio.Event()
        """Set while none is running."""
        self._idle.set()
        self.version = 0
        """The version that draws, or that was being loaded when a commit failed."""
        self.clock = BusyClock()
        self.generated_tokens = 0
        self.finished_requests = 0
        manager = sglang.manager
        manager._handle_batch_output = partial(self._on_message, manager._handle_batch_output)

    async def generate(self, prompt_ids: list[int], sampling: Sampling, on_part: OnPart) -> Completion:
        """See :meth:`monarch_rl.generator.engine.Engine.generate`."""
        self._check_sampling(sampling)
        stop_ids, stream = self._stop_ids(sampling), PartStream(on_part)
        parts: list[Completion] = []
        drawn_ids: list[int] = []
        routes_from = sampling.expert_routes_from
        async with self._places:
            while True:
                # Held here and not by SGLang: the prefix cache's version must be that of the weights it is used with.
                while not self._serving.is_set():
                    await self._sglang.or_stopped(self._serving.wait(), "a commit to end")
                self._sglang.check()
                remaining = sampling.max_new_tokens - len(drawn_ids)
                rest = replace(sampling, max_new_tokens=remaining, expert_routes_from=routes_from)
                part = await self._draw(prompt_ids + drawn_ids, rest, stream)
                parts.append(part)
                drawn_ids += part.token_ids.tolist()
                if routes_from is not None and part.expert_routes is not None:
                    routes_from += len(part.expert_routes)
                reason: str | None = part.finish_reason
                if reason == UNFINISHED:
                    # The step that ended it may have drawn its last token.
                    reason = finish_reason_of(drawn_ids, sampling, stop_ids)
                if reason is not None:
                    self.finished_requests += 1
                    return join_parts(parts, reason)
                stream.send_rest(parts)

    # ---- for commits -------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests in SGLang."""
        return len(self._running)

    def hold_new(self) -> None:
        """Send no request to SGLang until :meth:`serve`."""
        self._serving.clear()

    def serve(self) -> None:
        """Send requests to SGLang again."""
        self._serving.set()

    async def interrupt_running(self) -> None:
        """Tell SGLang to end the running requests; each is resumed from what it drew once requests are sent again."""
        await asyncio.sleep(0)  # a request that was let in just now is sent in its first turn
        for request in self._running.values():
            request.interrupted = True
        self._sglang.manager.abort_request(abort_all=True)

    async def wait_until_idle(self) -> None:
        """Return when no request is in SGLang."""
        await self._idle.wait()  # waits: the commit has a deadline for it

    # ---- one request to SGLang ---------------------------------------------------------------------------------------

    async def _draw(self, prompt_ids: list[int], sampling: Sampling, stream: PartStream) -> Completion:
        request_id, routes_from = uuid.uuid4().hex, sampling.expert_routes_from
        request = io_structs().GenerateReqInput(
            input_ids=prompt_ids,
            sampling_params=self.sampling_params(sampling),
            return_logprob=True,
            return_sampling_mask=sampling.truncated,
            return_routed_experts=routes_from is not None,
            routed_experts_start_len=routes_from or 0,
            cache_salt=str(self.version),
            lora_path=self._lora_name,
            rid=request_id,
        )
        running = self._running[request_id] = _RunningRequest(stream)
        self._idle.clear()
        self.clock.enter()
        try:
            generating = self._sglang.manager.generate_request(request, None)
            answer = await self._sglang.or_stopped(anext(generating), f"tokens after {len(prompt_ids)} others")
        except ValueError as error:
            raise GenerationError(str(error)) from error
        finally:
            self.clock.leave()
            del self._running[request_id]
            if not self._running:
                self._idle.set()
        completion = self._read(answer, running, len(prompt_ids), sampling)
        self.generated_tokens += len(completion.token_ids)
        presence.progress("tokens drawn")
        return completion

    def _read(
        self, answer: dict[str, Any], request: _RunningRequest, prompt_tokens: int, sampling: Sampling
    ) -> Completion:
        side, routes_from = request.side, sampling.expert_routes_from
        if side.error is not None:
            raise side.error
        completion = to_completion(answer, request.interrupted, side)
        if sampling.truncated and len(completion.token_ids) and completion.kept_sets is None:
            raise GenerationError("SGLang reported no kept sets, though it was asked for them")
        if self._route_format is not None and routes_from is not None and side.expert_routes is not None:
            rows = prompt_tokens + len(completion.token_ids) - 1 - routes_from
            completion = replace(completion, expert_routes=self._route_format.read(side.expert_routes, rows))
        return completion

    async def _on_message(self, handle: Callable[[Any], Awaitable[None]], output: Any) -> None:
        """Do what SGLang does with a message of its scheduler, then pass on the parts that are in it.

        SGLang's own streaming would send and handle the first token of every request by itself.
        """
        sides = take_side_channel(output)
        for request_id, side in zip(output.rids, sides, strict=True):
            if (request := self._running.get(request_id)) is not None:
                request.side.add(side)
        await handle(output)  # waits: for nothing but the event loop
        for index, request_id in enumerate(output.rids):
            request = self._running.get(request_id)
            if output.finished_reasons[index] is not None or request is None or request.side.error is not None:
                continue
            try:
                part = to_part(output, index, sides[index])
            except GenerationError as error:
                request.side.error = error  # for _read to raise: SGLang would end this process for it
                continue
            if len(part.token_ids):
                request.stream.send(part)
                presence.progress("tokens drawn")

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def _check_sampling(self, sampling: Sampling) -> None:
        """Refuse what SGLang would end its scheduler for, or ignore."""
        if sampling.expert_routes_from is not None and self._route_format is None:
            raise GenerationError("expert routes are asked for, but the engine was not started to report them")
        if sampling.min_p and (sampling.seed is not None or self._seeds is not None):
            raise GenerationError("SGLang draws with min_p only without a seed")

    def _stop_ids(self, sampling: Sampling) -> set[int]:
        """The ids that end a request, as :meth:`sampling_params` asks SGLang for it."""
        if not sampling.stop_token_ids:
            return set()
        return set(sampling.stop_token_ids) | self._sglang.manager.model_config.hf_eos_token_id

    def sampling_params(self, sampling: Sampling) -> dict[str, Any]:
        """SGLang's sampling parameters of a request."""
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": list(sampling.stop_token_ids),
            # SGLang switches all stop tokens on or off at once. With them on, the model's own end token stops too.
            "ignore_eos": not sampling.stop_token_ids,
        }
        if sampling.truncated:
            params |= {"top_k": sampling.top_k or -1, "top_p": sampling.top_p, "min_p": sampling.min_p}
        seed = sampling.seed
        if seed is None and self._seeds is not None:
            seed = self._seeds.getrandbits(63)
        if seed is not None:
            params["sampling_seed"] = seed
        return params
