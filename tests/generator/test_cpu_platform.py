"""SGLang's features through the plug-in on a machine without an accelerator."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.episode.sampling import Sampling
from monarch_rl.generator.engine import Engine
from monarch_rl.model.architecture import ARCHITECTURES
from tests.generator.helpers import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    LOGPROB_BOUND,
    LoopThread,
    Staging,
    checksums_of,
    next_version,
    reference_logprobs,
    weights_in,
)

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="the plug-in is for machines without one")

PROMPT = [5, 6, 7, 8]


async def ask(engine: Engine, **request: Any) -> dict[str, Any]:
    """SGLang's own answer to a request with more fields than :class:`Sampling` has."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    given = GenerateReqInput(input_ids=PROMPT, return_logprob=True, **request)
    return await engine._sglang.manager.generate_request(given, None).__anext__()


def test_mixture_of_experts_agrees_with_transformers_and_takes_new_weights(
    moe_engine: Engine, run: LoopThread, models: dict[str, Path]
) -> None:
    """Log-probs before and after a commit; checksums of experts stacked in ``w13`` and ``w2`` are bit-exact."""
    base = weights_in(models["moe"])
    staging = Staging(base)
    for version, weights in enumerate([None, next_version(base, 1), next_version(base, 2)]):
        if weights is not None:
            staging.fill(version, weights)
            run(staging.commit(moe_engine, version, checksums_of(weights)))
        if version == 1:
            continue  # the commit that makes the plan; later ones, which replay it, are tested
        sampled = run(moe_engine.generate(PROMPT, Sampling(max_new_tokens=40)))
        assert set(sampled.policy_versions.tolist()) == {version}
        (reference,) = reference_logprobs(models["moe"], [(PROMPT, sampled)], weights)
        assert np.abs(sampled.logprobs - reference).max() < LOGPROB_BOUND


def test_a_seed_also_repeats_truncated_samples(moe_engine: Engine, run: LoopThread) -> None:
    params = {"max_new_tokens": 15, "top_p": 0.9, "top_k": 20, "sampling_seed": 4}
    once, repeated = (run(ask(moe_engine, sampling_params=params))["output_ids"] for _ in range(2))
    other = run(ask(moe_engine, sampling_params=params | {"sampling_seed": 5}))["output_ids"]
    assert once == repeated != other


def test_an_adapter_from_tensors_changes_only_its_own_requests(moe_engine: Engine, run: LoopThread) -> None:
    from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput
    from sglang.srt.utils import MultiprocessingSerializer

    generator = torch.Generator().manual_seed(0)
    wide, narrow = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    adapter = {}
    for layer in range(LAYERS):
        for module, rows, columns in (("q", wide, HIDDEN), ("k", narrow, HIDDEN), ("v", narrow, HIDDEN)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}_proj.lora_"
            adapter[name + "A.weight"] = torch.randn(4, columns, generator=generator)
            adapter[name + "B.weight"] = torch.randn(rows, 4, generator=generator)
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "lora_dropout": 0.0,
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    greedy = {"sampling_params": {"max_new_tokens": 12, "temperature": 0}}
    base = run(ask(moe_engine, **greedy))["output_ids"]
    request = LoadLoRAAdapterFromTensorsReqInput(
        lora_name="adapter",
        config_dict=config,
        serialized_named_tensors=[MultiprocessingSerializer.serialize(adapter)],
    )
    loaded = run(moe_engine._sglang.manager.load_lora_adapter_from_tensors(request, None))
    assert loaded.success, loaded
    assert run(ask(moe_engine, **greedy, lora_path="adapter"))["output_ids"] != base
    assert run(ask(moe_engine, **greedy))["output_ids"] == base


@pytest.mark.parametrize("kind", ["image_data", "video_data", "audio_data"])
def test_images_are_refused_with_a_remedy(moe_engine: Engine, run: LoopThread, kind: str) -> None:
    with pytest.raises(ValueError, match="torchvision"):
        run(ask(moe_engine, sampling_params={"max_new_tokens": 2}, **{kind: "picture.png"}))


def test_the_hash_is_murmur3() -> None:
    from monarch_rl.generator.cpu.platform import murmur3

    seeds = torch.tensor([0, 1, -5, 2**40 + 17], dtype=torch.int64)
    positions = torch.tensor([0, 3, 1000, 2**31 - 1])
    columns = torch.tensor([0, 1, 151_935])
    found = murmur3(seeds, positions, columns)
    for row in range(4):
        for column in range(3):
            data = int(seeds[row]).to_bytes(8, "little", signed=True)
            data += int(positions[row]).to_bytes(4, "little") + int(columns[column]).to_bytes(4, "little")
            assert int(found[row, column]) == murmur3_of_bytes(data)


def murmur3_of_bytes(data: bytes) -> int:
    """The published algorithm, seed 0, for a multiple of four bytes."""
    mask, state = 0xFFFFFFFF, 0
    for i in range(0, len(data), 4):
        key = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & mask
        key = (key << 15 | key >> 17) & mask
        state ^= key * 0x1B873593 & mask
        state = (state << 13 | state >> 19) & mask
        state = state * 5 + 0xE6546B64 & mask
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state = (state ^ state >> shift) * factor & mask
    return state


def test_seeded_samples_follow_the_probabilities() -> None:
    from monarch_rl.generator.cpu.platform import UNSEEDED, multinomial_with_seed

    probabilities = torch.tensor([0.5, 0.25, 0.2, 0.05, 0.0])
    samples = 20_000
    for seed in (3, UNSEEDED):
        torch.manual_seed(0)
        sampled = multinomial_with_seed(
            probabilities.log().expand(samples, -1), torch.full((samples,), seed), torch.arange(samples)
        )
        shares = torch.bincount(sampled[:, 0], minlength=5) / samples
        for share, probability in zip(shares.tolist(), probabilities.tolist(), strict=True):
            assert abs(share - probability) <= 5 * math.sqrt(probability * (1 - probability) / samples)


@settings(max_examples=20, deadline=None)
@given(weights=st.lists(st.sampled_from([0.0, 1e-9, 0.05, 0.3, 2.0]), min_size=1, max_size=9).filter(any))
def test_unseeded_samples_follow_the_probabilities(weights: list[float]) -> None:
    from monarch_rl.generator.cpu.install import draw

    samples = 20_000
    torch.manual_seed(len(weights))
    sampled = draw(torch.tensor(weights).expand(samples, -1))
    assert sampled.dtype == torch.int32
    counts = torch.bincount(sampled.long(), minlength=len(weights))
    for count, weight in zip(counts.tolist(), weights, strict=True):
        probability = weight / sum(weights)
        assert abs(count / samples - probability) <= 5 * math.sqrt(probability * (1 - probability) / samples) + 1e-4
        assert weight or not count


def test_tokens_of_probability_zero_are_never_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the uniform number is the largest possible one, or would be rounded up to 1."""
    from monarch_rl.generator.cpu.install import draw

    probabilities = torch.tensor([[0.1, 0.7, 1e-7, 0.0], [0.0, 0.3, 0.0, 0.0]])
    for largest in (1 - 2.0**-53, 1.0):
        monkeypatch.setattr(torch, "rand", lambda *shape, value=largest, **_: torch.full(shape, value).double())
        assert draw(probabilities).tolist() == [2, 1]
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.zeros(shape).double())
    assert draw(probabilities).tolist() == [0, 1]


def test_all_families_that_can_be_trained_are_found_without_other_models() -> None:
    from monarch_rl.generator.sglang_models.trained import EntryClass

    assert {model.__name__ for model in EntryClass} == set(ARCHITECTURES)
