"""How a launch resolves settings for its devices: automatic values, and refusals."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from monarch_rl.errors import SettingsError, TooFewDevices
from monarch_rl.generator.gpu import HARMFUL
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.model.lora import LoraSettings
from monarch_rl.model.sizes import trained_model
from monarch_rl.model.tensors import model_bytes
from monarch_rl.pipeline.memory import HEAD, STATES, cpu_weights, trainer_memory
from monarch_rl.pipeline.publishing import TransferGroup
from monarch_rl.pipeline.settings import (
    RunSettings,
    changed_settings,
    check,
    chosen_sizes,
    episode_limits,
    normaliser_tokens,
    prepare,
    prepare_engine,
    resolve,
    sized,
    to_record,
)
from monarch_rl.pipeline.start import whole_checkpoint_bytes
from monarch_rl.rollout.evaluation import EvaluationSettings
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.runtime.deadlines import disk_limit_s
from monarch_rl.runtime.devices import Devices
from monarch_rl.settings.cli import cli
from monarch_rl.tasks.mixture import Mixture
from monarch_rl.tasks.questions import Questions
from monarch_rl.tasks.task import Task
from monarch_rl.trainer.loss_settings import CriticSettings
from monarch_rl.trainer.settings import LossSettings, TrainerSettings
from monarch_rl.weights.manifest import Manifest
from monarch_rl.weights.transport import TransferSettings
from recipes import grpo
from tests.model.configs import qwen3
from tests.recipe.running import random_model

GPUS, CPUS = Devices("cuda", 1, 8), Devices("cpu", 1, 8)


def test_automatic_values_are_numbers_once_the_devices_are_known() -> None:
    """A run's settings.json holds the resolved values, so that reading it later needs no device."""
    for devices, requests, limit_s in ((GPUS, 256, 1200), (CPUS, 128, 300)):
        found = resolve(RunSettings(), devices)
        assert (found.generator.max_running_requests, found.generator.start_deadline_s) == (requests, limit_s)
        assert replace(found, generator=GeneratorSettings()) == RunSettings()
    own = RunSettings(generator=GeneratorSettings(max_running_requests=9, start_deadline_s=99))
    assert resolve(own, GPUS) == own


