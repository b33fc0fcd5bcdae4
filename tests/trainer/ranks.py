"""The trainer's side, on every rank of a torchrun job:  ranks.py FOLDER

Writes, for each model of reference.py, logits and the saved folder; then trains, and checks snapshots.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from monarch_rl.algorithms.advantages import ADVANTAGES
from monarch_rl.algorithms.aggregation import Aggregation
from monarch_rl.episode.episode import BatchShard
from monarch_rl.runtime import device_work
from monarch_rl.runtime.device_work import Piece
from monarch_rl.trainer.attention_layout import separate_layout
from monarch_rl.trainer.batch import MicroBatch, advantages_of, pack_shard
from monarch_rl.trainer.objective import reinforcement
from monarch_rl.trainer.policy import Policy
from monarch_rl.trainer.settings import LossSettings, TrainerSettings
from monarch_rl.weights.checksum import ShardChecksums, tensor_checksum
from monarch_rl.weights.manifest import make_manifest
from tests.episode.trees import distinct_inputs
from tests.trainer.batches import LR, MAX_NEW_TOKENS, STEPS, WEIGHT_DECAY, batch, shard
from tests.trainer.programs import saved
from tests.trainer.reference import CONFIGS

CLIPPED: tuple[Aggregation, ...] = ("sequence_mean", "token_mean")


def round_trip(folder: Path, name: str, settings: TrainerSettings, written: str) -> Policy:
    """Write the logits of a model to ``<written>.rank0`` and so on, and save it to ``<written>.saved``."""
    policy = Policy(folder / name, settings, total_steps=1)
    tokens = load_file(folder / f"{name}.logits")["tokens"]
    positions = torch.arange(tokens.shape[1]).repeat(tokens.shape[0])[None]
    masks = separate_layout([tokens.shape[1]] * tokens.shape[0], policy.device)
    with torch.no_grad():
        logits = policy.module(tokens.flatten()[None], positions=positions, attention_masks=masks)[0]
    save_file({"logits": logits.contiguous()}, folder / f"{written}.rank{policy.rank}")
    policy.save(folder / f"{written}.saved")
    return policy


def packed(part: BatchShard, policy: Policy) -> list[MicroBatch]:
    """The micro-batches of a shard, by the policy's loss settings."""
    loss = policy.settings.loss
    return pack_shard(
        part, advantages_of(part.rewards, ADVANTAGES[loss.advantage]), loss.aggregation, MAX_NEW_TOKENS, policy.device
    )


def train(folder: Path, name: str, settings: TrainerSettings, kind: str = "qwen3") -> Policy:
    """Train on the made-up batches; in micro-batches of at most 50 tokens, so that there are several."""
    policy = Policy(folder / kind, settings, total_steps=STEPS)
    for step in range(STEPS):
        part = shard(batch(step), step, policy.rank, policy.world_size, token_budget=50)
        assert len(part.microbatches) > 1
        batches, changes = packed(part, policy), list[Piece | None]()
        device_work.use_device("cuda", changes.append)
        metrics = policy.update(batches, reinforcement(settings.loss))
        device_work.use_device("cpu")
        # What a GPU that hangs would be found by: each micro-batch, then what waits for them all.
        sizes = [each.token_ids.numel() for each in batches]
        pieces = [f"a micro-batch of {size} tokens" for size in sizes] + [f"an optimizer step of {sum(sizes)} tokens"]
        assert [None if change is None else change.what for change in changes] == [x for p in pieces for x in (p, None)]
        assert metrics["tokens"] == part.trainable_tokens
        assert 0 <= metrics["imbalance"] < 0.5
        computed = sum(distinct_inputs(group.episodes) for group in batch(step))
        inputs = sum(episode.num_tokens - 1 for group in batch(step) for episode in group.episodes)
        assert computed / inputs <= metrics["computed_share"] < 1
    policy.save(folder / name)
    return policy


def check_snapshot(policy: Policy, folder: Path) -> None:
    """A snapshot in bfloat16 is the saved weights cast, cut by rows; checksums are those of the whole tensors."""
    tensors, runs = policy.published.tensors(), policy.published.owned_runs()
    owned: list[list[tuple[str, int, int]]] = [[] for _ in range(policy.world_size)]
    dist.all_gather_object(owned, runs)
    manifest = make_manifest([(name, shape, torch.bfloat16) for name, shape in tensors], owned)
    mine = manifest.shards[policy.rank]
    views = [torch.empty(run.numel * 2, dtype=torch.uint8) for run in mine]
    policy.published.snapshot(policy.published.plan_snapshot(manifest, views))
    sums = torch.from_numpy(ShardChecksums(manifest, policy.rank, views).take())
    dist.all_reduce(sums)
    whole = saved(folder)
    for run, view in zip(mine, views, strict=True):
        spec = manifest.tensors[run.tensor]
        expected = whole[spec.name].to(torch.bfloat16).flatten()[run.start : run.start + run.numel]
        assert torch.equal(view.view(torch.bfloat16), expected), spec.name
    for spec, checksum in zip(manifest.tensors, sums.tolist(), strict=True):
        assert checksum == tensor_checksum(whole[spec.name].to(torch.bfloat16)).item(), spec.name


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for name in CONFIGS:
        round_trip(folder, name, TrainerSettings(), name)
    train(folder, "still", TrainerSettings(lr=0.0, weight_decay=WEIGHT_DECAY))
    settings = TrainerSettings(lr=LR, weight_decay=WEIGHT_DECAY)
    for name, kind in (("trained", "qwen3"), ("biased", "qwen2")):
        check_snapshot(train(folder, name, settings, kind), folder / name)
    for aggregation in CLIPPED:
        loss = LossSettings(advantage="grpo", ratio_to="behaviour", aggregation=aggregation)
        train(folder, f"clipped_{aggregation}", TrainerSettings(lr=LR, weight_decay=WEIGHT_DECAY, loss=loss))
    train(folder, "recomputed", TrainerSettings(lr=LR, weight_decay=WEIGHT_DECAY, activation_checkpoint="full")).close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
