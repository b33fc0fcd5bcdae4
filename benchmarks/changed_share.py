"""The share of bfloat16 weights whose bits change in an optimiser step: how much it would save to send only changes.

    python benchmarks/changed_share.py --model .cache/smollm2-135m-instruct
    torchrun --nproc-per-node=2 benchmarks/changed_share.py

The real trainer makes policy-gradient steps at each learning rate: AdamW on fp32 master weights, starting from the
model. After each step the master weights are cast to bfloat16 and encoded against those of the previous step. The
episodes are excerpts of the documentation, and their rewards are random. The size of AdamW's steps depends
little on the size of gradients, but on how steady they are: noise makes steps smaller, so a run that learns may change
more.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from monarch_rl.trainer.loss_settings import LossSettings

from monarch_rl.trainer.policy import Policy  # isort: skip  # it prepares the platform before torch is imported

import torch
import torch.distributed as dist

from monarch_rl.algorithms.advantages import ADVANTAGES
from monarch_rl.algorithms.objectives import PPOClip
from monarch_rl.buffer.groups import Batch
from monarch_rl.buffer.shards import ShardPlan, cut
from monarch_rl.episode.episode import Episode, Group, Turn
from monarch_rl.episode.serialization import SerializedGroup, serialize_group
from monarch_rl.model.folder import resolve_model
from monarch_rl.runtime.network import free_port
from monarch_rl.trainer.advantages import advantages_of, group_views
from monarch_rl.trainer.batch import MicroBatch, pack_shard
from monarch_rl.trainer.objective import loss_function
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.trainer.shards import local_span
from monarch_rl.weights.delta import encode, stats, wire_bound

BUCKET_BYTES = 4 << 20


@dataclass(frozen=True)
class Settings:
    """Share of changed weights (see the top of this file)."""

    model: str = ".cache/tiny-qwen3"
    """Hugging Face folder or Hub name."""
    lrs: tuple[float, ...] = (1e-6, 1e-5, 3e-4)
    """Learning rates; the model is loaded again for each."""
    steps: int = 10
    """Optimiser steps at each rate. AdamW's first steps are its largest."""
    groups: int = 2
    """Groups of a batch."""
    group_size: int = 4
    """Episodes of a group."""
    tokens: int = 64
    """Tokens of an episode; the first quarter is its prompt."""
    text: tuple[Path, ...] = (Path("README.md"), Path("docs"))
    """Files, or folders of Markdown, from which episodes are taken."""

    def __post_init__(self) -> None:
        if min(self.steps, self.groups, self.group_size) < 1 or self.tokens < 4:
            raise ValueError("steps, groups and group-size must be at least 1, tokens at least 4")


def read_tokens(s: Settings, model: Path) -> np.ndarray[Any, Any]:
    """Return the token IDs of the text, int32, one file after the other."""
    from transformers import AutoTokenizer

    files = [file for path in s.text for file in (sorted(path.rglob("*.md")) if path.is_dir() else [path])]
    tokens = AutoTokenizer.from_pretrained(model).encode("\n".join(file.read_text() for file in files))
    if len(tokens) <= s.tokens:
        raise ValueError(f"{', '.join(map(str, s.text))}: {len(tokens)} tokens are too few for one episode")
    return np.asarray(tokens, dtype=np.int32)


def make_batch(s: Settings, text: np.ndarray[Any, Any], step: int, policy: Policy) -> list[MicroBatch]:
    """Return this rank's part of a batch; the episodes of a group are different continuations of one prompt."""
    random = np.random.default_rng(step)
    prompt = s.tokens // 4
    trainable = np.arange(s.tokens) >= prompt

    def excerpt(length: int) -> np.ndarray[Any, Any]:
        start = random.integers(0, len(text) - length)
        return text[start : start + length]

    def group(index: int) -> Group:
        shared = excerpt(prompt)
        turns = [
            Turn(
                token_ids=np.concatenate([shared, excerpt(s.tokens - prompt)]),
                logprobs=np.zeros(s.tokens, dtype=np.float32),
                policy_versions=np.where(trainable, step, -1).astype(np.int32),
                trainable=trainable,
            )
            for _ in range(s.group_size)
        ]
        return Group(index, index, [Episode([turn], float(random.random()), "stop") for turn in turns])

    groups = [group(index) for index in range(s.groups)]
    packed = [SerializedGroup.read(serialize_group(whole)) for whole in groups]
    whole = Batch(step, packed, None, np.asarray([sum(one.trainable for one in packed)]))
    shard = cut(whole, ShardPlan(policy.world_size, policy.settings.tokens_per_microbatch))[policy.rank]
    loss = policy.settings.loss
    advantages = advantages_of(group_views(shard), ADVANTAGES[loss.advantage]())
    (microbatches,) = pack_shard(shard, advantages, loss.aggregation, s.tokens, policy.device)
    return microbatches


def served(policy: Policy) -> torch.Tensor:
    """Return this rank's weights in bfloat16, as uint8."""
    runs = [local_span(value)[0].detach().flatten() for value in policy.model.hf_state().values()]
    return torch.cat([run.to(torch.bfloat16) for run in runs]).view(torch.uint8)


def measure(s: Settings, model: Path, text: np.ndarray[Any, Any], lr: float) -> dict[str, Any]:
    # Behaviour log-probs are unknown: without importance weights they do not matter.
    ranks = int(os.environ["WORLD_SIZE"])
    settings = TrainerSettings(ranks=ranks, lr=lr, loss=LossSettings(corrections=()))
    policy = Policy(model, settings, total_steps=s.steps)
    previous = served(policy)
    wire = torch.empty(wire_bound(previous.numel(), BUCKET_BYTES), dtype=torch.uint8, device=policy.device)
    shares, compressions = [], []
    for step in range(s.steps):
        started = time.perf_counter()
        metrics = policy.update(make_batch(s, text, step, policy), loss_function(PPOClip(), settings.loss))
        current = served(policy)
        found = stats(wire[: encode(previous, current, 2, BUCKET_BYTES, wire)])
        sums = torch.tensor([found.changed, found.elements, found.wire_bytes, found.dense_bytes], dtype=torch.float64)
        dist.all_reduce(sums)
        changed, elements, wire_bytes, dense_bytes = sums.tolist()
        shares.append(changed / elements)
        compressions.append(wire_bytes / dense_bytes)
        previous = current
        if policy.rank == 0:
            print(
                f"lr {lr:g} step {step}: {shares[-1]:.3%} of {elements:.0f} changed, wire {compressions[-1]:.4f}, "
                f"gradient norm {metrics['grad_norm']:.3g}, {time.perf_counter() - started:.1f} s",
                flush=True,
            )
    last = s.steps // 2
    return {
        "changed_share_first": round(shares[0], 6),
        "changed_share": round(statistics.median(shares[last:]), 6),
        "wire_over_dense": round(statistics.median(compressions[last:]), 6),
    }


def main(s: Settings) -> None:
    if "RANK" not in os.environ:  # not under torchrun: a process group of one rank
        place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        os.environ.update({name: str(value) for name, value in place.items()})
    model = resolve_model(s.model).folder
    text = read_tokens(s, model)
    by_lr = {f"{lr:g}": measure(s, model, text, lr) for lr in s.lrs}
    if dist.get_rank() == 0:
        batch = {"episodes": s.groups * s.group_size, "tokens": s.tokens, "steps": s.steps}
        print(json.dumps({"benchmark": "changed_share", "model": s.model, **batch, "by_lr": by_lr}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
