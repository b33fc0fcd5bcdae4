"""Prints transformers' log-probs of tokens that several versions drew in turn, as JSON: each version reads the keys and
values that the ones before it left. A program of its own: SGLang patches transformers.

python transformers_in_turn.py FOLDER... < [[prompt ids, drawn ids, [number of the folder that drew each token]], ...]
"""

from __future__ import annotations

import json
import sys
from itertools import groupby

import torch
from transformers import AutoModelForCausalLM, DynamicCache


def main() -> None:
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in sys.argv[1:]]
    answers = []
    with torch.no_grad():
        for prompt, drawn, drew in json.load(sys.stdin):
            # A position is read by the version that draws the token after it; the last token is read by none.
            ids, readers = prompt + drawn[:-1], [drew[0]] * (len(prompt) - 1) + drew
            past, start, rows = DynamicCache(), 0, []
            for reader, run in groupby(readers):
                end = start + len(list(run))
                rows.append(models[reader](torch.tensor([ids[start:end]]), past_key_values=past).logits[0])
                start = end
            logprobs = torch.cat(rows)[len(prompt) - 1 :].log_softmax(-1)
            answers.append(logprobs.gather(1, torch.tensor(drawn)[:, None])[:, 0].tolist())
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
