"""A real trainer and real generators with the same weights: parity, idempotence, bit-equality."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.dispatcher import Dispatcher
from monarch_rl.pipeline.start import save, update
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import Patience
from monarch_rl.weights.transport import transports_on
from tests.generator.helpers import LOGPROB_BOUND, make_model
from tests.patience import until
from tests.pipeline.held import check_engine_weights, same_bits
from tests.pipeline.system import LENGTHS, TRANSFER, VOCABULARY, InspectedGenerator, System, start_inspected

GREEDY = Sampling(max_new_tokens=32, temperature=0.0)


async def greedy_completions(generators: list[InspectedGenerator]) -> list[Completion]:
    """Greedy completions, one request at a time: a batch of several changes the last bits."""
    return [
        await Dispatcher([g], 60, max_losses=0).generate(prompt, GREEDY, 0)
        for g in generators
        for prompt in ([7, 8, 9], [20, 30])
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("pipeline") / "model", "qwen3")


@pytest.fixture(scope="module")
def generators(cluster: Cluster, model: Path) -> list[InspectedGenerator]:
    return asyncio.run(start_inspected(cluster, model, 2, 2, "generator"))


def test_with_learning_rate_zero_five_syncs_change_nothing(
    cluster: Cluster, model: Path, generators: list[InspectedGenerator]
) -> None:
    async def go() -> None:
        system = await System.start(cluster, model, generators, lr=0.0)
        before = await greedy_completions(generators), [await g.engine_checksums.call_one() for g in generators]
        for seed in range(5):
            await system.step(seed)
        after = await greedy_completions(generators), [await g.engine_checksums.call_one() for g in generators]
        assert before[1] == after[1]
        for first, last in zip(before[0], after[0], strict=True):
            assert set(first.policy_versions) == {0}
            assert set(last.policy_versions) == {5}
            assert np.array_equal(first.token_ids, last.token_ids)
            assert np.array_equal(first.logprobs, last.logprobs)

    asyncio.run(go())


UPDATES_IN_FLIGHT = 5
"""Versions that must arrive while a sequence is generated."""
ROUNDS = 10
"""Most rounds of updates until enough versions arrived during a sequence; a slow machine may need several."""


def versions_in_flight(completions: list[Completion]) -> set[int]:
    """Return the versions that arrived while one of these sequences was generated."""
    versions: set[int] = set()
    for completion in completions:
        assert len(completion.token_ids) in LENGTHS
        steps = np.diff(completion.policy_versions)
        assert (steps >= 0).all()
        versions |= set(completion.policy_versions[1:][steps > 0].tolist())
    return versions


@pytest.mark.core
def test_engine_and_trainer_agree_on_logprobs_also_after_five_updates_in_flight(
    cluster: Cluster, model: Path, generators: list[InspectedGenerator]
) -> None:
    async def go() -> None:
        system = await System.start(cluster, model, generators, lr=3e-3, version=10)
        assert await system.mismatch(seed=1) < LOGPROB_BOUND
        crossed: set[int] = set()
        for _ in range(ROUNDS):
            async with system.generating() as completions:
                for _ in range(UPDATES_IN_FLIGHT - len(crossed)):
                    await system.step(seed=system.version)
                    assert await system.mismatch(seed=100 + system.version) < LOGPROB_BOUND
            crossed |= versions_in_flight(completions)
            if len(crossed) >= UPDATES_IN_FLIGHT:
                break
        assert len(crossed) >= UPDATES_IN_FLIGHT, (
            f"of the versions 11 to {system.version} only {sorted(crossed)} arrived while a sequence was generated"
        )

    asyncio.run(go())


def test_served_weights_equal_the_trainers_bit_for_bit(
    cluster: Cluster, model: Path, generators: list[InspectedGenerator], tmp_path: Path
) -> None:
    """SGLang's own checksums of its parameters are the same after commits in flight and in an engine that loads the
    saved model."""

    async def go() -> None:
        system = await System.start(cluster, model, generators, lr=3e-3, version=20)
        start = await generators[0].engine_checksums.call_one()
        for seed in range(2):
            await system.step(seed)
        await save(system.trainer, tmp_path / "saved")
        (fresh,) = await start_inspected(cluster, tmp_path / "saved", 1, 4, "fresh")
        expected = await fresh.engine_checksums.call_one()
        for generator in generators:
            assert await generator.engine_checksums.call_one() == expected
        changed = [name for name in expected if start[name] != expected[name]]
        assert len(changed) == len(expected)
        await fresh.shutdown.call_one()

    asyncio.run(go())


@pytest.fixture(scope="module")
def wide(cluster: Cluster, model: Path) -> InspectedGenerator:
    """A replica of two engine ranks."""
    (generator,) = asyncio.run(start_inspected(cluster, model, 1, 4, "wide", tp=2))
    return generator


@pytest.mark.parametrize(
    ("trainer_ranks", "replicas"),
    [
        pytest.param(2, "one", marks=pytest.mark.core),
        (1, "two"),
        (1, "one of two ranks"),
        (2, "one of two ranks"),
    ],
)
def test_any_ratio_of_trainer_and_generator_ranks_gets_the_same_bits_by_every_transport(
    cluster: Cluster,
    model: Path,
    generators: list[InspectedGenerator],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    trainer_ranks: int,
    replicas: str,
) -> None:
    """2:1, two cases of 1:2, and 2:2; other tests of this file cover two ranks and two replicas.

    After every version, the parameters of all engine ranks, written by SGLang and joined, equal the trainer's full
    tensors, all of which have changed; and engine and trainer agree on log-probs.
    """
    if replicas == "one of two ranks":
        chosen = [request.getfixturevalue("wide")]
    else:
        chosen = generators[: ["one", "two"].index(replicas) + 1]

    async def go() -> None:
        served = max([(await g.stats.call_one())["version"] for g in chosen])
        system = await System.start(cluster, model, chosen, lr=3e-3, version=served + 1, ranks=trainer_ranks)
        before = await check_engine_weights(system, tmp_path)
        for transport in transports_on(on_gpu=False):
            await system.use_transfer(replace(TRANSFER, transport=transport))
            await check_engine_weights(system, tmp_path)
            await system.step(seed=served)
            assert await system.mismatch(seed=served) < LOGPROB_BOUND
            for replica in chosen:
                stats = await replica.stats.call_one()
                assert stats["last_commit"]["version"] == system.version
                assert stats["last_commit"]["nbytes"] >= system.publisher.transfer_group.manifest.nbytes
            after = await check_engine_weights(system, tmp_path)
            assert not [name for name in after if same_bits(before[name], after[name])]
            before = after
        await system.trainer.close.call()

    asyncio.run(go())


@pytest.mark.parametrize(("kind", "tp"), [("qwen2", 2), ("mistral", 1)])
def test_other_dense_models_are_served_bit_for_bit_and_agree(
    cluster: Cluster, tmp_path: Path, kind: str, tp: int
) -> None:
    """By every transport. A Qwen2 has biases, which an engine fuses and splits among its ranks, and a tied head."""
    model = make_model(tmp_path / "model", kind)

    async def go() -> None:
        (generator,) = await start_inspected(cluster, model, 1, 6, kind, tp=tp)
        system = await System.start(cluster, model, [generator], lr=3e-3)
        assert await system.mismatch(seed=0) < LOGPROB_BOUND
        before = await check_engine_weights(system, tmp_path)
        for transfer in (
            *(replace(TRANSFER, transport=name) for name in transports_on(on_gpu=False)),
            replace(TRANSFER, delta=True),
        ):
            await system.use_transfer(transfer)
            await system.step(seed=system.version)
            assert await system.mismatch(seed=100 + system.version) < LOGPROB_BOUND
            after = await check_engine_weights(system, tmp_path)
            assert not [name for name in after if same_bits(before[name], after[name])]
            before = after
        await system.trainer.close.call()
        await generator.shutdown.call_one()

    asyncio.run(go())


async def received_shares(system: System[InspectedGenerator]) -> list[list[float]]:
    """Return, per replica, the transfers since the last call, each as a share of a version's bytes."""
    received = [await generator.take_received.call_one() for generator in system.generators]
    whole = system.publisher.transfer_group.manifest.nbytes
    return [[nbytes / whole for nbytes in by_version] for by_version in received]


