"""Part ``speed``: tokens/s of the project's engine compared with SGLang alone, and a trainer's step compared with
torchtitan alone.

Both sides run alternately. A ratio above 1 means faster than the library alone.
"""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from benchmarks.speed_generator import Load, bare_engine
from monarch_rl.runtime.network import held_port
from tools.gpu_parts import old_torch
from tools.gpu_parts.common import Bench, Findings, make_groups, make_model, model_shape
from tools.gpu_parts.engines import engine_settings, generate, running_engine

ROUNDS = 4
TRAINER_S = 900.0
"""Seconds for the trainer, in its own process, even on shared cores; about 20 if nothing else runs."""


def run(bench: Bench, found: Findings) -> None:
    """See the top of this file."""
    folder = make_model(bench, model_shape(bench))
    # A trainer must not share a process with SGLang.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found.note(**pool.submit(trainer, bench, folder).result(TRAINER_S))
    if importlib.util.find_spec("sglang") is None:
        found.note(generator="not measured: SGLang is not installed")
        return
    asyncio.run(generator(bench, found, folder))


async def generator(bench: Bench, found: Findings, folder: Path) -> None:
    """Measure the tokens per second of both engines, which share the device and generate alternately."""
    vocabulary = model_shape(bench)["vocab_size"]
    load = Load(256, 64, 512, vocabulary) if bench.on_gpu else Load(16, 16, 48, vocabulary)
    # A smaller fraction for the second engine, which only finds the memory that the first has left.
    bare_settings = replace(engine_settings(bench), memory_fraction=0.3)
    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    async with running_engine(bench, found, folder) as engine, bare_engine(folder, bare_settings, shipped=True) as bare:
        for turn in range(ROUNDS + 1):
            _, ours_s = await generate(engine, load.prompts(turn), load.new_tokens)
            bare_s, _ = await bare.run(load, turn)
            if turn:  # the first round warms up
                seconds["ours"].append(ours_s)
                seconds["bare"].append(bare_s)
    ratios = [there / here for there, here in zip(seconds["bare"], seconds["ours"], strict=True)]
    found.note(
        generator_ratio=statistics.median(ratios),
        tokens_per_s=load.tokens / statistics.median(seconds["ours"]),
        bare_tokens_per_s=load.tokens / statistics.median(seconds["bare"]),
    )


def trainer(bench: Bench, folder: Path) -> dict[str, float]:
    """Measure the milliseconds per step of both trainers, on one batch of separate episodes."""
    from monarch_rl.trainer.platform import prepare

    old_torch.prepare()
    prepare()
    from benchmarks.plain_torchtitan import PlainTorchtitan, labelled
    from monarch_rl.trainer.objective import supervised
    from monarch_rl.trainer.policy import Policy
    from monarch_rl.trainer.settings import TrainerSettings
    from tools.gpu_parts.trainer import pack_separate

    sizes = (4, 8, 256, 512) if bench.on_gpu else (2, 4, 16, 16)
    episodes = [e for g in make_groups(model_shape(bench)["vocab_size"], *sizes) for e in g.episodes]
    trainable = sum(episode.num_trainable for episode in episodes)
    with held_port() as port:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        settings = TrainerSettings(ranks=1)
        policy = Policy(folder, settings, total_steps=2 * ROUNDS)
        plain = PlainTorchtitan(folder, settings, 2 * ROUNDS, policy.device, fuse_qkv=False)
    half = len(episodes) // 2
    batches = [pack_separate(part, 1 / trainable, policy.device) for part in (episodes[:half], episodes[half:])]
    theirs = [labelled(batch) for batch in batches]
    taken: dict[str, list[float]] = {"ours": [], "plain": []}
    for turn in range(ROUNDS + 1):
        for name in taken:
            bench.synchronize()
            started = time.perf_counter()
            _ = policy.update(batches, supervised) if name == "ours" else plain.step(theirs)
            bench.synchronize()
            if turn:
                taken[name].append(time.perf_counter() - started)
    ratios = [there / here for there, here in zip(taken["plain"], taken["ours"], strict=True)]
    return {
        "trainer_ratio": statistics.median(ratios),
        "trainer_step_ms": 1e3 * statistics.median(taken["ours"]),
        "torchtitan_step_ms": 1e3 * statistics.median(taken["plain"]),
        "trainer_step_tokens": sum(batch.num_tokens for batch in batches),
    }
