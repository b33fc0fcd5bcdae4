"""What a trainer rank is created from (:class:`TrainerPlan`), and its file in the run's journal.

Plans of memory are in ``pipeline/memory.py``, plans of micro-batches in ``algorithms/packing.py``.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from monarch_rl.algorithms.advantages import ADVANTAGES
from monarch_rl.algorithms.functions import code_of
from monarch_rl.algorithms.group_view import Advantage
from monarch_rl.algorithms.objectives import Objective
from monarch_rl.checkpoint.folders import read_checked, write_checked
from monarch_rl.checkpoint.journal import PLAN, PLAN_OF_0_1
from monarch_rl.episode.logged import NOT_LOGGED, LoggedGroups
from monarch_rl.errors import SettingsError, written_by_another_version
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.settings.ranges import from_plain, to_plain
from monarch_rl.trainer.functions import TrainingFunctions, name_of, unwrapped
from monarch_rl.trainer.loss_settings import LossSettings
from monarch_rl.trainer.objective import LossFunction, loss_function, made_from, supervised
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.user_code import code_behind, place_of

TRACES = "traces"
"""Folder of the traces of ``trainer.profile_steps``, in the run's folder."""


@dataclass(frozen=True)
class TrainerPlan:
    """Everything that a trainer rank is created from."""

    model: Path
    """The Hugging Face folder to start from."""
    settings: TrainerSettings
    total_steps: int
    """Optimiser steps of the run, for the learning-rate schedule: batches x updates per batch."""
    temperature: float
    """Sampling temperature, at which log-probs are computed."""
    normaliser_tokens: int
    """Tokens per episode in the normaliser of the ``constant`` aggregation: ``trainer.loss.max_tokens``, or
    ``rollout.max_new_tokens``."""
    functions: TrainingFunctions | None = None
    """Advantage and loss function. None: the advantage that ``settings.loss`` names, and PPO's clip. With a custom loss
    function only the aggregation of these settings has an effect, through ``MicroBatch.weights``."""
    journal: Path | None = None
    """Folder in which each rank records its batches; None: no journal."""
    journal_bytes: int = 0
    """Most bytes of the journal of a rank."""
    generation: int = 0
    """How many times the run has been resumed."""
    traces: Path | None = None
    """Folder of the traces of ``settings.profile_steps``; None: no trace."""
    logged: LoggedGroups = NOT_LOGGED
    """The groups whose tokens are recorded. It does not change how batches are trained, and is no part of the plan's
    file."""


# -- the plan as JSON: ``journal/plan-0.json``, and ``plan-1.json`` after the first resume -----------------------------
#
#     {"crc32": ..., "format": 2, "monarch_rl": "0.2.0", "model": ..., "settings": {...}, "total_steps": ...,
#      "temperature": ..., "normaliser_tokens": ..., "generation": ..., "functions": null, or
#         {"advantage": FUNCTION, "objective": FUNCTION, "advantage_columns": [...]}}
#
# A FUNCTION of this package is stored by its name and arguments, or as an objective and the settings ``trainer.loss``,
# so that a later version can read it even if it has moved to another module. A recipe's own function is stored by value
# (cloudpickle, base64), and can run code when it is read.

FORMAT = 2
"""2: an objective with its parameters, and the shared settings; 1, of no release: a name and all settings."""


