"""recipes/own_data.py with one frozen model, the initial policy, as judge and teacher of every episode."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2] / "recipes"))

import own_data  # noqa: E402

from monarch_rl.algorithms.advantages import dr_grpo  # noqa: E402
from monarch_rl.generator.frozen import FrozenSettings  # noqa: E402
from monarch_rl.pipeline.run import Run, launch  # noqa: E402
from monarch_rl.rollout.teachers import reference  # noqa: E402
from monarch_rl.settings.cli import cli  # noqa: E402
from monarch_rl.tasks.task import Policy  # noqa: E402

IDS = [5, 6, 7, 8, 9, 10, 11, 12]
LOADED_AFTER = 2
"""Steps after which the judge loads the weights of the current policy."""


@dataclass(frozen=True)
class Settings(own_data.Settings):
    """Settings of a small run."""

    judge: FrozenSettings = field(default_factory=lambda: FrozenSettings(max_total_tokens=4096, max_new_tokens=4))


async def train(run: Run, s: Settings) -> None:
    judge = run.frozen("judge", s.model, s.judge)

    async def episode(item: Any, policy: Policy) -> dict[str, float]:
        reply = await policy.reply(f"{item['word']} -> ")
        verdict = await judge.reply(f"{item['word']} -> {reply.text}")
        logprobs = await judge.logprobs(reply.token_ids, temperature=0.7)
        assert logprobs.shape == (len(reply.token_ids),) and np.isfinite(logprobs).all()
        return {"length": len(verdict.text) / 8, "likely": float(np.exp(logprobs.mean()))}

    task = own_data.task(s).with_episode(episode, success_reward=1.0)
    await run.start(task, advantage=dr_grpo, objective=s.objective, stages=[reference(judge)])
    expected = first = await judge.logprobs(IDS)
    async for step in run.steps(s.steps):
        await run.step()
        if step == LOADED_AFTER:
            await run.save()
            assert run.saved is not None
            await run.load_frozen(judge, run.saved)
            expected = await judge.logprobs(IDS)
            assert np.abs(expected - first).max() > 1e-3, "the policy did not change"
        assert np.abs(await judge.logprobs(IDS) - expected).max() < 1e-4, "a restarted engine has other weights"


if __name__ == "__main__":
    launch(train, cli(Settings))
