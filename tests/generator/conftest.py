"""Engines take 10 to 25 s to start: a module starts one. A process can hold only one at a time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.generator.engine import Engine
from monarch_rl.generator.scheduler_process import ENGINE_PRELOAD
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.pipeline.preloads import PRELOADS
from monarch_rl.runtime.forking.fork_client import ADDRESS_VARIABLE
from monarch_rl.runtime.forking.fork_context import ForkContext
from tests.forking import forking
from tests.generator.checked_scheduler import FOLDER, CheckedTarget
from tests.generator.helpers import PART_TOKENS, RUN_S, LoopThread, Staging, make_model, weights_in

# Set before Monarch's first use: how often it looks for dead processes.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
os.environ.setdefault("OMP_NUM_THREADS", "1")

FORKED = ("torch", "text", ENGINE_PRELOAD)
"""Preloads of the process from which schedulers are forked."""
SETTINGS = GeneratorSettings(
    max_running_requests=16, max_total_tokens=8192, part_tokens=PART_TOKENS, start_deadline_s=RUN_S
)


@pytest.fixture(scope="session", autouse=True)
def parity(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Engines that these tests start in their own process compare every forward with SGLang's own; the folder has the
    results."""
    folder = tmp_path_factory.mktemp("parity")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        # By its name: if this autouse fixture referred to engine-starting code, all tests would count as heavy.
        patch.setattr("monarch_rl.generator.launching.SchedulerTarget", CheckedTarget)
        yield folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny models with random weights: qwen3, moe, llama and qwen2 (tied)."""
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, kind) for kind in ("qwen3", "moe", "llama", "qwen2")}


@pytest.fixture(scope="session")
def fork_server() -> Iterator[subprocess.Popen[bytes]]:
    """Forks the schedulers of engines that these tests start in their own process: without imports, as in a run."""
    preloads = [preload for preload in PRELOADS if preload.name in FORKED]
    with forking(preloads) as (name, server), pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS_VARIABLE, name)
        # No deadline of a start or of Monarch should pass while the server still imports.
        ready = ForkContext(ENGINE_PRELOAD).Process(target=os.getpid)
        ready.start()
        ready.join()
        yield server


@pytest.fixture(scope="module")
def spawned() -> Iterator[None]:
    """The schedulers of a module's engines are started without the fork server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ADDRESS_VARIABLE, raising=False)
        yield


@pytest.fixture(scope="session")
def run(fork_server: subprocess.Popen[bytes]) -> Iterator[LoopThread]:
    """Runs a coroutine on the loop that all engines and actors of these tests share."""
    thread = LoopThread()
    yield thread
    thread.close()


class EngineKeeper:
    """Keeps one engine for all rules that a module tests: this process decides at each commit what happens to running
    sequences, and SGLang is not configured for it."""

    def __init__(self, run: LoopThread) -> None:
        self._run = run
        self._engine: Engine | None = None
        self._started: tuple[object, ...] = ()

    def under(self, settings: GeneratorSettings, model: Path, **options: Any) -> Engine:
        """An engine that commits by ``settings``; it holds the weights that the last test left."""
        started = model, replace(settings, in_flight="continue", drain_deadline_s=1.0), options
        if self._engine is None or self._started != started:
            self.close()
            self._engine, self._started = self._run(Engine.start(str(model), settings, **options)), started
        commits = self._engine._commits
        commits._in_flight, commits._drain_deadline_s = settings.in_flight, settings.drain_deadline_s
        self._engine.requests.keeps_conversations = settings.in_flight == "continue"
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._run(self._engine.shutdown())
            self._engine = None


@pytest.fixture(scope="module")
def engines(run: LoopThread) -> Iterator[EngineKeeper]:
    keeper = EngineKeeper(run)
    yield keeper
    keeper.close()


@pytest.fixture(scope="module")
def engine(models: dict[str, Path], run: LoopThread) -> Iterator[Engine]:
    """A dense Qwen3. Tests that commit use their own, ever higher, versions; see ``engine.requests.version``."""
    engine = run(Engine.start(str(models["qwen3"]), SETTINGS))
    yield engine
    run(engine.shutdown())


@pytest.fixture(scope="module")
def staging(models: dict[str, Path]) -> Staging:
    """The areas in which versions of the dense Qwen3 arrive."""
    return Staging(weights_in(models["qwen3"]))


@pytest.fixture(scope="module")
def moe_engine(models: dict[str, Path], run: LoopThread) -> Iterator[Engine]:
    """A Qwen3 mixture of experts that takes LoRA adapters."""
    engine = run(
        Engine.start(
            str(models["moe"]),
            SETTINGS,
            enable_lora=True,
            max_lora_rank=4,
            max_loras_per_batch=2,
            lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            lora_backend="torch_native",
        )
    )
    yield engine
    run(engine.shutdown())
