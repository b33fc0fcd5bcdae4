"""The requests of one engine: tokens in, tokens out with log-probs and versions, across commits.

A request keeps going across a commit, and each of its tokens carries the version that drew it. The prefix cache is
separate for each version: a conversation that begins after a commit never starts from keys and values of older
weights. One that began in the last moment before the commit may, like a sequence that was running already. Where
running sequences keep their keys and values across commits, conversations do between their turns: later turns belong to
the version of the first one. Elsewhere they are read anew.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from monarch_rl.episode.sampling import Completion, GenerationError, Sampling
from monarch_rl.generator.answers import ExpertRouteFormat
from monarch_rl.generator.clock import BusyClock
from monarch_rl.generator.parts import UNFINISHED, OnPart, PartStream, finish_reason_of, join_parts
from monarch_rl.generator.scheduler_requests import ANOTHER_TRAINER, SchedulerRequests, TurnReads
from monarch_rl.generator.sglang_engine import SglangEngine
from monarch_rl.runtime.wait_registry import Wait


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
        drawn_ids: list[int] = []
        rest, beginnings = sampling, self._scheduler.beginnings
        async with self._places:
            while True:
                if self._scheduler.beginnings != beginnings:
                    raise GenerationError(ANOTHER_TRAINER)
                part = await self._scheduler.draw(prompt_ids + drawn_ids if drawn_ids else prompt_ids, rest, stream)
                parts.append(part)
                self.generated_tokens += len(part.token_ids)
                reason: str | None = part.finish_reason
                if reason == UNFINISHED:
                    drawn_ids += part.token_ids.tolist()
                    # The step that ended it may have drawn its last token.
                    reason = finish_reason_of(drawn_ids, sampling, self._stop_ids(sampling))
                if reason is not None:
                    self.finished_requests += 1
                    self.prompt_tokens += len(prompt_ids)
                    return join_parts(parts, reason)
                routes_from = rest.expert_routes_from
                if routes_from is not None and part.expert_routes is not None:
                    routes_from += len(part.expert_routes)
                remaining = sampling.max_new_tokens - len(drawn_ids)
                rest = replace(sampling, max_new_tokens=remaining, expert_routes_from=routes_from)
                stream.send_rest(parts)

    # ---- for commits -------------------------------------------------------------------------------------------------

    def next_kept_tokens(self) -> int:
        """Tokens of the prefix cache to keep in the commit that comes now: what requests have used of late."""
        return self._scheduler.next_kept_tokens()

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

    def begin_anew(self) -> None:
        """Versions to come are another trainer's: see :meth:`monarch_rl.generator.engine.Engine.begin_anew`."""
        self._scheduler.begin_anew()

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