def write_plan(folder: Path, plan: TrainerPlan) -> None:
    """Write the plan to the run's ``journal/`` folder, named by its generation. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "format": FORMAT,
        "monarch_rl": version("monarch_rl"),
        "model": str(plan.model),
        "settings": to_plain(plan.settings),
        "total_steps": plan.total_steps,
        "temperature": plan.temperature,
        "normaliser_tokens": plan.normaliser_tokens,
        "generation": plan.generation,
        "functions": None if plan.functions is None else _functions(plan.functions),
    }
    write_checked(folder / PLAN.format(generation=plan.generation), values)


def read_plan(folder: Path, generation: int = 0) -> TrainerPlan:
    """The plan that :func:`write_plan` wrote, without its journal. Reading a recipe's own function can run code: read
    only plans of your own runs.

    Raises:
        ValueError: there is no plan, or another version of this package is needed to read it; names that version.
    """
    path, old = folder / PLAN.format(generation=generation), folder / PLAN_OF_0_1.format(generation=generation)
    if not path.is_file():
        if old.is_file():
            raise SettingsError(
                f"{old} was written by monarch_rl 0.1, and only that version reads it: replay the run with it"
            )
        if any(folder.glob("rank*")):
            raise SettingsError(
                f"{path} is missing: without it, no step that its ranks trained can be replayed. Copy the run's folder "
                "again"
            )
        raise SettingsError(
            f"{path} does not exist: to write a journal, start the run with --journal.mib 1024, and enough disk space"
        )
    values = read_checked(path)
    writer = str(values.get("monarch_rl", ""))
    try:
        if values["format"] != FORMAT:
            raise SettingsError(f"its format is {values['format']}, not {FORMAT}")
        settings = from_plain(TrainerSettings, values["settings"])
        functions = None if values["functions"] is None else _training_functions(values["functions"])
        return TrainerPlan(
            model=Path(values["model"]),
            settings=settings,
            total_steps=values["total_steps"],
            temperature=values["temperature"],
            normaliser_tokens=values["normaliser_tokens"],
            functions=functions,
            generation=values["generation"],
        )
    except (ValueError, TypeError, KeyError, ImportError, AttributeError) as error:
        raise SettingsError(written_by_another_version(str(path), writer, error)) from error


def trained_as(plan: TrainerPlan) -> str:
    """A digest of everything that determines how a batch is trained: settings, the number of optimiser steps if the
    learning rate depends on it, and the functions."""
    total_steps = None if plan.settings.lr_min_factor == 1 else plan.total_steps
    settings = to_plain(plan.settings)
    settings.pop("profile_steps")  # does not change what is computed
    return _digest([settings, total_steps, functions_as(plan)])


def functions_as(plan: TrainerPlan) -> str:
    """A digest of what determines how a batch is trained besides the settings: the temperature, the normaliser, and for
    each function its code, and its name and arguments, or, for a recipe's own, its file and line."""
    functions: list[Any] = []
    if plan.functions is not None:
        loaded = plan.functions.load()
        for function, named in (
            (loaded.advantage, _named_advantage(loaded.advantage)),
            (loaded.objective, _named_objective(loaded.objective)),
        ):
            functions.append([named or place_of(function), code_of(function)])
        functions.append(loaded.advantage_columns)
    return _digest([plan.temperature, plan.normaliser_tokens, functions])


def _digest(content: list[Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _functions(functions: TrainingFunctions) -> dict[str, Any]:
    loaded = functions.load()
    return {
        "advantage": _named_advantage(loaded.advantage) or _pickled(functions.advantage),
        "objective": _named_objective(loaded.objective) or _pickled(functions.objective),
        "advantage_columns": list(functions.advantage_columns),
    }


def _training_functions(values: dict[str, Any]) -> TrainingFunctions:
    advantage, objective = values["advantage"], values["objective"]
    if "name" in advantage:
        function: Any = ADVANTAGES[advantage["name"]]()
        function = partial(function, **advantage["arguments"]) if advantage["arguments"] else function
        of_advantage = ByValue(function, f"the advantage {advantage['name']}")
    else:
        of_advantage = _unpickled(advantage)
    if "objective" in objective:
        value = from_plain(Objective, objective["objective"])
        function = loss_function(value, from_plain(LossSettings, objective["loss"]))
        of_objective = ByValue(function, f"the objective {value.name}")
    elif objective.get("name") == "supervised":
        of_objective = ByValue(supervised, "the objective supervised")
    else:
        of_objective = _unpickled(objective)
    return TrainingFunctions(of_advantage, of_objective, tuple(values["advantage_columns"]))


def _named_advantage(advantage: Advantage) -> dict[str, Any] | None:
    """Name and arguments of a partial; None for a recipe's own function, and for arguments that JSON cannot hold."""
    name = name_of(advantage)
    if not name:
        return None
    function, arguments = unwrapped(advantage)
    fresh, own = unwrapped(ADVANTAGES[name]())
    given = {key: value for key, value in arguments.items() if key not in own}
    if function is not fresh and vars(function) != vars(fresh):  # an object with non-default arguments
        return None
    if not all(value is None or isinstance(value, bool | int | float | str) for value in given.values()):
        return None
    return {"name": name, "arguments": given}


def _named_objective(function: LossFunction) -> dict[str, Any] | None:
    """The objective and settings that a loss function was made from; None for a recipe's own."""
    if code_behind(function) == code_behind(supervised):
        return {"name": "supervised"}
    made = made_from(function)
    return None if made is None else {"objective": to_plain(made[0]), "loss": to_plain(made[1])}


def _pickled(function: ByValue[Any]) -> dict[str, Any]:
    return {"place": place_of(function.load()), "cloudpickle": base64.b64encode(function.data).decode()}


def _unpickled(values: dict[str, Any]) -> ByValue[Any]:
    function: ByValue[Any] = ByValue.of_bytes(base64.b64decode(values["cloudpickle"]))
    function.load()  # raises here if what it refers to has moved
    return function
