"""Adapters on experts: the trainer divides the experts among ranks, and engines serve the merged weights."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from monarch_rl.model.lora import LoraSettings
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.weights.transport import TransportName
from tests.generator.helpers import LOGPROB_BOUND, make_model, weights_in
from tests.pipeline.held import check_engine_weights, same_bits
from tests.pipeline.system import TRANSFER, System, start_inspected

LORA = LoraSettings(rank=3, alpha=6.0, targets=("q_proj", "gate_proj", "down_proj"))
"""In the engine, q shares a parameter with k and v, and gate with up: only a part of each is sent."""
CHANGED = "model.layers.1.self_attn.v_proj.weight"
"""The tensor in which the other model differs."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degree", "tp", "first_device", "transports"),
    [(1, 1, 4, ("collective", "shared_memory")), (2, 2, 5, ("rdma", "collective"))],
)
def test_only_weights_with_adapters_are_sent_and_they_are_merged(
    cluster: Cluster, tmp_path: Path, degree: int, tp: int, first_device: int, transports: tuple[TransportName, ...]
) -> None:
    """Engines hold the model that the trainer saves, bit for bit. An engine whose model differs in weights that are not
    sent refuses the adapters."""
    model, other = (make_model(tmp_path / name, "moe") for name in ("model", "other"))
    weights = weights_in(other)
    weights[CHANGED][0, 0] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})

    async def go() -> None:
        generators = await start_inspected(cluster, model, 1, first_device, f"merged{tp}", tp, lora=LORA)
        refusal = rf"generator 0 .* 1 of \d+ tensors .*: {CHANGED}"
        with pytest.raises(Exception, match=refusal):
            await System.start(cluster, other, generators, lr=1e-2, lora=LORA, expert_parallel=degree)
        system = await System.start(cluster, model, generators, lr=1e-2, lora=LORA, expert_parallel=degree)
        sent = {name for name in weights if name.split(".")[-2] in LORA.targets}
        assert set(system.publisher.transfer_group.manifest.names) == sent
        assert await system.mismatch(seed=0) < LOGPROB_BOUND
        before = await check_engine_weights(system, tmp_path)
        for transport in transports:
            await system.use_transfer(replace(TRANSFER, transport=transport))
            await system.step(seed=system.version)
            report = system.publisher.last
            assert report is not None and report.version == system.version
            assert report.max_received_bytes == sum(weights[name].nbytes for name in sent)
            assert await system.mismatch(seed=100 + system.version) < LOGPROB_BOUND
            after = await check_engine_weights(system, tmp_path)
            assert {name for name in after if not same_bits(before[name], after[name])} == sent
            before = after
        await system.trainer.close.call()
        await generators[0].shutdown.call_one()

    asyncio.run(go())
