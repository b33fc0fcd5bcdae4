"""On-policy distillation: a teacher scores the student's own samples, token by token.

    python recipes/grpo.py                                                          a run trains the teacher
    python tools/export.py runs/grpo-<date>-<time> .cache/tiny-teacher
    python recipes/distill.py

The student generates rollouts. The teacher, on a frozen engine, computes the log-probs of their tokens while other
groups are rolled out, and the student is trained to minimise the reverse KL divergence at each token
(docs/algorithms.md). The task's reward is only measured, not trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from monarch_rl import (
    Distillation,
    FrozenSettings,
    LossSettings,
    Objective,
    Range,
    ReasoningGym,
    RolloutSettings,
    Run,
    RunSettings,
    Task,
    TaskSettings,
    TrainerSettings,
    cli,
    launch,
    teacher,
)

TASK = TaskSettings(
    name="spell_backward", config='{"min_word_len": 3, "max_word_len": 5}', template="{word} -> ", pass_mark=1.0
)
TRAINER = TrainerSettings(lr=3e-4, lr_warmup_steps=5, loss=LossSettings(aggregation="token_mean"))
ROLLOUT = RolloutSettings(max_new_tokens=8, concurrent_groups=64)


@dataclass(frozen=True)
class Settings(RunSettings):
    """On-policy distillation (see the top of this file)."""

    model: str = ".cache/tiny-qwen3"
    """Hugging Face folder or Hub name of the student."""
    teacher: str = ".cache/tiny-teacher"
    """Hugging Face folder or Hub name of the teacher. It must have the student's tokenizer, and may be larger."""
    frozen: FrozenSettings = field(default_factory=FrozenSettings)
    """The teacher's engines."""
    snapshot_every: Annotated[int, Range(0, 10**9, "0 is never")] = 0
    """Versions after which the teacher loads the student's current weights, for self-distillation: give the student's
    own folder as `teacher`. 0 is never."""
    steps: int = 100
    """Training steps, each on one batch."""
    evaluate_every: int = 20
    """Steps between evaluations; 0 evaluates only before and after training."""
    task: TaskSettings = field(default_factory=lambda: TASK)
    # `--objective ppo_clip` instead uses log teacher - log student as each token's advantage in the policy gradient.
    objective: Objective = field(default_factory=Distillation)
    trainer: TrainerSettings = field(default_factory=lambda: TRAINER)
    rollout: RolloutSettings = field(default_factory=lambda: ROLLOUT)


def task(s: Settings) -> Task:
    return ReasoningGym(s.task)


async def train(run: Run, s: Settings) -> None:
    reader = run.frozen("teacher", s.teacher, s.frozen, snapshot_every=s.snapshot_every)
    # The stage fills the column `teacher`. To train on rewards, too: stages=[reference(reader)], advantage="dr_grpo",
    # --trainer.loss.kl-coefficient 1 --trainer.loss.kl-in reward.
    top = s.objective.top if isinstance(s.objective, Distillation) else 0
    await run.start(advantage="distillation", objective=s.objective, stages=[teacher(reader, top=top)])
    if run.resumed is None:
        await run.evaluate()
    async for step in run.steps(s.steps):
        await run.step()
        await run.evaluate_after(step)
    await run.save()
    await run.evaluate()


if __name__ == "__main__":
    launch(train, cli(Settings, description=__doc__), task)
