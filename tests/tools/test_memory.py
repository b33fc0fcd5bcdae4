"""What tools/memory.py prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.memory import MODELS, Options, main, sizes_of, table

ROOT = Path(__file__).parents[2]
BILLIONS = {
    "Qwen3-0.6B": 0.6,
    "Qwen3-1.7B": 1.72,
    "Qwen3-4B": 4.0,
    "Qwen3-8B": 8.2,
    "Llama-3.1-8B": 8.0,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235,
}
"""As the models' cards on the Hugging Face Hub give them."""


@pytest.mark.parametrize("name", MODELS)
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert sizes_of(MODELS[name]).elements / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_the_table_of_the_docs_is_the_one_that_is_printed() -> None:
    assert table(Options().sides) in (ROOT / "docs" / "memory.md").read_text(), "print it anew: tools/memory.py"


def test_one_model_by_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    main(Options(model="Qwen3-1.7B", colocate=True))
    printed = capsys.readouterr().out
    assert "| optimiser states | 12.8" in printed and "KV cache then has" in printed
    with pytest.raises(SystemExit, match="does not fit"):
        main(Options(model="Qwen3-8B", colocate=True))
    assert "| optimiser states | 61." in capsys.readouterr().out
