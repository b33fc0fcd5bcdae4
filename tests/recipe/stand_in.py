"""Runs a recipe with stand-in engines: ``stand_in.py SCRIPT ARGUMENTS...`` instead of ``python SCRIPT ARGUMENTS...``.

For tests of the controller, the watch and the workers. Generators are real actors and really receive versions; instead
of SGLang they have an engine that immediately answers with letters of its prompt. SGLang's import, start and decoding
are a third of the cost of a small run.
"""

from __future__ import annotations

import asyncio
import random
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.actor import Generator
from monarch_rl.generator.commit import CommitReport
from monarch_rl.generator.parts import OnPart, ignore_part
from monarch_rl.generator.requests import BusyClock, TurnReads
from monarch_rl.generator.scheduler_process import ENGINE_PRELOAD
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.pipeline import preloads, run, start
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.wait_registry import Wait
from monarch_rl.weights.manifest import Manifest


class SpellingRequests:
    """Implements the part of :class:`~monarch_rl.generator.requests.Requests` that a generator uses."""

    def __init__(self) -> None:
        self.version = 0
        self.clock = BusyClock()
        self.generated_tokens = self.finished_requests = 0
        self.turn_reads = TurnReads()

    def waits(self) -> list[Wait]:
        return []

    def reset_versions(self) -> None:
        """It stores nothing of previous versions."""


class SpellingEngine:
    """Implements the part of :class:`~monarch_rl.generator.engine.Engine` that a generator uses."""

    def __init__(self, seed: int) -> None:
        self.requests = SpellingRequests()
        self.child_pids: list[int] = []
        self.max_commit_delay_s = 0.0
        self._random = random.Random(seed)

    def check(self) -> None:
        """It cannot end before its process."""

    async def ended(self) -> str:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def generate(self, prompt_ids: list[int], sampling: Sampling, on_part: OnPart = ignore_part) -> Completion:
        sampled = self._random.choices(prompt_ids, k=self._random.randint(1, sampling.max_new_tokens))
        self.requests.generated_tokens += len(sampled)
        self.requests.finished_requests += 1
        versions = np.full(len(sampled), self.requests.version, np.int32)
        return Completion(np.asarray(sampled, np.int32), np.full(len(sampled), -2.0, np.float32), versions, "length")

    async def commit(self, version: int, manifest: Manifest, area: bytes, expected: np.ndarray) -> CommitReport:
        self.requests.version = version
        return CommitReport(version, manifest.nbytes, 0.0, 0.0, 0.0, 0.0)

    async def verify_base_weights(self, manifest: Manifest, expected: np.ndarray) -> None:
        """It holds no weights."""

    async def shutdown(self) -> None:
        """It has no process of its own."""


class SpellingGenerator(Generator):
    """A generator with a :class:`SpellingEngine`."""

    async def _start(self, name: str, model_path: str, settings: GeneratorSettings, index: int, **engine: Any) -> float:
        self._name, self._devices = name, settings.tp
        engine_stand_in: Any = SpellingEngine(index)
        self._engine = engine_stand_in
        wait_registry.register(name, engine_stand_in.requests.waits)
        return 0.0


def replace_engines() -> None:
    """Make the run of this process start these generators and import nothing of SGLang."""
    start.Generator = SpellingGenerator  # type: ignore[misc]
    run.PRELOADS = preloads.PRELOADS = tuple(
        replace(preload, modules=("monarch_rl.generator.engine",)) if preload.name == ENGINE_PRELOAD else preload
        for preload in preloads.PRELOADS
    )


if __name__ == "__main__":
    import stand_in  # type: ignore[import-not-found]  # pickling by name does not work for __main__

    stand_in.replace_engines()
    del sys.argv[0]
    runpy.run_path(str(Path(sys.argv[0])), run_name="__main__")
