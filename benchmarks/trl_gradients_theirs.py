"""TRL's side of trl_gradients.py, ``python -P trl_gradients_theirs.py JOB.json`` in TRL's own environment.

Makes one step of ``GRPOTrainer.train()`` for each loss of the job. Completions and rewards are those of the job
(``rollout_func`` and a reward function), and so are log-probs of other policies, if the loss uses them. The gradients
that the optimiser gets are written as NUMBER.safetensors to the job's folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

GIVEN = {"old": "old_per_token_logps", "reference": "ref_per_token_logps"}
"""TRL's names of our columns."""


class GivenBatch(GRPOTrainer):
    """A trainer with the job's log-probs of other policies."""

    given: dict[str, list[list[float]]]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        for name, values in self.given.items():
            padded = torch.zeros_like(output["completion_ids"], dtype=torch.float32)
            for row, sequence in zip(padded, values, strict=True):
                row[: len(sequence)] = torch.tensor(sequence)
            output[name] = padded
        return output


class KeepGradients(TrainerCallback):
    """Writes the gradients that the optimiser gets."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        named = given["model"].named_parameters()
        save_file({name: value.grad.contiguous() for name, value in named}, self._path)


def config(job: dict[str, Any], loss: dict[str, Any]) -> GRPOConfig:
    """Return the config of a step on the whole batch in float32, without clipping of the gradient."""
    return GRPOConfig(
        output_dir=job["folder"],
        max_steps=1,
        per_device_train_batch_size=len(job["sequences"]),
        gradient_accumulation_steps=1,
        num_generations=job["group_size"],
        max_completion_length=job["max_new_tokens"],
        shuffle_dataset=False,
        learning_rate=0.0,
        max_grad_norm=0.0,
        disable_dropout=True,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **{"beta": 0.0} | loss,
    )


def step(job: dict[str, Any], loss: dict[str, Any], path: Path) -> None:
    """Make one step with a loss, and write its gradients to ``path``."""
    sequences = job["sequences"]
    columns = {name: [sequence["columns"][name] for sequence in sequences] for name in ("old", "reference")}

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = {f"{name}_ids": [sequence[name] for sequence in sequences] for name in ("prompt", "completion")}
        return ids | {"logprobs": columns["old"]}

    def reward(**_: Any) -> list[float]:
        return [sequence["reward"] for sequence in sequences]

    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    prompts = [tokenizer.decode(sequence["prompt"]) for sequence in sequences[:: job["group_size"]]]
    trainer = GivenBatch(
        AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        reward,
        config(job, loss["config"]),
        Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[KeepGradients(path)],
        rollout_func=rollout,
    )
    trainer.given = {GIVEN[name]: columns[name] for name in loss["columns"]}
    trainer.train()


def main(path: Path) -> None:
    torch.set_num_threads(1)
    job = json.loads(path.read_text())
    for number, loss in enumerate(job["losses"].values()):
        step(job, loss, path.parent / f"{number}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
