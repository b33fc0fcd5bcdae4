"""Learn to use tools: a tiny model cannot compute 23*47+58 itself, but a calculator does it in two calls.

    python tools/make_tiny_model.py --recipe recipes/tools.py --steps 200 --output .cache/tiny-tools
    python recipes/tools.py

The first command trains a tiny model on demonstrations. At each call they stop and guess with probability 1/3, so the
model often guesses, too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from monarch_rl import (
    EvaluationSettings,
    Message,
    Outcome,
    Policy,
    RolloutSettings,
    Run,
    RunSettings,
    Task,
    TrainerSettings,
    assistant,
    cli,
    dr_grpo,
    launch,
    run_tools,
    tool,
    user,
)


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


TOOLS = [multiply, add]
ROLLOUT = RolloutSettings(max_new_tokens=28, concurrent_groups=32, tool_parser="pythonic")
Numbers = tuple[int, int, int]


def problem(index: int) -> Numbers:
    """The numbers a, b and c of problem a*b+c. All indices below 729,000 give different problems."""
    number = index * 450_539 % 729_000
    return 10 + number // 8100, 10 + number // 90 % 90, 10 + number % 90


def demonstration(index: int) -> list[Message]:
    """A conversation that shows the format, for tools/make_tiny_model.py."""
    (a, b, c), rng = problem(3 * index + 2), random.Random(index)
    messages = [user(f"{a}*{b}+{c}")]
    for call, result in ((f"multiply(a={a},b={b})", a * b), (f"add(a={a * b},b={c})", a * b + c)):
        if rng.random() < 1 / 3:
            break
        messages += [assistant(f"[{call}]"), tool(str(result))]
    return [*messages, assistant(str(a * b + c))]


async def episode(item: Numbers, policy: Policy) -> Outcome:
    (a, b, c), rounds = item, 0
    reply = await policy.reply(f"{a}*{b}+{c}", tools=TOOLS)
    while reply.tool_calls and rounds < 4:
        reply, rounds = await policy.reply(await run_tools(reply.tool_calls, TOOLS)), rounds + 1
    return Outcome(float(reply.text.strip() == str(a * b + c)), {"rounds_of_calls": rounds})


@dataclass(frozen=True)
class Settings(RunSettings):
    """Learn to use tools (see the top of this file)."""

    model: str = ".cache/tiny-tools"
    """Hugging Face folder or Hub name of the model to train."""
    steps: int = 30
    """Training steps, each on one batch."""
    groups_per_step: int = 16
    """Problems per batch. Each is rolled out rollout.group-size times."""
    trainer: TrainerSettings = field(default_factory=lambda: TrainerSettings(lr=3e-4, lr_warmup_steps=5))
    rollout: RolloutSettings = field(default_factory=lambda: ROLLOUT)
    # Sampled as in training: with greedy decoding, a policy that calls in 51 of 100 cases would always call.
    evaluation: EvaluationSettings = field(default_factory=lambda: EvaluationSettings(temperature=1.0))


def task(s: Settings) -> Task:
    held_out = [problem(3 * index + 1) for index in range(s.held_out)]
    sets = {"held_out": held_out}
    return Task(lambda cursor: problem(3 * cursor), episode, sets, name="calculator", success_reward=1.0)


async def train(run: Run, s: Settings) -> None:
    await run.start(advantage=dr_grpo, objective=s.objective)
    if run.resumed is None:
        await run.evaluate()
    async for step in run.steps(s.steps):
        await run.step()
        await run.evaluate_after(step)
    await run.evaluate()


if __name__ == "__main__":
    launch(train, cli(Settings, description=__doc__), task)
