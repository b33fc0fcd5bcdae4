"""A policy learns to call a calculator: what a user of TRL 1.16.0 writes (lines.py counts it)."""

from __future__ import annotations

import random
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a * b


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def problem(index: int) -> dict[str, str]:
    a, b, c = random.Random(index).choices(range(10, 100), k=3)
    return {"question": f"{a}*{b}+{c}", "answer": str(a * b + c)}


def rows(indices: range) -> Dataset:
    problems = map(problem, indices)
    return Dataset.from_list([row | {"prompt": [{"role": "user", "content": row["question"]}]} for row in problems])


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [float(said[-1]["content"].strip() == right) for said, right in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    config = GRPOConfig(
        output_dir="runs", max_steps=80, learning_rate=3e-4, max_tool_calling_iterations=4, eval_strategy="steps"
    )
    trainer = GRPOTrainer(
        model=".cache/tiny-tools",
        reward_funcs=reward,
        args=config,
        train_dataset=rows(range(20_000)),
        eval_dataset=rows(range(-200, 0)),
        tools=[multiply, add],
    )
    trainer.train()