@pytest.mark.parametrize(
    ("settings", "devices", "message"),
    [
        (RunSettings(), Devices("cuda", 1, 1), "4 ranks .* 1: .* --colocate"),
        (RunSettings(colocate=True), Devices("cuda", 1, 1), "2 ranks .* 2 gen"),
        (RunSettings(colocate=True, weights=TransferSettings("collective")), GPUS, "NCCL"),
        (RunSettings(colocate=True, weights=TransferSettings("auto")), GPUS, "weights.transport auto"),
        (
            RunSettings(colocate=True),
            Devices("cuda", 2, 1),
            "shared_memory .the default with colocate.* one host.* rdma",
        ),
    ],
)
def test_settings_that_do_not_allow_colocation_are_refused(
    settings: RunSettings, devices: Devices, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(settings, devices)


@pytest.mark.parametrize(
    ("evaluation", "flag"),
    [
        (EvaluationSettings(best="held_out/accuracy"), "best held_out/accuracy"),
        (EvaluationSettings(samples=4, temperature=1.0, best="held_out/pass_at_4"), "best held_out/pass_at_4"),
        (EvaluationSettings(samples=4, temperature=1.0, pass_at=(2,)), "pass-at"),
    ],
)
def test_accuracy_of_a_task_that_defines_no_success_is_refused(evaluation: EvaluationSettings, flag: str) -> None:
    async def episode(item: Any, policy: Any) -> float:
        return 1.0

    task = Task(int, episode, name="guess")
    with pytest.raises(SettingsError, match=f"evaluation.{flag}: task guess .*success_reward"):
        check(RunSettings(evaluation=evaluation), CPUS, task)
    with pytest.raises(SettingsError, match=r"(?s)held-out.*evaluation\."):  # all at once
        check(RunSettings(evaluation=evaluation, held_out=5), CPUS, replace(task, held_out={"few": [1]}))


def test_all_refusals_are_one_list() -> None:
    async def episode(item: Any, policy: Any) -> float:
        return 1.0

    settings = RunSettings(held_out=5, evaluation=EvaluationSettings(sets=("few", "many")))
    settings = replace(settings, trainer=TrainerSettings(minibatches=64))
    with pytest.raises(SettingsError) as refused:
        check(settings, CPUS, Task(int, episode, {"few": [1]}))
    assert str(refused.value).count("problems:") == 1 and str(refused.value).startswith("3 problems:\n- held-out")


@pytest.mark.parametrize(("first", "last", "steps"), [(3, 2, 9), (8, 10, 9)])
def test_steps_that_cannot_be_profiled_are_refused(first: int, last: int, steps: int) -> None:
    with pytest.raises(SettingsError, match=f"profile-steps {first} {last}"):
        check(RunSettings(steps=steps, trainer=TrainerSettings(profile_steps=(first, last))), CPUS)


def test_a_curriculum_over_other_steps_than_those_of_the_run_is_refused(tmp_path: Path) -> None:
    async def episode(item: Any, policy: Any) -> float:
        return 1.0

    weights = {Task(int, episode, name="easy"): lambda step: 1.0, Task(int, episode, name="hard"): lambda step: step}
    settings = RunSettings(model=str(tmp_path), groups_per_step=16)
    with pytest.raises(SettingsError, match="groups_per_step=8.*groups-per-step is 16"):
        check(settings, CPUS, Mixture(weights, groups_per_step=8))
    for fitting in (Mixture(weights, groups_per_step=16), Mixture(dict.fromkeys(weights, 1.0))):
        with pytest.raises(SettingsError, match="config.json"):  # the next check
            check(settings, CPUS, fitting)


def test_a_curriculum_that_ends_before_the_last_groups_of_the_run_is_refused(tmp_path: Path) -> None:
    """Its items could not be made: groups of up to max_policy_lag steps after the last are started, too."""

    async def episode(item: Any, policy: Any) -> float:
        return 1.0

    easy, hard = Task(int, episode, name="easy"), Task(int, episode, name="hard")
    settings = RunSettings(model=str(tmp_path), groups_per_step=16, steps=6)
    listed = Mixture({easy: [6, 5, 4, 3, 2, 1].__getitem__, hard: 1}, groups_per_step=16)
    faded = Mixture({easy: lambda step: 7 - step, hard: lambda step: 0}, groups_per_step=16)

    def weight(step: int) -> float:
        return 1 if step < 3 else float(Path(str(step)).read_text())

    mistaken = Mixture({easy: weight, hard: 1}, groups_per_step=16)
    with pytest.raises(SettingsError, match="step 3 .*FileNotFoundError"):
        check(settings, CPUS, mistaken)
    for task, step in ((listed, 6), (faded, 7)):
        with pytest.raises(SettingsError, match=f"step {step}.*max-policy-lag"):
            check(settings, CPUS, task)
        with pytest.raises(SettingsError, match="config.json"):  # the next check
            check(replace(settings, steps=step - 2), CPUS, task)


def test_playing_a_recipe_needs_the_devices_of_one_engine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tools/play.py`` needs fewer devices than a run; settings that it uses are checked as usual."""
    monkeypatch.setattr("monarch_rl.pipeline.settings.check_environment", lambda: None)  # it checks a machine with GPUs
    model = random_model(tmp_path / "tiny")
    settings = RunSettings(
        model=str(model),
        trainer=TrainerSettings(ranks=64),
        generator=GeneratorSettings(replicas=9, max_total_tokens=4096),
        output=tmp_path / "runs",
    )
    for devices in (CPUS, Devices("cuda", 1, 1, 80 << 30)):
        with pytest.raises(TooFewDevices):
            check(settings, devices)
        generator, config = prepare_engine(settings, devices)
        assert (config.folder, generator.replicas, generator.max_total_tokens) == (model, 1, 4096)
        assert generator.start_deadline_s is not None and (generator.memory_fraction > 0) == (devices.kind == "cuda")
    assert not settings.output.exists()
    for wrong, message in (
        (replace(settings, generator=GeneratorSettings(tp=16)), "16 ranks .*one generator replica"),
        (replace(settings, rollout=RolloutSettings(max_new_tokens=10**6)), "rollout.max-new-tokens"),
        (replace(settings, generator=GeneratorSettings(context_length=10**6)), "generator.context-length"),
        (replace(settings, model=str(tmp_path / "none")), "none"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare_engine(wrong, CPUS)


def test_replicas_that_share_devices_begin_at_the_first_one() -> None:
    apart, together = RunSettings(), RunSettings(colocate=True)
    assert (apart.first_replica_device, together.first_replica_device) == (apart.trainer.ranks, 0)
    assert (apart.transfers.resolved_transport, together.transfers.resolved_transport) == (
        "collective",
        "shared_memory",
    )
    assert replace(together, weights=TransferSettings("rdma")).transfers.resolved_transport == "rdma"
    assert resolve(together, CPUS).weights.transport == "shared_memory"


@pytest.mark.parametrize("patience", [0.1, 1.0, 2.5, 1000.0])
def test_patience_multiplies_each_deadline_once_and_no_other(patience: float) -> None:
    """Saved settings hold the deadlines without it, even when resolved twice, as launch() and run.start() do."""
    plain, saved = resolve(RunSettings(), GPUS), resolve(RunSettings(patience=patience), GPUS)
    assert resolve(saved, GPUS) == saved == replace(plain, patience=patience)
    once = saved.with_patience()
    assert once.with_patience() == once
    for deadline in (
        lambda s: s.generator.start_limit_s(True),
        lambda s: s.generator.drain_deadline_s,
        lambda s: s.rollout.generate_limit_s,
        lambda s: s.rollout.slot_deadline_s,
        lambda s: s.transfers.deadline_s,
        lambda s: s.update_limit_s,
    ):
        assert deadline(once) == pytest.approx(patience * deadline(plain))
    assert once.transfers.attempts == min(max(1, math.ceil(3 * patience)), 1000)
    for name in ("episode_deadline_s", "score_deadline_s"):
        assert getattr(once.rollout, name) == getattr(plain.rollout, name)
    short = replace(saved, weights=TransferSettings(deadline_s=10)).with_patience().weights.deadline_s
    assert short == pytest.approx(max(10 * patience, 1))
    assert (once.stall_s, once.recovery, once.checkpoint) == (plain.stall_s, plain.recovery, plain.checkpoint)


def test_deadlines_follow_the_bytes_of_the_model_and_the_tokens_of_an_episode() -> None:
    """A user need not raise them for a large model or long answers; deadlines set by the user stay."""
    large = {"vocab_size": 150_000, "hidden_size": 8192, "intermediate_size": 25_000, "num_hidden_layers": 64}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096}
    config = qwen3(dtype="bfloat16", **large, **heads)
    attention = 2 * 8192 * 128 * (64 + 8) + 2 * 128
    parameters = 2 * 150_000 * 8192 + 8192 + 64 * (attention + 3 * 8192 * 25_000 + 2 * 8192)
    assert model_bytes(config) == 2 * parameters
    written = whole_checkpoint_bytes(config, TrainerSettings())
    assert 0 <= written - 12 * parameters < 24, "in float32, whatever dtype the folder has"
    critic = TrainerSettings(critic=CriticSettings(lr=1e-4))
    assert 1.8 < whole_checkpoint_bytes(config, critic) / written < 2
    assert whole_checkpoint_bytes(config, TrainerSettings(lora=LoraSettings(16))) < 0.01 * written
    seconds = 2 * parameters / 1e9 * 20
    assert disk_limit_s(2 * parameters) == pytest.approx(600 + seconds)
    assert resolve(RunSettings(), GPUS, config).generator.start_deadline_s == pytest.approx(1200 + seconds)
    own = RunSettings(generator=GeneratorSettings(max_running_requests=9, start_deadline_s=99))
    assert resolve(own, GPUS, config) == own
    group = TransferGroup(cast(Any, None), [], Manifest((), 3 * 10**9, ()), TransferSettings(deadline_s=50))
    assert group.settings.deadline_s == pytest.approx(50 + 60)

    short = RunSettings()
    assert (short.rollout.generate_limit_s, short.update_limit_s) == (600, 600)
    long = RunSettings(rollout=RolloutSettings(max_new_tokens=20_000))
    assert long.rollout.generate_limit_s == 1000 and long.update_limit_s == 300 + 1000
    set_by_user = replace(long.rollout, generate_deadline_s=77.0)
    assert set_by_user.generate_limit_s == 77 and RunSettings(update_deadline_s=99.0).update_limit_s == 99


def test_gpus_without_compilers_are_refused_before_a_model_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    settings = RunSettings(model="no/such-model", trainer=TrainerSettings(ranks=2), output=tmp_path)
    with pytest.raises(ValueError, match="nvcc"):
        check(settings, GPUS)
    monkeypatch.setenv(HARMFUL, "1")
    with pytest.raises(ValueError, match=HARMFUL):
        check(settings, GPUS)


def test_engines_on_gpus_are_refused_in_float32(tmp_path: Path) -> None:
    settings = RunSettings(generator=GeneratorSettings(dtype="float32"), output=tmp_path)
    with pytest.raises(ValueError, match="generator.dtype float32"):
        check(settings, GPUS)


def test_an_episode_is_limited_by_micro_batches_and_by_the_context() -> None:
    config = qwen3(max_position_embeddings=4096)
    for tokens, limit in ((1000, 1000), (8192, 4090)):  # SGLang keeps 6 of the context
        settings = RunSettings(trainer=TrainerSettings(tokens_per_microbatch=tokens))
        assert min(episode_limits(settings, config, on_gpu=False).values()) == limit


def test_the_constant_aggregation_divides_by_the_tokens_of_an_answer_unless_a_number_is_given() -> None:
    rollout = RolloutSettings(max_new_tokens=8)
    assert normaliser_tokens(RunSettings(rollout=rollout)) == 8
    given = RunSettings(rollout=rollout, trainer=TrainerSettings(loss=LossSettings(max_tokens=64)))
    assert normaliser_tokens(given) == 64
    assert "8 tokens (rollout.max-new-tokens)" in LossSettings().normaliser(8)
    assert "64 tokens (trainer.loss.max-tokens)" in given.trainer.loss.normaliser(64)


def test_all_settings_that_cannot_work_are_refused_at_once(tmp_path: Path) -> None:
    """Before the model is looked for, which may have to be downloaded, and before the output folder is created."""
    settings = RunSettings(
        model=str(tmp_path / "none"),
        output=tmp_path / "runs",
        groups_per_step=1,
        trainer=TrainerSettings(minibatches=2, ranks=4096),
        rollout=RolloutSettings(group_size=1, workers=90_000),
    )
    with pytest.raises(SettingsError) as refused:
        check(settings, CPUS, Questions([], lambda row, answer: 0.0))
    expected = [
        "trainer.minibatches",
        "rollout.group-size",
        "rollout.workers",
        "4096 trainer ranks",
        "no rows",
    ]
    assert [part for part in expected if part not in str(refused.value)] == []
    assert not settings.output.exists() and str(tmp_path) not in str(refused.value)


def test_a_relative_model_folder_is_recorded_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that checkpoints, exports and evaluations find it from other directories."""
    random_model(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    settings, config = prepare(RunSettings(model="tiny", output=tmp_path), CPUS)
    assert settings.model == to_record(settings)["model"] == str(tmp_path / "tiny") == str(config.folder)
    monkeypatch.chdir("/")
    assert prepare(settings, CPUS) == (settings, config)


def test_recipes_get_a_models_folder_and_records_its_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads the former in a recipe's task, and takes no name with a revision."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = random_model(tmp_path / "models--org--tiny" / "snapshots" / "1234")
    settings, _ = prepare(RunSettings(model=str(folder), output=tmp_path), CPUS)
    assert settings.model == str(folder) and to_record(settings)["model"] == "org/tiny@1234"


@pytest.mark.parametrize(("kind", "cores", "expected"), [("cpu", 1, 1), ("cpu", 2, 1), ("cpu", 3, 2), ("cuda", 2, 2)])
def test_small_machines_have_one_rank_and_one_replica_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, kind: str, cores: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    offered = Devices(kind, 1, 8)

    def sizes(*flags: str) -> tuple[int, int]:
        settings = sized(cli(grpo.Settings, args=list(flags)), offered)
        assert sized(settings, offered) == settings, "they are given now"
        return settings.trainer.ranks, settings.generator.replicas

    assert sizes("--trainer.ranks=2") == (2, expected)
    assert sizes("--generator.replicas=2", "--trainer.lr=0.1") == (expected, 2)
    experts = RunSettings(trainer=TrainerSettings(expert_parallel=2))
    assert sized(experts, offered).trainer.ranks == 2, "experts are divided among two ranks"
    assert chosen_sizes(experts, sized(experts, offered)) == ["trainer.ranks 2", f"generator.replicas {expected}"]


def test_trainer_ranks_are_refused_beyond_the_machines_memory_and_the_limit_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random model's logits, of 8,192 tokens at most: two ranks on the CPU, none on GPUs of unknown memory."""
    trainer = TrainerSettings(ranks=2, logprob_chunk=65_536)
    generator = GeneratorSettings(max_total_tokens=4096)
    settings = RunSettings(model=str(random_model(tmp_path / "tiny")), trainer=trainer, generator=generator)
    settings = replace(settings, output=tmp_path / "runs")
    logits = 20 * 8192 * check(settings, CPUS).vocab_size
    for limited in ("the machine", "a process"):
        with monkeypatch.context() as patch:
            if limited == "the machine":
                patch.setattr("monarch_rl.pipeline.settings.memory_limit", lambda: 2 * logits)
            else:
                patch.setattr(resource, "getrlimit", lambda kind: (logits, resource.RLIM_INFINITY))
            with pytest.raises(
                ValueError, match=r"2 trainer ranks .*logits of 8192 tokens .*--trainer.logprob-chunk at"
            ):
                check(settings, CPUS)
            check(replace(settings, trainer=replace(trainer, logprob_chunk=1024)), CPUS)


def test_trainer_ranks_have_the_memory_that_the_weights_of_generators_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each side would fit alone; the run would be killed in its first step, when AdamW's states are allocated."""
    settings = RunSettings(
        model=str(random_model(tmp_path / "tiny")),
        trainer=TrainerSettings(ranks=1, logprob_chunk=64),
        generator=GeneratorSettings(replicas=2, max_total_tokens=4096),
        output=tmp_path / "runs",
    )
    config = check(settings, CPUS)
    weights = cpu_weights(config, settings.generator, settings.trainer.lora)
    planned = trainer_memory(
        trained_model(config, settings.trainer.lora), settings.trainer, TransferSettings(), on_gpu=False, served=4
    )
    needed = sum(planned.get(purpose, 0) for purpose in (*STATES, HEAD))
    assert weights > 0.1 * needed
    monkeypatch.setattr("monarch_rl.pipeline.settings.check_cache", lambda *_: None)
    monkeypatch.setattr("monarch_rl.pipeline.settings.memory_limit", lambda: needed + weights // 4)
    with pytest.raises(ValueError, match=r"trainer ranks .*generators.*--generator.replicas"):
        check(settings, CPUS)
    monkeypatch.setattr("monarch_rl.pipeline.settings.memory_limit", lambda: 2 * needed + weights)
    check(settings, CPUS)


@dataclass(frozen=True)
class NeedsData(RunSettings):
    """Settings whose defaults alone are refused."""

    data: str = ""

    def contradictions(self) -> Iterator[str]:
        if not self.data:
            yield "data must be given"


def test_settings_that_are_not_the_defaults_are_found_also_if_those_contradict_each_other() -> None:
    given = NeedsData(data="rows.jsonl", trainer=TrainerSettings(lr=0.5))
    assert changed_settings(given) == {"data": ["", "rows.jsonl"], "trainer.lr": [1e-6, 0.5]}
