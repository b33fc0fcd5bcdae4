"""transformers' log-probs of tokens that several versions sampled in turn: each version reads the keys and values left
by the versions before it. Run by :mod:`tests.generator.transformers_server`.
"""

from __future__ import annotations

from itertools import groupby

import torch
from transformers import AutoModelForCausalLM, DynamicCache


def answer(folders: list[str], asked: list[list[list[int]]]) -> list[list[float]]:
    """``asked``: prompt ids, sampled ids, and for each sampled token the number of the folder that sampled it."""
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
    answers = []
    for prompt, sampled, samplers in asked:
        # A position is read by the version that samples the token after it; the last token is read by none.
        ids, readers = prompt + sampled[:-1], [samplers[0]] * (len(prompt) - 1) + samplers
        past, start, rows = DynamicCache(), 0, []
        for reader, run in groupby(readers):
            end = start + len(list(run))
            rows.append(models[reader](torch.tensor([ids[start:end]]), past_key_values=past).logits[0])
            start = end
        logprobs = torch.cat(rows)[len(prompt) - 1 :].log_softmax(-1)
        answers.append(logprobs.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist())
    return answers
