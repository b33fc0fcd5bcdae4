"""Prints how transformers reads sequences, as JSON: the experts of each token, and the log-probs of all ids after it. A
program of its own: SGLang patches transformers.

python transformers_reading.py FOLDER... < [[ids, [number of the folder that reads each token]], ...]

Each reader goes on from the keys and values that the ones before it left. The answer is ``[[experts [tokens, layers,
k], sorted, or [] without experts, log-probs [tokens, vocabulary]], ...]``.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby

import torch
from transformers import AutoModelForCausalLM, DynamicCache


def main() -> None:
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in sys.argv[1:]]
    k = getattr(models[0].config, "num_experts_per_tok", 0)
    answers = []
    with torch.no_grad():
        for ids, readers in json.load(sys.stdin):
            past, start, experts, logits = DynamicCache(), 0, [], []
            for reader, run in groupby(readers):
                end = start + len(list(run))
                more = {"output_router_logits": True} if k else {}
                read = models[reader](torch.tensor([ids[start:end]]), past_key_values=past, **more)
                logits.append(read.logits[0])
                if k:
                    experts.append(
                        torch.stack([layer.topk(k).indices.sort().values for layer in read.router_logits], 1)
                    )
                start = end
            expert_routes = torch.cat(experts).tolist() if experts else []
            answers.append([expert_routes, torch.cat(logits).log_softmax(-1).tolist()])
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
