"""Prompts that share a prefix are computed once, in SGLang's scheduler on a machine without an accelerator.

The episodes of a group arrive together and would be read in one batch, each with the whole prompt. If that computes
more than another batch costs, only the first of them is read. The others wait for the next batch and find the prompt in
the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from monarch_rl.generator.cpu_cache import count_parameters

WORTH_A_BATCH = 5e7
"""Tokens times parameters of the model whose computation costs as much as one more batch: a batch takes some 4 ms of
Python beside what it computes, and a core computes 2 operations for each of them at 20 to 50 GFLOP/s."""
SAME_START = 16
"""Tokens that prompts must have in common before they are compared in full."""


def get_new_batch_prefill(scheduler: Any, original: Callable[..., Any], running_batch: Any) -> Any:
    """Replaces ``Scheduler.get_new_batch_prefill``: the next batch of prompts, without those that should wait."""
    held = _held_back(scheduler)
    if not held:
        return original(scheduler, running_batch=running_batch)
    behind = set(map(id, held))
    scheduler.waiting_queue = [req for req in scheduler.waiting_queue if id(req) not in behind]
    try:
        plan = original(scheduler, running_batch=running_batch)
    finally:
        scheduler.waiting_queue = held + scheduler.waiting_queue
    scheduler._monarch_rl_follows = plan.batch_to_run is not None
    return plan


def arm_interval(scheduler: Any, original: Callable[..., Any], batch: Any) -> None:
    """Replaces ``Scheduler._arm_prefill_decode_interval``: those that were held back are in the very next batch."""
    original(scheduler, batch)
    if scheduler.__dict__.pop("_monarch_rl_follows", False):
        scheduler._prefill_decode_interval_remaining = 0


def _held_back(scheduler: Any) -> list[Any]:
    """The waiting requests that should wait for another one, in order."""
    waiting = [req for req in scheduler.waiting_queue if not req.output_ids]
    first = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    if len(first + waiting) < 2 or not scheduler.tree_cache.supports_prefix_sharing():
        return []
    alike: dict[Any, list[Any]] = {}
    for req in first + waiting:
        if len(req.origin_input_ids) > SAME_START:
            start = req.origin_input_ids[:SAME_START].tobytes()
            alike.setdefault((req.extra_key, req.cache_salt, start), []).append(req)
    known = scheduler.__dict__
    if "_monarch_rl_parameters" not in known:
        scheduler._monarch_rl_parameters = count_parameters(scheduler)
    worth = WORTH_A_BATCH / known["_monarch_rl_parameters"]
    held: set[int] = set()
    for first_of_them, *others in alike.values():
        shared = {id(req): _common(first_of_them.origin_input_ids, req.origin_input_ids) for req in others}
        if sum(shared.values()) < worth:
            continue
        cached = _cached(scheduler, first_of_them)
        saved = {req: tokens - cached for req, tokens in shared.items() if tokens > cached}
        if sum(saved.values()) >= worth:
            held |= saved.keys()
    return [req for req in waiting if id(req) in held]


def _common(first: Any, other: Any) -> int:
    """Tokens that two prompts have in common, but for the last one, which is always computed."""
    length = min(len(first), len(other)) - 1
    if first[:length] == other[:length]:
        return length
    return int(np.argmax(np.asarray(first[:length]) != np.asarray(other[:length])))


def _cached(scheduler: Any, req: Any) -> int:
    """Tokens of a prompt that are in the prefix cache."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.common import _req_radix_key

    key = _req_radix_key(scheduler.tree_cache, req, req.origin_input_ids, None)
    return int(scheduler.tree_cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len)
