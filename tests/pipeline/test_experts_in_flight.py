"""A mixture of experts: the trainer divides the experts among ranks, and the engine holds them stacked."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest

from monarch_rl.pipeline.start import update
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import Patience
from monarch_rl.weights.checksum import add_checksums
from monarch_rl.weights.manifest import Manifest
from monarch_rl.weights.transport import SNAPSHOTS, transports_on
from tests.generator.helpers import EXPERTS, LAYERS, LOGPROB_BOUND, make_model
from tests.pipeline.held import check_engine_weights, same_bits
from tests.pipeline.system import TRANSFER, InspectedGenerator, System, start_inspected

EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.\w+_proj\.weight")
TRANSFERS = [replace(TRANSFER, transport=transport) for transport in transports_on(on_gpu=False)] + [
    replace(TRANSFER, delta=True)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("experts") / "model", "moe")


@pytest.fixture(scope="module")
def narrow(cluster: Cluster, model: Path) -> InspectedGenerator:
    """A replica of one engine rank."""
    (generator,) = asyncio.run(start_inspected(cluster, model, 1, 4, "narrow"))
    return generator


@pytest.fixture(scope="module")
def wide(cluster: Cluster, model: Path) -> InspectedGenerator:
    """A replica of two engine ranks."""
    (generator,) = asyncio.run(start_inspected(cluster, model, 1, 5, "wide", tp=2))
    return generator


def owners(manifest: Manifest) -> dict[tuple[int, int], int]:
    """Map (layer, expert) to the trainer rank that sends this expert, whole, with one shard per projection."""
    senders: dict[tuple[int, int], set[int]] = {}
    sent = 0
    for rank, shards in enumerate(manifest.shards):
        for shard in shards:
            spec = manifest.tensors[shard.tensor]
            if match := EXPERT.fullmatch(spec.name):
                assert (shard.start, shard.numel) == (0, spec.numel), f"rank {rank} sends a part of {spec.name}"
                senders.setdefault((int(match[1]), int(match[2])), set()).add(rank)
                sent += 1
    assert sent == 3 * LAYERS * EXPERTS
    assert all(len(ranks) == 1 for ranks in senders.values())
    return {expert: ranks.pop() for expert, ranks in senders.items()}


@pytest.mark.parametrize(
    ("ranks", "degree", "replica"),
    [
        (2, 1, "narrow"),
        (2, 2, "narrow"),
        (2, 2, "wide"),
        pytest.param(4, 2, "wide", marks=pytest.mark.slow),
    ],
)
def test_every_transport_sends_each_expert_once_from_its_owner(
    cluster: Cluster, model: Path, request: pytest.FixtureRequest, tmp_path: Path, ranks: int, degree: int, replica: str
) -> None:
    """After every version, the stacked experts written by SGLang equal those that the trainer saves, bit for bit. Every
    tensor has changed, all bytes of the version were received, and engine and trainer agree on log-probs."""
    generator: InspectedGenerator = request.getfixturevalue(replica)

    async def go() -> None:
        served = (await generator.stats.call_one())["version"]
        system = await System.start(
            cluster, model, [generator], lr=3e-3, version=served + 1, ranks=ranks, expert_parallel=degree
        )
        by_rank = list(owners(system.publisher.transfer_group.manifest).values())
        assert [by_rank.count(rank) for rank in range(ranks)] == [LAYERS * EXPERTS // ranks] * ranks
        before = await check_engine_weights(system, tmp_path)
        assert await system.mismatch(seed=0) < LOGPROB_BOUND
        for transfer in TRANSFERS:
            await system.use_transfer(transfer)
            await system.step(seed=system.version)
            report = system.publisher.last
            assert report is not None and report.version == system.version
            if not transfer.delta:
                tensors = system.publisher.transfer_group.manifest.tensors
                assert report.max_received_bytes == sum(spec.nbytes for spec in tensors)
            assert await system.mismatch(seed=system.version) < LOGPROB_BOUND
            after = await check_engine_weights(system, tmp_path)
            assert not [name for name in after if same_bits(before[name], after[name])]
            before = after
        await system.trainer.close.call()

    asyncio.run(go())


def test_engine_and_trainer_agree_on_a_deepseek(cluster: Cluster, tmp_path: Path) -> None:
    """It has latent attention, two tensors in one parameter, a router bias sent by one rank, and shared experts."""
    model = make_model(tmp_path / "model", "deepseek")

    async def go() -> None:
        generators = await start_inspected(cluster, model, 1, 7, "deepseek")
        system = await System.start(cluster, model, generators, lr=3e-3, expert_parallel=2)
        assert await system.mismatch(seed=0) < LOGPROB_BOUND
        before = await generators[0].engine_checksums.call_one()
        for seed in range(2):
            await system.step(seed)
            assert await system.mismatch(seed=100 + seed) < LOGPROB_BOUND
        served = await generators[0].engine_checksums.call_one()
        same = [name for name in served if before[name] == served[name]]
        assert same == ["model.layers.1.mlp.gate.e_score_correction_bias"]
        await system.trainer.close.call()
        await generators[0].shutdown.call_one()

    asyncio.run(go())


@pytest.mark.parametrize("replica", ["narrow", "wide"])
def test_a_wrong_bit_of_one_expert_is_caught_and_the_expert_is_named(
    cluster: Cluster, model: Path, request: pytest.FixtureRequest, replica: str
) -> None:
    """One bit at a time, in an expert of each trainer rank; then the version is served as it was sent."""
    generator: InspectedGenerator = request.getfixturevalue(replica)

    async def go() -> None:
        served = (await generator.stats.call_one())["version"]
        system = await System.start(cluster, model, [generator], lr=3e-3, version=served + 1, expert_parallel=2)
        await system.submit_batch(0)
        await update(system.trainer, system.buffer, system.version, Patience(60.0))
        version, manifest = system.version + 1, system.publisher.transfer_group.manifest
        snapshot = version % SNAPSHOTS
        await system.trainer.snapshot.call(version, snapshot)
        sums, _ = await asyncio.gather(
            system.trainer.send.call(version, snapshot), generator.receive.call_one(version, snapshot)
        )
        expected = add_checksums(list(sums.values()))
        by_rank = owners(manifest)
        chosen = [next(expert for expert, rank in by_rank.items() if rank == sender) for sender in range(2)]
        for layer, expert in chosen:
            for projection in ("gate", "up", "down"):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
                await generator.flip_bit.call_one(snapshot, name)
                with pytest.raises(Exception, match=rf"1 of \d+ tensors .*: {re.escape(name)}"):
                    await generator.commit.call_one(version, snapshot, expected)
                await generator.flip_bit.call_one(snapshot, name)
        await generator.commit.call_one(version, snapshot, expected)
        system.version = version
        assert await system.mismatch(seed=1) < LOGPROB_BOUND
        await system.trainer.close.call()

    asyncio.run(go())
