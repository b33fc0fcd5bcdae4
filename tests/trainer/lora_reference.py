"""peft's side of the LoRA tests, a program of its own:  lora_reference.py make|compare FOLDER NAME...

``make`` writes the models. ``compare`` loads the ranks' saved folders, as peft and transformers do, writes the logits
of both, and trains the same adapters plainly.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.trainer.batches import LR, STEPS, WEIGHT_DECAY, batch
from tests.trainer.lora_cases import CASES
from tests.trainer.reference import dr_grpo, make


def adapted(folder: Path, kind: str, adapter: str, *, train: bool = False) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float32)
    return PeftModel.from_pretrained(base, folder / adapter, is_trainable=train)


def logits(folder: Path, kind: str, name: str) -> None:
    """Logits of the saved adapter on its base, and of the saved merged model alone."""
    tokens = load_file(folder / f"{kind}.logits")["tokens"]
    merged = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    with torch.no_grad():
        found = {"peft": adapted(folder, kind, f"{name}_adapter").eval()(tokens).logits}
        found["merged"] = merged.eval()(tokens).logits
    save_file(found, folder / f"{name}.logits")


def train(folder: Path, kind: str, name: str) -> None:
    """Train plainly from the ranks' initial adapter: one episode at a time, no sharding."""
    model = adapted(folder, kind, f"{name}_start_adapter", train=True)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=WEIGHT_DECAY)
    for step in range(STEPS):
        optimizer.zero_grad()
        dr_grpo(model, batch(step)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    save_file(get_peft_model_state_dict(model), folder / f"{name}.trained")


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, target = sys.argv[1], Path(sys.argv[2])
    if command == "make":
        make(target)
    else:
        for case in sys.argv[3:]:
            model_kind, _ = CASES[case]
            logits(target, model_kind, case)
            train(target, model_kind, case)