def test_every_transport_sends_deltas_and_full_weights_to_a_restarted_replica(
    cluster: Cluster, model: Path, generators: list[InspectedGenerator]
) -> None:
    """Replicas that have the previous version get only the changes; a restarted replica gets the full weights."""

    async def go() -> None:
        system = await System.start(cluster, model, generators, lr=0.0, version=70)
        before = [await g.engine_checksums.call_one() for g in generators]
        for transport in transports_on(on_gpu=False):
            await system.use_transfer(replace(TRANSFER, transport=transport, delta=True, attempts=1))
            await received_shares(system)
            await system.step(seed=system.version)
            ((first,), (second,)) = await received_shares(system)
            assert max(first, second) < 0.01, f"{transport}: an update without changes"
            report = system.publisher.last
            assert report is not None and report.version == system.version
            assert report.max_received_bytes / report.nbytes == max(first, second)
            await system.publisher.add(0, generators[0])
            await system.publisher.wait_until_served()
            ((restarted,), others) = await received_shares(system)
            assert restarted >= 1 and not others, f"{transport}: a restarted replica"
            assert system.publisher.last is report, "the report belongs to the first publication of the version"
            assert [await g.engine_checksums.call_one() for g in generators] == before
            assert await system.mismatch(seed=0) < LOGPROB_BOUND

    asyncio.run(go())


@pytest.mark.core
def test_a_corrupted_version_is_not_served(cluster: Cluster, model: Path, generators: list[InspectedGenerator]) -> None:
    async def go() -> None:
        system = await System.start(cluster, model, generators, lr=3e-3, version=90)
        await system.submit_batch(0)
        await update(system.trainer, system.buffer, 90, Patience(60.0))
        wrong = np.zeros(len(system.publisher.transfer_group.manifest.tensors), np.int64)
        await system.trainer.snapshot.call(91, 1)
        await asyncio.gather(system.trainer.send.call(91, 1), *(g.receive.call_one(91, 1) for g in generators))
        with pytest.raises(Exception, match=rf"version 91 .*{len(wrong)} of {len(wrong)} tensors"):
            await generators[0].commit.call_one(91, 1, wrong)
        answer = asyncio.ensure_future(system.generate([[3, 4]] * 2))

        async def held() -> bool:
            return await generators[0].engine_waits.call_one() == ["a commit to end"]

        await until(held, "a request that is not sent to an engine whose weights were not verified")
        assert not answer.done()
        await system.publisher.publish(91)
        await system.publisher.wait_until_served()
        for completion in await answer:
            assert set(completion.policy_versions) <= {90, 91}
            assert (completion.token_ids < VOCABULARY).all()

    asyncio.run(go())
