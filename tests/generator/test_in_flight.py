"""Running sequences at a commit, under each policy, against transformers under each version.

Versions hold all weights, or an adapter. SGLang's overlap scheduler is off, as on CPUs, or on, as on GPUs.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import StillRunning, WeightMismatch
from monarch_rl.generator.engine import Engine
from monarch_rl.generator.requests import KEPT_COMMITS
from monarch_rl.generator.settings import InFlight
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings
from tests.generator.conftest import SETTINGS, EngineKeeper
from tests.generator.helpers import (
    LAYERS,
    LOGPROB_BOUND,
    LoopThread,
    RunningRequests,
    Staging,
    adapter,
    check_nothing_is_served,
    check_parts,
    checksums_of,
    merged,
    next_version,
    reference_in_turn,
    reference_logprobs,
    weights_in,
)

PROMPTS = [[5, 6, 7, 8 + i] for i in range(4)]
LAST = f"model.layers.{LAYERS - 1}."
KEYS_AND_VALUES = (f"{LAST}self_attn.k_proj.weight", f"{LAST}self_attn.v_proj.weight")
"""Changing these makes cached keys and values of older weights differ, but only in the last layer."""
LORA = LoraSettings(rank=3, alpha=6.0)


@dataclass(frozen=True)
class Case:
    """How an engine commits, and which kind of versions."""

    policy: InFlight
    lora: LoraSettings = FULL_TRAINING
    overlap: bool = False

    def __str__(self) -> str:
        return "-".join([self.policy, *["adapter"] * (self.lora.rank > 0), *["overlap"] * self.overlap])


ALONE: tuple[InFlight, ...] = ("recompute", "resume", "drain")
"""The policies under which a version's tokens have the log-probs of that version alone. Adapters under ``continue`` are
in test_load_lora, and here with the overlap scheduler."""
# Cases that share an engine are neighbours.
CASES = [Case(policy, overlap=overlap) for overlap in (False, True) for policy in get_args(InFlight)]
CASES += [Case(policy, LORA) for policy in ALONE]
CASES += [Case(policy, LORA, overlap=True) for policy in get_args(InFlight)]


CORE = [Case(policy) for policy in get_args(InFlight)] + [Case("continue", LORA, overlap=True)]
"""One real proof of each rule, and of the most different cases."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, id=str(case), marks=[pytest.mark.core] if case in CORE else []) for case in CASES],
)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def policy(case: Case) -> InFlight:
    return case.policy


@dataclass(frozen=True)
class Versions:
    """The versions that are committed."""

    folder: Path
    lora: LoraSettings

    def first(self) -> dict[str, torch.Tensor]:
        """The engine's initial version: the model's weights, or an adapter that adds nothing."""
        if not self.lora.rank:
            return weights_in(self.folder)
        return {name: torch.zeros_like(x) for name, x in adapter(self.folder, self.lora, 0).items()}

    def later(self, seed: int) -> dict[str, torch.Tensor]:
        return adapter(self.folder, self.lora, seed) if self.lora.rank else next_version(self.first(), seed)

    def reference(
        self, asked: list[tuple[list[int], Completion]], weights: dict[str, torch.Tensor]
    ) -> list[np.ndarray]:
        return reference_logprobs(self.folder, asked, weights, self.lora)

    def in_turn(
        self, asked: list[tuple[list[int], Completion]], weights: dict[int, dict[str, torch.Tensor]]
    ) -> list[np.ndarray]:
        """Each token under the version that it carries, over the keys and values computed by the versions before it."""
        if self.lora.rank:
            weights = {version: merged(self.folder, self.lora, tensors) for version, tensors in weights.items()}
        return reference_in_turn(self.folder, asked, weights)


@pytest.fixture(scope="module")
def versions(case: Case, models: dict[str, Path]) -> Versions:
    return Versions(models["qwen3"], case.lora)


@pytest.fixture(scope="module")
def staging(versions: Versions) -> Staging:
    return Staging(versions.first())


@pytest.fixture(scope="module")
def engine(
    case: Case,
    engines: EngineKeeper,
    versions: Versions,
    staging: Staging,
    run: LoopThread,
) -> Engine:
    """An engine with its initial weights."""
    settings = replace(SETTINGS, in_flight=case.policy, drain_deadline_s=600)
    options = {"lora": case.lora, "disable_overlap_schedule": not case.overlap}
    engine, weights = engines.under(settings, versions.folder, **options), versions.first()
    version = engine.requests.version + 1
    staging.fill(version, weights)
    run(staging.commit(engine, version, checksums_of(weights)))
    return engine


