"""An engine that serves an adapter: versions overwrite it in flight, and samples follow the merged model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import CommitError, WeightMismatch
from monarch_rl.generator import commit as commit_module
from monarch_rl.generator.engine import Engine
from monarch_rl.generator.load_lora import load
from monarch_rl.generator.load_report import LoadSheet
from monarch_rl.generator.load_staged import write_order
from monarch_rl.generator.sglang_format import sampling_params
from monarch_rl.model.lora import LoraSettings, Target
from tests.generator.conftest import SETTINGS
from tests.generator.helpers import (
    LOGPROB_BOUND,
    LoopThread,
    RunningRequests,
    Staging,
    Weights,
    adapter,
    check_nothing_is_served,
    checksums_of,
    expected_of,
    manifest_of,
    merged,
    reference_logprobs,
    weights_in,
)

LORA = LoraSettings(rank=3, alpha=6.0)


def sampling(tokens: int) -> Sampling:
    return Sampling(max_new_tokens=tokens)


def prompt(i: int) -> list[int]:
    return [5, 6, 7, 8 + i]


def start(engine: Engine, count: int, tokens: int) -> RunningRequests:
    return RunningRequests.start(engine, [prompt(i) for i in range(count)], sampling(tokens))


async def generate(engine: Engine, count: int, tokens: int) -> list[Completion]:
    return await start(engine, count, tokens).completions()


async def generate_base(engine: Engine, i: int, tokens: int) -> Completion:
    """SGLang's own request without an adapter, in the same batches as the policy's."""
    answer = await engine._sglang.engine.async_generate(
        input_ids=prompt(i), sampling_params=sampling_params(sampling(tokens)), return_logprob=True, cache_salt="0"
    )
    logprobs, ids, _ = zip(*answer["meta_info"]["output_token_logprobs"], strict=True)
    versions = np.zeros(tokens, np.int32)
    return Completion(np.asarray(ids, np.int32), np.asarray(logprobs, np.float32), versions, "length")


def check_logprobs(folder: Path, sampled: list[Completion], weights: Weights | None) -> None:
    completions = [(prompt(i), completion) for i, completion in enumerate(sampled)]
    for completion, reference in zip(sampled, reference_logprobs(folder, completions, weights), strict=True):
        assert np.abs(completion.logprobs - reference).max() < LOGPROB_BOUND


async def commit(engine: Engine, staging: Staging, tensors: Weights) -> None:
    version = engine.requests.version + 1
    staging.fill(version, tensors)
    await staging.commit(engine, version, checksums_of(tensors))


@pytest.fixture(scope="module")
def folder(models: dict[str, Path]) -> Path:
    return models["qwen3"]


@pytest.fixture(scope="module")
def adapted(folder: Path, run: LoopThread) -> Iterator[Engine]:
    """An engine with an adapter on all projections of a Qwen3."""
    engine = run(Engine.start(str(folder), SETTINGS, lora=LORA))
    yield engine
    run(engine.shutdown())


@pytest.fixture(scope="module")
def staging(folder: Path) -> Staging:
    return Staging(adapter(folder, LORA, 0))


def test_version_0_is_the_unchanged_model(adapted: Engine, run: LoopThread, folder: Path) -> None:
    if adapted.requests.version:
        pytest.skip("another version has been committed by now")
    check_logprobs(folder, run(generate(adapted, 4, 20)), None)


def test_the_base_weights_are_compared_in_place_and_not_changed(adapted: Engine, run: LoopThread, folder: Path) -> None:
    """A base model that differs in one bit is refused and generates nothing; then the right one is verified."""
    weights = weights_in(folder)
    manifest, right = manifest_of(weights), expected_of(weights)
    name = "model.layers.1.self_attn.k_proj.weight"
    weights[name].view(torch.int32)[3, 5] ^= 1

    async def scenario() -> str:
        await adapted.verify_base_weights(manifest, right)
        with pytest.raises(WeightMismatch) as caught:
            await adapted.verify_base_weights(manifest, expected_of(weights))
        waiting = asyncio.ensure_future(adapted.generate(prompt(0), sampling(3)))
        await asyncio.sleep(0)  # it starts to wait
        await check_nothing_is_served(adapted)
        assert not waiting.done()
        await adapted.verify_base_weights(manifest, right)
        await waiting
        await adapted.verify_base_weights(manifest, right)
        return str(caught.value)

    assert re.search(rf"generator 0 .*\b1 of {len(weights)} .*: {re.escape(name)}\.", run(scenario()))


def test_sequences_continue_across_commits_of_adapters(
    adapted: Engine, run: LoopThread, folder: Path, staging: Staging
) -> None:
    """8 sequences decode across three commits, none lost or truncated; new ones are sampled from the merged model.

    Requests for the base model run in the same batches and are sampled from it.
    """
    before = adapted.requests.version

    async def scenario() -> tuple[list[Completion], list[Completion]]:
        running = start(adapted, 8, 400)
        base = asyncio.gather(*[generate_base(adapted, i, 200) for i in range(4)])
        for seed in range(3):
            await running.wait_for_tokens()
            await commit(adapted, staging, adapter(folder, LORA, seed))
        return await running.completions(), await base

    completions, base = run(scenario())
    for completion in completions:
        assert len(completion.token_ids) == 400
        assert (np.diff(completion.policy_versions) >= 0).all()
    assert {v for c in completions for v in c.policy_versions.tolist()} == set(range(before, before + 4))
    check_logprobs(folder, base, None)
    fresh = run(generate(adapted, 8, 40))
    assert {v for c in fresh for v in c.policy_versions.tolist()} == {before + 3}
    check_logprobs(folder, fresh, merged(folder, LORA, adapter(folder, LORA, 2)))


def test_tokens_after_a_commit_are_sampled_from_the_new_adapter_on_the_old_keys_and_values(
    adapted: Engine, run: LoopThread, folder: Path, staging: Staging
) -> None:
    """B of q and o and of the MLP only: in the last layer such an adapter changes no keys or values."""
    last = "base_model.model.model.layers.1."
    quiet = {name: torch.zeros_like(x) if "lora_B" in name else x for name, x in adapter(folder, LORA, 5).items()}
    loud = quiet | {
        name: x
        for name, x in adapter(folder, LORA, 5).items()
        if name.startswith(last) and "k_proj" not in name and "v_proj" not in name
    }

    async def scenario() -> list[Completion]:
        await commit(adapted, staging, quiet)
        running = start(adapted, 4, 300)
        await running.wait_for_tokens()
        await commit(adapted, staging, loud)
        return await running.completions()

    sampled = run(scenario())
    completions = [(prompt(i), completion) for i, completion in enumerate(sampled)]
    under = {0: reference_logprobs(folder, completions)}
    under[1] = reference_logprobs(folder, completions, merged(folder, LORA, loud))
    for i, completion in enumerate(sampled):
        new = completion.policy_versions - (adapted.requests.version - 1)
        assert set(new.tolist()) == {0, 1}
        expected = np.where(new == 0, under[0][i], under[1][i])
        assert np.abs(completion.logprobs - expected).max() < LOGPROB_BOUND
        assert np.abs(under[0][i] - under[1][i])[new == 1].max() > 100 * LOGPROB_BOUND


def test_a_flipped_bit_of_an_adapter_is_found(adapted: Engine, run: LoopThread, folder: Path, staging: Staging) -> None:
    tensors, version = adapter(folder, LORA, 7), adapted.requests.version + 1
    staging.fill(version, tensors)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    spoilt = staging.byte(version, name, 5)
    spoilt ^= 16

    async def flipped() -> str:
        with pytest.raises(WeightMismatch) as caught:
            await staging.commit(adapted, version, checksums_of(tensors))
        spoilt.bitwise_xor_(torch.tensor(16, dtype=torch.uint8))
        await staging.commit(adapted, version, checksums_of(tensors))
        return str(caught.value)

    assert re.search(rf"\b1 of {len(tensors)} .*: {re.escape(name)}\.", run(flipped()))


def test_an_adapter_of_another_rank_is_refused(
    adapted: Engine, run: LoopThread, folder: Path, staging: Staging
) -> None:
    other = adapter(folder, LoraSettings(rank=4, alpha=6.0), 1)

    async def refused() -> None:
        with pytest.raises(CommitError, match=r"rank 3 .*lora_A\.weight \(4, "):
            await commit(adapted, Staging(other), other)
        await commit(adapted, staging, adapter(folder, LORA, 0))

    run(refused())


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("llama", ("q_proj", "v_proj")),
        ("llama", ("k_proj", "up_proj", "down_proj")),
        ("qwen2", ("k_proj", "v_proj", "o_proj")),
    ],
)
def test_an_adapter_on_some_projections_of_a_tied_model(
    models: dict[str, Path], run: LoopThread, adapted: Engine, kind: str, targets: tuple[Target, ...]
) -> None:
    """From here on each test has an engine of its own, because a process holds only one."""
    run(adapted.shutdown())
    folder, lora = models[kind], LoraSettings(rank=2, alpha=8.0, targets=targets)
    tensors = adapter(folder, lora, 3)
    assert len(tensors) == 2 * 2 * len(targets)

    async def scenario() -> list[Completion]:
        engine = await Engine.start(str(folder), SETTINGS, lora=lora)
        try:
            await engine.verify_base_weights(manifest_of(weights_in(folder)), expected_of(weights_in(folder)))
            await commit(engine, Staging(tensors), tensors)
            return await generate(engine, 4, 20)
        finally:
            await engine.shutdown()

    check_logprobs(folder, run(scenario()), merged(folder, lora, tensors))


def test_a_replica_of_two_ranks_shards_the_adapter(
    folder: Path, run: LoopThread, adapted: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences continue across a commit and sample from the merged model; a wrong bit on rank 1 alone is found."""
    run(adapted.shutdown())
    tensors = {version: adapter(folder, LORA, version) for version in (1, 2)}
    staging, spoilt = Staging(tensors[1]), Staging(tensors[1])
    order = commit_module._serialized_order

    def orders(rank: int, area: bytes, sheet: bytes, retained_tokens: int) -> Any:
        return order(rank, spoilt.area(2).handle if rank == 1 else area, sheet, retained_tokens)

    async def scenario() -> tuple[list[Completion], list[Completion], str]:
        engine = await Engine.start(str(folder), replace(SETTINGS, tp=2), lora=LORA)
        try:
            await engine.verify_base_weights(manifest_of(weights_in(folder)), expected_of(weights_in(folder)))
            running = start(engine, 4, 400)
            await running.wait_for_tokens()
            await commit(engine, staging, tensors[1])
            across, fresh = await running.completions(), await generate(engine, 4, 30)
            for each in (staging, spoilt):
                each.fill(2, tensors[2])
            name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
            spoilt.byte(2, name, -1 % tensors[2][name].nbytes).bitwise_xor_(1)
            with monkeypatch.context() as patch:
                patch.setattr(commit_module, "_serialized_order", orders)
                with pytest.raises(WeightMismatch) as caught:
                    await staging.commit(engine, 2, checksums_of(tensors[2]))
            await staging.commit(engine, 2, checksums_of(tensors[2]))
            return across, fresh, str(caught.value)
        finally:
            await engine.shutdown()

    across, fresh, message = run(scenario())
    assert {v for c in across for v in c.policy_versions.tolist()} == {0, 1}
    check_logprobs(folder, fresh, merged(folder, LORA, tensors[1]))
    assert re.search(r"\b1 of 28 .*: base_model\.model\.model\.layers\.1\.mlp\.down_proj", message)


def test_an_engine_without_adapters_reports_that() -> None:
    tensors: dict[str, Any] = {"a": torch.zeros(2, 2)}
    staging = Staging(tensors)
    sheet = LoadSheet(staging.manifest, 1)
    sheet.ask(expected_of(tensors))
    load(nn.Linear(2, 2), [(write_order(0, staging.area(0).handle, sheet.handle, 0), torch.empty(0))])
    assert "the engine was started without one" in str(sheet.judge())
