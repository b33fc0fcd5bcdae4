"""Tokenizers are compared by the meaning of their ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monarch_rl.model.tokens import tokenizer_difference
from tests.model.chat_helpers import write_model


def test_folders_with_the_same_ids_are_equal_whatever_else_differs(tmp_path: Path) -> None:
    one = Path(write_model(tmp_path / "one", "qwen3"))
    same = Path(write_model(tmp_path / "same", "qwen3", source="{{ messages[0]['content'] }}"))
    assert tokenizer_difference(one, same) == ""
    file = same / "tokenizer.json"
    content = json.loads(file.read_text())
    content["decoder"] = None
    file.write_text(json.dumps(content, indent=1))
    assert file.read_bytes() != (one / "tokenizer.json").read_bytes()
    assert tokenizer_difference(one, same) == ""


def test_a_difference_names_tokens_and_ids(tmp_path: Path) -> None:
    one = Path(write_model(tmp_path / "one", "qwen3"))
    other = Path(write_model(tmp_path / "other", "qwen3"))
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    file.write_text(json.dumps(content))
    here, there = vocabulary["B"], vocabulary["A"]
    difference = tokenizer_difference(one, other)
    assert difference.startswith(f"2 tokens differ: 'A' is {here} in {one} and {there} in {other}, 'B' is")
    llama = Path(write_model(tmp_path / "llama", "llama3"))
    assert "tokens differ" in tokenizer_difference(one, llama)


def test_a_missing_token_is_a_difference(tmp_path: Path) -> None:
    one = Path(write_model(tmp_path / "one", "qwen3"))
    more = Path(write_model(tmp_path / "more", "qwen3"))
    file = more / "tokenizer.json"
    content = json.loads(file.read_text())
    highest = max(entry["id"] for entry in content["added_tokens"])
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": highest + 1, "content": "<extra>"})
    file.write_text(json.dumps(content))
    assert tokenizer_difference(one, more) == f"1 tokens differ: '<extra>' is only in {more}"
    (more / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer.json"):
        tokenizer_difference(one, more)
