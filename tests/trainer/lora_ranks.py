"""The trainer's side of the LoRA tests, on every rank of a torchrun job:  lora_ranks.py FOLDER NAME...

Trains adapters, saves them before and after, and checks that the base does not change and snapshots are the adapters.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from monarch_rl.algorithms.objectives import PPOClip
from monarch_rl.model.lora import LoraSettings
from monarch_rl.trainer.attention_layout import separate_layout
from monarch_rl.trainer.objective import loss_function
from monarch_rl.trainer.policy import Policy
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.trainer.shards import local_span
from monarch_rl.weights.checksum import tensor_checksum
from tests.trainer.batches import LR, STEPS, WEIGHT_DECAY, batch, shard
from tests.trainer.lora_cases import CASES, VARIANTS
from tests.trainer.programs import saved
from tests.trainer.ranks import check_snapshot, packed


def check_base(policy: Policy, folder: Path) -> None:
    """The model's own weights equal its folder's, bit for bit; the checksums cover weights that are never sent."""
    whole = saved(folder)
    for name, value in policy.model.hf_state().items():
        local, start = local_span(value)
        assert torch.equal(local.flatten(), whole[name].flatten()[start : start + local.numel()]), name
    tensors, parts = policy.published.base_checksums(torch.float32)
    sent = dict(policy.published.tensors())
    assert dict(tensors) == {name: tuple(value.shape) for name, value in whole.items() if name not in sent}
    sums = torch.tensor(parts)
    dist.all_reduce(sums)
    for (name, _), total in zip(tensors, sums.tolist(), strict=True):
        assert total == tensor_checksum(whole[name]).item(), name


def check_trained(policy: Policy, lora: LoraSettings) -> None:
    """Only adapters are trained, are in the optimiser, and are fp32."""
    trained = [parameter for parameter in policy.module.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * len(lora.targets) * len(policy.module.layers)
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    groups = [group for optimizer in policy.optimizers for group in optimizer.param_groups]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in trained}


def logits(policy: Policy, folder: Path, kind: str) -> torch.Tensor:
    """Logits of the tokens whose logits the reference has written."""
    tokens = load_file(folder / f"{kind}.logits")["tokens"]
    positions = torch.arange(tokens.shape[1]).repeat(tokens.shape[0])[None]
    masks = separate_layout([tokens.shape[1]] * tokens.shape[0], policy.device)
    with torch.no_grad():
        found: torch.Tensor = policy.module(tokens.flatten()[None], positions=positions, attention_masks=masks)[0]
    return found.contiguous()


def train(folder: Path, kind: str, name: str, settings: TrainerSettings) -> Policy:
    policy = Policy(folder / kind, settings, total_steps=STEPS)
    check_trained(policy, settings.lora)
    policy.save(folder / f"{name}_start")
    for step in range(STEPS):
        part = shard(batch(step), step, policy.rank, policy.world_size, tokens_per_microbatch=50)
        policy.update(packed(part, policy), loss_function(PPOClip(), settings.loss))
    check_base(policy, folder / kind)
    policy.save(folder / name)
    check_base(policy, folder / kind)
    save_file({"logits": logits(policy, folder, kind)}, folder / f"{name}.rank{policy.rank}")
    return policy


CHANGES: dict[str, dict[str, Any]] = {
    "lora_divided": {"expert_parallel": 2},
    "lora_still": {"lr": 0.0},
    "lora_recomputed": {"activation_checkpoint": "full"},
}


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        kind, lora = CASES[VARIANTS.get(name, name)]
        settings = TrainerSettings(lr=LR, weight_decay=WEIGHT_DECAY, lora=lora)
        policy = train(folder, kind, name, replace(settings, **CHANGES.get(name, {})))
        if name in CASES:
            check_snapshot(policy, folder / f"{name}_adapter")
    policy.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
