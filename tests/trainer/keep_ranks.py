"""Expert routes and sampling masks in the trainer, on every rank of a torchrun job:  keep_ranks.py FOLDER DEGREE

``FOLDER/model`` is a mixture of experts. Writes for each setting of ``router_replay`` the policy's results for
synthetic episodes, and inputs and outputs of every layer of experts; ``FOLDER/<name>.rank<r>``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from safetensors.torch import save_file

from monarch_rl.algorithms.objectives import PPOClip
from monarch_rl.episode.episode import Episode, Turn
from monarch_rl.episode.sampling import SamplingMasks
from monarch_rl.trainer.batch import MicroBatch, pack
from monarch_rl.trainer.loss_settings import LossSettings
from monarch_rl.trainer.objective import loss_function
from monarch_rl.trainer.policy import Policy
from monarch_rl.trainer.settings import Checkpointing, RouterReplay, TrainerSettings
from tests.episode.trees import tree_of

VOCABULARY, LAYERS, EXPERTS, K = 500, 2, 4, 2
CHUNK = 7
"""Tokens per chunk of the head: fewer than an episode has."""


def episodes(rank: int, *, with_masks: bool, expert_routes: bool) -> list[Episode]:
    """Three episodes of two turns; expert routes and sampling masks are random. Some tokens that have a mask are not
    trained, like tokens that are too old."""
    rng = np.random.default_rng(rank)

    def turn() -> Turn:
        n = int(rng.integers(8, 20))
        trainable = np.arange(n) >= 4
        ids = rng.integers(0, VOCABULARY, n).astype(np.int32)
        sets: list[Any] = [
            rng.permutation(np.unique([token, *rng.integers(0, VOCABULARY, rng.integers(1, 9))])) if of_policy else []
            for token, of_policy in zip(ids, trainable, strict=True)
        ]
        counts = np.asarray([len(ids_of_set) for ids_of_set in sets], np.int32)
        sampling_masks = SamplingMasks(counts, np.concatenate(sets).astype(np.int32)) if with_masks else None
        logprobs = np.where(trainable, -1.0, 0.0).astype(np.float32)
        made_up = Turn(ids, logprobs, np.where(trainable, 0, -1).astype(np.int32), trainable, sampling_masks)
        made_up.trainable[5::7] = False
        return made_up

    made = [Episode([turn(), turn()], 1.0, "stop") for _ in range(3)]
    for episode in made if expert_routes else []:
        chosen = rng.random((episode.num_tokens - 1, LAYERS, EXPERTS)).argsort(-1)[..., :K]
        episode.expert_routes = chosen.astype(np.uint8)
    return made


def packed(made: list[Episode], device: torch.device) -> MicroBatch:
    return pack(made, torch.ones(len(made)), torch.full((len(made),), 0.1), 0, device)


def logprobs(policy: Policy, batch: MicroBatch) -> dict[str, torch.Tensor]:
    """The policy's log-probs, all logits, and input and output of each layer of experts."""
    tensors: dict[str, torch.Tensor] = {}

    def record(layer: str) -> Any:
        def hook(_: Any, inputs: Any, output: Any) -> None:
            tensors[f"in.{layer}"], tensors[f"out.{layer}"] = inputs[0].detach().clone()[0], output.detach().clone()[0]

        return hook

    hooks = [block.moe.register_forward_hook(record(name)) for name, block in policy.module.layers.items()]
    with torch.no_grad():
        token_logprobs = policy.token_logprobs(batch)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():  # expert routes are still set
        logits = policy.module(batch.token_ids, positions=batch.positions, attention_masks=batch.attention)[0]
    of_tokens = {name: values for name, values in token_logprobs._asdict().items() if values is not None}
    return tensors | of_tokens | {"logits": logits[batch.sampled_after].contiguous()}


def gradients(policy: Policy, batch: MicroBatch) -> dict[str, torch.Tensor]:
    policy.optimizers.zero_grad()
    (-policy.token_logprobs(batch).logprobs.sum()).backward()
    return {
        name: parameter.grad.full_tensor().clone()
        for name, parameter in policy.module.named_parameters()
        if parameter.grad is not None
    }


def shared_and_separate(policy: Policy, expert_routes: bool) -> dict[str, torch.Tensor]:
    """Log-probs and gradients of groups whose episodes share prefixes, computed once and computed separately. Each rank
    has other groups."""
    lengths, forks, seed = [18, 20, 12, 9], [(0, 0), (0, 9), (1, 12), (0, 5)], 10 * policy.rank
    made = [tree_of(lengths, forks, seed + group, routes=expert_routes, kept=True) for group in range(2)]
    flat = [episode for group in made for episode in group]
    found = {}
    for name, groups in (("shared", [0] * 4 + [1] * 4), ("separate", list(range(8)))):
        batch = pack(flat, torch.ones(8), torch.ones(8), 0, policy.device, groups)
        assert (batch.num_tokens < batch.separate_tokens) == (name == "shared")
        with torch.no_grad():
            found[f"{name}.logprobs"] = policy.token_logprobs(batch).logprobs
        found |= {f"{name}.grad.{key}": value for key, value in gradients(policy, batch).items()}
    return found


def check_reference(folder: Path, degree: int) -> None:
    """The reference also computes each token with the experts that sampled it: at first it equals the policy."""
    loss = LossSettings(kl_coefficient=0.1)
    settings = TrainerSettings(2, degree, router_replay="replay", lr=0.0, reference=True, loss=loss)
    policy = Policy(folder / "model", settings, total_steps=1)
    batch = packed(episodes(policy.rank, with_masks=False, expert_routes=True), policy.device)
    metrics = policy.update([batch], loss_function(PPOClip(), loss))
    assert metrics["routes_differ"] > 0.1 and metrics["kl_reference"] < 1e-9, metrics


def main(folder: Path, degree: int) -> None:
    torch.set_num_threads(1)
    for router_replay in get_args(RouterReplay):
        for checkpoint in get_args(Checkpointing) if router_replay == "replay" else ("none",):
            settings = TrainerSettings(
                2, degree, router_replay=router_replay, logprob_chunk=CHUNK, activation_checkpoint=checkpoint, lr=0.0
            )
            policy = Policy(folder / "model", settings, total_steps=1, temperature=0.7)
            made = episodes(policy.rank, with_masks=True, expert_routes=router_replay != "off")
            batch = packed(made, policy.device)
            name = f"{router_replay}.{checkpoint}.rank{policy.rank}"
            outputs = logprobs(policy, batch)
            inputs = {"sampled_after": batch.sampled_after, "ids": batch.targets}
            if batch.sampling_masks is not None:
                inputs |= {"mask_counts": batch.sampling_masks[0], "mask_ids": batch.sampling_masks[1]}
            if batch.expert_routes is not None:
                inputs["routes"] = batch.expert_routes[0]
            grads = {f"grad.{key}": value for key, value in gradients(policy, batch).items()}
            save_file({k: v.contiguous() for k, v in (outputs | inputs | grads).items()}, folder / name)
            found = shared_and_separate(policy, expert_routes=router_replay != "off")
            save_file({k: v.contiguous() for k, v in found.items()}, folder / f"shared.{name}")
            # This time one rank has no episodes.
            batches = [batch, packed(made if policy.rank == 0 else [], policy.device)]
            metrics = policy.update(batches, loss_function(PPOClip(), LossSettings()))
            (folder / f"{name}.json").write_text(json.dumps(metrics))
    check_reference(folder, degree)
    policy.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
