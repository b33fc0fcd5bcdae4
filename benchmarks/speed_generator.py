"""Tokens per second through the Generator actor and the Dispatcher against bare engines, alternately.

There are two references, each in its own process, with the same flags. One is the unmodified ``sglang.Engine``: on a
CPU it computes more than ours does (``generator/cpu/install.py``), so the ratio is a user's gain and may be above 1.
The other is the actor's own engine (``generator/engine.py``), called directly: the ratio is the cost of actor, messages
and dispatcher, and at most about 1. All engines get the same number of requests, because an engine slows down as its
prefix cache fills.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from monarch_rl.episode.sampling import Sampling
from monarch_rl.generator.actor import Generator
from monarch_rl.generator.dispatcher import Dispatcher
from monarch_rl.generator.parts import ignore_part
from monarch_rl.generator.scheduler_process import quiet_imports
from monarch_rl.generator.settings import GeneratorSettings, engine_arguments
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint
from monarch_rl.weights.area import attach

START_DEADLINE_S = 360.0
ROUND_DEADLINE_S = 300.0
STOP_DEADLINE_S = 20.0
COPIES = 20
"""Number of local copies of the weights, of which the median counts."""


@dataclass(frozen=True)
class Load:
    """The requests of a round."""

    requests: int
    """Number of requests, which are sent concurrently."""
    prompt_tokens: int
    new_tokens: int
    vocabulary: int

    def prompts(self, turn: int) -> list[list[int]]:
        """Return random prompts of ``prompt_tokens`` / 2 to 3 / 2 tokens, new in each round so that no prefix is
        cached."""
        rng = np.random.default_rng(turn)
        low, high = self.prompt_tokens // 2, self.prompt_tokens * 3 // 2
        lengths = rng.integers(low, high + 1, self.requests)
        return [rng.integers(0, self.vocabulary, n).tolist() for n in lengths]

    @property
    def sampling(self) -> Sampling:
        return Sampling(max_new_tokens=self.new_tokens)

    @property
    def tokens(self) -> int:
        """Tokens generated in a round: only the length ends a request."""
        return self.requests * self.new_tokens


def bare_parameters(sampling: Sampling) -> dict[str, Any]:
    """Return SGLang's sampling parameters for requests that end only by length."""
    return {"max_new_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, "ignore_eos": True}


async def play_bare(engine: Any, prompts: list[list[int]], sampling: Sampling) -> tuple[float, int]:
    """Send all prompts to a ``sglang.Engine`` concurrently; returns seconds and generated tokens."""
    parameters = bare_parameters(sampling)
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(engine.async_generate(input_ids=ids, sampling_params=parameters, return_logprob=True) for ids in prompts)
    )
    return time.perf_counter() - started, sum(len(answer["output_ids"]) for answer in answers)


class ObservedGenerator(Generator):
    """A replica whose engine can also be observed token by token, and that copies weights."""

    _emitted: list[float]
    _watching = False

    def __init__(self) -> None:
        super().__init__()
        self._verified.set()  # it serves the model's own weights

    @concurrent_endpoint
    async def watch(self, prompt: list[int], tokens: int) -> None:
        """Stream one request after the other until :meth:`stop_watching`."""
        self._watching, self._emitted = True, []
        while self._watching:
            stream = await self._running._sglang.engine.async_generate(
                input_ids=prompt, sampling_params=bare_parameters(Sampling(max_new_tokens=tokens)), stream=True
            )
            async for _ in stream:
                self._emitted.append(time.perf_counter())

    @concurrent_endpoint
    async def emitted(self) -> list[float]:
        """Return the arrival time of each token of the streamed requests, in seconds of ``time.perf_counter``, which
        all processes of a machine share."""
        return self._emitted

    @concurrent_endpoint
    async def stop_watching(self) -> None:
        """Stop after the request that is streaming."""
        self._watching = False

    @concurrent_endpoint
    async def local_copy(self) -> float:
        """Return the median seconds of a copy of all received tensors to private memory by one thread."""
        return await asyncio.to_thread(self._local_copy)

    def _local_copy(self) -> float:
        weights = self._weights_ready()
        area = attach(weights.receiver.area(0))
        sources = [spec.view(area) for spec in weights.manifest.tensors]
        targets = [torch.zeros_like(source) for source in sources]
        taken = []
        for _ in range(COPIES):
            started = time.perf_counter()
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            if area.device.type != "cpu":
                torch.accelerator.synchronize(area.device)
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)


@dataclass
class BareEngine:
    """An engine in its own process, called directly."""

    process: Any
    pipe: Connection = field(repr=False)

    async def run(self, load: Load, turn: int) -> tuple[float, int]:
        """Run one round; returns seconds and generated tokens."""
        self.pipe.send((load.prompts(turn), load.sampling))
        return await self.answer(ROUND_DEADLINE_S, "a round of a bare engine")

    def pids(self) -> set[int]:
        """Process ids of the engine's process and its children."""
        return {self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children(recursive=True))}

    async def answer(self, seconds: float, what: str) -> Any:
        if not await asyncio.to_thread(self.pipe.poll, seconds):
            raise TimeoutError(f"waited {seconds:g} s for {what} (process {self.process.pid})")
        try:
            return self.pipe.recv()
        except EOFError as error:
            raise RuntimeError(f"the bare engine's process ended, exit code {self.process.exitcode}") from error


