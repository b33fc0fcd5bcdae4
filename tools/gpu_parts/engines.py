"""Shared code of the parts with an engine."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.engine import Engine
from monarch_rl.generator.scheduler_process import quiet_imports
from monarch_rl.generator.settings import GeneratorSettings
from tools.gpu_parts.common import GIB, Bench, Findings, attention_backend

DRAW_S = 480.0
"""Seconds for a load of requests, even on shared cores."""


def engine_settings(bench: Bench) -> GeneratorSettings:
    """Settings of an engine that leaves half of the GPU's memory free."""
    if bench.on_gpu:
        return GeneratorSettings(replicas=1, memory_fraction=0.5, attention_backend=attention_backend())
    return GeneratorSettings(
        replicas=1,
        max_running_requests=16,
        max_total_tokens=8192,
        part_tokens=16,
        start_deadline_s=1200.0,  # the first import of the packages may be from a cold disk, on shared cores
    )


def free_gib(bench: Bench) -> float:
    """Free memory of the GPU, considering all processes; 0 on a CPU."""
    return torch.cuda.mem_get_info(bench.device)[0] / GIB if bench.on_gpu else 0.0


@asynccontextmanager
async def running_engine(bench: Bench, found: Findings, folder: Path) -> AsyncIterator[Engine]:
    """Run an engine; records its start-up time and memory. ``start_s`` includes compilation if SGLang has not compiled
    yet."""
    quiet_imports()
    settings = engine_settings(bench)
    before, started = free_gib(bench), time.perf_counter()
    engine = await asyncio.wait_for(Engine.start(str(folder), settings), settings.start_limit_s(bench.on_gpu))
    found.note(start_s=time.perf_counter() - started)
    arguments = engine._sglang.engine.server_args
    found.note(
        attention_backend=str(arguments.attention_backend),
        fp32_lm_head=bool(arguments.enable_fp32_lm_head),
        overlap=not arguments.disable_overlap_schedule,
    )
    if bench.on_gpu:
        found.note(engine_gib=before - free_gib(bench), left_gib=free_gib(bench))
    try:
        yield engine
    finally:
        await asyncio.wait_for(engine.shutdown(), 60.0)


def prompts(vocabulary: int, count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Random prompts: ``count`` times ``tokens`` token IDs."""
    sampled: list[list[int]] = np.random.default_rng(seed).integers(3, vocabulary, (count, tokens)).tolist()
    return sampled


async def generate(engine: Engine, asked: list[list[int]], new_tokens: int) -> tuple[list[Completion], float]:
    """Generate ``new_tokens`` for all prompts concurrently; returns the completions and the seconds."""
    started = time.perf_counter()
    requests = [engine.generate(prompt, Sampling(max_new_tokens=new_tokens)) for prompt in asked]
    completions = await asyncio.wait_for(asyncio.gather(*requests), DRAW_S)
    return completions, time.perf_counter() - started


def check_completions(found: Findings, completions: list[Completion], new_tokens: int, vocabulary: int) -> None:
    """Require that all completions have their length, token IDs of the vocabulary, and valid log-probs."""
    lengths = {len(completion.token_ids) for completion in completions}
    found.require(
        lengths == {new_tokens}, f"{new_tokens} tokens were requested, but completions have {sorted(lengths)}"
    )
    ids = np.concatenate([completion.token_ids for completion in completions])
    logprobs = np.concatenate([completion.logprobs for completion in completions])
    found.require(bool(((ids >= 0) & (ids < vocabulary)).all()), "token IDs outside the vocabulary were sampled")
    found.require(bool(np.isfinite(logprobs).all() and (logprobs <= 1e-3).all()), "some log-probs are invalid")
    mean = float(logprobs.mean())
    found.note(mean_logprob=mean)
    # The mean log-prob of sampled tokens is minus the entropy, which is at most that of equal probabilities.
    found.require(-1.05 * math.log(vocabulary) < mean < 0, f"the mean log-prob is {mean:.3g}")
