"""The trainer's side of the tests of tensor parallelism, on every rank of a torchrun job:

    tensor_parallel_ranks.py FOLDER TP LAYOUT MODEL...

Writes for each model the log-probs and gradients of fixed episodes, the saved folder, and the trained model; checks
snapshots, which rank writes which rows of a save, and log-probs over shards of a vocabulary against the whole one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from monarch_rl.algorithms.objectives import PPOClip
from monarch_rl.trainer import saving
from monarch_rl.trainer.batch import MicroBatch, pack
from monarch_rl.trainer.objective import loss_function
from monarch_rl.trainer.policy import Policy
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.trainer.shards import has_columns
from monarch_rl.trainer.token_logprobs import VocabularyPart, logprobs_of
from tests.episode.trees import tree_of
from tests.trainer.batches import LR, STEPS, WEIGHT_DECAY, batch, shard
from tests.trainer.ranks import check_snapshot, packed

Values = dict[str, torch.Tensor]
ROUNDINGS = 16.0
"""Bound on a result's error, in rounding errors of the largest logit: another order of sums and another processor's
instructions cause up to 7 in 1,500 examples."""


def rows(policy: Policy) -> dict[str, MicroBatch]:
    """Micro-batches that all ranks compute: with sampling masks and without, and of one input."""
    trees: dict[str, dict[str, Any]] = {
        "plain": {"lengths": [20, 18, 18, 9], "forks": [(0, 0), (0, 12), (1, 15), (0, 5)], "seed": 3},
        "kept": {"lengths": [31, 30, 16], "forks": [(0, 0), (0, 11), (1, 15)], "seed": 4, "kept": True},
        "short": {"lengths": [4, 3], "forks": [(0, 0), (0, 2)], "seed": 5},
    }
    made = {}
    for name, tree in trees.items():
        episodes = tree_of(**tree)
        number = len(episodes)
        values = torch.linspace(-1.5, 2.0, number), torch.linspace(0.3, 0.7, number)
        made[name] = pack(episodes, *values, 0, policy.device, [0] * number)
    return made


def computed(policy: Policy) -> Values:
    """Log-probs, entropies and mask masses of fixed episodes, and the whole gradients of a weighted sum of them."""
    values: Values = {}
    for name, row in rows(policy).items():
        policy.module.zero_grad()
        output = policy.token_logprobs(row)
        # All data-parallel ranks compute the same row here, so their gradients are added up.
        (output.logprobs * row.advantages * row.weights).sum().div(policy.settings.data_ranks).backward()
        for field, value in output._asdict().items():
            if value is not None:
                values[f"{name}.{field}"] = value.detach().clone()
        for parameter, tensor in policy.module.named_parameters():
            if tensor.grad is not None:
                grad = tensor.grad
                values[f"grad.{name}.{parameter}"] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
    policy.optimizers.zero_grad()
    return values


def train(policy: Policy, folder: Path, name: str) -> None:
    """Train on the synthetic batches; in micro-batches of at most 50 tokens, so that there are several."""
    steps = []
    for step in range(STEPS):
        part = shard(batch(step), step, policy.data_rank, policy.settings.data_ranks, tokens_per_microbatch=50)
        metrics = policy.update(packed(part, policy), loss_function(PPOClip(), policy.settings.loss))
        assert metrics["tokens"] == part.trainable_tokens
        assert 0 <= metrics["imbalance"] < 0.5
        steps.append({key: metrics[key] for key in ("loss", "grad_norm", "tokens", "entropy", "computed_share")})
    policy.save(folder / name)
    if policy.rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(steps))


def check_written(policy: Policy) -> None:
    """Each rank writes its rows of a weight whose columns are sharded, and no rank has all of it."""
    whole = policy.model.hf_state()
    divided = [name for name, value in whole.items() if has_columns(value)]
    assert len(divided) == 2 * policy.model.hf_config.num_hidden_layers, "o_proj and down_proj"
    with torch.no_grad():
        written = {name: local.numel() for name, local, _ in saving._values(policy.model)}
    for name in divided:
        elements = torch.tensor(written[name])
        assert 0 < elements < whole[name].numel(), name
        dist.all_reduce(elements)
        assert elements == whole[name].numel(), name


def check_parts_of_a_vocabulary() -> None:
    """Each rank has the logits of a shard; all test the same examples, and agree on the verdict."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    @settings(max_examples=60, derandomize=True, database=None, deadline=None)
    @given(
        seed=st.integers(0, 2**32 - 1),
        tokens=st.integers(1, 9),
        width=st.integers(1, 12),
        spread=st.sampled_from([0.0, 1.0, 30.0, 300.0]),
        mask_size=st.sampled_from([0, 1, 3, 40]),
    )
    def check(seed: int, tokens: int, width: int, spread: float, mask_size: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(tokens, 5, generator=generator)
        weight = torch.randn(width * ranks, 5, generator=generator) * spread
        ids = torch.randint(0, width * ranks, (tokens,), generator=generator)
        masks = None
        if mask_size:
            sets = [
                {int(ids[t]), *torch.randint(0, width * ranks, (mask_size,), generator=generator).tolist()}
                for t in range(tokens)
            ]
            counts = torch.tensor([len(ids_of_token) for ids_of_token in sets])
            masks = counts, torch.tensor([i for of_token in sets for i in of_token], dtype=torch.int32)
        others = None if mask_size else torch.randint(0, width * ranks, (tokens, 2), generator=generator)
        group = dist.group.WORLD
        assert group is not None
        part = VocabularyPart(rank * width, group)
        results = []
        for own, mine in ((weight, None), (weight[rank * width :][:width], part)):
            inputs = [hidden.clone().requires_grad_(), own.clone().requires_grad_()]
            shared = inputs[0] if mine is None else mine.share(inputs[0])
            output = logprobs_of(shared @ inputs[1].T, ids, masks, mine, entropy_gradient=True, others_TK=others)
            weights = torch.linspace(-1, 1, tokens)
            loss = (output.logprobs * weights + output.entropies * weights.flip(0)).sum()
            (loss if output.others is None else loss + output.others[:, 1] @ weights).backward()
            grads = [value.grad for value in inputs if value.grad is not None]
            results.append([*(value.detach() for value in output if value is not None), *grads])
        expected, found = results
        expected[-1] = expected[-1][rank * width :][:width]
        errors = [float((a - b).abs().max() / (1 + b.abs().max())) for a, b in zip(found, expected, strict=True)]
        worst = torch.tensor(errors)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        largest = float((hidden @ weight.T).abs().max())
        assert worst.max() < ROUNDINGS * torch.finfo().eps * (1 + largest), worst

    check()


def main(folder: Path, tp: int, layout: str, models: list[str]) -> None:
    torch.set_num_threads(1)
    for name in models:
        trainer = TrainerSettings(
            ranks=int(os.environ["WORLD_SIZE"]), tp=tp, lr=LR, weight_decay=WEIGHT_DECAY, logprob_chunk=7
        )
        policy = Policy(folder / name, trainer, total_steps=STEPS, temperature=0.8)
        values = computed(policy)
        if policy.rank == 0:
            save_file({key: value.contiguous() for key, value in values.items()}, folder / f"{name}.{layout}.values")
        policy.save(folder / f"{name}.{layout}.saved")
        if tp > 1:
            check_written(policy)
        check_snapshot(policy, folder / name)
        train(policy, folder, f"{name}.{layout}")
        check_snapshot(policy, folder / f"{name}.{layout}")
    if tp > 1:
        check_parts_of_a_vocabulary()
    policy.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
