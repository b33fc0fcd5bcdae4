"""What is worth an entry in SGLang's prefix cache, on a machine without an accelerator.

A request publishes its prompt when it is read, and what it drew when it ends: some 0.2 ms of Python each. The episodes
of a group publish the same prompt again and again, and the answers of a small model are sooner computed again.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from monarch_rl.generator.patch import check_parameters

PROMPT_FROM = 4
"""New tokens of a prompt from which it is published."""
SHORT_PROMPT = 64
"""Tokens up to which copies of a prompt that were computed in one batch are kept until their requests end. Publishing
frees them, which is worth its price for long ones."""
ANSWER_FROM = 17
"""New tokens of prompt and answer from which they are published whatever the model: a next turn may follow."""
WORTH_AN_ENTRY = 1e7
"""Tokens times parameters of the model from which fewer are published too, because their computation takes as long:
0.4 ms at 50 GFLOP/s. A model of 10 million parameters keeps all."""


class Publishing:
    """Decides what a scheduler publishes. ``parameters`` of the model are set before its first request."""

    def __init__(self) -> None:
        self.parameters = 0
        self._published: set[Any] = set()
        """Prompts that the batch whose results are handled has published."""

    def start_batch(self) -> None:
        """Forget the prompts of the batch before."""
        self._published.clear()

    def wants_prompt(self, req: Any) -> bool:
        """Whether a request should publish what has been read of its prompt."""
        if req.extend_end - req.kv.cache_protected_len < PROMPT_FROM:
            return False
        if req.extend_end > SHORT_PROMPT:
            return True
        key = (req.extra_key, req.cache_salt, req.full_untruncated_fill_ids[: req.extend_end].tobytes())
        new = key not in self._published
        self._published.add(key)
        return new

    def wants_answer(self, req: Any) -> bool:
        """Whether a request that has ended should publish what is not in the cache of its prompt and answer."""
        new = req.owned_kv_len() - req.kv.cache_protected_len
        return bool(new >= ANSWER_FROM or new * self.parameters >= WORTH_AN_ENTRY)


def install() -> None:
    """Change what SGLang's scheduler publishes. Raises RuntimeError if SGLang is not the one this was written for."""
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
            req.prefix_len = req.extend_end  # where the next extend resumes, published or not

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
    """Of this rank's part of a scheduler's model; all ranks have as many."""
    return sum(weight.numel() for weight in scheduler.tp_worker.model_runner.model.parameters())
