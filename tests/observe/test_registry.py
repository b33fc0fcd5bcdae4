"""The registry of metrics: each is listed once, documented, and complete for all that a run logs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from monarch_rl.algorithms.advantages import grpo
from monarch_rl.algorithms.objectives import Distillation, PPOClip
from monarch_rl.observe.registry import GROUPS, METRICS, OBJECTIVE, check_names, find, full_name
from monarch_rl.pipeline.run import Run
from monarch_rl.rollout.evaluation import EvaluatedItem, Evaluation, EvaluationPlan
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.simulate.costs import Costs
from monarch_rl.simulate.run import Plan, run_settings, simulated_actors
from monarch_rl.trainer.advantages import advantages_of, group_views
from monarch_rl.trainer.batch import pack_shard
from monarch_rl.trainer.loss_settings import LossSettings
from monarch_rl.trainer.objective import loss_function, supervised
from monarch_rl.trainer.token_logprobs import TokenLogprobs
from monarch_rl.watch.process_poller import LoopLag
from tests.trainer.batches import batch, shard
from tools.metrics_table import DOCS, updated

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def check(names: Iterable[str]) -> None:
    """All names have their own entry, not only the catch-all for metrics of objectives."""
    check_names(list(names))
    assert not [name for name in names if (metric := find(name)) is not None and metric.name == OBJECTIVE]


def test_each_metric_is_listed_once_and_described() -> None:
    assert Counter(metric.name for metric in METRICS).most_common(1)[0][1] == 1
    for metric in METRICS:
        assert metric.meaning.endswith(".") and "|" not in metric.meaning and metric.group in GROUPS
        assert bool(metric.heading) == bool(metric.form)
        assert not metric.form or metric.form.format(0.5)


def test_an_exact_name_precedes_a_pattern_and_an_unknown_one_is_refused() -> None:
    found = {
        "trainer/routes_differ": "trainer/routes_differ",
        "trainer/routes_differ_3": "trainer/routes_differ_*",
        "trainer/my_own": OBJECTIVE,
        "dropped/score took over 1 s": "dropped/*",
        "loop_lag/generator_max_ms": "loop_lag/*_max_ms",
        "reward/spell/mean": "reward/*/mean",
        "reward/spell/format": "reward/*/*",
        "reward/mean": "reward/mean",
    }
    assert {name: metric.name for name in found if (metric := find(name)) is not None} == found
    for name in ("reward/median", "steps", "dropped"):
        with pytest.raises(ValueError, match=f"registry.py: {name};"):
            check_names(["lag/max", name])


def test_metrics_of_a_rank_are_logged_by_full_name_or_under_trainer() -> None:
    given = ("reward/mean", "reward/spell/format", "loss", "my_own", "kl/reference", "lag")
    names = [full_name(name) for name in given]
    assert names[:2] == ["reward/mean", "reward/spell/format"]
    assert names[2:] == ["trainer/loss", "trainer/my_own", "trainer/kl/reference", "trainer/lag"]
    check_names(names)


def test_the_documentation_is_generated_from_the_registry() -> None:
    text = DOCS.read_text()
    assert updated(text) == text, "run python tools/metrics_table.py"
    assert all(f"`{metric.name}`" in text for metric in METRICS)


def test_metrics_of_observer_buffer_and_recovery_are_registered() -> None:
    async def rows() -> list[dict[str, float]]:
        plan = Plan(groups_per_step=2, group_size=2)
        async with Run.open(run_settings(plan, 1e6)) as run:
            await run.begin(simulated_actors(plan, Costs(), grain=1))
            return [await run.step() async for _ in run.steps(3)]

    names = run_virtual(rows())[-1]
    assert {"trainer/idle_share", "weights/swap_ms", "buffer/trained", "wasted/tokens"} <= names.keys()
    check(names)


def test_metrics_of_watch_and_evaluation_are_registered() -> None:
    lag = LoopLag()
    for kind in ("trainer", "generator", "rollout", "buffer", "controller"):
        lag.note(f"{kind} 0", kind, [0.01])
    names = lag.metrics()
    assert len(names) == 10
    check(names)
    for tasks in (["sums", "sums"], ["sums", "words"]):
        for held_out in ("", "easy"):
            plan = EvaluationPlan(held_out, 4, 1.0, (2, 4))
            items = [
                EvaluatedItem(0, tasks[0], (1.0,) * 4, ({"digits": 1.0},) * 4),
                EvaluatedItem(1, tasks[1], (0.0,) * 4, (None,) * 4),
            ]
            evaluation = Evaluation(items, {"score hung": 4}, plan=plan, success_rewards={"sums": 1.0})
            check(evaluation.metrics())


def test_sums_of_objectives_are_registered() -> None:
    part = shard(batch(0), 0, 0, 1, 1024)
    (batches,) = pack_shard(part, advantages_of(group_views(part), grpo), "token_mean", 20, torch.device("cpu"))
    tokens = len(batches[0].behaviour_logprobs)
    output = TokenLogprobs(*(torch.full((tokens,), value) for value in (-4.0, 4.0, 1.0)))
    derived = {
        "on_policy_tokens": "on_policy_share",
        "logprob_difference": "logprob_difference_p50",
    }
    batches[0].columns["teacher"] = batches[0].behaviour_logprobs
    ours = [loss_function(objective, LossSettings()) for objective in (PPOClip(), Distillation())]
    for function in [*ours, supervised]:
        _, sums = function(output, batches[0])
        check([f"trainer/{derived.get(name, name)}" for name in sums])


def test_all_metrics_of_a_real_run_are_registered() -> None:
    lines = (RESULTS / "smollm2_syllogism_cpu.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line)} - {"step", "seconds"}
    assert len(names) > 30
    check(names)
