"""Loads a run's model with transformers alone, generates, and compares: ``load_saved.py START SAVED``, prints JSON.

The process must import neither the engine's libraries nor the trainer's, so that loading cannot depend on them.
"""

from __future__ import annotations

import json
import re
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

STRANGER = re.compile(r"(sglang|torchtitan|monarch)$|monarch_rl\.(?!(runtime|moved|errors)(\.|$))")
"""Modules that must not be loaded; of this project, only the modules of the fork server may be."""
PROMPT = "Spell this word backward (example: sun -> nus): cat"


def main() -> None:
    start, saved = (AutoModelForCausalLM.from_pretrained(folder) for folder in sys.argv[1:])
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
    inputs = tokenizer(PROMPT, return_tensors="pt")
    generated = saved.generate(inputs.input_ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    before, after = start.state_dict(), saved.state_dict()
    report = {
        "same_tensors": {name: t.shape for name, t in before.items()} == {name: t.shape for name, t in after.items()},
        "same_dtype": start.dtype == saved.dtype,
        "largest_change": max(float((after[name] - before[name]).abs().max()) for name in before),
        "prompt": tokenizer.decode(inputs.input_ids[0]),
        "new_tokens": generated.shape[1] - inputs.input_ids.shape[1],
        "strangers": sorted(name for name in sys.modules if STRANGER.match(name)),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
