"""The memory of trainer ranks, on every rank of a torchrun job:  memory_ranks.py FOLDER [CASE...]

Writes ``<case>.rank<r>.json`` for each case of memory_cases.py: the peak bytes of tensors. They are added up from every
allocation and release that torch's profiler records. RSS would include code, and memory that the C library does not
return.

A thread of torch's own, which the profiler does not see, may release a tensor whose allocation it saw. The lifetime of
such a tensor is unknown, so it is not counted: a copy for a collective operation, which is short-lived.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from monarch_rl.algorithms.objectives import PPOClip
from monarch_rl.episode.episode import Episode, Turn
from monarch_rl.trainer.batch import MicroBatch, pack
from monarch_rl.trainer.objective import Sums, loss_function
from monarch_rl.trainer.policy import Policy
from monarch_rl.trainer.token_logprobs import TokenLogprobs
from monarch_rl.weights.manifest import make_manifest
from monarch_rl.weights.transport import TransferSettings, make_sender
from tests.trainer.memory_cases import CASES, Case, folder_of

EPISODES, PROMPT = 4, 8
"""Tokens of a micro-batch."""
STEPS = 2
"""Updates. Optimiser states are allocated with the first."""


def micro_batch(case: Case, seed: int, device: torch.device) -> MicroBatch:
    """Episodes, together as long as a micro-batch may be: without a common prefix, or with a prompt so long that they
    gather ``case.keys`` times as many keys."""
    rng = np.random.default_rng(seed)
    count, prompt, answer = EPISODES, PROMPT, case.tokens // EPISODES - PROMPT
    if case.keys > 1:
        # One more episode than keys per token: (keys + 1) (prompt + answer) = keys tokens.
        count, prompt = case.keys + 1, case.tokens * (case.keys - 1) // case.keys
        answer = (case.tokens - prompt) // count
    shared = rng.integers(0, case.config.vocab_size, prompt)
    sampled = np.arange(prompt + answer) >= prompt
    episodes = []
    for _ in range(count):
        begin = shared if case.keys > 1 else rng.integers(0, case.config.vocab_size, prompt)
        ids = np.concatenate([begin, rng.integers(0, case.config.vocab_size, answer)]).astype(np.int32)
        logprobs, versions = np.where(sampled, -5, 0).astype(np.float32), np.where(sampled, 0, -1).astype(np.int32)
        episodes.append(Episode([Turn(ids, logprobs, versions, sampled)], 1.0, "stop"))
    groups = [0] * count if case.keys > 1 else None
    return pack(episodes, torch.ones(count), torch.ones(count), 0, device, groups)


def work(folder: Path, case: Case) -> None:
    """The work of a rank: load, train, take a snapshot."""
    policy = Policy(folder, case.trainer, total_steps=STEPS)
    published = policy.published
    owned: list[list[tuple[str, int, int]]] = [[] for _ in range(policy.world_size)]
    dist.all_gather_object(owned, published.owned_spans())
    manifest = make_manifest([(name, shape, torch.float32) for name, shape in published.tensors()], owned)
    sender = make_sender(manifest, policy.rank, TransferSettings(), "127.0.0.1", policy.device)
    of_settings = loss_function(PPOClip(), case.trainer.loss)

    @functools.wraps(of_settings)
    def objective(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        loss, sums = of_settings(output, batch)
        values = [value for value in (*output, loss, *sums.values()) if value is not None]
        found = {value.dtype for value in values if value.is_floating_point()}
        assert found == {torch.float32}, f"computed in {case.trainer.compute_dtype}: {found}"
        return loss, sums

    for step in range(STEPS):
        batches = [micro_batch(case, 10 * step + i, policy.device) for i in range(2)]
        policy.update(batches, objective)
        if policy.critic is not None:
            for batch in batches:
                batch.columns |= {name: torch.ones_like(batch.advantages) for name in ("value", "returns")}
            policy.critic.update_batch([batches])
        published.snapshot(published.plan_snapshot(manifest, sender.views(step)))


def measure(folder: Path, case: Case) -> dict[str, int]:
    """Bytes at the peak."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work(folder, case)
        gc.collect()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    return peaks(changes(profiler.profiler.kineto_results.experimental_event_tree()))


def changes(tree: Iterable[Any]) -> list[tuple[int, int]]:
    """The address and the bytes of each allocation, and negative bytes of each release, in order of time."""
    found, left = list[tuple[int, int, int]](), list(tree)
    while left:
        event = left.pop()
        left += event.children
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return [(address, nbytes) for _, address, nbytes in sorted(found, key=lambda change: change[0])]


def peaks(changes: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Peak bytes: ``peak`` of the tensors whose release was recorded; ``bound`` also of the rest, as if they had lived
    until their address was reused."""
    seen, bound = np.zeros(len(changes), np.int64), np.zeros(len(changes), np.int64)
    live: dict[int, int] = {}
    """Places in ``changes``, by address."""
    for place, (address, nbytes) in enumerate(changes):
        before = live.pop(address, None)
        if before is not None:
            bound[place] -= changes[before][1]
        if nbytes > 0:
            bound[place] += nbytes
            live[address] = place
        elif before is not None:
            seen[before], seen[place] = -nbytes, nbytes
    return {"peak": int(seen.cumsum().max()), "bound": int(bound.cumsum().max())}


def main() -> None:
    root, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    for name in sys.argv[2:] or CASES:
        folder = folder_of(root, name)
        bytes_of_rank = measure(folder, CASES[name])
        Path(f"{folder}.rank{rank}.json").write_text(json.dumps(bytes_of_rank))


if __name__ == "__main__":
    main()
