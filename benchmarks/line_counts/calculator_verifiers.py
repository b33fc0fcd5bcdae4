"""A policy learns to call a calculator: what an author of an environment of verifiers 0.1.10 writes, without training
(lines.py counts it)."""

from __future__ import annotations

import random
from typing import Any

import verifiers as vf
from datasets import Dataset


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
    return Dataset.from_list([problem(index) for index in indices])


def right(completion: list[Any], answer: str) -> float:
    return float(completion[-1]["content"].strip() == answer)


def load_environment() -> vf.Environment:
    rubric, tools = vf.Rubric(funcs=[right]), [multiply, add]
    held_out = rows(range(-200, 0))
    return vf.ToolEnv(tools=tools, max_turns=5, dataset=rows(range(20_000)), eval_dataset=held_out, rubric=rubric)
