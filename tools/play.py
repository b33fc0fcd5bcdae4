"""Runs episodes of a recipe without a trainer, and prints them: the messages, coloured by role, and the rewards.

    python tools/play.py recipes/own_data.py --episodes 3
    python tools/play.py recipes/grpo.py --model .cache/tiny-qwen3 --task.name spell_backward

The recipe's own flags follow. Its initial model (`--model`) runs in a real engine, as in rollout workers: with the same
items, the same chat template and the same sampling. The recipe's frozen models have their own engines, as in a run;
devices for the trainer and for more replicas are not needed. Exceptions of an episode's code are shown with their place
in that code. Rewards relative to the group, and stages, are not computed. The exit code is 1 if an episode failed, and
2 if the settings are invalid.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from monarch_rl.episode.episode import Episode
from monarch_rl.offline.play import Table, engine_of, host_for, serve_frozen, table
from monarch_rl.offline.program import run_program
from monarch_rl.offline.recipes import Recipe, load_recipe
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.runtime.by_value import register_modules
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.devices import devices

COLOURS = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
"""Colour of a message by role."""


async def play(recipe: Recipe, episodes: int, first: int, console: Console, cluster: Cluster | None = None) -> int:
    """Run episodes of training items ``first``, ``first`` + 1, ... and print them; returns how many failed.

    Args:
        recipe: the recipe, with its settings.
        episodes: number of episodes.
        first: cursor of the first training item.
        console: output.
        cluster: cluster for the engines of the recipe's frozen models.
    """
    offered = devices()
    async with (
        engine_of(recipe.settings, offered, recipe.task) as (engine, model),
        table(recipe.settings, recipe.task, model, engine, offered) as opened,
    ):
        await serve_frozen(cluster, recipe.frozen, recipe.settings, model)
        return await play_at(opened, range(first, first + episodes), console)


async def play_at(opened: Table, indices: range, console: Console) -> int:
    """Run an episode of each of these training items and print it; returns how many episodes failed."""
    failed = 0
    for index in indices:
        sequences = await opened.train_episode(index)
        console.rule(Text(f"{opened.task.name}, item {index}"), align="left")
        if isinstance(sequences, EpisodeFailed):
            show(sequences, console)
        else:
            for number, sequence in enumerate(sequences):
                if len(sequences) > 1:
                    console.print(Text(described(sequence, number), style="bold"))
                show(sequence, console)
        failed += isinstance(sequences, EpisodeFailed)
    return failed


def described(sequence: Episode, number: int) -> str:
    """Title of a sequence within its episode."""
    seat = f", seat {sequence.seat}" if sequence.seat else ""
    fork = sequence.fork
    return f"sequence {number}{seat}" + (f", from turn {fork.turns} of sequence {fork.sequence} on" if fork else "")


def show(sequence: Episode | EpisodeFailed, console: Console) -> None:
    """Print a sequence of an episode, or an episode that failed."""
    for message in sequence.messages:
        show_message(message, console)
    if isinstance(sequence, EpisodeFailed):
        console.print(Text(f"failed: {sequence.failure}", style="bold red"), soft_wrap=True)
        return
    parts = "".join(f", {name} {value:g}" for name, value in sequence.parts.items())
    rewards = [turn.reward for turn in sequence.turns]
    listed = ", ".join("none" if reward is None else f"{reward:g}" for reward in rewards)
    if any(reward is not None for reward in rewards):
        parts += f"; of its turns: {listed}"
    info = f" {sequence.info}" if sequence.info else ""
    ended = f"{sequence.num_trainable} tokens sampled, ended by {sequence.finish_reason}"
    console.print(Text(f"reward {sequence.reward:g}{parts} ({ended}){info}", style="bold"), soft_wrap=True)


def show_message(message: dict[str, Any], console: Console) -> None:
    """Print a message with its role; its calls, its thought and any other keys as JSON."""
    style = COLOURS.get(message["role"], "")
    text = Text.assemble((f"{message['role']:>9}  ", f"bold {style}"), (message["content"], style))
    if others := {key: value for key, value in message.items() if key not in ("role", "content")}:
        text.append(f" {json.dumps(others, ensure_ascii=False)}", "dim")
    console.print(text, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("recipe", type=Path, help="the recipe's file; its flags follow (see python RECIPE --help)")
    parser.add_argument("--episodes", type=int, default=3, help="number of episodes, one item each (default 3)")
    parser.add_argument("--first", type=int, default=0, help="cursor of the first training item (default 0)")
    own, flags = parser.parse_known_args()
    recipe = load_recipe(own.recipe, flags)
    register_modules(own.recipe)
    with host_for(recipe.frozen) as cluster:
        return 1 if asyncio.run(play(recipe, own.episodes, own.first, Console(), cluster)) else 0


if __name__ == "__main__":
    run_program(main)
