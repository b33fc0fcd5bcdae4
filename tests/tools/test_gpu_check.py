"""tools/gpu_check.py on a CPU: the parts that need no SGLang pass, and problems of a part are its verdict."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from monarch_rl.episode.sampling import Completion
from monarch_rl.generator.settings import GeneratorSettings, check_served
from monarch_rl.model.config import parse_config
from monarch_rl.trainer.settings import TrainerSettings, check_experts
from tests import patience
from tools import gpu_check
from tools.gpu_parts import child, commits, engines, members, old_torch
from tools.gpu_parts import train as train_part
from tools.gpu_parts.common import Bench, Findings, Skipped, expert_shape, model_shape

ROOT = Path(__file__).parents[2]
ENGINES_S = 3100.0
"""Deadline in seconds, longer than that of two parts, so that parts can end their processes."""
PART_S = 900.0
"""Deadline of a part in seconds on shared cores; about 30 s when nothing else runs."""


@pytest.mark.slow
@pytest.mark.timeout(3 * PART_S + 60)
def test_the_parts_without_an_engine_pass_on_a_cpu_without_sglang(tmp_path: Path) -> None:
    command = [sys.executable, "tools/gpu_check.py", "--parts", "trainer,weights,members"]
    done = patience.run(
        [*command, "--part-deadline-s", PART_S, "--output", tmp_path / "found.jsonl"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        seconds=3 * PART_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert (tmp_path / "found.jsonl").read_text() == done.stdout
    trainer, weights, group = (json.loads(line) for line in done.stdout.splitlines())
    for name, line in {"trainer": trainer, "weights": weights, "members": group}.items():
        assert line["part"] == name and line["verdict"] == "passed" and line["problems"] == []
        assert line["device"].startswith("CPU") and line["versions"]["torch"] == torch.__version__
    assert trainer["figures"]["loss_last"] < trainer["figures"]["loss_first"]
    assert trainer["figures"]["experts_loss_last"] < trainer["figures"]["experts_loss_first"]
    assert trainer["figures"]["rotary_caches"] == 1
    assert weights["figures"]["many_tensors"] == 18_867
    assert group["figures"]["replicas"] == 2 and "members_abort_ms" in group["figures"]


def passed_on_a_cpu(*parts: str) -> list[dict[str, Any]]:
    """Run parts that need SGLang, as on a GPU, check that none found a problem, and return their measurements."""
    done = patience.run(
        [sys.executable, "tools/gpu_check.py", "--parts", ",".join(parts), "--device", "cpu"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        seconds=ENGINES_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(part["part"], part["verdict"], part["problems"]) for part in found] == [(p, "passed", []) for p in parts]
    return [part["figures"] for part in found]


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(ENGINES_S + 60)
def test_engines_sample_and_tokens_have_their_versions_on_a_cpu() -> None:
    """With the real engine, and commits under load."""
    engine, under_load = passed_on_a_cpu("engine", "commits")
    assert engine["sequences"] == 16 and engine["start_s"] > 0
    assert under_load["commits"] == 12 and under_load["versions"] > 2
    assert under_load["labelled_equal_by_version"] == {}


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(ENGINES_S + 60)
def test_parity_and_the_main_job_pass_on_a_cpu() -> None:
    """Also with a mixture of experts, and with LoRA."""
    parity, job = passed_on_a_cpu("parity", "train")
    assert parity["tokens"] == parity["experts_tokens"] == 8 * 32
    assert 0 <= parity["routes_differ"] < 0.002
    metrics = {"trainer/loss", "time/step_s", "weights/transfer_ms", "weights/swap_ms"}
    assert metrics | {f"lora_{name}" for name in metrics} <= job.keys()


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(ENGINES_S + 60)
def test_speed_is_measured_on_a_cpu() -> None:
    """The value itself means nothing on a CPU."""
    (speed,) = passed_on_a_cpu("speed")
    assert min(speed["generator_ratio"], speed["trainer_ratio"], speed["tokens_per_s"]) > 0


@pytest.mark.parametrize(
    "device, gpus, layouts",
    [("cuda", 1, ["colocated_", "lora_"]), ("cuda", 8, ["", "colocated_", "lora_"]), ("cpu", 0, ["", "lora_"])],
)
def test_the_main_job_is_colocated_on_one_gpu_and_runs_both_ways_on_several(
    device: str, gpus: int, layouts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs are faked here; tests/recipe/test_recipe.py has a real colocated run."""
    runs: list[tuple[str, ...]] = []

    def python(program: str, *arguments: object, **_: float) -> None:
        if program.startswith("recipes/"):
            flags = tuple(map(str, arguments))
            runs.append(flags)
            folder = Path(flags[flags.index("--output") + 1], "run")
            (folder / "model").mkdir(parents=True)
            (folder / "model" / "config.json").write_text("{}")
            row = json.dumps({"trainer/loss": 0.5, "time/step_s": 2.0})
            (folder / "metrics.jsonl").write_text(f"{row}\n" * train_part.STEPS)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(train_part, "_python", python)
    found = Findings()
    train_part.run(Bench(torch.device(device), tmp_path), found)
    assert found.problems == []
    assert ["--colocate" in flags for flags in runs] == [layout != "" for layout in layouts]
    checkpointing = [" ".join(flags).endswith("--trainer.activation-checkpoint full") for flags in runs]
    assert checkpointing == [layout == "colocated_" for layout in layouts]
    lora = [" ".join(flags).endswith("--trainer.lora.rank 8") for flags in runs]
    assert lora == [layout == "lora_" for layout in layouts]
    found_in = [layout for layout in train_part.LAYOUTS if f"{layout}trainer/loss" in found.figures]
    assert found_in == layouts


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_models_can_be_trained_and_served_on_their_device(device: str, tmp_path: Path) -> None:
    bench = Bench(torch.device(device), tmp_path)
    dense, sparse = parse_config(model_shape(bench)), parse_config(expert_shape(bench))
    for config in (dense, sparse):
        check_experts(config, TrainerSettings(ranks=1))
        check_served(config, GeneratorSettings(), bench.on_gpu)
    assert sparse.sparse_layers and not dense.sparse_layers


