"""A policy learns to call a calculator: what a user of monarch_rl writes (lines.py counts it)."""

from __future__ import annotations

import random
from dataclasses import dataclass

from monarch_rl import Policy, Run, RunSettings, Task, cli, dr_grpo, launch, run_tools


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a * b


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def problem(index: int) -> dict[str, str]:
    a, b, c = random.Random(index).choices(range(10, 100), k=3)
    return {"question": f"{a}*{b}+{c}", "answer": str(a * b + c)}


async def episode(item: dict[str, str], policy: Policy) -> float:
    reply = await policy.reply(item["question"], tools=[multiply, add])
    for _ in range(4):
        reply = await policy.reply(await run_tools(reply.tool_calls, [multiply, add])) if reply.tool_calls else reply
    return float(reply.text.strip() == item["answer"])


@dataclass(frozen=True)
class Settings(RunSettings):
    """GRPO with a calculator."""

    model: str = ".cache/tiny-tools"
    """Hugging Face folder or Hub name of the model to train."""
    steps: int = 80
    """Optimiser steps."""


def task(s: Settings) -> Task:
    return Task(problem, episode, {"held_out": [problem(-1 - index) for index in range(s.held_out)]})


async def train(run: Run, s: Settings) -> None:
    await run.start(advantage=dr_grpo, objective=s.objective)
    async for _ in run.steps(s.steps):
        await run.step()
    await run.evaluate()


if __name__ == "__main__":
    launch(train, cli(Settings, description=__doc__), task)
