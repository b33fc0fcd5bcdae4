"""Tasks from reasoning-gym: any of its data sets by name, in splits that share no held-out question.

An item is a pure function of (settings, split, index). reasoning-gym seeds item ``i`` of a data set with ``seed + i``,
so neighbouring seeds give almost the same items. The seeds of the splits are therefore ``SPLIT_DISTANCE`` apart. Small
tasks repeat questions even so, and the other splits skip every question that is held out.

Importing this module imports neither reasoning-gym nor torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import logging
import math
import operator
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from monarch_rl.settings.cli import NotAFlag
from monarch_rl.settings.ranges import SEED, CheckedSettings, Range
from monarch_rl.tasks.one_turn import OneTurn
from monarch_rl.tasks.task import Outcome, Task
from monarch_rl.tasks.template import check_template, fill

logger = logging.getLogger("monarch_rl")

Split = Literal["train", "held_out", "warm_up"]
"""``warm_up`` is for supervised examples before the training; it has no held-out question either."""

SPLIT_DISTANCE = 1_000_000_007
"""Difference of the seeds of two splits; larger than any index, and all seeds stay below 2^32."""
MAX_SKIPS = 64
"""Maximum number of times that a training index is advanced because its question is held out."""
MAX_HELD_OUT_SHARE = 0.5
"""Maximum share of training questions that are held out; even at a half, 64 skips in a row do not happen (5e-20)."""
SAMPLED = 16
"""Number of prompts that are made before a run, to check that they differ and fit."""
UNRELIABLE = frozenset({"boxnet", "graph_color", "list_functions", "propositional_logic", "rubiks_cube", "rush_hour"})
"""Data sets of reasoning-gym 0.1.25 that do not score their own answer as 1, or are not repeatable under a seed."""


@dataclass(frozen=True)
class TaskSettings(CheckedSettings, flags="task"):
    """The reasoning-gym data set to train on."""

    name: str = "chain_sum"
    """Data set of reasoning-gym, which has some 100; the error for an unknown name lists similar ones."""
    config: str = "{}"
    """Settings of the data set as JSON, for example '{"min_terms": 2, "max_terms": 2}'."""
    template: str = "{question}"
    """Template of the prompt, with {question} and any field of the item's metadata, such as '{expression} =' for
    chain_sum."""
    pass_mark: Annotated[float, Range(0, 1)] = 0.0
    """Scores from this value on count as 1, lower ones as 0. With 0 the data set's own score is the reward, with
    partial credit that may be gamed (spell_backward gives 0.8 for the right letters followed by others)."""
    seed: Annotated[int, SEED] = 0
    """Seed of the items. With every seed the held-out questions are separate from the others."""
    train_size: NotAFlag[Annotated[int, Range(1, 10_000_000)]] = 10_000
    """Number of training items, after which they repeat."""
    held_out_size: Annotated[int, Range(1, 20_000)] = 200
    """Number of held-out items. Their questions are never trained on."""


class ReasoningGym(Task):
    """One question, one answer and the data set's own score, computed in a scoring process.

    Cheap to create and to pickle: the data set is loaded in the processes that use it.

    Args:
        full_context_reward: reward of an episode that a full context ends.
        name: name for metrics; empty means the name of the data set.
    """

    def __init__(self, settings: TaskSettings, full_context_reward: float = 0.0, name: str = "") -> None:
        train, held_out = TaskSource(settings), TaskSource(settings, "held_out")
        super().__init__(
            train.item,
            OneTurn(operator.attrgetter("prompt"), score, functools.partial(_score_args, settings)),
            {"held_out": held_out},
            name=name or settings.name,
            full_context_reward=full_context_reward,
            warm_up=functools.partial(load_data_set, settings, "train"),
            check=train.check,
            success_reward=1.0,
        )


def _score_args(settings: TaskSettings, item: Item) -> tuple[TaskSettings, dict[str, Any]]:
    return settings, item.entry


@dataclass(frozen=True, slots=True)
class Item:
    """One question."""

    index: int
    prompt: str
    answer: str
    """The data set's own answer, for display; other answers may get the full score, too. "" if it has none."""
    entry: dict[str, Any]
    """reasoning-gym's record, which its scorer needs."""


