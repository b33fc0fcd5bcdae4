"""Evaluates a model on a recipe's held-out items, as the recipe's run does, without a trainer.

    python tools/evaluate.py runs/grpo-20260101-120000-1 --task recipes/grpo.py
    python tools/evaluate.py Qwen/Qwen3-0.6B --task recipes/grpo.py --evaluation.samples 8 --evaluation.temperature 1

The first argument is a Hugging Face folder, a Hub name, a checkpoint, or the folder of a run: then what it wrote last
is taken, its saved model or its newest whole checkpoint, which is written to a temporary folder (TMPDIR) meanwhile. The
recipe's own flags follow; `--held-out` and `--evaluation.*` say what is played. To the recipe, and so to the frozen
models that it asks, `--model` is the model that the run began with, or else the one that is evaluated. Prints what a
run prints, then the same figures as a JSON object. What a greedy evaluation of the same model gave in a run, it gives
here, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from monarch_rl.checkpoint.folders import MANIFEST
from monarch_rl.pipeline.evaluation import items_to_play
from monarch_rl.pipeline.exporting import MODEL, export, source_of
from monarch_rl.pipeline.program import run_program
from monarch_rl.pipeline.recipes import Recipe, load_recipe
from monarch_rl.pipeline.run_folder import SETTINGS
from monarch_rl.pipeline.standalone import Table, engine_of, host_for, serve_frozen, table
from monarch_rl.rollout.evaluation import Evaluation, play_held_out
from monarch_rl.runtime.by_value import register_modules
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.devices import devices
from monarch_rl.runtime.scratch import ScratchFolder


@contextmanager
def model_of(place: str) -> Iterator[str]:
    """The model to evaluate: what a run's folder stands for is that of :func:`source_of`; a checkpoint is exported for
    the block.

    Raises:
        ValueError: the run has saved neither; or the checkpoint cannot be exported.
    """
    folder = Path(place)
    if not (folder / SETTINGS).is_file() and not (folder / MANIFEST).is_file():
        yield place
        return
    with ScratchFolder() as scratch:
        with source_of(place) as source:
            print(f"evaluating {source.checkpoint or source.model}")
            model = source.model if source.checkpoint is None else scratch.path / MODEL
            if source.checkpoint is not None:
                export(source, model)
        yield str(model)


def begun_with(place: str, model: str) -> str:
    """The model that a run began with; ``model`` if ``place`` is no run's folder."""
    settings = Path(place) / SETTINGS
    return str(json.loads(settings.read_text()).get("model", model)) if settings.is_file() else model


async def evaluate(recipe: Recipe, cluster: Cluster | None = None) -> list[Evaluation]:
    """Play the held-out sets that the settings name.

    Args:
        cluster: for the engines of the recipe's frozen models.
    """
    offered, settings = devices(), recipe.settings
    async with (
        engine_of(settings, offered, recipe.task) as (engine, model),
        table(settings, recipe.task, model, engine, offered) as opened,
    ):
        await serve_frozen(cluster, recipe.frozen, settings, model)
        places = settings.generator.running_requests(offered.kind == "cuda")
        return [await evaluate_at(opened, recipe, name, places) for name in settings.evaluation.sets or ("",)]


async def evaluate_at(opened: Table, recipe: Recipe, held_out: str, places: int) -> Evaluation:
    """Play one held-out set, ``places`` episodes at once."""
    settings = recipe.settings
    return await play_held_out(
        settings.evaluation.plan(held_out, settings.rollout.seed or 0),
        recipe.task,
        range(items_to_play(recipe.task, held_out, settings.held_out)),
        opened.play,
        max_new_tokens=settings.rollout.max_new_tokens,
        stops=opened.template.stop_token_ids,
        item_deadline_s=settings.rollout.episode_deadline_s,
        places=places,
    )


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", metavar="MODEL_OR_RUN", help="a model's folder or Hub name, or a run's folder")
    parser.add_argument(
        "--task", type=Path, required=True, metavar="RECIPE", help="file whose held-out items are played"
    )
    own, flags = parser.parse_known_args()
    with model_of(own.model) as model:
        recipe = load_recipe(own.task, [f"--model={begun_with(own.model, model)}", *flags])
        recipe = replace(recipe, settings=replace(recipe.settings, model=model))
        register_modules(own.task)
        with host_for(recipe.frozen) as cluster:
            results = asyncio.run(evaluate(recipe, cluster))
    figures: dict[str, float] = {}
    for result in results:
        print(f"{result.plan.held_out or 'held-out items'} of {recipe.task.name}: {result}")
        for failure in result.first.values():
            print(failure, file=sys.stderr)
        figures |= result.metrics()
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    run_program(main)
