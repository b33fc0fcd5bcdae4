"""Plan and costs of a real run, read from its folder."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.checkpoint.folders import read_checked
from monarch_rl.errors import SettingsError
from monarch_rl.observe.lines import read_rows
from monarch_rl.observe.pieces import pieces_of
from monarch_rl.simulate.costs import Costs, DecodeCosts, Distribution, TrainerCosts
from monarch_rl.simulate.run import Plan

logger = logging.getLogger("monarch_rl")

WARM_UP = 0.25
"""Share of the first steps that are skipped: compilation, caches, an empty buffer."""
WINDOW = 8
"""Number of steps that are aggregated: replicas count tokens when a request ends, so a short step may have none."""
CALLS = 5
"""Consecutive calls per step during which no trainer rank computes or waits for a batch: update, trained, snapshot, and
two of the observer's."""
FLAT = 0.1
"""Relative standard deviation of ``x`` below which no slope is fitted."""


@dataclass(frozen=True)
class Made:
    """A real run, read from its folder."""

    plan: Plan
    costs: Costs
    step_s: float
    """Mean seconds per step, for comparison with a prediction."""


def read_run(folder: Path) -> Made:
    """Fit the costs to ``settings.json``, ``metrics.jsonl`` and the recorded episodes of a run folder.

    The files do not contain the costs of prefill and scores, which are set to 0 (their time counts as decoding), nor
    the size of the KV cache, which is unlimited.

    Raises:
        ValueError: a file is missing or too short, or was written by a version that did not log the required metrics.
    """
    settings, rows, samples = _files(folder)
    rows = rows[int(len(rows) * WARM_UP) :]
    generator, rollout = settings["generator"], settings["rollout"]
    known = {one.name for one in fields(BufferSettings)}
    buffer = BufferSettings(**{name: value for name, value in settings["buffer"].items() if name in known})
    plan = Plan(
        groups_per_step=settings["groups_per_step"],
        group_size=rollout["group_size"],
        trainer_devices=settings["trainer"]["ranks"],
        replicas=generator["replicas"],
        tp=generator["tp"],
        workers=rollout["workers"],
        concurrent_groups=rollout["concurrent_groups"],
        scorer_processes=rollout["scorer_processes"],
        in_flight=generator["in_flight"],
        buffer=buffer,
    )
    costs = Costs(
        length=_lengths(samples, rollout["max_new_tokens"]),
        prompt_tokens=1,
        decode=_decode(rows, generator["max_running_requests"]),
        trainer=_trainer(rows, plan.trainer_devices),
        equal_rewards=0.0 if buffer.drop_equal_rewards else _median(rows, "reward/equal_groups_share"),
        snapshot_s=_median(rows, "weights/snapshot_ms") / 1e3,
        transfer_s=_median(rows, "weights/transfer_ms") / 1e3,
        commit_s=_median(rows, "weights/swap_ms") / 1e3,
        call_s=_between_s(rows) / CALLS,
    )
    return Made(plan, costs, float(np.mean(_column(rows, "time/step_s"))))


def line(x: np.ndarray, y: np.ndarray, flat: Literal["constant", "slope"]) -> tuple[float, float]:
    """Least-squares fit of ``a + b x`` to ``y`` with nonnegative ``(a, b)``.

    If ``x`` hardly varies, all of ``y`` counts as ``a`` (``flat="constant"``) or as ``b x`` (``flat="slope"``).
    """
    through_origin = float(np.sum(x * y) / np.sum(x * x))
    if np.std(x) <= FLAT * np.mean(x):
        return (float(np.mean(y)), 0.0) if flat == "constant" else (0.0, through_origin)
    b, a = np.polyfit(x, y, 1)
    if b < 0:
        return float(np.mean(y)), 0.0
    return (float(a), float(b)) if a >= 0 else (0.0, through_origin)


