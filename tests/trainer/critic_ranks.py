"""A critic on every rank of a torchrun job:  critic_ranks.py FOLDER

Writes its metrics to ``critic.<ranks>``.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from monarch_rl.algorithms.advantages import gae
from monarch_rl.algorithms.functions import needs
from monarch_rl.algorithms.group_view import GroupView
from monarch_rl.algorithms.objectives import PPOClip
from monarch_rl.buffer.groups import Batch
from monarch_rl.buffer.shards import ShardPlan, cut
from monarch_rl.checkpoint.tensors import local_of
from monarch_rl.episode.episode import Group
from monarch_rl.episode.serialization import SerializedGroup, serialize_group
from monarch_rl.episode.shard import PackedShard
from monarch_rl.model.lora import LoraSettings
from monarch_rl.trainer.batch import pack
from monarch_rl.trainer.functions import LoadedFunctions
from monarch_rl.trainer.loss_settings import CriticSettings
from monarch_rl.trainer.objective import loss_function
from monarch_rl.trainer.policy import Policy
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.trainer.step import train
from monarch_rl.trainer.step_journal import weights_checksums
from tests.trainer.batches import LR, MAX_NEW_TOKENS, batch

CRITIC_LR, STEPS, COMPARED = 1e-2, 8, 3
"""Updates, and how many of them are also made on one rank."""


def part_of(policy: Policy, groups: list[Group], oldest: int | None = None, minibatches: int = 1) -> PackedShard:
    packed = [SerializedGroup.read(serialize_group(group)) for group in groups]
    trainable = np.asarray([sum(group.trainable for group in packed)])
    plan = ShardPlan(policy.world_size, 50, minibatches=minibatches)
    return cut(Batch(0, packed, oldest, trainable), plan)[policy.rank]


def predictable(step: int) -> list[Group]:
    """A batch in which the first sampled token decides the reward."""
    groups = batch(step)
    for episode in (episode for group in groups for episode in group.episodes):
        episode.reward = float(episode.token_ids[episode.trainable][0] % 2)
    return groups


def check_values(folder: Path) -> None:
    """The column has, for every token that any rank's episodes sampled, the head's value of the policy's last hidden
    state before it: the critic starts as a copy of the policy. Tokens that are masked for lag have values, too."""
    generator = torch.Generator().manual_seed(1)
    settings = TrainerSettings(ranks=int(os.environ["WORLD_SIZE"]), critic=CriticSettings(lr=CRITIC_LR))
    policy = Policy(folder / "model", settings, total_steps=1)
    critic = policy.critic
    assert critic is not None
    head = critic.model.module.lm_head.weight
    own = head.to_local() if isinstance(head, DTensor) else head  # a single rank holds plain tensors
    assert isinstance(own, torch.Tensor)
    row = torch.randn(head.shape, generator=generator)
    with torch.no_grad():
        own.copy_(row[: len(own)])
    groups = batch(1)
    column = critic.with_values(part_of(policy, groups, oldest=2)).columns["value"]
    policy.module._skip_lm_head = True
    for group, of_group in zip(groups, column, strict=True):
        for episode, found in zip(group.episodes, of_group, strict=True):
            alone = pack([episode], torch.zeros(1), torch.zeros(1), 0, policy.device)
            with torch.no_grad():
                hidden = policy.module(alone.token_ids, positions=alone.positions, attention_masks=alone.attention)
            expected = hidden[0, alone.sampled_after] @ row[0]
            np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


@needs("value")
def writing(group: GroupView) -> torch.Tensor:
    """An advantage that writes into its view."""
    for values in group.columns["value"]:
        values.zero_()
    group.parts[0]["format"] = 7.0
    return group.rewards.sub_(group.rewards.mean())


def check_returns(folder: Path) -> None:
    """The critic learns the original rewards, whatever an advantage writes into its view. Without discounting, a return
    is the reward, whatever the values are."""
    made = TrainerSettings(ranks=int(os.environ["WORLD_SIZE"]), lr=LR, critic=CriticSettings(lr=CRITIC_LR))
    policy, rewarded = Policy(folder / "model", made, total_steps=2), predictable(0)
    episodes = [episode for group in rewarded for episode in group.episodes]
    lengths = np.asarray([episode.num_trainable for episode in episodes])
    expected = float((lengths * [episode.reward for episode in episodes]).sum() / lengths.sum())
    for _ in range(2):
        part = part_of(policy, rewarded)
        metrics, *_ = train(policy, part, LoadedFunctions(writing, loss_function(PPOClip(), made.loss)), MAX_NEW_TOKENS)
        assert abs(metrics["critic/return"] - expected) < 1e-5, metrics
        assert all(parts == {} for of_group in part.parts for parts in of_group)
    assert metrics["critic/value"] != 0


def learn(folder: Path, model: str, steps: int = STEPS, **settings: object) -> list[dict[str, float]]:
    """Several updates from one batch, from the first of which only the critic learns; their metrics."""
    critic = CriticSettings(lr=CRITIC_LR, warmup=1, lam=0.95, clip=0.2)
    made = TrainerSettings(ranks=int(os.environ["WORLD_SIZE"]), lr=LR, critic=critic, **settings)  # type: ignore[arg-type]
    policy = Policy(folder / model, made, total_steps=steps)
    advantage = partial(gae, gamma=critic.gamma, lam=critic.lam)
    functions = LoadedFunctions(advantage, loss_function(PPOClip(), made.loss))  # type: ignore[arg-type]
    weights = [local_of(weight) for weight in policy.model.trained_state().values()]
    assert policy.critic is not None
    critic_weights = list(policy.critic.model.module.parameters())
    found, before, sums = [], [weight.clone() for weight in weights], weights_checksums(policy)
    for step in range(steps):
        part = part_of(policy, predictable(0), minibatches=made.minibatches)
        part.version = step
        metrics, advantages, *_ = train(policy, part, functions, MAX_NEW_TOKENS)
        flat = torch.cat(list(chain(*advantages)))
        assert abs(float(flat.mean())) < 1e-5 and abs(float(flat.std()) - 1) < 1e-3
        made_sums = weights_checksums(policy)
        of_critic = sum(weight.requires_grad for weight in critic_weights)
        if step or policy.rank == 0:  # the first update changes the head alone, whose row is the first rank's
            assert (made_sums[-of_critic:] != sums[-of_critic:]).any(), "the critic's checksums are included"
        sums = made_sums
        changed = any(not torch.equal(a, b) for a, b in zip(before, weights, strict=True))
        assert changed == (step > 0), "during the critic's warm-up the policy does not change"
        assert metrics["optimizer_steps"] == step * made.updates_per_batch
        found.append({name: value for name, value in metrics.items() if name.startswith("critic/")})
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    check_values(folder)
    check_returns(folder)
    steps = COMPARED if os.environ["WORLD_SIZE"] == "1" else STEPS
    once = learn(folder, "model", steps)
    assert once[0]["critic/value"] == 0 and once[0]["critic/clipped"] == 0
    found = [once, learn(folder, "model", steps, epochs=2, minibatches=2)]
    if steps == STEPS:
        found += [learn(folder, "model", lora=LoraSettings(rank=4)), learn(folder, "moe")]
    if os.environ["RANK"] == "0":
        (folder / f"critic.{os.environ['WORLD_SIZE']}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
