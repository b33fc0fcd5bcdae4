"""Asynchronous PPO: like grpo.py, but a critic estimates the return of the rest of each sequence, token by token.

    python recipes/ppo.py
    python recipes/ppo.py --trainer.critic.lam 0.95 --trainer.critic.warmup 10

The critic is a second model of the policy's size on the trainer's devices. It is worth its memory where credit per
token matters: in long conversations and with rewards of turns (docs/algorithms.md#a-critic).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import grpo

from monarch_rl import CriticSettings, LossSettings, TrainerSettings, cli, launch


@dataclass(frozen=True)
class Trainer(TrainerSettings, flags="trainer"):
    """The trainer mesh, its optimiser (torchtitan's), its micro-batches and its critic."""

    critic: CriticSettings = CriticSettings(lr=1e-5)
    """The critic, which the advantage `gae` needs."""


# The tiny model's rates: a larger model needs far lower ones (verl: 1e-6 for the policy, 1e-5 for the critic).
TRAINER = Trainer(lr=3e-4, lr_warmup_steps=5, critic=CriticSettings(lr=1e-3), loss=LossSettings(advantage="gae"))


@dataclass(frozen=True)
class Settings(grpo.Settings):
    """Asynchronous PPO (see the top of this file)."""

    trainer: Trainer = field(default_factory=lambda: TRAINER)


if __name__ == "__main__":
    launch(grpo.train, cli(Settings, description=__doc__), grpo.task)
