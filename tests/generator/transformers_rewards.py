"""transformers' rewards of given sequences. Run by :mod:`tests.generator.transformers_server`."""

from __future__ import annotations

import torch
from transformers import AutoModelForSequenceClassification


def answer(folders: list[str], asked: list[list[list[int]]]) -> list[list[float]]:
    """``asked``: for each sequence a list with its ids alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folders[0], dtype=torch.float32).eval()
    return [model(torch.tensor([ids])).logits[0].tolist() for (ids,) in asked]