def test_a_commit_of_the_same_weights_changes_no_seeded_sample(
    engine: Engine, run: LoopThread, versions: Versions, staging: Staging, policy: str
) -> None:
    """The sequence continues where it was, with the noise it would have had: no token is lost or doubled."""
    weights = versions.first()
    seeded = Sampling(max_new_tokens=300, seed=7)

    async def scenario() -> tuple[Completion, Completion]:
        alone = await engine.generate(PROMPTS[0], seeded)
        running = RunningRequests.start(engine, PROMPTS[:1], seeded)
        for _ in range(1 if policy == "drain" else 3):
            await running.wait_for_tokens()
            version = engine.requests.version + 1
            staging.fill(version, weights)
            await staging.commit(engine, version, checksums_of(weights))
        (across,) = await running.completions()
        return alone, across

    alone, across = run(scenario())
    assert across.token_ids.tolist() == alone.token_ids.tolist()
    assert np.abs(across.logprobs - alone.logprobs).max() < LOGPROB_BOUND
    assert across.finish_reason == alone.finish_reason == "length"
    assert len(set(across.policy_versions.tolist())) == (1 if policy == "drain" else 4)


def test_each_token_is_sampled_by_the_version_that_it_carries(
    engine: Engine, run: LoopThread, versions: Versions, staging: Staging, policy: str
) -> None:
    """A failed commit, a good one in its place, and another, while four sequences run and two more are submitted.

    The parts that arrive while they run carry the same versions.
    """
    first = engine.requests.version + 1  # the test's own version: an earlier test may have left other weights
    weights = {first: versions.first()} | {first + i: versions.later(i) for i in (1, 2)}
    sampling = Sampling(max_new_tokens=300)

    async def scenario() -> tuple[list[list[Completion]], list[Completion]]:
        staging.fill(first, weights[first])
        await staging.commit(engine, first, checksums_of(weights[first]))
        early = RunningRequests.start(engine, PROMPTS, sampling)
        await early.wait_for_tokens()
        staging.fill(first + 1, weights[first + 1])
        name = next(name for name in staging.manifest.names if "layers.0.mlp.down_proj" in name)
        spoilt = staging.byte(first + 1, name, 40)
        spoilt ^= 1
        with pytest.raises(WeightMismatch, match=rf"\b1 of \d+ .*: {re.escape(name)}"):
            await staging.commit(engine, first + 1, checksums_of(weights[first + 1]))
        late = RunningRequests.start(engine, PROMPTS[:2], sampling)
        tasks = early.tasks + late.tasks
        done = [task for task in tasks if task.done()]
        await check_nothing_is_served(engine, early, late)
        assert [task for task in tasks if task.done()] == done
        spoilt ^= 1
        await staging.commit(engine, first + 1, checksums_of(weights[first + 1]))
        await late.wait_for_tokens()
        staging.fill(first + 2, weights[first + 2])
        await staging.commit(engine, first + 2, checksums_of(weights[first + 2]))
        return early.parts + late.parts, await early.completions() + await late.completions()

    arrived, completions = run(scenario())
    asked = [(prompt, completion) for prompt, completion in zip(PROMPTS + PROMPTS[:2], completions, strict=True)]
    for parts, completion in zip(arrived, completions, strict=True):
        check_parts(parts, completion)
    seen: set[int] = set()
    for _, completion in asked:
        assert len(completion.token_ids) == sampling.max_new_tokens
        assert (np.diff(completion.policy_versions) >= 0).all()
        assert policy != "drain" or len(set(completion.policy_versions.tolist())) == 1
        seen |= set(completion.policy_versions.tolist())
    assert seen == ({first, first + 1} if policy == "drain" else set(weights))
    alone = version_alone(versions, asked, weights)
    differences = [np.abs(c.logprobs - reference).max() for (_, c), reference in zip(asked, alone, strict=True)]
    print(f"{policy}: log-probs are within {max(differences):.1e} of those of the tokens' versions alone")
    if policy != "continue":
        assert max(differences) < LOGPROB_BOUND
        return
    assert max(differences) > 1e-3  # otherwise the next check would prove nothing
    in_turn = versions.in_turn(asked, weights)
    differences = [np.abs(c.logprobs - reference).max() for (_, c), reference in zip(asked, in_turn, strict=True)]
    print(f"continue: within {max(differences):.1e} of those over keys and values that older versions computed")
    assert max(differences) < LOGPROB_BOUND


def version_alone(
    versions: Versions, asked: list[tuple[list[int], Completion]], weights: dict[int, dict[str, torch.Tensor]]
) -> list[np.ndarray]:
    """The log-prob of each sampled token under the version that it carries, as if that version had read everything."""
    found = [np.full(len(completion.token_ids), np.nan, np.float32) for _, completion in asked]
    for version in sorted({version for _, c in asked for version in c.policy_versions.tolist()}):
        for (_, completion), mine, row in zip(asked, found, versions.reference(asked, weights[version]), strict=True):
            of_version = completion.policy_versions == version
            mine[of_version] = row[of_version]
    return found


