"""The memory plan: a run that does not fit its GPUs is refused before spawning, with settings that would fit."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.model.sizes import trained_model
from monarch_rl.pipeline.memory import (
    CACHE,
    REPLICA,
    STATIC,
    TRAINER,
    VERSIONS,
    MemoryPlan,
    Sides,
    check_cpu_trainer,
    check_gpu_memory,
    plan_memory,
)
from monarch_rl.pipeline.settings import RunSettings, engine_sides, memory_sides, resolve
from monarch_rl.runtime.devices import Devices
from monarch_rl.settings.cli import cli
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.weights.transport import TransferSettings, TransportName
from recipes.grpo import Settings
from tools.memory import GPUS, MODELS, device_bytes

ROOT = Path(__file__).parents[2]
GIB = 2**30
FLAG = re.compile(r"(trainer|generator|weights)\.([a-z-]+) (\w+)")


def sides(ranks: int = 2, transport: TransportName = "collective", **generator: Any) -> Sides:
    return Sides(TrainerSettings(ranks=ranks), GeneratorSettings(**generator), TransferSettings(transport))


def gpus(gigabytes: int, hosts: int = 1) -> Devices:
    return Devices("cuda", hosts, 8, device_bytes(gigabytes))


def refused(name: str, s: Sides, offered: Devices) -> str:
    with pytest.raises(ValueError) as caught:
        check_gpu_memory(MODELS[name], s, offered)
    return str(caught.value)


def changed(s: Sides, found: tuple[str, str, str]) -> Sides:
    """Return the settings with one flag changed as a message suggests."""
    room, flag, value = found
    typed: Any = int(value) if value.isdecimal() else value
    return s._replace(**{room: replace(getattr(s, room), **{flag.replace("-", "_"): typed})})


@pytest.mark.parametrize("gigabytes", GPUS)
@pytest.mark.parametrize("name", MODELS)
def test_the_settings_that_a_refusal_suggests_fit(name: str, gigabytes: int) -> None:
    """Suggestions are applied one after the other until nothing is refused; each must make its process fit."""
    s, offered = sides(), gpus(gigabytes)
    for _ in range(4):
        try:
            check_gpu_memory(MODELS[name], s, offered)
            return
        except ValueError as error:
            message = str(error)
        assert re.search(r"\d GiB", message), message
        if "no 3 settings" in message:
            return
        advice = message.partition("it fits with ")[2]
        if "lora.rank" in advice and " or " not in advice:
            return  # LoRA trains something else, so this suggestion is not applied
        who = TRAINER if message.startswith(TRAINER) else REPLICA
        alternatives = [part for part in advice.split(" or ") if "lora.rank" not in part]
        assert 1 <= len(advice.split(" or ")) <= 3
        for alternative in alternatives:
            other = s
            for flag in FLAG.findall(alternative):
                other = changed(other, flag)
            assert plan_memory(MODELS[name], other, offered.memory).fits(who), alternative
        for flag in FLAG.findall(alternatives[0]):
            s = changed(s, flag)
    pytest.fail(f"still refused: {message}")


def test_a_refusal_lists_memory_by_purpose_and_suggests_three_settings() -> None:
    message = refused("Qwen3-8B", sides(ranks=4), gpus(80, hosts=4))
    assert message.startswith("a trainer rank needs ") and "optimiser states 15.3" in message
    for setting in ("activation-checkpoint selective", "ranks 16", "tokens-per-microbatch 4096"):
        assert f"trainer.{setting}" in message
    s = sides(transport="rdma")._replace(trainer=TrainerSettings(ranks=64, activation_checkpoint="full"))
    message = refused("Qwen3-14B", s, gpus(80))
    assert message.startswith("a generator replica needs ") and "versions that arrive 5" in message
    assert "it fits with weights.transport collective or " in message


def test_a_memory_fraction_that_leaves_too_little_is_refused() -> None:
    s = sides(memory_fraction=0.9)._replace(trainer=TrainerSettings(ranks=8, activation_checkpoint="full"))
    message = refused("Qwen3-8B", s, gpus(80))
    assert "generator.memory-fraction 0.9 leaves 7.9 GiB" in message and "versions that arrive 15." in message
    most = re.search(r"give at most ([\d.]+), or 0", message)
    assert most is not None
    for fraction in (float(most[1]), 0.0):
        check_gpu_memory(MODELS["Qwen3-8B"], sides(memory_fraction=fraction)._replace(trainer=s.trainer), gpus(80))


def test_a_memory_fraction_too_small_for_the_cache_is_refused_with_one_that_fits() -> None:
    s = sides(memory_fraction=0.2)._replace(trainer=TrainerSettings(ranks=8, activation_checkpoint="full"))
    for tokens, cache in (
        (0, "a cache for one sequence"),
        (100_000, "the 100000 tokens of generator.max-total-tokens"),
    ):
        s = s._replace(generator=replace(s.generator, max_total_tokens=tokens, memory_fraction=0.2))
        message = refused("Qwen3-8B", s, gpus(80))
        assert (
            message.startswith("generator.memory-fraction 0.2 gives weights and KV cache 15.8 GiB") and cache in message
        )
        least = re.search(r"give at least ([\d.]+), or 0", message)
        assert least is not None
        for fraction in (float(least[1]), 0.0):
            generator = replace(s.generator, memory_fraction=fraction)
            check_gpu_memory(MODELS["Qwen3-8B"], s._replace(generator=generator), gpus(80))


def test_nothing_is_refused_where_the_memory_is_not_known() -> None:
    check_gpu_memory(MODELS["Qwen3-235B-A22B"], sides(), Devices("cuda", 1, 8))
    check_gpu_memory(MODELS["Qwen3-235B-A22B"], sides(), Devices("cpu", 1, 8))


def outside_static(plan: MemoryPlan) -> int:
    """Bytes of a replica outside SGLang's static memory."""
    return sum(nbytes for purpose, nbytes in plan.replica.items() if purpose not in STATIC)


