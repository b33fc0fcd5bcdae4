"""Checkpoints on every rank of a torchrun job:  checkpoint_ranks.py FOLDER MODEL NAME [write|read]

``write``: makes three updates, a checkpoint for which a rank is too late, one that a full disk refuses to one rank, one
that is written during a fourth update, and saves the model after a fifth. ``read``: resumes from the checkpoint, makes
the same two updates, and saves.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from monarch_rl.algorithms.advantages import gae
from monarch_rl.algorithms.objectives import PPOClip
from monarch_rl.buffer.groups import Batch
from monarch_rl.buffer.shards import ShardPlan, cut
from monarch_rl.episode.serialization import SerializedGroup, serialize_group
from monarch_rl.errors import CannotWrite
from monarch_rl.model.lora import LoraSettings
from monarch_rl.runtime.network import world_store
from monarch_rl.trainer.functions import LoadedFunctions
from monarch_rl.trainer.loss_settings import NO_CRITIC, CriticSettings
from monarch_rl.trainer.objective import loss_function
from monarch_rl.trainer.policy import Policy
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.trainer.step import train
from tests.trainer.batches import LR, MAX_NEW_TOKENS, batch, shard
from tests.trainer.ranks import packed

UPDATES, AT = 5, 3
WRITERS = 2
"""Ranks that wrote the checkpoint."""
FULL_BYTES = 20_000
WARMUP = AT + 1
"""Warm-up of the critic: the checkpoint is made before the policy starts to learn."""


def update(policy: Policy, step: int) -> None:
    if policy.critic is not None:
        update_both(policy, step)
        return
    part = shard(batch(step), step, policy.rank, policy.world_size, tokens_per_microbatch=50)
    policy.update(packed(part, policy), loss_function(PPOClip(), policy.settings.loss))


def update_both(policy: Policy, step: int) -> None:
    groups = [SerializedGroup.read(serialize_group(group)) for group in batch(step)]
    trainable = np.asarray([sum(group.trainable for group in groups)])
    part = cut(Batch(step, groups, None, trainable), ShardPlan(policy.world_size, 50))[policy.rank]
    functions = LoadedFunctions(gae, loss_function(PPOClip(), policy.settings.loss))  # type: ignore[arg-type]
    metrics, *_ = train(policy, part, functions, MAX_NEW_TOKENS)
    assert metrics["critic/grad_norm"] > 0


def save(policy: Policy, folder: Path) -> None:
    policy.save(folder)
    if policy.critic is not None:
        state = policy.critic.model.trained_state().items()
        whole = {f"critic.{n}": v.full_tensor() for n, v in state if isinstance(v, DTensor)}
        if policy.rank == 0:
            save_file(whole, folder / "critic.safetensors")
        dist.barrier()


def refused_by_a_full_disk(policy: Policy, folder: Path) -> None:
    """The rank that cannot write reports it, and the other one does not wait for it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if policy.rank == policy.world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, before[1]))
    with pytest.raises(CannotWrite, match=f"trainer rank {policy.world_size - 1}"):
        policy.checkpoint.write(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def held_up_by_a_stalled_disk(policy: Policy, folder: Path) -> None:
    """The last rank is late, when the others have given up: from then on their group transfers nothing."""
    checkpoint, store, late = policy.checkpoint, world_store(), policy.rank == policy.world_size - 1
    stalled = checkpoint.group
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), stalled)
    if late:
        store.wait(["given up"], timedelta(seconds=600))
    for _ in range(2):
        with pytest.raises(CannotWrite, match=f"trainer rank {policy.rank} .*coordinate"):
            checkpoint.write(folder)
    store.set("given up", "")
    checkpoint.stage(new_group=True)
    with pytest.raises(CannotWrite, match="given up"):
        checkpoint.write(folder, stalled)


def random_numbers_of(folder: Path, name: str, rank: int) -> Path:
    """The file of the random numbers that a rank generated after its copy was made."""
    return folder / f"{name}.random.{rank}"


def write(policy: Policy, folder: Path, name: str) -> None:
    for step in range(AT):
        update(policy, step)
    policy.checkpoint.note(AT, {})
    policy.checkpoint.stage()
    held_up_by_a_stalled_disk(policy, folder / f"{name}_stalled")
    refused_by_a_full_disk(policy, folder / f"{name}_full")
    torch.manual_seed(100 + policy.rank)
    states: dict[str, dict[str, float]] = {"advantage": {"mean": 0.5}, "objective": {"rank": policy.rank}}
    policy.checkpoint.note(AT, states)
    states["advantage"]["mean"] = 0.7  # by an update that fails later
    staged = policy.checkpoint.stage()
    assert (staged.version, staged.optimizer_steps) == (AT, 0 if policy.critic else AT)
    torch.save(torch.rand(4), random_numbers_of(folder, name, policy.rank))
    failures: list[BaseException] = []

    def write_in_background() -> None:
        try:
            policy.checkpoint.write(folder / f"{name}_checkpoint")
        except BaseException as error:
            failures.append(error)

    writing = threading.Thread(target=write_in_background)
    writing.start()
    update(policy, AT)  # changes the weights, not the copy
    writing.join(60)
    assert not failures, failures
    for step in range(AT + 1, UPDATES):
        update(policy, step)
    save(policy, folder / f"{name}_whole")


def read(policy: Policy, folder: Path, name: str) -> None:
    steps = AT if policy.critic is None else 0
    states = policy.checkpoint.restore(folder / f"{name}_checkpoint", steps)
    rank = policy.rank if policy.rank < WRITERS else 0
    assert states == {"advantage": {"mean": 0.5}, "objective": {"rank": rank}}
    assert policy.checkpoint.optimizer_steps == steps
    if policy.rank < WRITERS:
        assert torch.equal(torch.rand(4), torch.load(random_numbers_of(folder, name, policy.rank)))
    for step in range(AT, UPDATES):
        update(policy, step)
    save(policy, folder / f"{name}_resumed_{policy.world_size}")
    if policy.critic is None:
        follow_another_schedule(policy)


def follow_another_schedule(policy: Policy) -> None:
    """The next update has the rate of the other schedule at its step, and the one after it the following one."""
    other = replace(policy.settings, lr=3 * LR, lr_warmup_steps=1, lr_min_factor=0.5, lr_decay_ratio=0.5)
    policy.reschedule(other, total_steps=8)
    for step in range(UPDATES, UPDATES + 2):
        part = shard(batch(step), step, policy.rank, policy.world_size, tokens_per_microbatch=50)
        metrics = policy.update(packed(part, policy), loss_function(PPOClip(), policy.settings.loss))
        assert metrics["lr"] == pytest.approx(3 * LR * (1 - 0.5 * (step - 4) / 4)), step


def main(folder: Path, model: str, name: str, does: str) -> None:
    torch.set_num_threads(1)
    lora = LoraSettings(rank=4) if "lora" in name else LoraSettings()
    settings = TrainerSettings(
        ranks=int(os.environ["WORLD_SIZE"]),
        lr=LR,
        weight_decay=0.1,
        lr_warmup_steps=2,
        lr_min_factor=0.1,
        lora=lora,
        critic=CriticSettings(lr=LR, warmup=WARMUP) if name == "critic" else NO_CRITIC,
    )
    policy = Policy(folder / model, settings, total_steps=UPDATES)
    (write if does == "write" else read)(policy, folder, name)
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
