"""Trains with and without compiled blocks, on every rank of a torchrun job:

    compile_ranks.py FOLDER RUN...

Writes the metrics of each step, the trained models, and how many graphs were compiled.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from monarch_rl.algorithms.objectives import PPOClip
from monarch_rl.model.lora import LoraSettings
from monarch_rl.trainer.loss_settings import LossSettings
from monarch_rl.trainer.objective import loss_function
from monarch_rl.trainer.policy import Policy
from monarch_rl.trainer.settings import TrainerSettings
from tests.trainer.batches import LR, STEPS, batch, shard
from tests.trainer.ranks import packed

RUNS = {
    "checkpointed": ("dense", TrainerSettings(lr=LR, activation_checkpoint="full")),
    "experts": ("moe", TrainerSettings(lr=LR, expert_parallel=2)),
    "passes": (  # without gradients: for log-probs of the second mini-batch, and of the model without LoRA
        "dense",
        TrainerSettings(
            lr=LR, minibatches=2, reference=True, lora=LoraSettings(rank=4), loss=LossSettings(kl_coefficient=0.1)
        ),
    ),
}


def train(folder: Path, model: str, settings: TrainerSettings, name: str) -> tuple[int, int]:
    """Graphs compiled at the start, and after all steps."""
    torch._dynamo.reset()
    counters.clear()
    policy = Policy(folder / model, settings, total_steps=STEPS)
    at_start = counters["stats"]["unique_graphs"]
    metrics_of_steps = []
    for step in range(STEPS):
        part = shard(batch(step), step, policy.rank, policy.world_size, tokens_per_microbatch=50)
        microbatches, parts = packed(part, policy), settings.minibatches
        minibatches = [microbatches[number::parts] for number in range(parts)]
        metrics = policy.update_batch(minibatches, loss_function(PPOClip(), settings.loss))
        metrics_of_steps.append({"loss": metrics["loss"], "grad_norm": metrics["grad_norm"]})
    policy.save(folder / name)
    if policy.rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(metrics_of_steps))
    return at_start, counters["stats"]["unique_graphs"]


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        model, settings = RUNS[name]
        train(folder, model, settings, f"{name}.plain")
        graphs = train(folder, model, replace(settings, compile=True), f"{name}.compiled")
        if dist.get_rank() == 0:
            (folder / f"{name}.graphs.json").write_text(json.dumps(graphs))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