@given(
    name=st.sampled_from(sorted(MODELS)),
    gigabytes=st.integers(16, 192),
    tp=st.sampled_from((1, 2, 4)),
    transport=st.sampled_from(get_args(TransportName)),
    delta=st.booleans(),
)
def test_the_automatic_memory_fraction_leaves_room_for_everything_planned(
    name: str, gigabytes: int, tp: int, transport: TransportName, delta: bool
) -> None:
    memory = gigabytes * GIB
    s = Sides(TrainerSettings(), GeneratorSettings(tp=tp), TransferSettings(transport, delta=delta))
    plan = plan_memory(MODELS[name], s, memory)
    if not plan.fits(REPLICA):
        return
    assert outside_static(plan) <= (1 - plan.memory_fraction) * memory
    static = sum(plan.replica.get(purpose, 0) for purpose in STATIC)
    assert static <= plan.memory_fraction * memory + memory / 1000
    least = s.trainer.tokens_per_microbatch  # the longest episode
    assert plan.cache_tokens >= least and plan.replica[CACHE] > 0


@pytest.mark.parametrize("gigabytes", GPUS)
@pytest.mark.parametrize("name", MODELS)
def test_the_cache_tokens_of_a_plan_are_accepted_as_a_setting(name: str, gigabytes: int, tmp_path: Path) -> None:
    """The check accepts them both as given by a user and after the settings are resolved."""
    s, offered = RunSettings(trainer=TrainerSettings(ranks=8)), gpus(gigabytes)
    plan = plan_memory(MODELS[name], memory_sides(s), offered.memory)
    if not plan.fits(REPLICA) or not plan.fits(TRAINER):
        return
    s = replace(s, generator=replace(s.generator, max_total_tokens=plan.cache_tokens))
    check_gpu_memory(MODELS[name], memory_sides(s), offered)
    check_gpu_memory(MODELS[name], memory_sides(resolve(s, offered, MODELS[name])), offered)


def test_resolved_settings_contain_the_memory_fraction(tmp_path: Path) -> None:
    model = MODELS["Qwen3-8B"]
    settings = RunSettings(trainer=TrainerSettings(ranks=8))
    found = resolve(settings, gpus(80), model)
    plan = plan_memory(MODELS["Qwen3-8B"], Sides(found.trainer, settings.generator, found.weights), device_bytes(80))
    assert 0.5 < found.generator.memory_fraction == plan.memory_fraction < 0.8
    assert resolve(found, gpus(80), model) == found
    assert resolve(settings, Devices("cpu", 1, 8), model).generator.memory_fraction == 0


def test_an_engine_alone_gets_the_memory_of_trainer_and_versions(tmp_path: Path) -> None:
    """``tools/play.py`` runs a recipe on one GPU even if its trainer needs eight or its actors share GPUs."""
    model, one = MODELS["Qwen3-8B"], Devices("cuda", 1, 1, device_bytes(80))
    for settings in (
        RunSettings(trainer=TrainerSettings(ranks=1), weights=TransferSettings("rdma")),
        RunSettings(trainer=TrainerSettings(ranks=1), colocate=True),
    ):
        assert refused("Qwen3-8B", memory_sides(settings), one).startswith("a trainer rank")
        alone = engine_sides(settings)
        check_gpu_memory(MODELS["Qwen3-8B"], alone, one)
        assert VERSIONS not in plan_memory(MODELS["Qwen3-8B"], alone, one.memory).replica
        found = resolve(settings, one, model, alone).generator
        assert found.max_total_tokens == 0 and 0.7 < found.memory_fraction < 0.95
    message = refused("Qwen3-14B", alone, Devices("cuda", 1, 2, device_bytes(24)))
    assert message.startswith("a generator replica needs ") and "it fits with generator.tp 2" in message
    assert "trainer." not in message and "weights." not in message


