"""Sequences that SGLang retracts into its queue because the KV cache is full, to read them again later."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.engine import Engine
from tests.generator.conftest import SETTINGS
from tests.generator.helpers import LoopThread, check_masks, reference_reading, watched, weights_in

pytestmark = pytest.mark.usefixtures("spawned")  # SGLang reads its switch when it is imported


def test_routes_and_masks_equal_those_of_transformers(
    models: dict[str, Path], run: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own test switch makes it retract every few steps."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "9")
    sampling = Sampling(max_new_tokens=60, top_k=20, top_p=0.9, expert_routes_from=0)
    base, prompts = weights_in(models["moe"]), [[5, 6, 7, 8 + i] for i in range(4)]

    engine = run(Engine.start(str(models["moe"]), SETTINGS, expert_routes=True))
    retracted = watched(engine, "retraction_counts", monkeypatch)

    async def generate() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))

    try:
        sampled = run(generate())
    finally:
        run(engine.shutdown())
    assert max(retracted) > 0, "none was retracted"
    sequences = [prompt + one.token_ids.tolist() for prompt, one in zip(prompts, sampled, strict=True)]
    readings = reference_reading(models["moe"], [(ids, [0] * len(ids)) for ids in sequences], {0: base})
    for prompt, one, reading in zip(prompts, sampled, readings, strict=True):
        assert one.expert_routes is not None
        np.testing.assert_array_equal(np.sort(one.expert_routes, -1), reading.expert_routes[:-1])
        check_masks(one, prompt, reading, 20)
