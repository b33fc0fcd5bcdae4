"""Parity: an engine samples sequences, then a trainer computes the log-probs of the same tokens.

``tools/parity.py`` judges the differences.

The two sides run one after the other, in processes of their own, so that one device is enough and SGLang and torchtitan
are never imported into one process. Sequences are passed on in the format of a run (``episode/serialization.py``).
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from monarch_rl.algorithms.packing import plan_microbatches, separate
from monarch_rl.episode.episode import Episode, Group, Turn
from monarch_rl.episode.sampling import Sampling
from monarch_rl.episode.serialization import deserialize_group, serialize_group
from monarch_rl.errors import SideFailed
from monarch_rl.generator.scheduler_process import ENGINE_PRELOAD, quiet_imports
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.model.config import read_config
from monarch_rl.model.lora import FULL_TRAINING
from monarch_rl.model.tensors import model_bytes
from monarch_rl.pipeline.memory import cpu_memory
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.forking.fork_context import ForkContext
from monarch_rl.runtime.network import held_port
from monarch_rl.runtime.process import die_with_parent
from monarch_rl.runtime.scratch import temporary_directory
from monarch_rl.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from monarch_rl.generator.engine import Engine
    from monarch_rl.trainer.policy import Policy

NEAR_ZERO = 1e-3
"""Temperature at which the trainer computes log-probs of greedily sampled tokens: its own most likely token then has
more than half of the probability, and any other less. Fails only if three tokens are within some 1e-3 nats."""
TOP = math.log(0.5)
"""At temperature ``NEAR_ZERO``, a log-prob above this belongs to the trainer's most likely token."""
END_S = 60.0
"""Seconds that a side may take to end after its work, in addition to its deadline."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts that are continued with the same sampling parameters."""

    name: str
    prompts: list[list[int]]
    sampling: Sampling


@dataclass(frozen=True)
class Reading:
    """Log-probs of both sides for a prompt set, with N sampled tokens and R input tokens (all but the last of each
    sequence)."""

    group: Group
    """The sampled sequences."""
    engine: torch.Tensor
    """float32[N], the engine's log-probs under the distribution that each token was sampled from: 0 if greedily."""
    own: torch.Tensor
    """float32[N], the trainer's log-probs, with the experts chosen by its own routers; at temperature ``NEAR_ZERO`` if
    the tokens were sampled greedily."""
    replayed: torch.Tensor | None = None
    """float32[N], the trainer's log-probs with the engine's experts; None for a model without experts."""
    differing: torch.Tensor | None = None
    """int64[R, layers with experts]: number of the engine's experts for a token that the trainer would not choose."""


def compare(
    engine_model: Path,
    trainer_model: Path,
    generator: GeneratorSettings,
    trainer: TrainerSettings,
    prompt_sets: Sequence[PromptSet],
    *,
    experts: bool,
    deadline_s: float,
    engine_arguments: Mapping[str, object] | None = None,
) -> dict[str, Reading]:
    """Have an engine continue all prompts, and a trainer compute the log-probs of the sampled tokens.

    Args:
        engine_model: the model that the engine serves.
        trainer_model: the model that the trainer loads.
        trainer: settings; ``router_replay`` is ignored: with experts, both own routes and replayed ones are measured.
        experts: whether the models have experts.
        deadline_s: seconds that each side may take for all sequences together; the engine's start has its own limit.
        engine_arguments: SGLang ``ServerArgs`` that are added to the project's, or override them.

    Raises:
        SideFailed: a side failed; its own error is on stderr.
    """
    quiet_imports()
    trainer = replace(trainer, router_replay="compare" if experts else "off")
    start_s = generator.start_limit_s(torch.cuda.is_available(), model_bytes(read_config(engine_model)))
    generator = replace(generator, start_deadline_s=start_s)
    with temporary_directory() as folder:
        what = f"the engine to sample {sum(len(prompt_set.prompts) for prompt_set in prompt_sets)} sequences"
        limit_s = start_s + deadline_s + END_S
        sampling = (folder, engine_model, generator, prompt_sets, experts, deadline_s, dict(engine_arguments or {}))
        run_ranks(sample_sequences, sampling, 1, limit_s, what, ENGINE_PRELOAD)
        what = f"{trainer.ranks} trainer ranks to compute the log-probs"
        with held_port() as port:
            arguments = (folder, trainer_model, trainer, prompt_sets, port)
            limit_s = trainer.compile_limit_s + deadline_s + END_S
            run_ranks(compute_logprobs, arguments, trainer.ranks, limit_s, what)
        return {prompt_set.name: _collect(folder, prompt_set, trainer.data_ranks) for prompt_set in prompt_sets}


def run_ranks(
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    ranks: int,
    limit_s: float,
    what: str,
    preload: str = "trainer",
) -> None:
    """Call ``work(rank, *arguments)`` in a process for each rank, and wait for all of them.

    Args:
        limit_s: seconds after which the processes are killed.
        what: description of the work for the error, such as "2 trainer ranks to compute the log-probs".
        preload: the preloaded process to fork from, if a fork server is running
            (``runtime/forking/fork_server.py``); then ``work`` must not be defined in the main program.

    Raises:
        SideFailed: a process failed, or they took too long; all have ended.
    """
    context = ForkContext(preload, "rank")
    processes = [context.Process(target=_enter, args=(os.getpid(), work, rank, *arguments)) for rank in range(ranks)]
    deadline = time.monotonic() + limit_s
    try:
        for process in processes:
            process.start()
        running = list(processes)
        while running:
            ended = wait([process.sentinel for process in running], timeout=max(0.0, deadline - time.monotonic()))
            if not ended:
                raise SideFailed(f"waited {limit_s:g} s for {what}, then killed them")
            for process in [process for process in running if process.sentinel in ended]:
                process.join(END_S)
                running.remove(process)
                if process.exitcode:
                    raise SideFailed(
                        f"waited for {what}: a process ended with {process.exitcode}; its error is printed above"
                    )
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join(END_S)


