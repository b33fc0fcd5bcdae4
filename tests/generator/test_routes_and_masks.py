"""What the engine reports with tokens: the experts that read them, and the masks from which they were sampled.

Both against transformers, whatever commits do with running sequences.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from monarch_rl.episode.sampling import Completion, Sampling, SamplingMasks
from monarch_rl.errors import GenerationError, SamplingMaskMissing
from monarch_rl.generator import requests as requests_module
from monarch_rl.generator.engine import Engine
from monarch_rl.generator.settings import InFlight
from monarch_rl.generator.sglang_format import ExpertRouteFormat, SideChannel, read_reason, take_side_channel
from tests.generator.conftest import SETTINGS, EngineKeeper
from tests.generator.helpers import (
    LAYERS,
    PART_TOKENS,
    LoopThread,
    Reading,
    RunningRequests,
    Staging,
    check_masks,
    check_parts,
    checksums_of,
    next_version,
    reference_reading,
    watched,
    weights_in,
)
from tests.model.configs import qwen3, qwen3_moe

PROMPT = [5, 6, 7, 8]
POLICIES: list[InFlight] = ["continue", "recompute", "resume"]
CASES = [(policy, False) for policy in POLICIES] + [(policy, True) for policy in POLICIES]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[0] + "-overlap-tp2" * case[1])
def case(request: pytest.FixtureRequest) -> tuple[InFlight, bool]:
    """What a commit does with running sequences; and whether SGLang's overlap scheduler is on, as on GPUs, in an engine
    of two ranks."""
    found: tuple[InFlight, bool] = request.param
    return found


@pytest.fixture(scope="module")
def policy(case: tuple[InFlight, bool]) -> InFlight:
    return case[0]


@pytest.fixture(scope="module")
def engine(case: tuple[InFlight, bool], engines: EngineKeeper, models: dict[str, Path]) -> Engine:
    policy, overlap = case
    settings = replace(SETTINGS, in_flight=policy, tp=2 if overlap else 1)
    return engines.under(settings, models["moe"], expert_routes=True, disable_overlap_schedule=not overlap)


@pytest.fixture(scope="module")
def staging(models: dict[str, Path]) -> Staging:
    return Staging(weights_in(models["moe"]))


def test_routes_and_masks_equal_those_of_transformers(
    engine: Engine, run: LoopThread, models: dict[str, Path], staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all tokens, for some, for a cached prompt, and for a later turn."""
    sampling = Sampling(max_new_tokens=40, top_k=20, top_p=0.1, expert_routes_from=0)
    base = weights_in(models["moe"])
    version = engine.requests.version + 1
    staging.fill(version, base)
    run(staging.commit(engine, version, checksums_of(base)))
    first = run(engine.generate(PROMPT, sampling))
    second_prompt = PROMPT + first.token_ids.tolist() + [9, 10]
    cached_tokens = len(PROMPT) + len(first.token_ids) - 1
    cached = watched(engine, "cached_tokens", monkeypatch)
    second = run(
        engine.generate(second_prompt, replace(sampling, expert_routes_from=cached_tokens, top_k=5, top_p=1.0))
    )
    assert cached and min(cached) >= cached_tokens, "the turn before was not cached"
    cached.clear()
    whole = run(engine.generate(second_prompt, replace(sampling, max_new_tokens=1, top_k=20, top_p=1.0, min_p=0.2)))
    assert cached and min(cached) == len(second_prompt) - 1, "the prompt was not cached"
    sequence = second_prompt + second.token_ids.tolist()
    (reading,) = reference_reading(models["moe"], [(sequence, [0] * len(sequence))], {0: base})

    assert first.expert_routes is not None and second.expert_routes is not None and whole.expert_routes is not None
    assert first.expert_routes.dtype == np.uint8 and first.expert_routes.shape == (cached_tokens, LAYERS, 2)
    expert_routes = np.concatenate([first.expert_routes, second.expert_routes])
    np.testing.assert_array_equal(np.sort(expert_routes, -1), reading.expert_routes[:-1])
    np.testing.assert_array_equal(np.sort(whole.expert_routes, -1), reading.expert_routes[: len(second_prompt)])
    check_masks(first, PROMPT, reading, 20)
    check_masks(second, second_prompt, reading, 5)
    check_masks(whole, second_prompt, reading, 20)
    assert len({*first.sampling_masks.counts.tolist()}) > 1  # type: ignore[union-attr]  # top-p truncates by likelihood


