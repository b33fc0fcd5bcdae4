"""The same tokens read twice: an engine draws sequences, then a trainer scores them. ``tools/parity.py`` judges it.

Each side runs in processes of its own and alone, so that one device is enough, and so that SGLang and torchtitan never
meet in one process. Sequences travel between them as the bytes that a run's would (``packed.py``).
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from monarch_rl.algorithms.packing import plan_microbatches
from monarch_rl.episode.episode import Episode, Group, Turn
from monarch_rl.episode.packed import pack_group, unpack_group
from monarch_rl.episode.sampling import Sampling
from monarch_rl.generator.scheduler_process import quiet_imports
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.lifetime import die_with_parent
from monarch_rl.runtime.network import held_port
from monarch_rl.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from monarch_rl.generator.engine import Engine
    from monarch_rl.trainer.policy import Policy

NEAR_ZERO = 1e-3
"""Temperature at which tokens that were drawn greedily are scored: one that is the trainer's most likely, too, then has
more than half of the probability, and any other less. Three tokens within some 1e-3 nats could deceive it."""
TOP = math.log(0.5)
"""Log-probs at ``NEAR_ZERO`` above this are of the trainer's most likely token."""
END_S = 60.0
"""Seconds that a side may take to end after its work, beside its deadline."""


@dataclass(frozen=True)
class Lot:
    """Prompts that are continued in one way."""

    name: str
    prompts: list[list[int]]
    sampling: Sampling


@dataclass(frozen=True)
class Reading:
    """What both sides say of a lot: N drawn tokens, R tokens read, of which the last of each sequence is none."""

    group: Group
    """The lot's sequences as they were drawn."""
    engine: torch.Tensor
    """float32[N], log-probs; of the distribution that drew each token, so 0 if it was drawn greedily."""
    own: torch.Tensor
    """float32[N], the trainer's, each layer's experts chosen by itself; at temperature ``NEAR_ZERO`` if the tokens were
    drawn greedily."""
    replayed: torch.Tensor | None = None
    """float32[N], the same with the engine's experts; None for a model without experts."""
    differing: torch.Tensor | None = None
    """int64[R, layers that have experts]: how many of the engine's experts of a token the trainer would not choose."""


class SideFailed(RuntimeError):
    """The engine's or the trainer's process failed, or took too long."""


def compare(
    engine_model: Path,
    trainer_model: Path,
    generator: GeneratorSettings,
    trainer: TrainerSettings,
    lots: Sequence[Lot],
    *,
    experts: bool,
    deadline_s: float,
) -> dict[str, Reading]:
    """Have an engine draw all lots and a trainer score them.

    Args:
        trainer: ``routing`` is not looked at: both ways are taken.
        experts: the models have some.
        deadline_s: seconds that all draws, or all scores, may take together; the engine's start has its own.

    Raises:
        SideFailed: a side failed; its own error is on stderr.
    """
    quiet_imports()
    trainer = replace(trainer, router_replay="compare" if experts else "off")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        what = f"the engine to draw {sum(len(lot.prompts) for lot in lots)} sequences"
        limit = generator.start_deadline_s + deadline_s + END_S
        run_ranks(draw, (folder, engine_model, generator, lots, experts, deadline_s), 1, limit, what)
        what = f"{trainer.ranks} trainer ranks to score them"
        with held_port() as port:
            run_ranks(score, (folder, trainer_model, trainer, lots, port), trainer.ranks, deadline_s + END_S, what)
        return {lot.name: _collect(folder, lot, trainer.ranks) for lot in lots}


def run_ranks(work: Callable[..., None], arguments: tuple[Any, ...], ranks: int, limit_s: float, what: str) -> None:
    """Call ``work(rank, *arguments)`` in a process for each rank, and wait for all of them.

    Args:
        limit_s: seconds after which they are killed.
        what: is waited for.

    Raises:
        SideFailed: one failed, or they took too long; none is left.
    """
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_enter, args=(os.getpid(), work, rank, *arguments)) for rank in range(ranks)]
    deadline = time.monotonic() + limit_s
    try:
        for process in processes:
            process.start()
        running = list(processes)
        while running:
            ended = wait([process.sentinel for process in running], timeout=max(0.0, deadline - time.monotonic()))
            if not ended:
                raise SideFailed(f"waited {limit_s:g} s for {what}: killed")
            for process in [process for process in running if process.sentinel in ended]:
                process.join(END_S)
                running.remove(process)
                if process.exitcode:
                    raise SideFailed(f"waited for {what}: a process ended with {process.exitcode}; see above why")
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join(END_S)


