"""A short run that is made sick in one way, for benchmarks/diagnose.py: recipes/own_data.py with a fault.

python benchmarks/diagnose_recipe.py --sick wrong
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from monarch_rl import (
    Questions,
    RolloutSettings,
    Run,
    RunSettings,
    Stage,
    Task,
    TrainerSettings,
    cli,
    dr_grpo,
    jsonl,
    launch,
)

Sickness = Literal[
    "wrong",  # every answer gets 0
    "cut",  # answers have room for 2 tokens only
    "format",  # a part of the reward is never earned
    "gaming",  # the reward is the number of letters, not the right ones
    "entropy",  # steps so large that the policy soon answers alike
    "mismatch",  # the log-probs are not those of the policy that sampled
    "small",  # steps too small for bfloat16
    "few",  # 5 rows
    "clipped",  # a clip range of 1e-4, in 4 passes over each batch
    "failing",  # most rewards raise
    "noisy",  # 6 held-out items, and steps too small to learn much
    "waiting",  # the trainer waits for slow rewards
]


@dataclass(frozen=True)
class Settings(RunSettings):
    """A sick run (see the top of this file)."""

    sick: Sickness = "wrong"
    """The fault."""
    model: str = ".cache/tiny-qwen3"
    """Hugging Face folder or Hub name of the model to train."""
    held_out: int = 100
    """Rows that are held out from training, for evaluations."""
    trainer: TrainerSettings = field(default_factory=lambda: TrainerSettings(lr=3e-4, lr_warmup_steps=5))
    rollout: RolloutSettings = field(default_factory=lambda: RolloutSettings(max_new_tokens=8, concurrent_groups=64))


def right(row: dict[str, Any], answer: str) -> float:
    return float(answer.strip() == row["backward"])


def wrong(row: dict[str, Any], answer: str) -> float:
    return 0.0


def with_format(row: dict[str, Any], answer: str) -> dict[str, float]:
    return {"right": right(row, answer), "format": float(answer.startswith("<answer>"))}


def letters(row: dict[str, Any], answer: str) -> float:
    return min(len(answer.strip()), 16) / 16


def failing(row: dict[str, Any], answer: str) -> float:
    if row["word"][0] > "d":
        raise KeyError(f"no answer of {row['word']}")
    return right(row, answer)


async def slow(row: dict[str, Any], answer: str) -> float:
    await asyncio.sleep(10)
    return right(row, answer)


REWARDS = {"wrong": wrong, "format": with_format, "gaming": letters, "failing": failing, "waiting": slow}


async def disturb(item: Any, group: Any) -> None:
    for episode in group.episodes:
        for turn in episode.turns:
            noise = np.random.default_rng(len(turn.logprobs)).normal(0, 1, len(turn.logprobs))
            turn.logprobs = np.where(turn.trainable, np.minimum(turn.logprobs + noise, 0), 0).astype(np.float32)


def task(s: Settings) -> Task:
    rows = list(jsonl(Path(__file__).parents[1] / "recipes" / "words.jsonl"))
    held_out: Any = s.held_out
    if s.sick == "few":
        rows, held_out = rows[:5], {"held_out": rows[5 : 5 + s.held_out]}
    reward: Any = REWARDS.get(s.sick, right)
    return Questions(rows, reward, template="{word} -> ", held_out=held_out, success_reward=1.0)


async def train(run: Run, s: Settings) -> None:
    stages = [Stage(disturb)] if s.sick == "mismatch" else []
    await run.start(advantage=dr_grpo, objective=s.objective, stages=stages)
    await run.evaluate()
    async for step in run.steps(s.steps):
        await run.step()
        await run.evaluate_after(step)
    await run.evaluate()


if __name__ == "__main__":
    launch(train, cli(Settings, description=__doc__), task)