def _enter(parent: int, work: Callable[..., None], rank: int, *arguments: Any) -> None:
    die_with_parent(signal.SIGKILL, parent)
    work(rank, *arguments)


# -- the engine's side ------------------------------------------------------------------------------------------------


def sample_sequences(
    _rank: int,
    folder: Path,
    model: Path,
    settings: GeneratorSettings,
    prompt_sets: Sequence[PromptSet],
    expert_routes: bool,
    deadline_s: float,
    arguments: Mapping[str, Any],
) -> None:
    """Continue all prompts with one engine, and write each set to ``folder`` as a serialized group."""
    asyncio.run(_sample(folder, model, settings, prompt_sets, expert_routes, deadline_s, arguments))


async def _sample(
    folder: Path,
    model: Path,
    settings: GeneratorSettings,
    prompt_sets: Sequence[PromptSet],
    expert_routes: bool,
    deadline_s: float,
    arguments: Mapping[str, Any],
) -> None:
    from monarch_rl.generator.engine import Engine

    on_gpu = torch.cuda.is_available()
    memory = None if on_gpu else cpu_memory(read_config(model), settings, FULL_TRAINING)
    starting = Engine.start(str(model), settings, expert_routes=expert_routes, memory=memory, **arguments)
    limit_s = settings.start_limit_s(on_gpu)
    engine = await within(limit_s, starting, "the engine to start", on="the engine")
    try:
        what = f"{sum(len(prompt_set.prompts) for prompt_set in prompt_sets)} sequences"
        await within(deadline_s, _sample_all(folder, engine, prompt_sets, expert_routes), what, on="the engine")
    finally:
        await engine.shutdown()


async def _sample_all(folder: Path, engine: Engine, prompt_sets: Sequence[PromptSet], expert_routes: bool) -> None:
    for index, prompt_set in enumerate(prompt_sets):
        sampling = replace(prompt_set.sampling, expert_routes_from=0 if expert_routes else None)
        # waits: within the deadline of _sample
        completions = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompt_set.prompts))
        episodes = [
            Episode(
                [Turn.from_completion(prompt, completion)],
                0.0,
                completion.finish_reason,
                expert_routes=completion.expert_routes,
            )
            for prompt, completion in zip(prompt_set.prompts, completions, strict=True)
        ]
        (folder / prompt_set.name).write_bytes(serialize_group(Group(index, index, episodes)))


# -- the trainer's side -----------------------------------------------------------------------------------------------


def compute_logprobs(
    rank: int, folder: Path, model: Path, settings: TrainerSettings, prompt_sets: Sequence[PromptSet], port: int
) -> None:
    """Compute the log-probs of this rank's share of all sets, and write those of each set to
    ``<prompt set>.<data rank>``. Of tensor-parallel ranks, which compute the same share, only the first one writes."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(settings.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from monarch_rl.trainer.policy import Policy

    policy = Policy(model, settings, total_steps=1)
    for prompt_set in prompt_sets:
        group = deserialize_group((folder / prompt_set.name).read_bytes())
        policy.temperature = prompt_set.sampling.temperature or NEAR_ZERO
        tensors = _compute(policy, group.episodes)
        if rank % settings.tp == 0:
            save_file(tensors, folder / f"{prompt_set.name}.{policy.data_rank}")
    policy.close()


def _compute(policy: Policy, episodes: Sequence[Episode]) -> dict[str, torch.Tensor]:
    """The tensor fields of :class:`Reading`, for this rank's episodes."""
    from monarch_rl.trainer.batch import pack

    settings: TrainerSettings = policy.settings
    lengths = [episode.num_tokens for episode in episodes]
    computed: dict[str, list[torch.Tensor]] = {}

    def add(name: str, value: torch.Tensor) -> None:
        computed.setdefault(name, []).append(value.cpu())

    plan = plan_microbatches(separate(lengths), settings.tokens_per_microbatch, settings.data_ranks)
    for microbatch in plan[policy.data_rank]:
        mine = [episodes[i] for i, _ in microbatch]
        batch = pack(mine, torch.zeros(len(mine)), torch.zeros(len(mine)), 0, policy.device)
        with torch.no_grad():
            add("own", policy.token_logprobs(batch).logprobs)
            add("engine", batch.behaviour_logprobs)
            if settings.router_replay == "off":
                continue
            if batch.expert_routes is not None:
                add("differing", policy.differing_experts())
            add("replayed", policy.token_logprobs(batch, "replay").logprobs)
    return {name: torch.cat(values) for name, values in computed.items()}


def _collect(folder: Path, prompt_set: PromptSet, data_ranks: int) -> Reading:
    by_rank = [load_file(folder / f"{prompt_set.name}.{rank}") for rank in range(data_ranks)]

    def merged(name: str) -> torch.Tensor | None:
        values = [tensors[name] for tensors in by_rank if name in tensors]
        return torch.cat(values) if values else None

    engine, own = merged("engine"), merged("own")
    assert engine is not None and own is not None
    group = deserialize_group((folder / prompt_set.name).read_bytes())
    return Reading(group, engine, own, merged("replayed"), merged("differing"))
