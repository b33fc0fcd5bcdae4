"""The operations that a scheduler reports: the wrappers in SGLang's two loops, and the memory between processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator import scheduler_operations, scheduler_process
from monarch_rl.generator.engine import Engine
from monarch_rl.generator.scheduler_operations import VARIABLE, SchedulerOperations
from monarch_rl.model.weight_files import index_of, plan_files
from monarch_rl.runtime import device_work
from monarch_rl.runtime.device_work import COMPILATION_S, FIRST_S, FLOOR_S, GpuOperation
from tests import patience
from tests.generator.conftest import SETTINGS
from tests.generator.helpers import LoopThread, reference_reading, weights_in
from tests.patience import until

DECODE, EXTEND = (SimpleNamespace(is_decode=lambda decodes=decodes: decodes) for decodes in (True, False))


def batch(mode: Any, tokens: int) -> Any:
    return SimpleNamespace(
        forward_mode=mode, reqs=[None] * tokens, extend_num_tokens=None if mode is DECODE else tokens
    )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[str]]]:
    """A scheduler with the methods that SGLang's loops call; it records which operation is reported in progress."""
    monkeypatch.setenv(VARIABLE, "")  # the next line sets it, and it is unset after the test
    read = SchedulerOperations(2).reader(1)
    monkeypatch.setattr(scheduler_operations, "_rank", lambda: 1)
    seen: list[str] = []

    def look(where: str) -> None:
        operation = read()
        assert read() == device_work.operation_in_progress() == operation
        seen.append(f"{where}: {operation.what if operation is not None else 'nothing'}")

    class Scheduler:
        def run_batch(self, batch: Any) -> str:
            look("launch")
            return "result"

        def process_batch_result(self, batch: Any, result: Any) -> None:
            look("wait")

        def on_idle(self) -> None:
            look("idle")

        def pause_generation(self, request: Any) -> None:
            look("pause")

    scheduler_operations.install(Scheduler)
    pending_step_patch(Scheduler)
    yield Scheduler(), seen
    device_work.use_device("cpu")


def pending_step_patch(scheduler: Any) -> None:
    """As ``scheduler_process.py`` does."""
    from functools import partialmethod

    for name in ("pause_generation", "process_batch_result"):
        setattr(scheduler, name, partialmethod(getattr(scheduler_process, name), getattr(scheduler, name)))


def test_each_batch_of_the_plain_loop_is_a_gpu_operation(engine: tuple[Any, list[str]]) -> None:
    scheduler, seen = engine
    for each in (batch(EXTEND, 300), batch(DECODE, 7)):
        scheduler.process_batch_result(each, scheduler.run_batch(each))
        assert device_work.operation_in_progress() is None
    scheduler.on_idle()
    assert seen == [
        "launch: a prefill of 300 tokens",
        "wait: a prefill of 300 tokens",
        "launch: a step of decoding of 7 tokens",
        "wait: a step of decoding of 7 tokens",
        "idle: nothing",
    ]


def test_with_overlap_an_operation_begins_when_the_previous_one_ends(engine: tuple[Any, list[str]]) -> None:
    scheduler, seen = engine
    first, second = batch(DECODE, 7), batch(DECODE, 8)
    scheduler.result_queue = deque([(first, scheduler.run_batch(first))])
    scheduler.result_queue.append((second, scheduler.run_batch(second)))
    scheduler.process_batch_result(*scheduler.result_queue.popleft())
    in_progress = device_work.operation_in_progress()
    assert in_progress is not None and in_progress.what == "a step of decoding of 8 tokens"
    scheduler.pause_generation(SimpleNamespace(mode="in_place"))
    scheduler.process_batch_result(*scheduler.result_queue.popleft())  # already read
    assert seen == [
        "launch: a step of decoding of 7 tokens",
        "launch: a step of decoding of 7 tokens",
        "wait: a step of decoding of 7 tokens",
        "wait: a step of decoding of 8 tokens",
        "pause: nothing",
    ]


def test_an_idle_scheduler_has_no_operation_whatever_became_of_its_last_batch(
    engine: tuple[Any, list[str]],
) -> None:
    scheduler, seen = engine
    scheduler.run_batch(batch(DECODE, 7))
    scheduler.on_idle()
    assert seen[-1] == "idle: nothing" and device_work.operation_in_progress() is None


def test_another_process_reads_a_schedulers_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    operations = SchedulerOperations(2)
    code = (
        "import os\n"
        "from monarch_rl.generator import scheduler_operations as s\n"
        "from monarch_rl.runtime.device_work import GpuOperation\n"
        f"memory = s.attach(bytes.fromhex(os.environ[{VARIABLE!r}])).numpy().data\n"
        "s._write(memory, 1, GpuOperation('a prefill of 5 tokens', 12.5, 60.0))\n"
    )
    done = patience.run([sys.executable, "-c", code], env=os.environ.copy())
    assert done.returncode == 0, done.stderr
    assert operations.reader(0)() is None
    assert operations.reader(1)() == GpuOperation("a prefill of 5 tokens", 12.5, 60.0)


def test_nothing_is_installed_unless_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    scheduler: Any = type("Scheduler", (), {})
    scheduler_operations.install(scheduler)
    assert not hasattr(scheduler, "run_batch")


def in_several_files(source: Path, folder: Path) -> Path:
    """The model as the trainer saves a large one: in planned files, with an index."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    weights = weights_in(source)
    files = plan_files(((name, tuple(value.shape)) for name, value in weights.items()), "F32", most=20_000)
    assert len(files) > 2
    for file in files:
        content = bytearray(file.header) + bytes(file.nbytes - len(file.header))
        for name, place in file.places.items():
            content[place : place + weights[name].nbytes] = weights[name].numpy().tobytes()
        (folder / file.name).write_bytes(content)
    for name, text in index_of(files).items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.usefixtures("spawned")
def test_sglangs_scheduler_reports_its_operations_and_loads_a_model_in_several_files(
    models: dict[str, Path], run: LoopThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a GPU, with the real loop: this process sees the operation in progress, new steps all the time, and nothing
    once the scheduler idles."""
    monkeypatch.setenv(VARIABLE, "")  # the next line sets it, and it is unset after the test
    read = SchedulerOperations(1).reader(0)
    engine = run(Engine.start(str(in_several_files(models["qwen3"], tmp_path / "model")), SETTINGS))
    seen: list[GpuOperation] = []
    prompt = [5, 6, 7, 8]

    async def generate() -> Completion:
        running = asyncio.ensure_future(engine.generate(prompt, Sampling(max_new_tokens=400)))
        while not running.done():
            if (operation := read()) is not None:
                seen.append(operation)
            await asyncio.sleep(0)
        await until(lambda: read() is None, lambda: f"the end of {read()}")
        return running.result()  # waits: it is done

    try:
        sampled = run(generate())
    finally:
        run(engine.shutdown())
    decoding = [operation for operation in seen if operation.what == "a step of decoding of 1 tokens"]
    assert len({operation.since for operation in decoding}) > 3, seen[:5]
    assert {operation.limit_s for operation in decoding} <= {FIRST_S, FLOOR_S, COMPILATION_S}
    ids = prompt + sampled.token_ids.tolist()
    (reading,) = reference_reading(models["qwen3"], [(ids, [0] * len(ids))], {0: weights_in(models["qwen3"])})
    expected = reading.logprobs[np.arange(len(prompt) - 1, len(ids) - 1), sampled.token_ids]
    assert np.abs(sampled.logprobs - expected).max() < 2e-5
