"""transformers' log-probs of given tokens. Run by :mod:`tests.generator.transformers_server`."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM


def answer(folders: list[str], asked: list[list[list[int]]]) -> list[list[float]]:
    """``folders``: a model, and an adapter if there is one; ``asked``: prompt ids and sampled ids."""
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
    if len(folders) > 1:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folders[1]).eval()
    answers = []
    for prompt, sampled in asked:
        logprobs = model(torch.tensor([prompt + sampled])).logits[0].log_softmax(-1)
        answers.append(logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist())
    return answers