@asynccontextmanager
async def bare_engine(model: Path, settings: GeneratorSettings, shipped: bool) -> AsyncIterator[BareEngine]:
    """Start a bare engine, unmodified or like the actor's, for the duration of the block; it also ends with this
    process."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    serve = _serve_shipped if shipped else _serve_own
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, str(model), settings))
    process.start()
    theirs.close()
    try:
        bare = BareEngine(process, ours)
        await bare.answer(START_DEADLINE_S, "a bare engine to start")
        yield bare
    finally:
        ours.close()  # this ends the engine
        await asyncio.to_thread(process.join, STOP_DEADLINE_S)
        if process.is_alive():
            process.kill()


def _serve_own(pipe: Connection, model: str, settings: GeneratorSettings) -> None:
    """Run the process of an engine like the actor's: one answer per message, until the pipe is closed."""
    asyncio.run(_answer(pipe, model, settings))


async def _answer(pipe: Connection, model: str, settings: GeneratorSettings) -> None:
    from monarch_rl.generator.engine import Engine

    engine = await Engine.start(model, settings)
    try:
        pipe.send("ready")
        while True:
            prompts, sampling = await asyncio.to_thread(pipe.recv)
            started = time.perf_counter()
            answers = await asyncio.gather(*(engine.generate(ids, sampling, ignore_part) for ids in prompts))
            pipe.send((time.perf_counter() - started, sum(len(answer.token_ids) for answer in answers)))
    except (EOFError, KeyboardInterrupt):
        pass  # the benchmark is over
    finally:
        await engine.shutdown()


def _serve_shipped(pipe: Connection, model: str, settings: GeneratorSettings) -> None:
    """Run the process of SGLang's engine: one answer per message, until the pipe is closed."""
    quiet_imports()
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning"  # for the scheduler that it starts
    import sglang

    engine = sglang.Engine(**engine_arguments(model, settings, 0, torch.accelerator.is_available()))
    try:
        pipe.send("ready")
        while True:
            prompts, sampling = pipe.recv()
            pipe.send(engine.loop.run_until_complete(play_bare(engine, prompts, sampling)))
    except (EOFError, KeyboardInterrupt):
        pass  # the benchmark is over
    finally:
        engine.shutdown()


async def start(cluster: Cluster, model: Path, settings: GeneratorSettings, first_device: int) -> ObservedGenerator:
    """One replica."""
    mesh = cluster.spawn("generator0", 1, first_device=first_device)
    generator = mesh.spawn("generator0", ObservedGenerator)
    await within(START_DEADLINE_S, generator.setup.call_one(str(model), settings, 0), "the generator to start")
    return generator


async def measure(generator: Any, shipped: BareEngine, own: BareEngine, load: Load, rounds: int) -> dict[str, Any]:
    """Run rounds of equal load, alternating between the sides; the first round warms up.

    A ratio is the median over rounds of seconds of a reference / seconds of the actor.
    """
    dispatcher = Dispatcher([generator], ROUND_DEADLINE_S, max_losses=0)

    stats = await within(ROUND_DEADLINE_S, generator.stats.call_one(), "the generator's stats")
    replica = {stats["pid"], *stats["child_pids"]}

    async def ours(turn: int) -> tuple[float, int]:
        prompts = load.prompts(turn)
        started = time.perf_counter()
        completions = await asyncio.gather(
            *(dispatcher.generate(ids, load.sampling, group) for group, ids in enumerate(prompts))
        )
        return time.perf_counter() - started, sum(len(completion.token_ids) for completion in completions)

    sides: dict[str, tuple[Callable[[int], Awaitable[tuple[float, int]]], set[int]]] = {
        "actor": (ours, {os.getpid(), *replica}),
        "shipped": (partial(shipped.run, load), shipped.pids()),
        "own": (partial(own.run, load), own.pids()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        order = list(sides.items())
        for name, (side, pids) in order if turn % 2 else reversed(order):  # no side always goes first
            before = _cpu_seconds(pids)
            taken, tokens = await side(turn)
            if tokens != load.tokens:
                raise RuntimeError(f"{name}: {tokens} tokens were generated, {load.tokens} were requested")
            if turn:
                seconds[name].append(taken)
                cpu[name].append(_cpu_seconds(pids) - before)

    def ratio(values: dict[str, list[float]], yardstick: str) -> float:
        pairs = zip(values[yardstick], values["actor"], strict=True)
        return statistics.median(there / here for there, here in pairs)

    def rate(name: str) -> float:
        return load.tokens / statistics.median(seconds[name])

    return {
        "generator_tokens_ratio": ratio(seconds, "shipped"),
        "generator_cpu_ratio": ratio(cpu, "shipped"),
        "generator_actor_tokens_ratio": ratio(seconds, "own"),
        "generator_actor_cpu_ratio": ratio(cpu, "own"),
        "generator_tokens_per_s": rate("actor"),
        "shipped_engine_tokens_per_s": rate("shipped"),
        "own_engine_tokens_per_s": rate("own"),
        "generator_requests": load.requests,
        "generator_new_tokens": load.new_tokens,
        "generator_rounds": rounds,
    }


def _cpu_seconds(pids: set[int]) -> float:
    """Return the CPU time of processes so far."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)
