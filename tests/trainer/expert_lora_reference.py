"""transformers' side of the tests of adapters on experts:

    expert_lora_reference.py make FOLDER
    expert_lora_reference.py compare FOLDER RANKS

``compare`` trains and computes the same as the ranks. peft has no adapter for a single expert of transformers' stacked
ones, so the formula is written out here: the model is computed with ``W + alpha / rank * B A`` in the place of each
adapted W, and differentiated.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.func import functional_call

from monarch_rl.model.lora import LoraSettings
from tests.trainer.batches import LR, STEPS, WEIGHT_DECAY, batch
from tests.trainer.lora_cases import EXPERT_CASES, EXPERT_LAYOUTS
from tests.trainer.moe_cases import layout
from tests.trainer.moe_reference import load
from tests.trainer.moe_reference import make as make_models
from tests.trainer.programs import saved
from tests.trainer.reference import dr_grpo

Weights = dict[str, torch.Tensor]


def added(module: str, adapters: Weights, lora: LoraSettings, weight: torch.Tensor) -> torch.Tensor:
    name = f"base_model.model.{module}"
    if f"{name}.lora_A.weight" not in adapters:
        return weight
    return weight + lora.alpha / lora.rank * adapters[f"{name}.lora_B.weight"] @ adapters[f"{name}.lora_A.weight"]


def adapted(model: Any, adapters: Weights, lora: LoraSettings) -> Weights:
    """All parameters with adapters added, experts stacked as in transformers: gate above up."""
    weights: Weights = {}
    for name, weight in model.named_parameters():
        weight = weight.detach()
        module, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            halves = [weight.chunk(2, dim=1)[part] for part in range(2)]
            stacks = [
                torch.stack([added(f"{module}.{e}.{part}_proj", adapters, lora, w) for e, w in enumerate(half)])
                for part, half in zip(("gate", "up"), halves, strict=True)
            ]
            weights[name] = torch.cat(stacks, dim=1)
        elif leaf == "down_proj":
            stack = [added(f"{module}.{e}.down_proj", adapters, lora, w) for e, w in enumerate(weight)]
            weights[name] = torch.stack(stack)
        else:
            weights[name] = added(module, adapters, lora, weight)
    return weights


def train(folder: Path, case: str, ranks: int) -> None:
    """Train plainly, from the ranks' initial adapters: one episode at a time, no sharding."""
    kind, lora = EXPERT_CASES[case]
    model = load(folder / kind)
    start = saved(folder / f"{case}.{layout(ranks, EXPERT_LAYOUTS[ranks][0])}_start_adapter")
    adapters = {name: value.requires_grad_() for name, value in start.items()}
    parameters = list(adapters.values())
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=WEIGHT_DECAY)
    for step in range(STEPS):
        optimizer.zero_grad()
        weights = adapted(model, adapters, lora)
        dr_grpo(lambda ids, weights=weights: functional_call(model, weights, (ids,)), batch(step)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    save_file({name: value.detach() for name, value in adapters.items()}, folder / f"{case}.{ranks}.trained")


def logits(folder: Path, case: str, name: str) -> None:
    """Logits of the saved adapters on their base by the formula, and of the saved merged model alone."""
    kind, lora = EXPERT_CASES[case]
    tokens = load_file(folder / f"{kind}.logits")["tokens"]
    model = load(folder / kind).eval()
    with torch.no_grad():
        weights = adapted(model, saved(folder / f"{name}_adapter"), lora)
        found = {"formula": functional_call(model, weights, (tokens,)).logits}
        found["merged"] = load(folder / name).eval()(tokens).logits
    save_file(found, folder / f"{name}.logits")


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, target = sys.argv[1], Path(sys.argv[2])
    if command == "make":
        make_models(target, [kind for kind, _ in EXPERT_CASES.values()])
    else:
        world = int(sys.argv[3])
        for case in EXPERT_CASES:
            train(target, case, world)
            for degree in EXPERT_LAYOUTS[world]:
                logits(target, case, f"{case}.{layout(world, degree)}")