def _enter(parent: int, work: Callable[..., None], rank: int, *arguments: Any) -> None:
    die_with_parent(signal.SIGKILL, parent)
    work(rank, *arguments)


# ---- the engine's side ---------------------------------------------------------------------------------------


def draw(
    _rank: int,
    folder: Path,
    model: Path,
    settings: GeneratorSettings,
    lots: Sequence[Lot],
    expert_routes: bool,
    deadline_s: float,
) -> None:
    """Draw all lots with one engine, and write each to ``folder`` as the bytes of a group."""
    asyncio.run(_draw(folder, model, settings, lots, expert_routes, deadline_s))


async def _draw(
    folder: Path, model: Path, settings: GeneratorSettings, lots: Sequence[Lot], expert_routes: bool, deadline_s: float
) -> None:
    from monarch_rl.generator.engine import Engine

    starting = Engine.start(str(model), settings, expert_routes=expert_routes)
    engine = await within(settings.start_deadline_s, starting, "the engine to start", on="the engine")
    try:
        what = f"{sum(len(lot.prompts) for lot in lots)} sequences of all lots"
        await within(deadline_s, _draw_all(folder, engine, lots, expert_routes), what, on="the engine")
    finally:
        await engine.shutdown()


async def _draw_all(folder: Path, engine: Engine, lots: Sequence[Lot], expert_routes: bool) -> None:
    for index, lot in enumerate(lots):
        sampling = replace(lot.sampling, expert_routes_from=0 if expert_routes else None)
        # waits: within _draw's deadline
        drawn = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in lot.prompts))
        episodes = [
            Episode([Turn.from_completion(prompt, one)], 0.0, one.finish_reason, expert_routes=one.expert_routes)
            for prompt, one in zip(lot.prompts, drawn, strict=True)
        ]
        (folder / lot.name).write_bytes(pack_group(Group(index, index, episodes)))


# ---- the trainer's side --------------------------------------------------------------------------------------


def score(rank: int, folder: Path, model: Path, settings: TrainerSettings, lots: Sequence[Lot], port: int) -> None:
    """Score this rank's part of all lots, and write what was found to ``<lot>.<rank>``."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(settings.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from monarch_rl.trainer.policy import Policy

    policy = Policy(model, settings, total_steps=1)
    for lot in lots:
        group = unpack_group((folder / lot.name).read_bytes())
        policy.temperature = lot.sampling.temperature or NEAR_ZERO
        save_file(_score(policy, group.episodes), folder / f"{lot.name}.{rank}")
    policy.close()


def _score(policy: Policy, episodes: Sequence[Episode]) -> dict[str, torch.Tensor]:
    """The fields of :class:`Reading` that are tensors, of this rank's episodes."""
    from monarch_rl.trainer.batch import pack

    settings: TrainerSettings = policy.settings
    lengths = [episode.num_tokens for episode in episodes]
    found: dict[str, list[torch.Tensor]] = {}

    def keep(name: str, value: torch.Tensor) -> None:
        found.setdefault(name, []).append(value.cpu())

    for microbatch in plan_microbatches(lengths, settings.tokens_per_microbatch, settings.ranks)[policy.rank]:
        mine = [episodes[i] for i in microbatch]
        batch = pack(mine, torch.zeros(len(mine)), torch.zeros(len(mine)), 0, policy.device)
        with torch.no_grad():
            keep("own", policy.logprobs(batch).logprobs)
            keep("engine", batch.behaviour_logprobs)
            if settings.router_replay == "off":
                continue
            if batch.expert_routes is not None:
                keep("differing", policy.routes_differ())
            keep("replayed", policy.logprobs(batch, "replay").logprobs)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _collect(folder: Path, lot: Lot, ranks: int) -> Reading:
    parts = [load_file(folder / f"{lot.name}.{rank}") for rank in range(ranks)]

    def joined(name: str) -> torch.Tensor | None:
        there = [part[name] for part in parts if name in part]
        return torch.cat(there) if there else None

    engine, own = joined("engine"), joined("own")
    assert engine is not None and own is not None
    group = unpack_group((folder / lot.name).read_bytes())
    return Reading(group, engine, own, joined("replayed"), joined("differing"))