def test_only_under_continue_does_a_later_turn_reuse_the_cache_of_older_weights(
    engine: Engine, run: LoopThread, versions: Versions, staging: Staging, policy: str
) -> None:
    """Turns before and after a commit, and conversations that start after it with the same prompts."""
    if versions.lora.rank:
        pytest.skip("the cache is the same, and adapters under each rule are tested above")
    first = engine.requests.version + 1
    weights = {first: versions.first(), first + 1: versions.later(1)}
    prompts = [list(range(5, 85)) + [90 + i] for i in range(3)]
    message, sampling = [7, 8, 9, 10, 11], Sampling(max_new_tokens=60)

    async def commit(version: int) -> None:
        staging.fill(version, weights[version])
        await staging.commit(engine, version, checksums_of(weights[version]))

    async def turns(asked: list[list[int]], began: int | None) -> tuple[list[Completion], float, int]:
        """The completions, the share of prompt tokens that were cached, and the number that were read again."""
        before = replace(engine.requests.turn_reads)
        requests = [engine.generate(prompt, replace(sampling, conversation_version=began)) for prompt in asked]
        completions, after = await asyncio.gather(*requests), engine.requests.turn_reads
        tokens = after.prompt_tokens - before.prompt_tokens
        assert tokens == (0 if began is None else sum(map(len, asked)))
        cached = (after.cached_tokens - before.cached_tokens) / tokens if tokens else 0.0
        return completions, cached, after.reread_tokens - before.reread_tokens

    async def scenario() -> None:
        await commit(first)
        began, _, _ = await turns(prompts, None)
        later = [[*prompt, *c.token_ids.tolist(), *message] for prompt, c in zip(prompts, began, strict=True)]
        _, cached, reread = await turns(later, first)
        assert cached >= 0.9 and not reread
        await commit(first + 1)
        sampled, cached, reread = await turns(later, first)
        alone = version_alone(versions, list(zip(later, sampled, strict=True)), weights)
        differences = [np.abs(c.logprobs - reference).max() for c, reference in zip(sampled, alone, strict=True)]
        if policy == "continue":
            assert cached >= 0.9 and reread < 0.1 * sum(map(len, later)) and max(differences) > 1e-3
            check_past(list(zip(prompts, began, sampled, strict=True)))
        else:
            assert cached == 0 and reread == sum(map(len, later)) and max(differences) < LOGPROB_BOUND
        fresh = [prompt + [3] for prompt in prompts]
        for version in (None, first + 9):  # a conversation may arrive from a replica that is ahead
            sampled, _, _ = await turns(fresh, version)
            alone = version_alone(versions, list(zip(fresh, sampled, strict=True)), weights)
            for completion, reference in zip(sampled, alone, strict=True):
                assert np.abs(completion.logprobs - reference).max() < LOGPROB_BOUND
        for version in range(first + 2, first + 2 + KEPT_COMMITS + 1):
            weights[version] = weights[first + 1]
            await commit(version)
        _, cached, _ = await turns(later, first)
        assert cached == 0  # unused for too long

    def check_past(turns: list[tuple[list[int], Completion, Completion]]) -> None:
        """The later turn's log-probs are over keys and values of the first version, except for its last token."""
        conversations = []
        for prompt, began, sampled in turns:
            ids = np.concatenate([began.token_ids, np.asarray(message, np.int32), sampled.token_ids])
            of_version = np.full(len(ids), first + 1, np.int32)
            of_version[: -len(sampled.token_ids)] = first
            conversations.append((prompt, replace(sampled, token_ids=ids, policy_versions=of_version)))
        references = versions.in_turn(conversations, {version: weights[version] for version in (first, first + 1)})
        for (_, _, sampled), reference in zip(turns, references, strict=True):
            assert np.abs(sampled.logprobs - reference[-len(sampled.logprobs) :]).max() < LOGPROB_BOUND

    run(scenario())


def feeds_no_key_or_value(name: str) -> bool:
    """Whether a tensor acts only after the last layer's keys and values are computed."""
    makes_them = ("input_layernorm", "self_attn.k_norm", "self_attn.k_proj", "self_attn.v_proj")
    return name in ("model.norm.weight", "lm_head.weight") or (
        name.startswith(LAST) and not any(part in name for part in makes_them)
    )


