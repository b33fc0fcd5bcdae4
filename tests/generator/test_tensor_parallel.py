"""An engine of two ranks: its shards, the verification of both, and the end of the engine when one rank ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import EngineStopped, WeightMismatch
from monarch_rl.generator import commit as commit_module
from monarch_rl.generator.engine import Engine
from tests.generator.conftest import SETTINGS
from tests.generator.helpers import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LOGPROB_BOUND,
    VOCABULARY,
    LoopThread,
    RunningRequests,
    Staging,
    check_nothing_is_served,
    checksums_of,
    next_version,
    reference_logprobs,
    weights_in,
)

pytestmark = pytest.mark.core

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def engine(models: dict[str, Path], run: LoopThread) -> Iterator[Engine]:
    engine = run(Engine.start(str(models["qwen3"]), replace(SETTINGS, tp=2)))
    yield engine
    run(engine.shutdown())


def test_sequences_continue_across_commits_and_agree_with_transformers(
    engine: Engine, run: LoopThread, models: dict[str, Path], staging: Staging
) -> None:
    """The trainer's bits on both ranks together: the log-probs of every version, and each slice once."""
    weights = {version: next_version(weights_in(models["qwen3"]), version) for version in (1, 2, 3)}

    async def scenario() -> tuple[Completion, Completion]:
        running = RunningRequests.start(engine, [PROMPT], Sampling(max_new_tokens=600))
        for version in weights:
            await running.wait_for_tokens()
            staging.fill(version, weights[version])
            await staging.commit(engine, version, checksums_of(weights[version]))
        (across,) = await running.completions()
        return across, await engine.generate(PROMPT, Sampling(max_new_tokens=40, temperature=0.0))

    across, fresh = run(scenario())
    assert len(across.token_ids) == 600
    assert set(across.policy_versions.tolist()) == {0, 1, 2, 3}
    (reference,) = reference_logprobs(models["qwen3"], [(PROMPT, fresh)], weights[3])
    assert np.abs(fresh.logprobs - reference).max() < LOGPROB_BOUND


def test_ranks_agree_however_soon_the_next_commit_comes(
    engine: Engine, run: LoopThread, models: dict[str, Path], staging: Staging
) -> None:
    """A rank that is not yet notified of the end of a commit is not confused by the next one."""
    weights = weights_in(models["qwen3"])
    staging.fill(0, weights)
    staging.fill(1, weights)

    async def scenario() -> Completion:
        for _ in range(30):
            report = await staging.commit(engine, engine.requests.version + 1, checksums_of(weights))
            assert report.paused_seconds < report.seconds
        return await engine.generate(PROMPT, Sampling(max_new_tokens=5))

    assert len(run(scenario()).token_ids) == 5


def test_ranks_hold_rows_columns_and_copies(engine: Engine, run: LoopThread, staging: Staging) -> None:
    sheet = engine._commits._sheets[0]
    boxes = {spec.name: sheet.boxes[:, i].tolist() for i, spec in enumerate(sheet.specs)}
    block, width = "model.layers.1.", HEADS * HEAD_DIM
    assert boxes[block + "self_attn.q_proj.weight"] == [[0, width // 2, 0, HIDDEN], [width // 2, width // 2, 0, HIDDEN]]
    assert boxes[block + "self_attn.o_proj.weight"] == [[0, HIDDEN, 0, width // 2], [0, HIDDEN, width // 2, width // 2]]
    assert boxes[block + "mlp.down_proj.weight"] == [[0, HIDDEN, 0, HIDDEN], [0, HIDDEN, HIDDEN, HIDDEN]]
    assert boxes[block + "input_layernorm.weight"] == [[0, HIDDEN, 0, 1]] * 2
    split = boxes["model.embed_tokens.weight"]
    assert split[0][:2] == [0, split[1][0]]
    assert split[1][0] + split[1][1] == VOCABULARY


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("name", "bytes_of_rank"),
    [
        ("model.norm.weight", (0, 0)),
        ("model.layers.0.self_attn.o_proj.weight", (0, HEADS * HEAD_DIM * 4 // 2)),
        ("model.layers.1.mlp.up_proj.weight", (0, HIDDEN * HIDDEN * 4)),
        ("lm_head.weight", (0, -1)),
    ],
)
def test_a_wrong_bit_on_one_rank_alone_is_found(
    engine: Engine,
    run: LoopThread,
    models: dict[str, Path],
    staging: Staging,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    name: str,
    bytes_of_rank: tuple[int, int],
) -> None:
    """That rank gets another area, in which only a tensor of its own shard is corrupted; then all is repaired."""
    version = engine.requests.version + 1
    weights = next_version(weights_in(models["qwen3"]), version)
    spoilt = Staging(weights)
    for each in (staging, spoilt):
        each.fill(version, weights)
    place = bytes_of_rank[rank] % weights[name].nbytes
    spoilt.byte(version, name, place).bitwise_xor_(1)
    order = commit_module._serialized_order

    def orders(of: int, area: bytes, sheet: bytes, retained_tokens: int) -> Any:
        return order(of, spoilt.area(version).handle if of == rank else area, sheet, retained_tokens)

    async def scenario() -> Completion:
        with monkeypatch.context() as patch:
            patch.setattr(commit_module, "_serialized_order", orders)
            with pytest.raises(WeightMismatch, match=rf"\b1 of \d+ .*: {re.escape(name)}"):
                await staging.commit(engine, version, checksums_of(weights))
        waiting = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_new_tokens=3)))
        await asyncio.sleep(0)  # it starts to wait
        await check_nothing_is_served(engine)
        assert not waiting.done()
        await staging.commit(engine, version, checksums_of(weights))
        return await waiting

    assert run(scenario()).policy_versions.tolist() == [version] * 3


def test_a_tp_that_does_not_divide_the_heads_is_refused_before_the_start(
    models: dict[str, Path], run: LoopThread
) -> None:
    with pytest.raises(ValueError, match=r"generator\.tp 3 .*num_attention_heads is 4"):
        run(Engine.start(str(models["qwen3"]), replace(SETTINGS, tp=3)))


def test_the_ranks_have_no_named_file_in_shared_memory(engine: Engine) -> None:
    """It would stay behind when they are killed, which is how an engine ends."""
    mapped = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in engine.child_pids)
    names = re.findall(r"/dev/shm/(sgl\S+)( \(deleted\))?$", mapped, re.MULTILINE)
    assert names, "the ranks have no queue: nothing would be tested"
    assert all(deleted for _, deleted in names), names


def test_the_end_of_one_rank_ends_the_engine(engine: Engine, run: LoopThread) -> None:
    """The last test with this module's engine."""

    async def scenario() -> None:
        request = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_new_tokens=1000)))
        await asyncio.sleep(0)
        victim = engine.child_pids[1]
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(EngineStopped, match="exit code"):
            await request

    run(scenario())
