"""The trainer's side of the mixture-of-experts tests, on every rank of a torchrun job:

    moe_ranks.py FOLDER DEGREE...

Writes for each degree of expert parallelism the logits and the saved folder of each model of moe_reference.py, and the
trained models; checks snapshots. Then resumes from a checkpoint of each degree with the others.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from monarch_rl.algorithms.objectives import PPOClip
from monarch_rl.trainer.objective import loss_function, supervised
from monarch_rl.trainer.policy import Policy
from monarch_rl.trainer.settings import TrainerSettings
from tests.trainer.batches import LR, STEPS, WEIGHT_DECAY, batch, shard, single
from tests.trainer.moe_cases import MODELS, TRAININGS, layout
from tests.trainer.ranks import check_snapshot, packed, round_trip


def check_counts(policy: Policy, training: str) -> None:
    """Experts got unequal numbers of tokens; experts that the test wants without any got none.

    If two ranks divide the experts, all experts of the second one are without tokens.
    """
    for layer in (layer for layer in policy.module.layers.values() if layer.moe_enabled):
        counts = layer.moe.tokens_per_expert_E.clone()
        dist.all_reduce(counts)
        assert counts.max() > (1.2 if len(counts) > 2 else 1.0) * counts.min(), counts
        if training == "moe_starved_trained":
            assert counts[:2].min() > 0, counts
            assert counts[2:].sum() == 0, counts


def train(folder: Path, training: str, settings: TrainerSettings, name: str) -> Policy:
    """Train on the synthetic batches; in micro-batches of at most 50 tokens, so that there are several."""
    single_episode = training == "moe_single"
    objective = supervised if single_episode else loss_function(PPOClip(), settings.loss)
    policy = Policy(folder / TRAININGS[training], settings, total_steps=STEPS)
    steps = []
    for step in range(STEPS):
        groups, ranks = single(step) if single_episode else batch(step), policy.world_size
        shards = [shard(groups, step, rank, ranks, tokens_per_microbatch=50) for rank in range(ranks)]
        metrics = policy.update(packed(shards[policy.rank], policy), objective)
        without_episodes = sum(not microbatch for part in shards for microbatch in part.places)
        assert (metrics["padding"] > 0) == (without_episodes > 0) >= single_episode
        steps.append({"loss": metrics["loss"], "grad_norm": metrics["grad_norm"]})
    check_counts(policy, training)
    policy.save(folder / name)
    if policy.rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(steps))
    return policy


def resume_with_another_degree(folder: Path, before: TrainerSettings, after: TrainerSettings) -> None:
    """Saves the trained model at the checkpoint, the model that another degree reads, and both after another update."""

    def update(policy: Policy, step: int) -> None:
        part = shard(batch(step), step, policy.rank, policy.world_size, tokens_per_microbatch=50)
        policy.update(packed(part, policy), loss_function(PPOClip(), policy.settings.loss))

    policy = Policy(folder / "moe", before, total_steps=STEPS)
    update(policy, 0)
    name = f"degree.{layout(policy.world_size, before.expert_parallel)}"
    policy.checkpoint.note(1, {})
    policy.checkpoint.stage()
    policy.checkpoint.write(folder / name)
    other = Policy(folder / "moe", after, total_steps=STEPS)
    other.checkpoint.restore(folder / name, 1)
    for kind, one in (("saved", policy), ("read", other)):
        one.save(folder / f"{name}.{kind}")
        update(one, 1)
        one.save(folder / f"{name}.{kind}.trained")


def main(folder: Path, degrees: list[int]) -> None:
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    for degree in degrees:
        where = layout(ranks, degree)
        settings = TrainerSettings(ranks=ranks, expert_parallel=degree, lr=LR, weight_decay=WEIGHT_DECAY)
        for name in MODELS:
            policy = round_trip(folder, name, settings, f"{name}.{where}")
            check_snapshot(policy, folder / name)
        for training in TRAININGS:
            policy = train(folder, training, settings, f"{training}.{where}")
        recomputed = replace(settings, activation_checkpoint="full")
        policy = train(folder, "moe_trained", recomputed, f"moe_recomputed.{where}")
        other = next(each for each in degrees if each != degree)
        resume_with_another_degree(folder, settings, replace(settings, expert_parallel=other))
    policy.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(degree) for degree in sys.argv[2:]])
