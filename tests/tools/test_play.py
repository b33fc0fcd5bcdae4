"""Episodes of the recipes, run by tools/play.py in one engine."""

from __future__ import annotations

import asyncio
import io
import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.lines import PROGRAMS
from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.offline.play import Table, engine_of, host_for, serve_frozen, table
from monarch_rl.offline.recipes import load_recipe
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.runtime.by_value import register_modules
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.devices import Devices
from monarch_rl.tasks.task import Policy, Task
from monarch_rl.trainer.settings import TrainerSettings
from tests.model.chat_helpers import write_model
from tests.recipe.running import ROOT, random_model
from tools.evaluate import evaluate_at
from tools.make_tiny_model import conversations
from tools.play import COLOURS, play_at, show_message

RECIPES = ROOT / "recipes"
CPU = Devices("cpu", 1, 8)


def test_a_recipes_flags_reach_its_settings_and_its_task() -> None:
    recipe = load_recipe(
        RECIPES / "grpo.py", ["--task.name=chain_sum", "--task.template={question}", "--task.config={}"]
    )
    assert recipe.task.name == "chain_sum" and set(recipe.functions) >= {"advantage", "objective"}
    with pytest.raises(SystemExit):
        load_recipe(RECIPES / "grpo.py", ["--task.nam=x"])


def test_the_program_whose_lines_are_counted_has_a_task() -> None:
    task = load_recipe(PROGRAMS / "calculator_monarch_rl.py", []).task
    assert task.items(3) == task.items(3) and len(task.held_out["held_out"]) == 200


def test_a_file_that_launches_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("print('nothing')\n")
    with pytest.raises(ValueError, match="launches no run"):
        load_recipe(tmp_path / "empty.py", [])


