"""The trainer's side of the tests of adapters on experts, on every rank of a torchrun job:

    expert_lora_ranks.py FOLDER DEGREE...

Trains them with each degree of expert parallelism, saves before and after, and checks the tensors of a version.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from monarch_rl.model.lora import LoraSettings
from monarch_rl.trainer.lora import without_lora
from monarch_rl.trainer.policy import Policy
from monarch_rl.trainer.settings import TrainerSettings
from tests.trainer.batches import LR, WEIGHT_DECAY
from tests.trainer.lora_cases import EXPERT_CASES
from tests.trainer.lora_ranks import logits, train
from tests.trainer.moe_cases import layout
from tests.trainer.programs import saved
from tests.trainer.ranks import check_snapshot


def check_sent(policy: Policy, folder: Path, lora: LoraSettings) -> None:
    """A version has the targets' weights and nothing else; an expert is sent whole, by the one rank that owns it."""
    tensors, runs = policy.published.tensors(), policy.published.owned_spans()
    targets = {n: tuple(v.shape) for n, v in saved(folder).items() if n.split(".")[-2] in lora.targets}
    assert dict(tensors) == targets
    experts = [(name, start, numel) for name, start, numel in runs if ".experts." in name]
    assert all((start, numel) == (0, targets[name][0] * targets[name][1]) for name, start, numel in experts)
    assert len(experts) * policy.world_size == sum(".experts." in name for name in targets)


def check_without_lora(policy: Policy, folder: Path, kind: str) -> None:
    """The KL's reference, whatever LoRA has learned: the initial model."""
    trained, start = logits(policy, folder, kind), load_file(folder / f"{kind}.logits")["logits"]
    with without_lora(policy.module):
        found = logits(policy, folder, kind)
    assert (found.view(start.shape) - start).abs().max() < 5e-6 and (found - trained).abs().max() > 2e-3
    assert torch.equal(logits(policy, folder, kind), trained)


def main(folder: Path, degrees: list[int]) -> None:
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    for degree in degrees:
        for case, (kind, lora) in EXPERT_CASES.items():
            settings = TrainerSettings(ranks, degree, lr=LR, weight_decay=WEIGHT_DECAY, lora=lora)
            name = f"{case}.{layout(ranks, degree)}"
            policy = train(folder, kind, name, settings)
            check_sent(policy, folder / kind, lora)
            check_without_lora(policy, folder, kind)
            check_snapshot(policy, folder / name)
    policy.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(degree) for degree in sys.argv[2:]])