def test_routes_and_masks_across_commits(
    engine: Engine, run: LoopThread, models: dict[str, Path], staging: Staging, policy: InFlight
) -> None:
    """A sequence over three versions has a route for each token that was read, and a mask for each sampled token."""
    base, sampling = weights_in(models["moe"]), Sampling(max_new_tokens=400, top_k=20, top_p=0.9, expert_routes_from=0)
    first_version = engine.requests.version + 1
    weights = {first_version + i: next_version(base, 10 + i) for i in range(3)}

    async def scenario() -> tuple[list[Completion], Completion]:
        running: RunningRequests | None = None
        for version, changed in weights.items():
            staging.fill(version, changed)
            await staging.commit(engine, version, checksums_of(changed))
            running = running or RunningRequests.start(engine, [PROMPT], sampling)
            await running.wait_for_tokens()
        assert running is not None
        (sampled,) = await running.completions()
        return running.parts[0], sampled

    parts, sampled = run(scenario())
    check_parts(parts, sampled)
    assert set(sampled.policy_versions.tolist()) == set(weights), "the commits happened while it was running"
    ids = PROMPT + sampled.token_ids.tolist()[:-1]
    versions = sampled.policy_versions.tolist()
    # A token is read by the version that samples the one after it.
    readers = [versions[0]] * (len(PROMPT) - 1) + versions
    assert sampled.expert_routes is not None and len(sampled.expert_routes) == len(ids) == len(readers)
    if policy == "continue":
        (reading,) = reference_reading(models["moe"], [(ids, readers)], weights)
        expected, logprobs = reading.expert_routes, reading.logprobs
    else:  # each version has read everything before
        alone = reference_reading(models["moe"], [(ids, [version] * len(ids)) for version in weights], weights)
        read = dict(zip(weights, alone, strict=True))
        expected = np.stack([read[reader].expert_routes[place] for place, reader in enumerate(readers)])
        logprobs = np.stack([read[reader].logprobs[place] for place, reader in enumerate(readers)])
        if policy == "recompute":  # the engine recomputes its own cache, where the last reading stays
            expected = read[versions[-1]].expert_routes
    np.testing.assert_array_equal(np.sort(sampled.expert_routes, -1), expected)
    check_masks(sampled, PROMPT, Reading(expected, logprobs), 20)


def test_a_lost_mask_fails_its_request() -> None:
    """SGLang ends a request whose token it finds outside its recorded mask; other aborts do not count."""

    lost = "The sampling backend selected a token outside its captured sampling support."
    with pytest.raises(SamplingMaskMissing, match=lost):
        read_reason({"type": "abort", "message": lost})
    with pytest.raises(GenerationError) as caught:
        read_reason({"type": "abort", "message": "Aborted by AbortReq."})
    assert not isinstance(caught.value, SamplingMaskMissing)


def test_a_wrong_mask_fails_only_its_request(engine: Engine, run: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a part of an answer, which SGLang handles where an error would end this process."""
    take, victims = take_side_channel, list[str]()

    def forge(output: Any) -> list[SideChannel]:
        sides = take(output)
        for request, side in zip(output.rids, sides, strict=True):
            if side.sampling_masks and (not victims or request in victims):
                victims.append(request)
                side.sampling_masks = [SamplingMasks(sets.counts, sets.ids + 1) for sets in side.sampling_masks]
        return sides

    async def both() -> list[Completion | BaseException]:
        completions = (engine.generate([*PROMPT, i], sampling) for i in range(2))
        return await asyncio.gather(*completions, return_exceptions=True)

    sampling = Sampling(max_new_tokens=4 * PART_TOKENS, top_k=2)
    monkeypatch.setattr(requests_module, "take_side_channel", forge)
    sampled = run(both())
    (spoiled,) = [one for one in sampled if isinstance(one, GenerationError)]
    assert "does not contain the sampled token" in str(spoiled) and len(victims) > 1, "in a part, and at the end"
    (whole,) = [one for one in sampled if isinstance(one, Completion)]
    assert len(whole.token_ids) == 4 * PART_TOKENS


def test_inconsistent_masks_fail_only_their_request() -> None:
    mask = SimpleNamespace(lengths=[2, 1], token_ids=[5, 6], logprobs=[-0.5, 0.0])
    right = SimpleNamespace(lengths=[2], token_ids=[5, 6], logprobs=[-0.5])
    output = SimpleNamespace(rids=["a", "b"], output_token_sampling_mask=[mask, right], routed_experts=None)
    wrong, fine = take_side_channel(output)
    assert re.search(r"\b3 ids.*\b2\b", str(wrong.error)) and fine.error is None and len(fine.sampling_masks) == 1


def test_masks_that_the_engine_cannot_report_are_refused(engine: Engine, run: LoopThread) -> None:
    with pytest.raises(GenerationError, match="min_p.*seed"):
        run(engine.generate(PROMPT, Sampling(top_k=5, min_p=0.1, seed=1)))
    plain = run(engine.generate(PROMPT, Sampling(max_new_tokens=3)))
    assert plain.expert_routes is None and plain.sampling_masks is None


def test_routes_of_another_sequence_are_refused() -> None:
    """Fewer rows than tokens, or unknown experts, must come from another sequence or model."""
    config = qwen3_moe(num_experts=300, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3])
    form = ExpertRouteFormat(config)
    reported = np.arange(3 * 4 * 2, dtype=np.int32).reshape(3, 4, 2)
    sparse = form.read(reported, 3)
    assert sparse.dtype == np.uint16 and sparse.tolist() == reported[:, [1]].tolist()
    with pytest.raises(GenerationError, match=r"\b3 tokens.*\b4\b"):
        form.read(reported, 4)
    with pytest.raises(GenerationError, match=r"300 to 301.*\b300\b"):
        form.read(np.asarray([300, 301], np.int32).reshape(1, 1, 2).repeat(4, 1), 1)
    with pytest.raises(GenerationError, match="the same expert twice"):
        form.read(np.zeros((3, 4, 2), np.int32), 3)
    with pytest.raises(ValueError, match="has no experts"):
        ExpertRouteFormat(qwen3())
