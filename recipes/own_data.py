"""GRPO on your own data with your own reward: a file of rows, and a function.

    python recipes/own_data.py

This file is all the code it takes. Rows come from a JSONL or parquet file, a list, or `datasets` (tasks/rows.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from monarch_rl import (
    Questions,
    Range,
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
    """GRPO on your own rows (see the top of this file)."""

    model: str = ".cache/tiny-qwen3"
    """Hugging Face folder or Hub name of the model to train."""
    held_out: int = 100
    """Rows that are held out from training, for evaluations."""
    steps: int = 150
    """Training steps, each on one batch."""
    supervised_steps: Annotated[int, Range(0, 10**9, "0 is none")] = 0
    """Steps on correct answers only, before the first of the `steps`; 0 is none."""
    supervised_share: Annotated[float, Range(0, 0.99, "0 is none")] = 0.0
    """Share of correct answers in each later batch; 0 is none."""
    trainer: TrainerSettings = field(default_factory=lambda: TrainerSettings(lr=3e-4, lr_warmup_steps=5))
    rollout: RolloutSettings = field(default_factory=lambda: RolloutSettings(max_new_tokens=8, concurrent_groups=64))


def reward(row: dict[str, Any], answer: str) -> float:
    return float(answer.strip() == row["backward"])


def task(s: Settings) -> Task:
    rows = jsonl(Path(__file__).with_name("words.jsonl"))
    # An answer is right from a reward of 1 on: evaluations report accuracy, and not only the mean reward.
    return Questions(rows, reward, template="{word} -> ", held_out=s.held_out, success_reward=1.0)


async def train(run: Run, s: Settings) -> None:
    await run.start(advantage=dr_grpo, objective=s.objective)
    if run.resumed is None:
        await run.evaluate()
    rows = [{"prompt": f"{row['word']} -> ", "answer": row["backward"]} for row in map(run.task.items, range(200))]
    if s.supervised_steps:  # on training rows: none of them is held out
        await run.supervised(rows, steps=s.supervised_steps)
    if s.supervised_share:
        await run.mix(rows, share=s.supervised_share)
    async for step in run.steps(s.steps):
        await run.step()  # wait for the next batch, make one optimiser step, start to publish the new version, log
        await run.evaluate_after(step)
    await run.evaluate()


if __name__ == "__main__":
    launch(train, cli(Settings, description=__doc__), task)
