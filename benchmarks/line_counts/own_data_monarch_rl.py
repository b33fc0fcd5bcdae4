"""Rows and a reward of one's own: recipes/own_data.py without its warm start (lines.py counts it)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monarch_rl import (
    Questions,
    RolloutSettings,
    Run,
    RunSettings,
    Task,
    TrainerSettings,
    cli,
    dr_grpo,
    jsonl,
    launch,
)


@dataclass(frozen=True)
class Settings(RunSettings):
    """GRPO on your own rows (see recipes/own_data.py)."""

    model: str = ".cache/tiny-qwen3"
    """Hugging Face folder or Hub name of the model to train."""
    held_out: int = 100
    """Rows that are held out, and played by an evaluation."""
    steps: int = 150
    """Optimiser steps."""
    trainer: TrainerSettings = field(default_factory=lambda: TrainerSettings(lr=3e-4, lr_warmup_steps=5))
    rollout: RolloutSettings = field(default_factory=lambda: RolloutSettings(max_new_tokens=8, concurrent_groups=64))


def reward(row: dict[str, Any], answer: str) -> float:
    return float(answer.strip() == row["backward"])


def task(s: Settings) -> Task:
    rows = jsonl(Path("recipes/words.jsonl"))
    return Questions(rows, reward, template="{word} -> ", held_out=s.held_out)


async def train(run: Run, s: Settings) -> None:
    await run.start(advantage=dr_grpo, objective=s.objective)
    if run.resumed is None:
        await run.evaluate()
    async for _ in run.steps(s.steps):
        await run.step()  # the next batch, one optimiser step, and the new version on its way
    await run.evaluate()


if __name__ == "__main__":
    launch(train, cli(Settings, description=__doc__), task)