def verdict_of(work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the verdict of a process on a part that runs ``work``."""
    part: Any = ModuleType("tools.gpu_parts.made_up")
    part.run = work
    monkeypatch.setitem(sys.modules, "tools.gpu_parts.made_up", part)
    return child.look("made_up", "cpu", tmp_path)


def test_an_exception_is_a_failed_verdict_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(_bench: Bench, found: Findings) -> None:
        found.note(before=1.23456)
        raise ZeroDivisionError("so it is")

    verdict = verdict_of(work, tmp_path, monkeypatch)
    assert verdict["verdict"] == "failed" and verdict["figures"] == {"before": 1.235} and verdict["versions"]["python"]
    assert "ZeroDivisionError: so it is" in verdict["problems"][0] and "in work" in verdict["problems"][0]


def test_a_problem_fails_and_a_reason_skips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_bench: Bench, found: Findings) -> None:
        found.require(True, "nothing")
        found.require(False, "it is wrong")

    def skips(*_: Any) -> None:
        raise Skipped("there is no second GPU")

    verdict = verdict_of(fails, tmp_path, monkeypatch)
    assert (verdict["verdict"], verdict["problems"]) == ("failed", ["it is wrong"])
    verdict = verdict_of(skips, tmp_path, monkeypatch)
    assert (verdict["verdict"], verdict["problems"]) == ("skipped", ["there is no second GPU"])


def test_members_need_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Skipped, match="one GPU"):
        members.run(Bench(torch.device("cuda", 0), tmp_path), Findings())


def test_a_part_that_does_not_end_is_killed_and_the_next_one_runs(capsys: pytest.CaptureFixture[str]) -> None:
    settings = gpu_check.Settings(parts="weights,trainer", device="cpu", part_deadline_s=0.01)
    assert gpu_check.main(settings) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["part"] for line in lines] == ["weights", "trainer"]
    assert all(line["verdict"] == "failed" and "0.01 s" in line["problems"][-1] for line in lines)


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(ValueError, match="wieghts.*weights"):
        gpu_check.Settings(parts="trainer,wieghts")


def test_an_old_torch_gets_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that varlen_attn of torch 2.11 does not have would change nothing there, and are left out."""
    import torch.distributed.fsdp as fsdp
    import torch.nn.attention.varlen as varlen

    def varlen_attn(query: int, *, scale: float | None = None) -> tuple[int, float | None]:
        return query, scale

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.delattr(fsdp, "DataParallelMeshDims")
    old_torch.prepare()
    monkeypatch.setattr(varlen, "varlen_attn", now := varlen.varlen_attn)
    now_any: Any = now
    assert now_any(3, scale=0.5, enable_gqa=True, num_splits=1) == (3, 0.5)
    from torch.distributed.fsdp import DataParallelMeshDims

    assert isinstance(DataParallelMeshDims, type)


def test_a_torch_of_today_is_left_as_it_is() -> None:
    import torch.distributed.fsdp as fsdp
    import torch.nn.attention.varlen as varlen

    before = varlen.varlen_attn, fsdp.DataParallelMeshDims
    old_torch.prepare()
    assert (varlen.varlen_attn, fsdp.DataParallelMeshDims) == before


def completion(versions: list[int], flat: list[bool], vocabulary: int = 500) -> Completion:
    """Return a completion whose tokens have these versions, and where ``flat`` the log-prob of uniform sampling."""
    logprobs = np.where(flat, -np.log(vocabulary), -1.5).astype(np.float32)
    return Completion(np.zeros(len(flat), np.int32), logprobs, np.asarray(versions, np.int32), "length")


@pytest.mark.parametrize(
    "flat, problem",
    [
        ([0, 2, 0], None),
        ([0, 1, 0], "1 tokens are labelled with a version that did not sample them"),
        ([3, 2, 0], None),  # by chance
        ([1, 2, 3], "4 tokens sampled with equal probabilities are labelled with the other version"),
        ([0, 2, 9], "9 tokens sampled with equal probabilities are labelled with the other version"),
    ],
)
def test_a_token_labelled_with_another_version_is_found(flat: list[int], problem: str | None) -> None:
    """Odd versions sample uniformly: here 2 tokens of version 1, between 20,000 and 9 tokens of the model."""
    findings, sizes = Findings(), [20_000, 2, 9]
    equal = [i < many for many, size in zip(flat, sizes, strict=True) for i in range(size)]
    commits.judge(findings, [completion(np.repeat([0, 1, 2], sizes).tolist(), equal)], 500)
    assert findings.figures["tokens"] == 20_011 and findings.figures["versions"] == 3
    wrong = {version: flat[version] for version in (0, 2) if flat[version]}
    assert findings.figures["labelled_own_by_version"] == wrong
    assert findings.figures["labelled_equal_by_version"] == ({} if flat[1] == 2 else {1: 1})
    assert len(findings.problems) == (problem is not None)
    assert problem is None or problem in findings.problems[0]


def test_a_request_that_failed_is_the_error_of_the_part() -> None:
    async def fails(error: Exception | None) -> Completion:
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return completion([0], [False])

    async def run(error: Exception | None) -> None:
        requests = [asyncio.ensure_future(fails(None)), asyncio.ensure_future(fails(error))]
        commits.raise_failed(requests)  # none has ended
        await asyncio.wait(requests)
        commits.raise_failed(requests)

    asyncio.run(run(None))
    with pytest.raises(ConnectionError, match="the engine is gone"):
        asyncio.run(run(ConnectionError("the engine is gone")))


def test_a_part_with_engines_has_the_time_of_a_first_start() -> None:
    settings = gpu_check.Settings(part_deadline_s=100)
    assert GeneratorSettings().start_limit_s(on_gpu=True) == gpu_check.FIRST_START_S
    assert {name: settings.deadline_s(name) for name in gpu_check.PARTS} == {
        name: 100 if name in child.WITHOUT_SGLANG else 1300 for name in gpu_check.PARTS
    }


def test_incomplete_completions_are_found() -> None:
    findings = Findings()
    engines.check_completions(findings, [completion([0] * 4, [False] * 4)], 4, 500)
    assert findings.problems == []
    engines.check_completions(findings, [completion([0] * 3, [False] * 3)], 4, 500)
    assert "4 tokens were requested, but completions have [3]" in findings.problems[0]
