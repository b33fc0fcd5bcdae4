"""Engines that serve adapters on experts merged into the weights, and how SGLang itself handles such adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from monarch_rl.episode.sampling import Sampling
from monarch_rl.errors import EngineStopped, WeightMismatch
from monarch_rl.generator.engine import Engine
from monarch_rl.model.lora import LoraSettings
from tests.generator.conftest import SETTINGS
from tests.generator.helpers import (
    LOGPROB_BOUND,
    LoopThread,
    Staging,
    Weights,
    adapter,
    checksums_of,
    expected_of,
    manifest_of,
    merged,
    reference_logprobs,
)

LORA = LoraSettings(rank=3, alpha=6.0, targets=("v_proj", "gate_proj", "up_proj", "down_proj"))
PROMPTS = [[5, 6, 7, 8 + i] for i in range(4)]


@pytest.fixture(scope="module")
def part_engine(models: dict[str, Path], run: LoopThread) -> Iterator[Engine]:
    engine = run(Engine.start(str(models["moe"]), SETTINGS, lora=LORA))
    yield engine
    run(engine.shutdown())


def parts(folder: Path, seed: int) -> tuple[Weights, Weights]:
    """A model with adapters merged into it: the tensors that a version holds, and the rest."""
    weights = merged(folder, LORA, adapter(folder, LORA, seed))
    sent = {name for name in weights if name.split(".")[-2] in LORA.targets}
    return {n: x for n, x in weights.items() if n in sent}, {n: x for n, x in weights.items() if n not in sent}


def test_merged_partial_versions_load_once_the_rest_is_verified(
    part_engine: Engine, run: LoopThread, models: dict[str, Path]
) -> None:
    folder = models["moe"]
    sent, rest = parts(folder, 0)
    staging = Staging(sent)

    async def commit(version: int, weights: Weights) -> None:
        staging.fill(version, weights)
        await staging.commit(part_engine, version, checksums_of(weights))

    async def scenario() -> None:
        with pytest.raises(ValueError, match="version 1 "):
            await commit(1, sent)
        wrong = rest | {"model.norm.weight": rest["model.norm.weight"] + 1}
        with pytest.raises(WeightMismatch, match=r"generator 0 .*: model\.norm\.weight"):
            await part_engine.verify_base_weights(manifest_of(wrong), expected_of(wrong))
        with pytest.raises(ValueError, match="version 1 "):
            await commit(1, sent)
        await part_engine.verify_base_weights(manifest_of(rest), expected_of(rest))
        for version in (1, 2):
            weights = parts(folder, version)[0]
            await commit(version, weights)
            sampled = await asyncio.gather(*[part_engine.generate(p, Sampling(max_new_tokens=20)) for p in PROMPTS])
            references = reference_logprobs(folder, list(zip(PROMPTS, sampled, strict=True)), weights | rest)
            for completion, reference in zip(sampled, references, strict=True):
                assert np.abs(completion.logprobs - reference).max() < LOGPROB_BOUND

    run(scenario())


def test_sglang_still_cannot_serve_adapters_on_experts_on_a_cpu(
    part_engine: Engine, models: dict[str, Path], run: LoopThread, capfd: pytest.CaptureFixture[str]
) -> None:
    """The reason why they are merged. If this fails, SGLang supports it, and adapters could be sent alone."""
    run(part_engine.shutdown())  # a process holds one at a time
    engine = run(
        Engine.start(
            str(models["moe"]),
            SETTINGS,
            enable_lora=True,
            max_lora_rank=LORA.rank,
            lora_target_modules=["gate_proj", "up_proj", "down_proj"],
            lora_backend="torch_native",
        )
    )
    try:
        with pytest.raises(EngineStopped):
            run(engine.generate(PROMPTS[0], Sampling(max_new_tokens=2)))
    finally:
        run(engine.shutdown())
    printed = "".join(capfd.readouterr())
    assert "in _forward_with_lora" in printed
    assert "in pre_permute_standard_to_triton" in printed