class TaskSource:
    """The items of one split. Cheap to create and to pickle; invalid settings raise when the first item is made."""

    def __init__(self, settings: TaskSettings, split: Split = "train") -> None:
        self.settings = settings
        self.split: Split = split

    def __len__(self) -> int:
        return self.settings.held_out_size if self.split == "held_out" else self.settings.train_size

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        return self.item(index)

    def item(self, index: int) -> Item:
        """Item ``index`` of the split, modulo its size.

        Raises ValueError if there is no such data set, it refuses its settings, or the template does not fit the item.
        """
        data_set = load_data_set(self.settings, self.split)
        index %= len(self)
        if self.split == "held_out":
            return self._item(index, _entry(self.settings, data_set, index))
        held_out = _held_out_questions(self.settings)
        for skip in range(MAX_SKIPS):
            entry = _entry(self.settings, data_set, index + skip * len(self))
            if entry["question"] not in held_out:
                return self._item(index, entry)
        raise ValueError(f"task {self.settings.name} has too few different questions: {self._advice()}")

    def check(self) -> list[str]:
        """Check the settings before any actor is spawned; returns the first prompts.

        Raises ValueError if the template does not fit or most questions are held out. May take some seconds.
        """
        check_template(self.settings.template, "task.template")
        held_out = _held_out_questions(self.settings)
        data_set = load_data_set(self.settings, "train")
        questions = [_entry(self.settings, data_set, i)["question"] for i in range(min(100, len(self)))]
        share = sum(question in held_out for question in questions) / len(questions)
        if share > MAX_HELD_OUT_SHARE:
            raise ValueError(
                f"{share:.0%} of the training questions of {self.settings.name} are held out: {self._advice()}"
            )
        if self.settings.name in UNRELIABLE:
            logger.warning(
                "reasoning-gym's %s does not always score its own answer as right, or is not repeatable under a seed",
                self.settings.name,
            )
        return self._first_prompts()

    def _first_prompts(self) -> list[str]:
        items = [self.item(index) for index in range(SAMPLED)]
        prompts = [item.prompt for item in items]
        if len(set(prompts)) == 1 and len({item.entry["question"] for item in items}) > 1:
            raise ValueError(
                f"task.template {self.settings.template!r} makes the same prompt for {SAMPLED} different items, "
                f"{prompts[0][:60]!r}: use a template with {{question}}"
            )
        return prompts

    def _item(self, index: int, entry: dict[str, Any]) -> Item:
        fields = {**entry.get("metadata", {}), "question": entry["question"]}
        try:
            prompt = fill(self.settings.template, fields)
        except ValueError as error:
            raise ValueError(
                f"task.template {self.settings.template!r} does not fit {self.settings.name}, item {index}: {error}"
            ) from error
        return Item(index, prompt, entry["answer"] or "", entry)

    def _advice(self) -> str:
        return "hold out fewer items (task.held-out-size) or use settings with more questions (task.config)"


def score(settings: TaskSettings, entry: dict[str, Any], text: str) -> Outcome:
    """Score a completion with the data set's own scorer, then apply the pass mark.

    With a pass mark the reward is 0 or 1, and its part ``"score"`` is the scorer's value.

    Raises what the scorer raises, and ValueError if the score is not finite.
    """
    raw = float(load_data_set(settings, "train").score_answer(answer=extract_answer(text), entry=entry))
    if not math.isfinite(raw):
        raise ValueError(f"the score of {settings.name} is {raw}, not a finite number")
    return Outcome(float(raw >= settings.pass_mark), {"score": raw}) if settings.pass_mark > 0 else Outcome(raw)


def extract_answer(text: str) -> str:
    """The content of the last ``<answer>...</answer>``, or the whole text; without surrounding white space."""
    tagged = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    return (tagged[-1] if tagged else text).strip()


@functools.lru_cache(maxsize=8)
def load_data_set(settings: TaskSettings, split: Split) -> Any:
    """The reasoning-gym data set of a split, cached in the process. Raises ValueError saying what to change."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if settings.name not in DATASETS:
        close = difflib.get_close_matches(settings.name, DATASETS, n=5, cutoff=0.4)
        hint = f"did you mean {', '.join(close)}?" if close else f"it has {', '.join(sorted(DATASETS))}"
        raise ValueError(f"task.name: reasoning-gym has no data set {settings.name!r}; {hint}")
    config_class = DATASETS[settings.name][1]
    known = sorted({f.name for f in dataclasses.fields(config_class)} - {"seed", "size"})
    try:
        config = json.loads(settings.config)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"task.config is not JSON ({error}): {settings.config}") from error
    if not isinstance(config, dict) or not set(config) <= set(known):
        raise ValueError(f"task.config must be a JSON object with settings of {settings.name}: {', '.join(known)}")
    seed = settings.seed + SPLIT_DISTANCE * get_args(Split).index(split)
    size = settings.held_out_size if split == "held_out" else settings.train_size * MAX_SKIPS
    try:
        return create_dataset(settings.name, seed=seed, size=size, **_with_specs(settings.name, config))
    except Exception as error:  # data sets may raise anything
        message = str(error) or repr(error)
        raise ValueError(f"task.config: reasoning-gym refuses the settings of {settings.name}: {message}") from error


def _with_specs(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """``config`` with the data sets of ``composite``, which mixes data sets, as the objects that it expects."""
    if name != "composite" or "datasets" not in config:
        return config
    from reasoning_gym.composite import DatasetSpec

    return {**config, "datasets": [DatasetSpec(**spec) for spec in config["datasets"]]}


@functools.lru_cache(maxsize=8)
def _held_out_questions(settings: TaskSettings) -> frozenset[str]:
    data_set = load_data_set(settings, "held_out")
    return frozenset(_entry(settings, data_set, i)["question"] for i in range(settings.held_out_size))


def _entry(settings: TaskSettings, data_set: Any, index: int) -> dict[str, Any]:
    """An entry of the data set. Raises ValueError if it cannot be made: some data sets check their settings only
    then."""
    try:
        entry: dict[str, Any] = data_set[index]
    except Exception as error:  # data sets may raise anything
        raise ValueError(
            f"task.config {settings.config}: {settings.name} of reasoning-gym cannot make item {index} ({error!r})"
        ) from error
    return entry
