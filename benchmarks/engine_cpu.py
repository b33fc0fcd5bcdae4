"""CPU-seconds and batches of the engine's scheduler per 1,000 tokens on a machine without an accelerator, compared with
plain SGLang.

    python benchmarks/engine_cpu.py
    python benchmarks/engine_cpu.py --model .cache/smollm2-135m-instruct --rounds 2 --groups 12 --max-new-tokens 64

Two engines in separate processes alternately get the same requests: ours, and SGLang's unmodified scheduler with its
`torch_native` attention. Prints a line per load and, last, everything as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from reporting import run_benchmark, short

from monarch_rl.episode.sampling import Sampling
from monarch_rl.generator import launching
from monarch_rl.generator.engine import Engine
from monarch_rl.generator.parts import ignore_part
from monarch_rl.generator.scheduler_process import SchedulerTarget, run_plain_scheduler, run_scheduler
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.model.folder import resolve_model

START_DEADLINE_S = 360.0
ROUND_DEADLINE_S = 300.0
STOP_DEADLINE_S = 30.0
COUNTS = "ENGINE_CPU_COUNTS"
"""Variable with the path of the file to which a scheduler writes its counts."""
COUNT_FORMAT = struct.Struct("<qq")
Side = Literal["ours", "plain"]
SIDES: tuple[Side, Side] = ("ours", "plain")


@dataclass(frozen=True)
class Settings:
    """CPU time of the engine (see the top of this file)."""

    model: str = ".cache/tiny-qwen3"
    """Hugging Face folder or Hub name."""
    groups: int = 128
    """Groups of a round of the main job's load."""
    playing: int = 24
    """Concurrent groups; when one ends, the next starts. The main job has 64, on all replicas together."""
    group_size: int = 8
    """Episodes of a group, which share their prompt."""
    prompt_tokens: int = 8
    """Tokens of a prompt; prompts of the main job have 7 to 9."""
    max_new_tokens: int = 7
    """Longest answer; the shortest has three tokens less, if possible. Answers of the main job have 4 to 7."""
    long_prompt_tokens: int = 256
    """Tokens of the prompt of the load of 1 long sequence."""
    long_new_tokens: int = 512
    """Tokens generated for the long sequence."""
    max_running_requests: int = GeneratorSettings().running_requests(on_gpu=False)
    """Sequences that an engine decodes at once; the default is the engine's."""
    rounds: int = 5
    """Timed rounds of each load, alternating between the sides, after one that warms up."""
    sides: tuple[Side, ...] = SIDES
    """Which engines to measure."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name.replace('_', '-')} must be at least 1, got {value}")


@dataclass(frozen=True)
class Load:
    """The requests of a round."""

    groups: int
    playing: int
    group_size: int
    prompt_tokens: int
    new_tokens: tuple[int, int]
    """Minimum and maximum number of tokens of a request; only the length ends it."""
    vocabulary: int

    async def run(self, engine: Engine, turn: int) -> int:
        """Send all requests of a round; returns the number of generated tokens."""
        random = np.random.default_rng(turn)
        places = asyncio.Semaphore(self.playing)

        async def group(prompt: list[int], lengths: list[int]) -> int:
            async with places:
                wanted = (Sampling(max_new_tokens=length) for length in lengths)
                answers = await asyncio.gather(*(engine.generate(prompt, each, ignore_part) for each in wanted))
                return sum(len(answer.token_ids) for answer in answers)

        low, high = self.new_tokens
        prompts = random.integers(3, self.vocabulary, (self.groups, self.prompt_tokens)).tolist()
        lengths = random.integers(low, high + 1, (self.groups, self.group_size)).tolist()
        return sum(await asyncio.gather(*(group(*each) for each in zip(prompts, lengths, strict=True))))


@dataclass(frozen=True)
class Round:
    """Cost of a round."""

    tokens: int
    seconds: float
    scheduler_cpu_s: float
    batches: int
    batch_tokens: int
    """Tokens of all batches, of prompts and of decoding steps."""


class CountedTarget(SchedulerTarget):
    """Starts the scheduler, which counts its batches."""

    @staticmethod
    def run(*args: Any, **kwargs: Any) -> None:
        count_batches()
        run_scheduler(*args, **kwargs)


class PlainTarget(SchedulerTarget):
    """The same without the changes that monarch_rl makes for speed."""

    @staticmethod
    def run(*args: Any, **kwargs: Any) -> None:
        count_batches()
        run_plain_scheduler(*args, **kwargs)


def count_batches() -> None:
    """Have this process's scheduler write the numbers of its batches and of their tokens to the file ``COUNTS``."""
    from sglang.srt.managers.scheduler import Scheduler

    process, file, counts = Scheduler.process_batch_result, os.open(os.environ[COUNTS], os.O_WRONLY), [0, 0]

    def process_and_count(scheduler: Any, batch: Any, result: Any) -> None:
        counts[0] += 1
        counts[1] += batch.extend_num_tokens if batch.forward_mode.is_extend() else len(batch.reqs)
        os.pwrite(file, COUNT_FORMAT.pack(*counts), 0)
        process(scheduler, batch, result)

    Scheduler.process_batch_result = process_and_count