@pytest.mark.parametrize("past_changes", [False, True], ids=["no key or value", "keys and values"])
def test_under_continue_a_version_that_changes_no_keys_or_values_has_its_own_logprobs(
    engine: Engine, run: LoopThread, versions: Versions, staging: Staging, policy: str, past_changes: bool
) -> None:
    """The same keys and values bit for bit, so nothing of the version before is left. With other ones much is left."""
    if policy != "continue" or versions.lora.rank:
        pytest.skip("another policy, or the adapter's test is in test_load_lora")
    first = engine.requests.version + 1
    old = versions.later(first)
    names = KEYS_AND_VALUES if past_changes else tuple(filter(feeds_no_key_or_value, old))
    assert len(names) == (2 if past_changes else 9)
    changed = next_version(old, first + 1)
    weights = {first: old, first + 1: old | {name: changed[name] for name in names}}

    async def scenario() -> list[Completion]:
        staging.fill(first, weights[first])
        await staging.commit(engine, first, checksums_of(weights[first]))
        running = RunningRequests.start(engine, PROMPTS, Sampling(max_new_tokens=300))
        await running.wait_for_tokens()
        staging.fill(first + 1, weights[first + 1])
        await staging.commit(engine, first + 1, checksums_of(weights[first + 1]))
        return await running.completions()

    asked = list(zip(PROMPTS, run(scenario()), strict=True))
    sampled = np.concatenate([completion.logprobs for _, completion in asked])
    new = np.concatenate([completion.policy_versions == first + 1 for _, completion in asked])
    assert 100 < new.sum() < len(new) - 100  # the commit came in the middle
    older, newer = (np.concatenate(versions.reference(asked, weights[version])) for version in sorted(weights))
    assert np.abs(newer - older)[new].max() > 0.01, "the versions do not differ: nothing would be tested"
    assert np.abs(sampled - older)[~new].max() < LOGPROB_BOUND
    largest = np.abs(sampled - newer)[new].max()
    print(
        f"{len(names)} tensors changed: tokens after the commit are within {largest:.1e} of those of its version alone"
    )
    if not past_changes:
        assert largest < LOGPROB_BOUND
        return
    assert largest > 100 * LOGPROB_BOUND
    in_turn = np.concatenate(versions.in_turn(asked, weights))
    assert np.abs(sampled - in_turn).max() < LOGPROB_BOUND


def test_a_stop_token_in_the_step_of_a_commit_ends_the_request(
    engine: Engine, run: LoopThread, versions: Versions, staging: Staging
) -> None:
    """Commits as fast as possible: a sequence ends where it ends without them, with the same reason."""
    weights = versions.first()

    async def scenario() -> tuple[list[list[Completion]], list[Completion], list[Completion]]:
        version = engine.requests.version + 1
        staging.fill(version, weights)
        await staging.commit(engine, version, checksums_of(weights))
        whole = await engine.generate(PROMPTS[0], Sampling(max_new_tokens=60, seed=3))
        ends = [int(token) for token in whole.token_ids[5:50:5]]
        wanted = [Sampling(max_new_tokens=60, seed=3, stop_token_ids=(end,)) for end in ends]
        wanted += [Sampling(max_new_tokens=count, seed=3) for count in range(1, 7)]
        alone = [await engine.generate(PROMPTS[0], sampling) for sampling in wanted]
        running = RunningRequests.start(engine, [PROMPTS[0]] * len(wanted), *wanted)
        while not all(task.done() for task in running.tasks):
            version = engine.requests.version + 1
            staging.fill(version, weights)
            await staging.commit(engine, version, checksums_of(weights))
            await asyncio.sleep(0.01)  # the next commit is a few steps later
        return running.parts, alone, await running.completions()

    for parts, alone, across in zip(*run(scenario()), strict=True):
        check_parts(parts, across)
        assert across.token_ids.tolist() == alone.token_ids.tolist()
        assert across.finish_reason == alone.finish_reason


def test_a_drain_that_takes_too_long_reports_how_many_requests_still_run(
    engine: Engine, run: LoopThread, versions: Versions, staging: Staging, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if policy != "drain":
        pytest.skip("another policy")
    monkeypatch.setattr(engine._commits, "_drain_deadline_s", 0.1)
    weights = versions.first()

    async def scenario() -> tuple[list[Completion], int]:
        served = engine.requests.version
        running = RunningRequests.start(engine, PROMPTS, Sampling(max_new_tokens=400))
        await running.wait_for_tokens()
        staging.fill(served + 1, weights)
        with pytest.raises(StillRunning, match=rf"version {served} is: {len(PROMPTS)} requests"):
            await staging.commit(engine, served + 1, checksums_of(weights))
        assert engine.requests.version == served
        return [*await running.completions(), await engine.generate([4], Sampling(max_new_tokens=3))], served

    completions, served = run(scenario())
    assert {version for completion in completions for version in completion.policy_versions.tolist()} == {served}
