"""Asynchronous GRPO of a mixture of experts, with expert parallelism, replayed expert routes and sampling masks.

    python tools/make_tiny_model.py --kind moe && python recipes/grpo_moe.py

The loop is that of grpo.py. Experts are divided among trainer ranks (trainer.expert-parallel). Each token is trained
with the experts that the engine chose for it (trainer.router-replay replay), and with probabilities over the tokens
that the engine could sample there (rollout.keep-sampling-mask): docs/moe.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import grpo

from monarch_rl import RolloutSettings, TrainerSettings, cli, launch

TRAINER = TrainerSettings(lr=3e-4, lr_warmup_steps=5, expert_parallel=2, router_replay="replay")
ROLLOUT = RolloutSettings(max_new_tokens=8, concurrent_groups=64, top_k=20, top_p=0.95, keep_sampling_mask=True)


@dataclass(frozen=True)
class Settings(grpo.Settings):
    """Asynchronous GRPO of a mixture of experts (see the top of this file)."""

    model: str = ".cache/tiny-qwen3-moe"
    """Hugging Face folder or Hub name of the model to train (Qwen3-MoE)."""
    trainer: TrainerSettings = field(default_factory=lambda: TRAINER)
    rollout: RolloutSettings = field(default_factory=lambda: ROLLOUT)


if __name__ == "__main__":
    launch(grpo.train, cli(Settings, description=__doc__), grpo.task)
