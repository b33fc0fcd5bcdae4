"""Self-play: one model plays both sides of a game, and learns from wins and losses.

    python tools/make_tiny_model.py --output .cache/tiny-digits --task.name count_bits \\
        --task.config '{"max_n": 400}' --task.template '{number} -> ' --task.held-out-size 20
    python recipes/game.py

Nim: two players take turns to remove one to three stones, and the player who takes the last one wins. Each side is a
seat of the policy, with its own conversation, reward and advantage. Evaluations play against the initial model.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from monarch_rl import (
    BySeat,
    FrozenModel,
    LossSettings,
    Policy,
    Range,
    RolloutSettings,
    Run,
    RunSettings,
    Task,
    TrainerSettings,
    cli,
    dr_grpo,
    launch,
)

SEATS = ("first", "second")
TRAINER = TrainerSettings(lr=3e-4, lr_warmup_steps=5, loss=LossSettings(max_tokens=12))
ROLLOUT = RolloutSettings(max_new_tokens=2, concurrent_groups=32)


@dataclass(frozen=True)
class Settings(RunSettings):
    """Self-play of Nim (see the top of this file)."""

    model: str = ".cache/tiny-digits"
    """Hugging Face folder or Hub name of the model to train."""
    steps: int = 200
    """Training steps, each on one batch."""
    groups_per_step: int = 16
    """Games per batch, with different numbers of stones. Each is played rollout.group-size times."""
    evaluate_every: int = 20
    """Steps between evaluations; 0 evaluates only before and after training."""
    held_out: int = 136
    """Evaluation games against the initial model. With 136 each number of stones is played four times from each side.
    """
    stones: Annotated[int, Range(4, 1000)] = 20
    """Maximum number of stones in a game."""
    trainer: TrainerSettings = field(default_factory=lambda: TRAINER)
    rollout: RolloutSettings = field(default_factory=lambda: ROLLOUT)


async def play(game: dict[str, Any], policy: Policy, start: FrozenModel) -> dict[str, float]:
    """Play one game. ``game["start"]`` is the seat of the initial model; it is empty in self-play."""
    own = [seat for seat in SEATS if seat != game["start"]]
    players: dict[str, Any] = {seat: policy.seat(seat) for seat in own}
    if game["start"]:
        players[game["start"]] = start.conversation()
    stones = game["stones"]
    for seat in itertools.cycle(SEATS):
        move = await players[seat].reply(f"{stones} -> ", temperature=1.0 if seat == game["start"] else None)
        stones -= {"2": 2, "3": 3}.get(move.text, 1)  # an invalid move takes one stone
        if stones <= 0:
            return {player: 1.0 if player == seat else -1.0 for player in own}
    raise AssertionError


def task(s: Settings, start: FrozenModel) -> Task:
    def game(cursor: int) -> dict[str, Any]:
        return {"stones": 4 + cursor % (s.stones - 3), "start": ""}

    held_out = [game(cursor) | {"start": seat} for _ in range(4) for cursor in range(s.stones - 3) for seat in SEATS]
    return Task(game, partial(play, start=start), {"start": held_out}, name="nim", success_reward=1.0)


async def train(run: Run, s: Settings) -> None:
    start = run.frozen("start", s.model)
    # Each seat is compared with the same seat in the other games with the same number of stones. The alternative is
    # SeatBaselines(), a running mean of each seat's rewards (RAE, arXiv:2506.24119).
    await run.start(task(s, start), advantage=BySeat(dr_grpo), objective=s.objective)
    if run.resumed is None:
        await run.evaluate()
    async for step in run.steps(s.steps):
        await run.step()
        if s.evaluates_after(step):
            await run.evaluate()  # accuracy: the share of games won against the initial model
    await run.evaluate()


if __name__ == "__main__":
    launch(train, cli(Settings, description=__doc__))
