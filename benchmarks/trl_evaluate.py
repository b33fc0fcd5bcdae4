"""Held-out accuracy of a saved model, greedily, by transformers: ``trl_evaluate.py JOB.json MODEL...``

The same program for the models of both sides, with the tokenizer of the model from which both started. The last line is
JSON: accuracy (share of items with the full reward) and mean reward of each model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.messages import user
from monarch_rl.tasks.reasoning_gym import TaskSettings, TaskSource, score

BATCH = 50


def answer(model: Any, template: ChatTemplate, prompts: list[str], new_tokens: int) -> list[str]:
    """Return the model's greedy answers; prompts are padded on the left so that all answers start at one position."""
    ids = [template.opening([user(prompt)]) for prompt in prompts]
    width, stops = max(map(len, ids)), list(template.stop_token_ids)
    padded = torch.tensor([[stops[0]] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    generated = model.generate(
        input_ids=padded,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=stops,
        pad_token_id=stops[0],
    )
    return [template.plain(row) for row in generated[:, width:].tolist()]


def main(job: dict[str, Any], folders: list[str]) -> None:
    task, template = TaskSettings(**job["task"]), ChatTemplate(job["model"])
    source = TaskSource(task, "held_out")
    items = [source.item(index) for index in range(job["held_out"])]
    results = []
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        texts: list[str] = []
        for first in range(0, len(items), BATCH):
            prompts = [item.prompt for item in items[first : first + BATCH]]
            texts += answer(model, template, prompts, job["max_new_tokens"])
        rewards = [score(task, item.entry, text).reward for item, text in zip(items, texts, strict=True)]
        right = sum(reward >= 1 for reward in rewards)
        results.append({"accuracy": right / len(rewards), "reward": sum(rewards) / len(rewards)})
    print(json.dumps(results))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:])
