"""The advantage and the objective of a plan are those that train, and where it has none, those of its settings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch

from monarch_rl.algorithms.advantages import dr_grpo, grpo
from monarch_rl.trainer.actor import TrainerPlan, loss_functions
from monarch_rl.trainer.batch import MicroBatch, advantages_of, pack, pack_shard
from monarch_rl.trainer.objective import Sums, supervised
from monarch_rl.trainer.settings import LossSettings, TrainerSettings
from monarch_rl.trainer.token_logprobs import TokenLogprobs
from tests.trainer.batches import MAX_NEW_TOKENS, batch, shard

DEVICE = torch.device("cpu")
PLAN = TrainerPlan(Path("model"), TrainerSettings(1), total_steps=1, temperature=1.0, max_new_tokens=MAX_NEW_TOKENS)


def leave_one_out(rewards: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * (rewards - (rewards.sum() - rewards) / (len(rewards) - 1))


def scaled(factor: float, output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
    loss, sums = supervised(output, batch)
    return factor * loss, sums | {"factor": torch.tensor(factor)}


def test_a_plans_own_advantage_is_the_one_of_every_token() -> None:
    plan = replace(PLAN, advantage=partial(leave_one_out, scale=3.0))
    advantage, _ = loss_functions(cloudpickle.loads(cloudpickle.dumps(plan)))
    part = shard(batch(0), 0, 0, 1, token_budget=50)
    microbatches = pack_shard(part, advantages_of(part.rewards, advantage), "token_mean", MAX_NEW_TOKENS, DEVICE)
    assert len(microbatches) > 1
    for packed, episodes in zip(microbatches, part.microbatches, strict=True):
        expected = []
        for group, place, episode in episodes:
            rewards = part.rewards[group]
            others = np.delete(rewards, place)
            expected += [3.0 * (rewards[place] - others.mean())] * episode.num_trainable
        np.testing.assert_allclose(packed.advantages.numpy(), expected, atol=1e-6)


def test_a_plans_own_objective_is_the_one_that_is_differentiated() -> None:
    def doubled(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:  # as a script would have it
        return scaled(2.0, output, batch)

    plan = replace(PLAN, objective=doubled)
    _, objective = loss_functions(cloudpickle.loads(cloudpickle.dumps(plan)))
    loss, sums = objective(*one_microbatch())
    assert float(loss) == 2.0 * float(supervised(*one_microbatch())[0])
    assert float(sums["factor"]) == 2.0


def test_without_any_the_settings_name_them() -> None:
    for name, function in (("grpo", grpo), ("dr_grpo", dr_grpo)):
        settings = TrainerSettings(1, loss=LossSettings(advantage=name, importance_cap=0.0))  # type: ignore[arg-type]
        advantage, objective = loss_functions(replace(PLAN, settings=settings))
        assert advantage is function
        output, packed = one_microbatch()
        loss, _ = objective(output, packed)
        assert float(loss) == float(-(packed.advantages * packed.weights).sum())  # ratio and weights are 1


def one_microbatch() -> tuple[TokenLogprobs, MicroBatch]:
    """Made-up episodes, and log-probs that a model might give them."""
    episodes = batch(1)[0].episodes
    packed = pack(episodes, torch.arange(4.0), torch.full((4,), 0.5), 1, DEVICE)
    logprobs = packed.behaviour_logprobs - 0.1
    return TokenLogprobs(logprobs, torch.ones_like(logprobs), torch.ones_like(logprobs)), packed


def test_an_advantage_of_another_shape_is_refused_with_its_place() -> None:
    def shortened(rewards: torch.Tensor) -> torch.Tensor:
        return rewards[1:]

    with pytest.raises(
        ValueError, match=r"shortened \(.*test_loss_functions\.py:\d+\) returned shape \[2\] .* of 3 ep"
    ):
        advantages_of([np.zeros(3, np.float32)], shortened)