def test_a_trainer_rank_and_a_replica_on_one_gpu_are_planned_together() -> None:
    """A 1.7B model fits one GPU; a 4B model is refused with suggestions. The cache gets what the trainer leaves."""
    trainer = TrainerSettings(ranks=1, activation_checkpoint="full", tokens_per_microbatch=4096)
    s = Sides(trainer, GeneratorSettings(replicas=1), TransferSettings("shared_memory"), colocate=True)
    check_gpu_memory(MODELS["Qwen3-1.7B"], s, gpus(80))
    plan = plan_memory(MODELS["Qwen3-1.7B"], s, device_bytes(80))
    static = plan.cache_tokens * 28 * 2 * 8 * 128 * 2
    others = sum(plan.trainer.values()) + sum(plan.replica.values()) - plan.replica[CACHE]
    assert plan.room - 2**20 < static + others <= plan.room
    message = refused("Qwen3-4B", s, gpus(80))
    assert message.startswith("a trainer rank with a generator replica needs ")
    assert "weights of a generator replica 7.5" in message and "it fits with " in message


def test_a_colocated_run_sets_the_cache_tokens_of_the_engine(tmp_path: Path) -> None:
    model = MODELS["Qwen3-0.6B"]
    settings = RunSettings(
        colocate=True,
        trainer=TrainerSettings(ranks=1, activation_checkpoint="full"),
        generator=GeneratorSettings(replicas=1),
    )
    found = resolve(settings, gpus(80), model)
    assert found.weights.transport == "shared_memory" and found.generator.max_total_tokens > 100_000
    assert resolve(found, gpus(80), model) == found
    check_gpu_memory(MODELS["Qwen3-0.6B"], memory_sides(found), gpus(80))


def commands_for_gpus() -> list[list[str]]:
    """Return the commands in the README that run the recipe on GPUs, split into words."""
    section = (ROOT / "README.md").read_text().partition("\n## On GPUs\n")[2].partition("\n## ")[0]
    lines = [line for line in section.replace("\\\n", " ").splitlines() if line.startswith("    ")]
    return [words for line in lines if "recipes/grpo.py" in (words := shlex.split(line))]


def test_the_readmes_commands_train_a_real_model_that_fits_80_gb() -> None:
    """They override the recipe's defaults for learning rate, answer length and task, which suit the tiny model."""
    apart, shared = (cli(Settings, args=words[words.index("recipes/grpo.py") + 1 :]) for words in commands_for_gpus())
    assert not apart.colocate and shared.colocate
    for s in (apart, shared):
        check_gpu_memory(MODELS[s.model.removeprefix("Qwen/")], memory_sides(s), gpus(80))
        assert s.trainer.lr == 1e-6 and s.rollout.max_new_tokens == 1024 and s.task.name == "chain_sum"
        assert s.task == apart.task


@given(
    st.sampled_from(["Qwen3-0.6B", "Qwen3-1.7B", "Llama-3.1-8B"]),
    st.integers(1, 4),
    st.integers(64, 2**17),
    st.integers(1024, 2**17),
    st.integers(1, 200 * GIB),
)
def test_trainer_ranks_that_cannot_fit_a_machine_without_gpus_are_refused(
    name: str, ranks: int, chunk: int, tokens: int, memory: int
) -> None:
    """The largest chunk that the message suggests fits, and no larger one does."""
    settings = TrainerSettings(ranks=ranks, logprob_chunk=chunk, tokens_per_microbatch=tokens)

    def message(chunk: int) -> str:
        try:
            check_cpu_trainer(MODELS[name], replace(settings, logprob_chunk=chunk), TransferSettings(), memory, ranks)
        except ValueError as error:
            return str(error)
        return ""

    sizes = trained_model(MODELS[name], settings.lora).sizes
    states = ranks * 16 * -(-sizes.elements // ranks)  # float32 weights, gradients and two moments
    text, logits = message(chunk), ranks * 20 * sizes.vocabulary * min(chunk, tokens)
    if text:
        assert memory < 1.01 * (states + logits) and f"{min(chunk, tokens)} tokens" in text
    else:
        assert memory > 0.99 * (states + logits)
    if found := re.search(r"--trainer.logprob-chunk at most (\d+)", text):
        assert int(found[1]) < min(chunk, tokens)
        assert not message(int(found[1])) and message(int(found[1]) + 1)
