"""A thousand concurrent conversations in one rollout worker: the cost of a turn, without the engine.

    python benchmarks/conversations.py [--model FOLDER] [--conversations 1000] [--turns 6]

The worker is the real one, in this process, with its episode runners, stages and submissions. The generator is
scripted: it answers each turn after a random delay; the buffer gives slots and accepts groups. The cost of these two
alone, with as many requests from as many tasks, is measured first and subtracted. Messages to engines and buffer are
not included (`benchmarks/calls.py`). CPU time is reported because it is meaningful (to about a tenth) on a busy
machine; the lag of the event loop is not. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from reporting import run_benchmark, short

from monarch_rl.episode.admission_steps import AdmissionSteps
from monarch_rl.episode.episode import Ticket
from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.episode.serialization import deserialize_group
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.worker import Resources, RolloutWorker
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.simulate.handles import LocalMesh
from monarch_rl.tasks.task import Policy, Task

sys.path.append(str(Path(__file__).parents[1]))

from tests.model.chat_helpers import write_model  # noqa: E402

ANSWER = "A horse has four legs, and {} plus four is what I have to say. "
QUESTION = "What is {} plus the number of legs of a horse? Think, then answer with a number and nothing else."
SAMPLE_S = 0.02
"""Interval in seconds at which the lag of the event loop is sampled."""


@dataclass(frozen=True)
class Settings:
    """Settings of the load."""

    model: str = ""
    """Folder of tokenizer and chat template; empty makes a small tokenizer with Qwen3's template."""
    conversations: int = 1000
    """At once."""
    group_size: int = 8
    """Conversations of a group."""
    turns: int = 6
    """Turns of a conversation."""
    delay_s: float = 2.0
    """Mean seconds until the generator answers; uniform between half and one and a half times this."""
    rounds: int = 2
    """Groups that each place runs."""


class ScriptedGenerator:
    """A generator that answers with the same ids after a random delay."""

    def __init__(self, answer: list[int], delay_s: float) -> None:
        n = len(answer)
        self._ids, self._logprobs = np.asarray(answer, np.int32), np.full(n, -0.5, np.float32)
        self._versions = np.zeros(n, np.int32)
        self._delay_s, self._draws = delay_s, random.Random(0)
        self.turns = self.at_once = self.most_at_once = self.prompt_tokens = 0

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        self.turns += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.prompt_tokens = max(self.prompt_tokens, len(prompt_ids))
        await asyncio.sleep(self._delay_s * self._draws.uniform(0.5, 1.5))
        self.at_once -= 1
        return Completion(self._ids.copy(), self._logprobs.copy(), self._versions.copy(), "stop")


class ScriptedBuffer:
    """A buffer that gives each slot once, and ends the run when all groups are submitted."""

    def __init__(self, groups: int) -> None:
        self._groups, self._given, self._ended = groups, 0, asyncio.Event()
        self.put_groups: list[bytes] = []

    async def admit_many(self, worker: str, limit: int, timeout_s: float) -> list[Ticket]:
        given = range(self._given, min(self._groups, self._given + limit))
        self._given += len(given)
        if not given:
            await self._ended.wait()  # waits: for the groups in flight
        return [Ticket(number, number, AdmissionSteps(1)) for number in given]

    async def submit_if_room(self, *groups: bytes) -> list[bool]:
        self.put_groups += groups
        if len(self.put_groups) == self._groups:
            self._ended.set()
        return [True] * len(groups)

    async def note_failure(self, failure: Any) -> None:
        raise RuntimeError(f"an episode failed: {failure}")


def conversation(turns: int) -> Callable[[int, Policy], Awaitable[float]]:
    """The episode: a user asks repeatedly."""

    async def episode(item: int, policy: Policy) -> float:
        for turn in range(turns):
            reply = await policy.reply(QUESTION.format(item * turns + turn))
        return float(len(reply.text) % 2)

    return episode


@dataclass
class Load:
    """Cost of a load in this process."""

    cpu_s: float
    lag_s: list[float]


async def measured(work: Awaitable[None]) -> Load:
    """Run a load, and sample the lag of the event loop meanwhile."""
    lags: list[float] = []

    async def look() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(SAMPLE_S)
            lags.append(time.monotonic() - before - SAMPLE_S)

    looking, began = asyncio.ensure_future(look()), time.process_time()
    await work
    load = Load(time.process_time() - began, lags)
    looking.cancel()
    return load


async def alone(generator: ScriptedGenerator, s: Settings) -> None:
    """As many concurrent turns, without conversations."""

    async def ask() -> None:
        for _ in range(s.turns * s.rounds):
            await generator.generate([0], Sampling(), 0)

    await asyncio.gather(*(ask() for _ in range(s.conversations)))


async def run_groups(template: ChatTemplate, generator: Any, buffer: ScriptedBuffer, s: Settings) -> None:
    """Run as many groups as the buffer gives slots."""
    settings = RolloutSettings(
        concurrent_groups=s.conversations // s.group_size, group_size=s.group_size, max_new_tokens=1024
    )
    task = Task(lambda cursor: cursor, conversation(s.turns))
    worker = RolloutWorker(settings, ByValue(task), "", "the worker")
    handle: Any = LocalMesh([buffer])
    worker.connect(handle, generator, Resources(template, task, Scorer(1, 10.0)))
    actor: Any = LocalMesh([worker])
    await actor.run.call_one()
    await actor.close.call_one()


async def measure(s: Settings, template: ChatTemplate) -> dict[str, Any]:
    """Measure both loads (see the top of this file)."""
    answer = template.tokenizer.encode(ANSWER.format(7) * 2, add_special_tokens=False) + [template.stop_token_ids[0]]
    groups, process = s.rounds * (s.conversations // s.group_size), psutil.Process()
    few = Settings(conversations=s.group_size, group_size=s.group_size, turns=s.turns)
    await run_groups(template, ScriptedGenerator(answer, 0.01), ScriptedBuffer(few.rounds), few)  # warms up
    generator_alone = await measured(alone(ScriptedGenerator(answer, s.delay_s), s))
    generator, buffer = ScriptedGenerator(answer, s.delay_s), ScriptedBuffer(groups)
    before = process.memory_info().rss
    load = await measured(run_groups(template, generator, buffer, s))
    for number, data in enumerate(buffer.put_groups[:1]):
        assert all(len(episode.turns) == s.turns for episode in deserialize_group(data).episodes), number
    return {
        "conversations_at_once": generator.most_at_once,
        "turns": generator.turns,
        "tokens_of_a_conversation": generator.prompt_tokens + len(answer),
        "worker_cpu_ms_a_turn": 1e3 * (load.cpu_s - generator_alone.cpu_s) / generator.turns,
        "generator_cpu_ms_a_turn": 1e3 * generator_alone.cpu_s / generator.turns,
        "loop_lag_max_ms": 1e3 * max(load.lag_s),
        "loop_lag_p99_ms": 1e3 * float(np.percentile(load.lag_s, 99)),
        "loop_lag_max_alone_ms": 1e3 * max(generator_alone.lag_s),
        "memory_grew_mib": (process.memory_info().rss - before) / 2**20,
    }


def main(settings: Settings) -> None:
    with tempfile.TemporaryDirectory() as folder:
        template = ChatTemplate(settings.model or write_model(Path(folder), "qwen3"))
    numbers = short(asyncio.run(measure(settings, template)))
    for name, value in numbers.items():
        print(f"{name:26} {value}")
    print(json.dumps(numbers))


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
