"""Output of tools/memory.py."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.weights.transport import TransferSettings
from tools.memory import MODELS, Options, Trainer, device_bytes, fewest, main, sizes_of, table

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
"""Billions of parameters according to the model cards on the Hugging Face Hub."""


@pytest.mark.parametrize("name", MODELS)
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert sizes_of(MODELS[name]).elements / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_the_table_of_the_docs_is_the_one_that_is_printed() -> None:
    assert table(Options().sides) in (ROOT / "docs" / "memory.md").read_text(), (
        "update it with the output of tools/memory.py"
    )


def test_one_model_by_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(Options(model="Qwen3-1.7B", colocate=True)) == 0
    printed = capsys.readouterr().out
    assert "| optimiser states | 12.8" in printed and "KV cache then has" in printed
    assert main(Options(model="Qwen3-8B", colocate=True)) == 1
    printed, error = capsys.readouterr()
    assert "| optimiser states | 61." in printed and error == "it does not fit\n"


@pytest.mark.parametrize(
    "options, message",
    [
        (Options(model="Qwen/Qwen3-8B"), "model Qwen/Qwen3-8B .*Qwen3-0.6B"),
        (Options(model=str(ROOT / "tests")), "tests .*config.json"),
        (
            Options(model="Qwen3-30B-A3B", trainer=Trainer(ranks=2, tp=2)),
            "trainer.tp 2",
        ),
        (Options(model="Qwen3-8B", trainer=Trainer(ranks=2, expert_parallel=2)), "expert-parallel 2"),
        (Options(model="Qwen3-8B", generator=GeneratorSettings(tp=3)), "generator.tp 3"),
        (Options(model="Qwen3-8B", generator=GeneratorSettings(context_length=50_000)), "context-length 50000"),
        (Options("Qwen3-8B", weights=TransferSettings("collective"), colocate=True), "collective.*colocate"),
        (Options(colocate=True), "model"),
    ],
)
def test_settings_that_a_run_refuses_are_not_planned(options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        main(options)


def test_a_mistake_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["memory.py", "--model", "Qwen3-9B"])
    monkeypatch.setenv("PATH", os.environ["PATH"])  # the program extends it
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / "memory.py"), run_name="__main__")
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "error: model Qwen3-9B" in error and "Traceback" not in error


def test_the_table_leaves_out_settings_that_a_run_refuses() -> None:
    """It refuses tensor-parallel trainer ranks for a mixture of experts, and fewer ranks than tensor-parallel parts."""
    experts, dense = (
        fewest(MODELS[name], Options(trainer=Trainer(ranks=2, tp=2)).sides, device_bytes(141))
        for name in ("Qwen3-30B-A3B", "Qwen3-0.6B")
    )
    assert experts[0] == "-" != experts[1] and dense[0].startswith("2 x ")