def serve(pipe: Connection, model: str, side: Side, requests: int) -> None:
    """Run an engine's process: each message is a load to run, until the pipe is closed."""
    with tempfile.NamedTemporaryFile() as counts:
        counts.write(COUNT_FORMAT.pack(0, 0))
        counts.flush()
        os.environ[COUNTS] = counts.name
        asyncio.run(_serve(pipe, model, side, GeneratorSettings(replicas=1, max_running_requests=requests)))


def read_counts() -> tuple[int, int]:
    """Batches and their tokens so far."""
    batches, tokens = COUNT_FORMAT.unpack(Path(os.environ[COUNTS]).read_bytes())
    return batches, tokens


async def _serve(pipe: Connection, model: str, side: Side, settings: GeneratorSettings) -> None:
    extra: dict[str, Any] = {}
    launching.SchedulerTarget = CountedTarget  # type: ignore[misc]
    if side == "plain":
        launching.SchedulerTarget = PlainTarget  # type: ignore[misc]
        extra["prefill_decode_interval"] = 0
    engine = await Engine.start(model, settings, **extra)
    scheduler = psutil.Process(engine.child_pids[0])
    pipe.send(scheduler.pid)
    try:
        while True:
            load, turn = await asyncio.to_thread(pipe.recv)
            before, batches_before, started = sum(scheduler.cpu_times()[:2]), read_counts(), time.perf_counter()
            tokens = await load.run(engine, turn)
            seconds = time.perf_counter() - started
            cpu_s = sum(scheduler.cpu_times()[:2]) - before
            batches, batch_tokens = (now - then for now, then in zip(read_counts(), batches_before, strict=True))
            pipe.send(Round(tokens, seconds, cpu_s, batches, batch_tokens))
    except EOFError:
        pass  # the benchmark is over
    finally:
        await engine.shutdown()


@contextmanager
def running(model: str, side: Side, requests: int) -> Iterator[Connection]:
    """Start an engine for the duration of the block; it also ends with this process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, model, side, requests), name=f"{side} engine")
    process.start()
    theirs.close()
    try:
        print(f"{side}: scheduler {answer(ours, START_DEADLINE_S, f'{side} engine to start')}", flush=True)
        yield ours
    finally:
        ours.close()  # this ends the engine
        process.join(STOP_DEADLINE_S)
        if process.is_alive():
            process.kill()


def answer(pipe: Connection, seconds: float, what: str) -> Any:
    """Return the next message. Raises TimeoutError if none arrives, EOFError if the engine's process has ended."""
    if not pipe.poll(seconds):
        raise TimeoutError(f"waited {seconds:g} s for the {what}")
    return pipe.recv()


def measure(pipes: dict[Side, Connection], load: Load, rounds: int) -> dict[str, Any]:
    """Run rounds of equal load, alternating between the sides; returns medians, and median ratios ours / plain."""
    costs: dict[Side, list[Round]] = {side: [] for side in pipes}
    for turn in range(rounds + 1):
        for side in list(pipes) if turn % 2 else reversed(list(pipes)):  # neither side always goes first
            pipes[side].send((load, turn))
            cost = answer(pipes[side], ROUND_DEADLINE_S, f"{side} engine to run a round")
            if turn:
                costs[side].append(cost)
    medians: dict[str, Any] = {"tokens": statistics.median(each.tokens for each in next(iter(costs.values())))}
    for side, side_rounds in costs.items():
        medians[f"{side}_cpu_s_per_1000_tokens"] = statistics.median(
            each.scheduler_cpu_s / each.tokens * 1000 for each in side_rounds
        )
        medians[f"{side}_batches_per_1000_tokens"] = statistics.median(
            each.batches / each.tokens * 1000 for each in side_rounds
        )
        medians[f"{side}_tokens_per_batch"] = statistics.median(
            each.batch_tokens / each.batches for each in side_rounds
        )
        medians[f"{side}_tokens_per_s"] = statistics.median(each.tokens / each.seconds for each in side_rounds)
    if len(costs) == len(SIDES):
        pairs = zip(costs["ours"], costs["plain"], strict=True)
        medians["cpu_ratio"] = statistics.median(ours.scheduler_cpu_s / plain.scheduler_cpu_s for ours, plain in pairs)
    return medians


def main(s: Settings) -> None:
    """Measure both loads."""
    if torch.accelerator.is_available():
        raise ValueError("this machine has an accelerator: the engine would run there")
    config = resolve_model(s.model)
    model, vocabulary = config.folder, config.vocab_size
    shortest = max(1, s.max_new_tokens - 3)
    lengths = (s.long_new_tokens, s.long_new_tokens)
    loads = {
        "main_job": Load(s.groups, s.playing, s.group_size, s.prompt_tokens, (shortest, s.max_new_tokens), vocabulary),
        "long": Load(1, 1, 1, s.long_prompt_tokens, lengths, vocabulary),
    }
    result: dict[str, Any] = {"benchmark": "engine_cpu", "model": s.model}
    with ExitStack() as stack:
        pipes = {side: stack.enter_context(running(str(model), side, s.max_running_requests)) for side in s.sides}
        for name, load in loads.items():
            found = measure(pipes, load, s.rounds)
            print(f"{name}: " + ", ".join(f"{key} {short(value)}" for key, value in found.items()), flush=True)
            result |= {f"{name}_{key}": value for key, value in found.items()}
    print(json.dumps(short(result)))


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
