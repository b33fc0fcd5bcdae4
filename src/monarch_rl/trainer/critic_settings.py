"""What a user sets about the critic; docs/algorithms.md has the formulas."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

from monarch_rl.settings.ranges import CheckedSettings, Range


@dataclass(frozen=True)
class CriticSettings(CheckedSettings, flags="trainer.critic"):
    """A critic on the trainer's devices, which estimates what a sequence will still get: what the advantage `gae` reads
    (PPO, arXiv:1707.06347; GAE, arXiv:1506.02438)."""

    lr: Annotated[float, Range(0, 1, "0 is no critic")] = 0.0
    """AdamW's learning rate of the critic, a model of its own that begins as the policy does; 0 is no critic. 1e-5 is
    verl's, ten times that of the policy. It takes 16 bytes a parameter, shared among the ranks, and two forward passes
    and a backward pass a batch."""
    gamma: Annotated[float, Range(0, 1)] = 1.0
    """With `trainer.loss.advantage gae`: a reward counts gamma times less with each token before it. 1, which counts
    all alike, is the default of TRL and verl."""
    lam: Annotated[float, Range(0, 1)] = 1.0
    """With the same: how far an advantage looks beyond the critic's next value. 1, verl's, takes what was given and
    subtracts the value: no bias; less is less noisy, and as biased as the critic (TRL has 0.95)."""
    clip: Annotated[float, Range(0, 1_000_000, "0 is off")] = 0.2
    """How far an update may move the value of a token from the value at the start of the batch, in units of the reward
    (0.2 in TRL, as in OpenAI's PPO; verl has 0.5); 0 is off. It matters with several updates a batch."""
    warmup: Annotated[int, Range(0, 10**9)] = 0
    """First batches from which only the critic learns, and the policy stays as it is: a critic that knows
    nothing yet adds noise (arXiv:2503.01491). 0 is verl's."""

    @property
    def enabled(self) -> bool:
        """Whether there is a critic."""
        return self.lr > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enabled:
            return
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                raise ValueError(
                    f"{self.flag(field.name)} {getattr(self, field.name)}: there is no critic. Give trainer.critic.lr, "
                    "such as 1e-5, or leave it out"
                )


NO_CRITIC = CriticSettings()
