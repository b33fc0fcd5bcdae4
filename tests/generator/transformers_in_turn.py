"""transformers' log-probs of tokens that several versions drew in turn: each version reads the keys and values that the
ones before it left. Run by :mod:`tests.generator.transformers_server`.
"""

from __future__ import annotations

from itertools import groupby

import torch
from transformers import AutoModelForCausalLM, DynamicCache


def answer(folders: list[str], asked: list[list[list[int]]]) -> list[list[float]]:
    """``asked``: prompt ids, drawn ids, and for each drawn token the number of the folder that drew it."""
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
    answers = []
    for prompt, drawn, drew in asked:
        # A position is read by the version that draws the token after it; the last token is read by none.
        ids, readers = prompt + drawn[:-1], [drew[0]] * (len(prompt) - 1) + drew
        past, start, rows = DynamicCache(), 0, []
        for reader, run in groupby(readers):
            end = start + len(list(run))
            rows.append(models[reader](torch.tensor([ids[start:end]]), past_key_values=past).logits[0])
            start = end
        logprobs = torch.cat(rows)[len(prompt) - 1 :].log_softmax(-1)
        answers.append(logprobs.gather(1, torch.tensor(drawn)[:, None])[:, 0].tolist())
    return answers
