"""Prints transformers' log-probs of given tokens, as JSON. A program of its own: SGLang patches transformers.

python transformers_logprobs.py FOLDER [ADAPTER] < [[prompt ids, drawn ids], ...]
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    if len(sys.argv) > 2:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, sys.argv[2]).eval()
    answers = []
    with torch.no_grad():
        for prompt, drawn in json.load(sys.stdin):
            logprobs = model(torch.tensor([prompt + drawn])).logits[0].log_softmax(-1)
            taken = logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(drawn)[:, None])[:, 0]
            answers.append(taken.tolist())
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
