"""TRL's side of trl.py: one run of its GRPOTrainer, ``python -P trl_train.py JOB.json`` in TRL's own environment.

``-P`` keeps this folder off the import path, where ``trl.py`` would hide TRL. Of monarch_rl only the task is imported:
both sides have the same items and scores. Writes ``metrics.jsonl`` and the model to the folder of the job.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from monarch_rl.tasks.reasoning_gym import TaskSettings, TaskSource, score


def config(job: dict[str, Any], world: int) -> GRPOConfig:
    """Return TRL's config for the job; ``world`` is the number of processes that share a batch.

    Defaults that affect learning are ours. Features that only cost time here are off: gradient checkpointing (a second
    forward pass), bfloat16 (slow on a CPU), pinned memory, checkpoints, bars. One generation, one forward and one
    backward pass make a step, unless ``trl_microbatch`` says otherwise.
    """
    samples = job["groups_per_step"] * job["group_size"] // world
    micro = min(job["trl_microbatch"] or samples, samples)
    gpu: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
    return GRPOConfig(
        output_dir=job["folder"],
        max_steps=job["steps"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=samples // micro,
        num_generations=job["group_size"],
        max_completion_length=job["max_new_tokens"],
        temperature=job["temperature"],
        top_p=1.0,
        top_k=0,
        shuffle_dataset=False,
        beta=0.0,
        num_iterations=1,
        epsilon=job["clip_low"],
        epsilon_high=job["clip_high"],
        loss_type=job["loss_type"],
        scale_rewards=job["scale_rewards"],
        max_grad_norm=job["max_grad_norm"],
        disable_dropout=True,
        gradient_checkpointing=False,
        bf16=job["gpu"],
        use_cpu=not job["gpu"],
        dataloader_pin_memory=job["gpu"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=job["seed"],
        **(gpu if job["gpu"] else {}),
    )


def dataset(job: dict[str, Any], source: TaskSource, chat: bool) -> Dataset:
    """Return the training items in their order, as many as the steps need."""
    count = job["steps"] * job["groups_per_step"]
    prompts = [source.item(index).prompt for index in range(count)]
    rows = [[{"role": "user", "content": prompt}] if chat else prompt for prompt in prompts]
    return Dataset.from_dict({"prompt": rows, "item": list(range(count))})


class Steps(TrainerCallback):
    """Writes a line per step, with the keys of our ``metrics.jsonl``."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)
        self._started = self._last = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "reward" not in logs or not state.is_world_process_zero:
            return
        ended, last = time.monotonic(), self._last
        self._last = ended
        row = {"step": state.global_step, "seconds": ended - self._started, "time/step_s": ended - last}
        row |= {"reward/mean": logs["reward"], "trainer/lr": logs["learning_rate"], "trainer/loss": logs["loss"]}
        row |= {"trainer/grad_norm": logs["grad_norm"], "trainer/entropy": logs["entropy"]}
        self._file.write(json.dumps({name: float(value) for name, value in row.items()}) + "\n")


def main(path: Path) -> None:
    job = json.loads(path.read_text())
    folder, task = Path(job["folder"]), TaskSettings(**job["task"])
    if not job["gpu"]:
        torch.set_num_threads(job["threads"])
    source = TaskSource(task, "train")
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    chat = tokenizer.chat_template is not None

    def reward(completions: list[Any], item: list[int], **_: Any) -> list[float]:
        texts = [completion[0]["content"] if chat else completion for completion in completions]
        return [score(task, source.item(i).entry, text).reward for i, text in zip(item, texts, strict=True)]

    optimizer = torch.optim.AdamW(
        model.parameters(), job["lr"], tuple(job["betas"]), weight_decay=job["weight_decay"], fused=True
    )
    # torchtitan's warm-up (components/optimizer/lr_scheduler.py); transformers' warm-up begins with a rate of 0
    warmup = max(1, job["lr_warmup_steps"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    trainer = GRPOTrainer(
        model,
        reward,
        config(job, int(os.environ.get("WORLD_SIZE", "1"))),
        dataset(job, source, chat),
        processing_class=tokenizer,
        callbacks=[Steps(folder / "metrics.jsonl")],
        optimizers=(optimizer, schedule),
    )
    trainer.train()
    trainer.save_model(str(folder / "model"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
