"""Rows and a reward of one's own: what an author of an environment of verifiers 0.1.10 writes, without training
(lines.py counts it)."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import load_dataset


def asked(row: dict[str, Any]) -> dict[str, str]:
    return {"question": f"{row['word']} -> ", "answer": row["backward"]}


def right(completion: list[Any], answer: str) -> float:
    return float(completion[-1]["content"].strip() == answer)


def load_environment() -> vf.Environment:
    rows = load_dataset("json", data_files="recipes/words.jsonl", split="train").map(asked)
    parts = rows.train_test_split(test_size=100, seed=0)
    return vf.SingleTurnEnv(dataset=parts["train"], eval_dataset=parts["test"], rubric=vf.Rubric(funcs=[right]))
