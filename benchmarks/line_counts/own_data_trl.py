"""Rows and a reward of one's own: what a user of TRL 1.16.0 writes (lines.py counts it)."""

from __future__ import annotations

from typing import Any

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def prompted(row: dict[str, Any]) -> dict[str, str]:
    return {"prompt": f"{row['word']} -> "}


def reward(completions: list[str], backward: list[str], **_: Any) -> list[float]:
    return [float(text.strip() == right) for text, right in zip(completions, backward, strict=True)]


if __name__ == "__main__":
    rows = load_dataset("json", data_files="recipes/words.jsonl", split="train").map(prompted)
    parts = rows.train_test_split(test_size=100, seed=0)
    config = GRPOConfig(
        output_dir="runs", max_steps=150, learning_rate=3e-4, max_completion_length=8, eval_strategy="steps"
    )
    trainer = GRPOTrainer(
        model=".cache/tiny-qwen3",
        reward_funcs=reward,
        args=config,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
    )
    trainer.train()