def group_share(groups: dict[Any, list[float]]) -> float:
    """Share of the variance of ranks that the members of a group have in common (one-way analysis of variance on normal
    scores); 0 if fewer than four groups have two or more members."""
    groups = {name: values for name, values in groups.items() if len(values) > 1}
    if len(groups) < 4:
        return 0.0
    values = np.concatenate([np.asarray(group, float) for group in groups.values()])
    ordered = np.sort(values)
    middle = (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")) / 2 / len(values)
    normal = NormalDist()
    scores = np.asarray([normal.inv_cdf(min(max(float(p), 1e-6), 1 - 1e-6)) for p in middle])
    parts = np.split(scores, np.cumsum([len(group) for group in groups.values()])[:-1])
    within = sum(float(((part - part.mean()) ** 2).sum()) for part in parts) / (len(values) - len(parts))
    between = sum(len(part) * (part.mean() - scores.mean()) ** 2 for part in parts) / (len(parts) - 1)
    size = len(values) / len(parts)
    common = max(0.0, (float(between) - within) / size)
    return common / (common + within) if common + within > 0 else 0.0


def _lengths(samples: list[dict[str, Any]], limit: int) -> Distribution:
    by_group = defaultdict(list)
    for sample in samples:
        by_group[sample["group"]].append(float(sample["tokens"]))
    lengths = tuple(length for group in by_group.values() for length in group)
    return Distribution(maximum=limit, group_share=group_share(by_group), samples=lengths)


def _decode(rows: list[dict[str, Any]], max_running: int) -> DecodeCosts:
    """Fit the time of a decoding step to the number of sequences: the replicas' busy seconds / their decoding steps."""
    seconds = _column(rows, "time/step_s")
    busy_s = (1 - _column(rows, "generator/idle_share")) * _column(rows, "generator/replicas") * seconds
    starts = range(0, len(rows) - WINDOW + 1, WINDOW) or range(1)

    def windows(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, starts)

    tokens = windows(_column(rows, "tokens_per_second") * seconds)
    if not tokens.all():
        raise SettingsError("the replicas finished no request in some of the steps: the run is too short to be fitted")
    running = windows(_column(rows, "generator/running") * busy_s) / windows(busy_s)
    running = np.minimum(running, max_running)
    a, b = line(running, running * windows(busy_s) / tokens, flat="constant")
    return DecodeCosts(a, b, max_running=max_running)


def _trainer(rows: list[dict[str, Any]], devices: int) -> TrainerCosts:
    a, b = line(_column(rows, "trainer/tokens"), _column(rows, "trainer/step_s"), flat="slope")
    return TrainerCosts(a, b * devices)


def _between_s(rows: list[dict[str, Any]]) -> float:
    """Mean seconds per step in which the trainer neither computed, nor copied, nor waited for a batch."""
    trainer_s = _column(rows, "trainer/wait_s") + _column(rows, "trainer/step_s")
    between_s = float(np.mean(_column(rows, "time/step_s") - trainer_s)) - _median(rows, "weights/snapshot_ms") / 1e3
    return max(0.0, between_s)


def _files(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    try:
        settings = read_checked(folder / "settings.json")
        metrics, damage = read_rows(folder / "metrics.jsonl")
        samples, more = list[dict[str, Any]](), list[str]()
        # rollouts.jsonl: of a run of an earlier version, which wrote only trained episodes, without their kind
        for path in pieces_of(folder / "rollouts", "episodes") or [folder / "rollouts.jsonl"]:
            found, of_piece = read_rows(path)
            samples += [row for row in found if row.get("kind", "train") == "train"]
            more += of_piece
    except (OSError, SettingsError) as error:
        raise SettingsError(f"{folder} is not a run folder: {error}") from error
    if damage or more:
        others = len(metrics) + len(samples)
        logger.warning(
            "%s. The fit leaves out %d such lines and uses the other %d",
            "; ".join([*damage, *more][:3]),
            len(damage) + len(more),
            others,
        )
    rows = [row for row in metrics if "time/step_s" in row]
    if len(rows) < 8 or not samples:
        raise SettingsError(f"{folder} has {len(rows)} steps and {len(samples)} episodes: at least 8 steps are needed")
    return settings, rows, samples


def _column(rows: list[dict[str, Any]], name: str) -> np.ndarray:
    values = [row.get(name) for row in rows]
    found = np.asarray([value for value in values if value is not None], float)
    if len(found) < len(values):
        raise SettingsError(
            f"metric {name} is missing in {len(values) - len(found)} steps of the run, which an older version made: "
            "use a newer run"
        )
    return found


def _median(rows: list[dict[str, Any]], name: str) -> float:
    """Median of a metric; 0 if no step has it, because no version was served yet."""
    found = [row[name] for row in rows if row.get(name) is not None]
    return float(np.median(found)) if found else 0.0
