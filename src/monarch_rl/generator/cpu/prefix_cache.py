"""Decides what to insert into SGLang's prefix cache, on a machine without an accelerator.

A request inserts ("publishes") its prompt when it has been read, and its sampled tokens when it ends, for some 0.2 ms
of Python each. The episodes of a group insert the same prompt repeatedly, and for a small model it is faster to compute
an answer again.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from monarch_rl.generator.patch import check_parameters

PROMPT_FROM = 4
"""Minimum number of new prompt tokens for a prompt to be published."""
SHORT_PROMPT = 64
"""Maximum prompt length at which only one of several equal prompts in a batch is published; the copies then stay in
memory until their requests end. Publishing a copy frees it, which is worth the cost only for longer prompts."""
ANSWER_FROM = 17
"""Minimum number of new tokens of prompt and answer for them to be published with any model, as a next turn may
follow."""
WORTH_AN_ENTRY = 1e7
"""Tokens times model parameters from which fewer new tokens are published, too, because computing them again takes as
long: 0.4 ms at 50 GFLOP/s. A model with 10 million parameters publishes everything."""


class Publishing:
    """Decides what a scheduler publishes. Set ``parameters``, the model's size, before the first request."""

    def __init__(self) -> None:
        self.parameters = 0
        self._published: set[Any] = set()
        """Prompts that the current batch has published."""

    def start_batch(self) -> None:
        """Start the results of a new batch."""
        self._published.clear()

    def wants_prompt(self, req: Any) -> bool:
        """Whether a request should publish the part of its prompt that has been read."""
        if req.extend_end - req.kv.cache_protected_len < PROMPT_FROM:
            return False
        if req.extend_end > SHORT_PROMPT:
            return True
        key = (req.extra_key, req.cache_salt, req.full_untruncated_fill_ids[: req.extend_end].tobytes())
        new = key not in self._published
        self._published.add(key)
        return new

    def wants_answer(self, req: Any) -> bool:
        """Whether an ended request should publish the part of its prompt and answer that is not in the cache."""
        new = req.owned_kv_len() - req.kv.cache_protected_len
        return bool(new >= ANSWER_FROM or new * self.parameters >= WORTH_AN_ENTRY)


def install() -> None:
    """Patch SGLang's scheduler. Raises RuntimeError if SGLang's version is not the expected one."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components import batch_result_processor as results

    publishing = Publishing()
    publish, release = results.checkpoint_kv_cache, results.release_kv_cache
    process = results.SchedulerBatchResultProcessor.process_batch_result_prefill
    run = Scheduler.run_event_loop
    check_parameters(publish, "req tree_cache")
    check_parameters(release, "req tree_cache checkpoint")
    check_parameters(process, "batch result")
    check_parameters(run, "")

    @wraps(publish)
    def publish_prompt(req: Any, tree_cache: Any) -> None:
        if publishing.wants_prompt(req):
            publish(req, tree_cache)
        else:
            req.prefix_len = req.extend_end  # the next extend resumes here, whether or not this was published

    @wraps(release)
    def release_sequence(req: Any, tree_cache: Any, *, checkpoint: bool) -> None:
        holds = req.kv.holds_kv
        release(req, tree_cache, checkpoint=checkpoint and (not holds or publishing.wants_answer(req)))

    @wraps(process)
    def process_prefill(self: Any, batch: Any, result: Any) -> None:
        publishing.start_batch()
        process(self, batch, result)

    @wraps(run)
    def run_event_loop(self: Any) -> None:
        publishing.parameters = count_parameters(self)
        run(self)

    results.checkpoint_kv_cache = publish_prompt
    results.release_kv_cache = release_sequence
    results.SchedulerBatchResultProcessor.process_batch_result_prefill = process_prefill
    Scheduler.run_event_loop = run_event_loop


def count_parameters(scheduler: Any) -> int:
    """Number of parameters of a scheduler's model on this rank; it is the same on all ranks."""
    return sum(weight.numel() for weight in scheduler.tp_worker.model_runner.model.parameters())
