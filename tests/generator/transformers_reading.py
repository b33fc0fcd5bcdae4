"""How transformers reads sequences: the experts of each token, and the log-probs of all ids after it.

Each reader continues from the keys and values left by the readers before it. Run by
:mod:`tests.generator.transformers_server`.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache


def answer(folders: list[str], asked: list[list[list[int]]]) -> list[list[Any]]:
    """``asked``: ids, and for each the number of the folder that reads it.

    Returns:
        For each sequence ``[experts [tokens, layers, k], sorted, or [] without experts, log-probs [tokens,
        vocabulary]]``.
    """
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
    k = getattr(models[0].config, "num_experts_per_tok", 0)
    answers = []
    for ids, readers in asked:
        past, start, experts, logits = DynamicCache(), 0, [], []
        for reader, run in groupby(readers):
            end = start + len(list(run))
            more = {"output_router_logits": True} if k else {}
            read = models[reader](torch.tensor([ids[start:end]]), past_key_values=past, **more)
            logits.append(read.logits[0])
            if k:
                experts.append(torch.stack([layer.topk(k).indices.sort().values for layer in read.router_logits], 1))
            start = end
        expert_routes = torch.cat(experts).tolist() if experts else []
        answers.append([expert_routes, torch.cat(logits).log_softmax(-1).tolist()])
    return answers
