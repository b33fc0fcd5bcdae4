"""Decides which requests start together, in SGLang's scheduler on a machine without an accelerator.

Requests arrive one by one, some 0.3 to 1 ms apart. An idle scheduler would start the first of a group alone, so it
waits a moment for the others.

Prompts that share a prefix are computed once. SGLang would read the episodes of a group in one batch, each with the
whole prompt. If that costs more than another batch, only the first request is read; the others wait for the next batch
and find the prompt in the prefix cache. With the overlap scheduler they would not find it, because a batch is chosen
before the results of the previous one are processed and published. So with that scheduler no request waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from monarch_rl.generator.cpu.prefix_cache import PROMPT_FROM, count_parameters

WORTH_A_BATCH = 5e7
"""Tokens times model parameters whose computation costs as much as another batch. A batch takes some 4 ms of Python
besides its computation; that takes 2 operations per token and parameter, at 20 to 50 GFLOP/s per core."""
GATHER_S = 0.003
"""Seconds that an idle scheduler waits after a message. Starting a request alone would cost more of a core, and nothing
else in this process waits meanwhile."""
SAME_START = 16
"""Number of leading tokens that prompts must have in common before they are compared in full."""


def get_new_batch_prefill(scheduler: Any, original: Callable[..., Any], running_batch: Any) -> Any:
    """Replaces ``Scheduler.get_new_batch_prefill``: the next batch of prompts, without those that should wait."""
    held = _held_back(scheduler)
    if not held:
        return original(scheduler, running_batch=running_batch)
    held_ids, queue = set(map(id, held)), list(scheduler.waiting_queue)
    scheduler.waiting_queue = [req for req in queue if id(req) not in held_ids]
    try:
        plan = original(scheduler, running_batch=running_batch)
    finally:  # restore the original order, so that no request is overtaken repeatedly
        left, queued_ids = {id(req) for req in scheduler.waiting_queue}, set(map(id, queue))
        added = [req for req in scheduler.waiting_queue if id(req) not in queued_ids]
        scheduler.waiting_queue = [req for req in queue if id(req) in left | held_ids] + added
    scheduler._monarch_rl_follows = plan.batch_to_run is not None
    return plan


def arm_interval(scheduler: Any, original: Callable[..., Any], batch: Any) -> None:
    """Replaces ``Scheduler._arm_prefill_decode_interval``: requests that were held back start in the very next
    batch."""
    original(scheduler, batch)
    if scheduler.__dict__.pop("_monarch_rl_follows", False):
        scheduler._prefill_decode_interval_remaining = 0


def gather_after_idle(scheduler: Any, original: Callable[..., Any]) -> None:
    """Replaces ``Scheduler.maybe_sleep_on_idle``: wait briefly for further requests after the message that ends the
    sleep."""
    original(scheduler)
    sleeper = scheduler.idle_sleeper
    if sleeper is not None and not scheduler._engine_paused and sleeper.poller.poll(0):
        time.sleep(GATHER_S)


def _held_back(scheduler: Any) -> list[Any]:
    """The queued requests that should wait for another one to publish their common prefix, in order."""
    if scheduler.enable_overlap:
        return []
    waiting = [req for req in scheduler.waiting_queue if not req.output_ids]
    first = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    if len(first + waiting) < 2 or not scheduler.tree_cache.supports_prefix_sharing():
        return []
    groups: dict[Any, list[Any]] = {}
    for req in first + waiting:
        if len(req.origin_input_ids) > SAME_START:
            start = req.origin_input_ids[:SAME_START].tobytes()
            groups.setdefault((req.extra_key, req.cache_salt, start), []).append(req)
    attributes = scheduler.__dict__
    if "_monarch_rl_parameters" not in attributes:
        scheduler._monarch_rl_parameters = count_parameters(scheduler)
    worth = WORTH_A_BATCH / attributes["_monarch_rl_parameters"]
    held: set[int] = set()
    for of_start in groups.values():
        if sum(len(req.origin_input_ids) for req in of_start) < worth:
            continue
        # Prompts of several groups may begin with the same chat template, so each distinct prompt has its own reader.
        cached: dict[bytes, int] = {}
        saved: dict[int, int] = {}
        readers: list[Any] = []
        for req in of_start:
            prompt = req.origin_input_ids.tobytes()
            if prompt not in cached:
                cached[prompt] = _cached(scheduler, req)
            shared = max((_common(reader.origin_input_ids, req.origin_input_ids) for reader in readers), default=0)
            if shared - cached[prompt] >= PROMPT_FROM:
                saved[id(req)] = shared - cached[prompt]
            elif len(req.origin_input_ids) - cached[prompt] >= PROMPT_FROM:  # otherwise it would not be published
                readers.append(req)
        if sum(saved.values()) >= worth:
            held |= saved.keys()
    return [req for req in waiting if id(req) in held]


def _common(first: Any, other: Any) -> int:
    """Length of the common prefix of two prompts, without the last token, which is always computed."""
    length = min(len(first), len(other)) - 1
    if first[:length] == other[:length]:
        return length
    return int(np.argmax(np.asarray(first[:length]) != np.asarray(other[:length])))


def _cached(scheduler: Any, req: Any) -> int:
    """Number of a prompt's tokens that are in the prefix cache."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.common import _req_radix_key

    key = _req_radix_key(scheduler.tree_cache, req, req.origin_input_ids, None)
    return int(scheduler.tree_cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len)
