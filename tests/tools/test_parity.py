"""tools/parity.py on tiny random models: equal models pass, differences fail by name, and bad input is refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.pipeline.preloads import PRELOADS
from monarch_rl.rollout.scoring import PRELOAD as SCORING_PRELOAD
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.runtime.forking.fork_client import ADDRESS_VARIABLE
from monarch_rl.trainer.settings import TrainerSettings
from tests import patience
from tests.forking import forking
from tests.generator.helpers import LAYERS, LOGPROB_BOUND, make_model, weights_in
from tools import parity

ROOT = Path(__file__).parents[2]
RUN_S = 300.0
"""Deadline of a run on shared cores by the clock of tests/patience.py; about 30 s when nothing else runs."""
FLAGS = (
    "--prompts random --sequences 8 --rollout.max-new-tokens 48 --generator.max-total-tokens 4096 --rollout.top-k 20"
)
TOKENS = 8 * 48


@dataclass(frozen=True)
class Run:
    code: int
    verdict: str
    found: dict[str, Any]


def run(model: Path, *flags: str) -> Run:
    command = [sys.executable, "tools/parity.py", str(model), *FLAGS.split(), *flags]
    done = patience.run(command, cwd=ROOT, seconds=RUN_S)
    assert done.returncode in (0, 1), done.stderr[-4000:]
    assert "without the fork server" not in done.stderr, "processes were not forked by the fork server"
    *_, verdict, last = done.stdout.splitlines()
    return Run(done.returncode, verdict, json.loads(last))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, kind) for kind in ("qwen3", "qwen2", "mistral", "moe")}


@pytest.fixture(scope="module")
def fork_server() -> Iterator[None]:
    """A fork server for the engine, scheduler and trainer processes of all runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}")
        with forking([preload for preload in PRELOADS if preload.name != SCORING_PRELOAD]) as (name, _):
            patch.setenv(ADDRESS_VARIABLE, name)
            yield


@pytest.mark.heavy
@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_a_dense_model_agrees(kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    done = run(models[kind], "--plot", str(tmp_path / "plots" / "parity.png"))
    assert done.code == 0 and done.verdict.startswith("PASS: ") and done.found["verdict"] == "pass"
    assert set(done.found["rows"]) == {"sampled", "truncated"}
    for row in done.found["rows"].values():
        assert row["tokens"] == TOKENS and 0 < row["max"] < LOGPROB_BOUND and row["outside"] == 0
    assert done.found["top_differs"] == {"own": 0.0} and done.found["routes_differ"] == []
    assert (tmp_path / "plots" / "parity.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.heavy
@pytest.mark.usefixtures("fork_server")
def test_a_mixture_of_experts_agrees_in_its_routes_too(models: dict[str, Path]) -> None:
    done = run(models["moe"])
    assert done.code == 0 and "with the engine's experts replayed" in done.verdict
    assert set(done.found["rows"]) == {"sampled", "sampled_replayed", "truncated", "truncated_replayed"}
    assert all(row["max"] < LOGPROB_BOUND for name, row in done.found["rows"].items() if name.endswith("_replayed"))
    assert len(done.found["routes_differ"]) == LAYERS and max(done.found["routes_differ"]) < 0.002
    costs = done.found["costs"]
    assert costs["route_bytes_per_token"] == 2 * LAYERS  # two experts of each layer, a byte each
    assert 1 < costs["kept_ids_per_token"] <= 20
    assert costs["mask_bytes_per_token"] == pytest.approx(4 + 4 * costs["kept_ids_per_token"], rel=1e-3)


@pytest.mark.heavy
@pytest.mark.usefixtures("fork_server")
def test_other_weights_fail_and_replay_fixes_only_differences_of_routing(
    models: dict[str, Path], tmp_path: Path
) -> None:
    other, weights = tmp_path / "other", weights_in(models["moe"])
    shutil.copytree(models["moe"], other)
    router = weights["model.layers.1.mlp.gate.weight"]
    router += 0.02 * torch.randn(router.shape, generator=torch.Generator().manual_seed(1))
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    done = run(models["moe"], "--trainer-model", str(other))
    assert done.code == 1 and done.verdict.startswith("FAIL: ") and "p99" in done.verdict and "ABOVE" in done.verdict
    assert done.found["verdict"] == "fail" and {"p99", "routes_differ"} <= set(done.found["failed"])
    before, after = done.found["routes_differ"]
    assert before == 0 < after <= done.found["tokens_rerouted"]
    rows = done.found["rows"]
    assert LOGPROB_BOUND < rows["sampled_replayed"]["max"] < rows["sampled"]["max"]


# ---- no engine and no trainer --------------------------------------------------------------------------------


def row(**others: float) -> dict[str, float]:
    return {"p99": 1e-6, "k3": 1e-12, "outside": 0.0, "nonfinite": 0.0} | others


def test_each_limit_counts_and_replay_is_judged_where_there_is_one() -> None:
    limits = parity.Limits(k3=0.5).of("float32")
    good = parity.Differences({"sampled": row()}, {"own": 0.0}, [], 0.0, {})
    assert parity.judge(good, limits)[1] == []
    for name in ("p99", "k3", "outside"):
        assert parity.judge(replace(good, rows={"sampled": row(), "truncated": row(**{name: 1.0})}), limits)[1] == [
            name
        ]
    assert parity.judge(replace(good, rows={"sampled": row(nonfinite=0.1)}), limits)[1] == ["nonfinite"]
    assert parity.judge(replace(good, top_differs={"own": 0.1}), limits)[1] == ["top_differs"]
    sparse = replace(
        good,
        rows={"sampled": row(p99=1.0), "sampled_replayed": row()},
        top_differs={"own": 0.1, "replayed": 0.0},
        routes_differ=[0.0, 0.001],
    )
    assert parity.judge(sparse, limits)[1] == []
    assert parity.judge(replace(sparse, routes_differ=[0.0, 0.1]), limits)[1] == ["routes_differ"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "no/such/folder/"}, "no/such/folder"),
        ({"prompts": "task"}, "tokenizer"),
        ({"trainer_model": "other"}, "architecture"),
        ({"prompt_tokens": 1000}, "1064 .*1024"),
        ({"trainer": TrainerSettings(ranks=1, tokens_per_microbatch=70)}, "trainer.tokens-per-microbatch"),
        ({"trainer": TrainerSettings(ranks=3)}, "trainer.ranks 3"),
        ({"trainer": TrainerSettings(ranks=2, tp=2)}, "trainer.tp 2"),
        ({"generator": GeneratorSettings(tp=3)}, "generator.tp 3"),
    ],
)
def test_models_that_cannot_be_compared_are_refused_before_anything_starts(
    changes: dict[str, Any], message: str, models: dict[str, Path]
) -> None:
    if changes.get("trainer_model"):
        changes = {"trainer_model": str(models["qwen3"])}
    settings = replace(parity.Settings(str(models["moe"]), prompts="random"), **changes)
    with pytest.raises(ValueError, match=message):
        parity.prepare(settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequences": 0}, "sequences"),
        ({"ratio_low": 1.5}, "ratio.low"),
        ({"rollout": RolloutSettings(temperature=0.0)}, "rollout.temperature"),
        ({"trainer": TrainerSettings(ranks=1, router_replay="replay")}, "trainer.router-replay"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(parity.Settings("model"), **changes)
    with pytest.raises(ValueError, match="limits.p99"):
        parity.Limits(p99=-1.0)