class Silent:
    """An engine that ends each turn immediately."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        return Completion(np.array([1]), np.full(1, -0.5, np.float32), np.zeros(1, np.int64), "stop")


async def failing(item: dict[str, Any], policy: Policy) -> float:
    reply = await policy.reply(f"{item['word']} -> ")
    raise KeyError(reply.finish_reason)


async def forking(item: Any, policy: Policy) -> list[float]:
    return [float(bool(await branch.reply(str(item)))) for branch in (policy, policy.fork(), policy.fork())]


def test_an_episode_has_its_share_of_the_groups_bound(tmp_path: Path) -> None:
    template = ChatTemplate(write_model(tmp_path, "qwen3"))
    task = Task(lambda cursor: cursor, forking)

    async def run_episodes(max_sequences: int) -> list[Any]:
        settings = RolloutSettings(group_size=2, max_sequences=max_sequences)
        opened = Table(Silent(), template, settings, task, 64)  # type: ignore[arg-type]
        return [await opened.train_episode(0), await opened.play(task, 0, 0, Sampling(6, 0.0), -1)]

    assert [len(sequences) for sequences in asyncio.run(run_episodes(6))] == [3, 3]
    for failed in asyncio.run(run_episodes(4)):
        assert isinstance(failed, EpisodeFailed) and "GroupFull" in failed.reason


async def rewarding(item: Any, policy: Policy) -> dict[str, float]:
    await policy.reply("a")
    (await policy.reply("b")).reward = 0.25
    return {"right": 1.0}


def test_the_rewards_of_turns_are_printed(tmp_path: Path) -> None:
    template, text = ChatTemplate(write_model(tmp_path, "qwen3")), io.StringIO()
    opened = Table(Silent(), template, RolloutSettings(), Task(int, rewarding), 256)  # type: ignore[arg-type]
    assert asyncio.run(play_at(opened, range(1), Console(file=text, width=200))) == 0
    assert "reward 1, right 1; of its turns: none, 0.25 (2 tokens sampled" in text.getvalue()


def test_the_frozen_models_of_a_recipe_are_planned_or_refused(tmp_path: Path) -> None:
    model = random_model(tmp_path / "tiny")
    (plan,) = load_recipe(RECIPES / "game.py", [f"--model={model}"]).frozen
    assert (plan.model.name, plan.model.model, plan.settings.replicas) == ("start", str(model), 1)
    with pytest.raises(ValueError, match="frozen model start: .*model"):
        load_recipe(RECIPES / "game.py", [f"--model={tmp_path / 'missing'}"])
    with host_for(load_recipe(RECIPES / "own_data.py", []).frozen) as cluster:
        assert cluster is None


def test_roles_have_colours_and_text_is_unchanged() -> None:
    text = io.StringIO()
    console = Console(file=text, width=20, force_terminal=True, color_system="standard")
    for role in COLOURS:
        show_message({"role": role, "content": f"[bold]{role}[/bold] says more than a line"}, console)
    printed = text.getvalue()
    for colour, role in zip(("35", "36", "32", "33"), COLOURS, strict=True):
        assert f"\x1b[1;{colour}m{role:>9}  \x1b[0m\x1b[{colour}m[bold]{role}[/bold] says more than a line" in printed


def test_calls_and_thoughts_of_a_message_are_printed() -> None:
    text = io.StringIO()
    call = {"name": "look", "arguments": {"at": "é"}}
    show_message({"role": "assistant", "content": "", "tool_calls": [call]}, Console(file=text, width=200))
    assert json.dumps([call], ensure_ascii=False) in text.getvalue()


class Scripted:
    """An engine that generates the next turn of a given conversation; the prompt must be everything before it."""

    def __init__(self, ids: list[int], learned: list[bool]) -> None:
        self._ids, self._learned = ids, learned

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        start = len(prompt_ids)
        assert prompt_ids == self._ids[:start]
        turn = self._ids[start : start + [*self._learned[start:], False].index(False)]
        assert 0 < len(turn) <= sampling.max_new_tokens
        return Completion(np.array(turn), np.full(len(turn), -0.5, np.float32), np.zeros(len(turn), int), "stop")


def test_the_examples_of_the_tools_recipe_are_the_tokens_of_its_episodes(tmp_path: Path) -> None:
    """The tiny model is trained on exactly these tokens; the tools that they call give the right answers."""
    path = RECIPES / "tools.py"
    model, shown = random_model(tmp_path / "tiny", recipe=path), runpy.run_path(str(path))
    recipe = load_recipe(path, [f"--model={model}"])
    template = ChatTemplate(str(model), tool_parser=recipe.settings.rollout.tool_parser)
    task = replace(recipe.task, items=lambda index: shown["problem"](3 * index + 2))
    example = conversations(template.tokenizer, path)

    async def rounds(index: int) -> float:
        ids, learned = example(index)
        opened = Table(Scripted(ids, learned), template, recipe.settings.rollout, task, 256)  # type: ignore[arg-type]
        sequences = await opened.train_episode(index)
        assert not isinstance(sequences, EpisodeFailed), sequences
        (episode,) = sequences
        end = len(ids) - learned[::-1].index(True)
        assert np.concatenate([turn.token_ids for turn in episode.turns]).tolist() == ids[:end]
        assert np.concatenate([turn.trainable for turn in episode.turns]).tolist() == learned[:end]
        assert episode.reward == 1.0 and episode.parts["rounds_of_calls"] == len(episode.turns) - 1
        return episode.parts["rounds_of_calls"]

    assert {asyncio.run(rounds(index)) for index in range(20)} == {0, 1, 2}


@pytest.mark.heavy
def test_episodes_of_the_recipes_are_run_and_printed(tmp_path: Path) -> None:
    """Also against a frozen model, whose engine has its own process, and with fewer devices than a run needs."""
    model = random_model(tmp_path / "tiny", recipe=RECIPES / "tools.py")
    flags = [f"--model={model}"]
    recipes = {name: load_recipe(RECIPES / f"{name}.py", flags) for name in ("grpo", "own_data", "tools")}
    game = load_recipe(RECIPES / "game.py", [*flags, "--stones=5", "--held-out=4"])
    register_modules(RECIPES / "grpo.py")
    own = recipes["own_data"]

    async def test(cluster: Cluster | None) -> dict[str, str]:
        tasks = {name: recipe.task for name, recipe in recipes.items()}
        tasks["failing"] = replace(own.task.with_episode(failing), name="failing")
        shown: dict[str, str] = {}
        large = replace(recipes["grpo"].settings, trainer=TrainerSettings(ranks=64))
        async with engine_of(large, CPU) as (engine, model):
            for name, task in tasks.items():
                text = io.StringIO()
                settings = recipes[name].settings if name in recipes else own.settings
                async with table(settings, task, model, engine, CPU) as opened:
                    failed = await play_at(opened, range(2), Console(file=text, width=200))
                assert failed == (2 if name == "failing" else 0)
                shown[name] = text.getvalue()
            await serve_frozen(cluster, game.frozen, game.settings, model)
            async with table(game.settings, game.task, model, engine, CPU) as opened:
                against_start = await evaluate_at(opened, game, "", 4)
        assert not against_start.failed and against_start.rewards.shape == (4, 1)
        assert set(against_start.rewards.ravel().tolist()) <= {-1.0, 0.0, 1.0}
        return shown

    with host_for(game.frozen) as cluster:
        shown = asyncio.run(test(cluster))
    for name in ("grpo", "own_data"):
        assert shown[name].count("user  ") == shown[name].count("assistant  ") == 2
        assert shown[name].count(" -> ") >= 2 and shown[name].count("reward ") == 2
    assert "item 1" in shown["own_data"]
    assert shown["tools"].count("user  ") == 2 and "rounds_of_calls" in shown["tools"]
    assert "KeyError" in shown["failing"] and Path(__file__).name in shown["failing"]
    assert "raise KeyError(reply.finish_reason)" in shown["failing"] and "rollout/play.py" not in shown["failing"]
