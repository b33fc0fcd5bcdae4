"""Evaluates a model on a recipe's held-out items, as the recipe's run does, with one engine and without a trainer.

    python tools/evaluate.py runs/grpo-20260101-120000 --task recipes/grpo.py
    python tools/evaluate.py Qwen/Qwen3-0.6B --task recipes/grpo.py --evaluation.samples 8 --evaluation.temperature 1

The first argument is a Hugging Face folder, a Hub name, a checkpoint, or a run folder. For a run folder, whichever is
newer is evaluated: its newest complete checkpoint, which is exported to a temporary folder (TMPDIR), or the model that
it has saved. The recipe's own flags follow; `--held-out` and `--evaluation.*` select the episodes. For a run of this
recipe, and for its checkpoints, the run's settings are the defaults, except that there is one engine. The recipe, and
so its frozen models, get as `--model` the model that the run started from, or else the evaluated one. Prints what a run
prints, then the same metrics as a JSON object. A greedy evaluation of a checkpoint gives the same results as in its
run, unless the run served LoRA unmerged: here it is merged, which rounds differently. A model folder is version 0, in
the dtype of its files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from monarch_rl.checkpoint.folders import MANIFEST, complete, read_checked, read_manifest
from monarch_rl.errors import BrokenCheckpoint
from monarch_rl.generator.settings import GeneratorSettings, resolve_dtype
from monarch_rl.model.folder import find_folder
from monarch_rl.offline.export import export, source_of
from monarch_rl.offline.play import Table, engine_of, host_for, serve_frozen, table
from monarch_rl.offline.program import run_program
from monarch_rl.offline.recipes import Recipe, load_recipe
from monarch_rl.pipeline.checkpoints import FOLDER
from monarch_rl.pipeline.evaluation import items_to_run
from monarch_rl.pipeline.run_folder import SAVED, SETTINGS
from monarch_rl.rollout.evaluation import Evaluation, run_held_out
from monarch_rl.runtime.by_value import register_modules
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.devices import Devices, devices
from monarch_rl.runtime.scratch import ScratchFolder


@dataclass(frozen=True)
class Evaluated:
    """The model to evaluate."""

    place: str
    """A model folder or Hub name, a run folder, or a checkpoint."""
    run: Path | None = None
    """Folder of its run, if there is one."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the run."""
    writer: str = ""
    """Version of monarch_rl that saved the settings; "" if no checkpoint has it."""

    @classmethod
    def of(cls, place: str) -> Evaluated:
        """Identify the model by its path or name. Raises BrokenCheckpoint."""
        folder = Path(place).resolve()
        if (folder / SETTINGS).is_file():
            writer = ""
            for checkpoint in reversed(complete(folder / FOLDER).values()):
                with suppress(BrokenCheckpoint):  # model_of() reports it
                    writer = read_manifest(checkpoint).packages.get("monarch_rl", "")
                    break
            return cls(place, folder, read_checked(folder / SETTINGS), writer)
        if (folder / MANIFEST).is_file():
            manifest = read_manifest(folder)
            return cls(place, folder.parents[1], manifest.settings, manifest.packages.get("monarch_rl", ""))
        return cls(place)

    @property
    def initial_model(self) -> str:
        """The model that the run started from."""
        return str(self.settings.get("model", self.place))

    def settings_for(self, recipe: Path) -> dict[str, Any]:
        """The run's settings, which replace the defaults of ``recipe``; empty if the run is of another recipe."""
        if self.run is None:
            return {}
        if not self.run.name.startswith(f"{recipe.stem}-"):
            print(f"{self.run} is not a run of {recipe}: using the recipe's defaults instead of the run's settings")
            return {}
        return {name: value for name, value in self.settings.items() if name not in ("model", "output", "resume")}


@contextmanager
def model_of(evaluated: Evaluated, settings: GeneratorSettings, offered: Devices) -> Iterator[tuple[str, int]]:
    """The folder or name of the model to evaluate, and its version.

    For a run folder, :func:`source_of` selects the model. A checkpoint is exported for the duration of the block, in
    the dtype that an engine with these settings serves on these devices.

    Raises:
        ValueError: the run has neither a checkpoint nor a model, or the checkpoint cannot be exported.
    """
    if evaluated.run is None:
        yield evaluated.place, 0
        return
    with ScratchFolder() as scratch:
        with source_of(evaluated.place) as source:
            print(f"evaluating {source.checkpoint or source.model}")
            model, version = source.model, 0
            if source.checkpoint is not None:
                model, version = scratch.path / SAVED, source.version
                export(source, model, resolve_dtype(settings.dtype, offered.kind == "cuda"))
        yield str(model), version


async def evaluate(recipe: Recipe, version: int, cluster: Cluster | None = None) -> list[Evaluation]:
    """Evaluate the held-out sets that the settings name.

    Args:
        recipe: the recipe, with its settings.
        version: policy version of the model's weights.
        cluster: cluster for the engines of the recipe's frozen models.
    """
    offered, settings = devices(), recipe.settings
    async with (
        engine_of(settings, offered, recipe.task, version) as (engine, model),
        table(settings, recipe.task, model, engine, offered) as opened,
    ):
        await serve_frozen(cluster, recipe.frozen, settings, model)
        max_concurrent = settings.generator.running_requests(offered.kind == "cuda")
        return [await evaluate_at(opened, recipe, name, max_concurrent) for name in settings.evaluation.sets or ("",)]


async def evaluate_at(opened: Table, recipe: Recipe, held_out: str, max_concurrent: int) -> Evaluation:
    """Evaluate one held-out set, with at most ``max_concurrent`` episodes at once."""
    settings = recipe.settings
    return await run_held_out(
        settings.evaluation.plan(held_out, settings.rollout.seed or 0),
        recipe.task,
        range(items_to_run(recipe.task, held_out, settings.held_out)),
        opened.play,
        max_new_tokens=settings.rollout.max_new_tokens,
        stops=opened.template.stop_token_ids,
        item_deadline_s=settings.rollout.episode_deadline_s,
        max_concurrent=max_concurrent,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", metavar="MODEL_OR_RUN", help="model folder, Hub name, checkpoint, or run folder")
    parser.add_argument(
        "--task", type=Path, required=True, metavar="RECIPE", help="recipe whose held-out items are evaluated"
    )
    own, flags = parser.parse_known_args()
    evaluated = Evaluated.of(own.model)
    initial = evaluated.initial_model
    if "@" in initial:  # a run's record: recipes get a folder, as in the run
        initial = str(find_folder(initial))
    arguments = [f"--model={initial}", *flags]
    recipe = load_recipe(own.task, arguments, evaluated.settings_for(own.task), evaluated.writer)
    with model_of(evaluated, recipe.settings.generator, devices()) as (model, version):
        recipe = replace(recipe, settings=replace(recipe.settings, model=model))
        register_modules(own.task)
        with host_for(recipe.frozen) as cluster:
            results = asyncio.run(evaluate(recipe, version, cluster))
    metrics: dict[str, float] = {}
    for result in results:
        print(f"{result.plan.held_out or 'held-out items'} of {recipe.task.name}: {result}")
        for failure in result.first.values():
            print(failure, file=sys.stderr)
        metrics |= result.metrics()
    print(json.dumps(metrics))
    return 0


if __name__ == "__main__":
    run_program(main)
