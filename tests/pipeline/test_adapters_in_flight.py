"""LoRA with a real trainer and real generators: only adapters are sent, and log-probs of both agree."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from monarch_rl.model.config import read_config
from monarch_rl.model.lora import LoraSettings
from monarch_rl.pipeline.start import save, start_generators
from monarch_rl.runtime.cluster import Cluster
from tests.generator.helpers import LOGPROB_BOUND, make_model, weights_in
from tests.pipeline.system import ENGINES, System

LORA = LoraSettings(rank=3, alpha=6.0)
CHANGED = "model.layers.0.mlp.up_proj.weight"
"""The tensor in which the other model differs."""


@pytest.mark.slow
@pytest.mark.core
def test_adapters_are_published_while_sequences_are_sampled(cluster: Cluster, tmp_path: Path) -> None:
    """Engines whose base model differs from the trainer's refuse them."""
    model, other = (make_model(tmp_path / name, "qwen3") for name in ("model", "other"))
    weights = weights_in(other)
    weights[CHANGED][0, 0] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})

    async def go() -> None:
        pool = await start_generators(cluster, read_config(model), ENGINES, first_device=2, lora=LORA)
        generators = list(pool.handles.values())
        refusal = rf"generator 0 .* 1 of \d+ tensors .*: {CHANGED}"
        with pytest.raises(Exception, match=refusal):
            await System.start(cluster, other, generators, lr=1e-2, lora=LORA)
        system = await System.start(cluster, model, generators, lr=1e-2, lora=LORA)
        names = system.publisher.transfer_group.manifest.names
        assert len(names) == 2 * 2 * 7
        assert all(".lora_A." in name or ".lora_B." in name for name in names)
        assert await system.mismatch(seed=1) < LOGPROB_BOUND
        async with system.generating() as completions:
            for seed in range(3):
                await system.step(seed)
                assert await system.mismatch(seed=100 + seed) < LOGPROB_BOUND
        assert any(len({*c.policy_versions.tolist()}) > 1 for c in completions), "no update arrived during a sequence"
        await save(system.trainer, tmp_path / "saved")

    asyncio.run(go())
    adapter = load_file(tmp_path / "saved_adapter" / "adapter_model.safetensors")
    assert all(value.any() for value in adapter.values())
