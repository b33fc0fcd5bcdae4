"""The rows that the controller takes from workers: all of them are written, whatever other workers do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.episode.logged import LoggedGroups
from monarch_rl.observe.pieces import pieces_of
from monarch_rl.pipeline import rollout_record as module
from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.rollout_record import LAST_S, NEWEST, TAKE_S, RolloutRecord
from monarch_rl.pipeline.run_folder import ROLLOUTS
from monarch_rl.rollout.record import WorkerRows
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.simulate.handles import LocalMesh
from tests.patience import happened, result_of

NEVER = 1e6
"""Seconds that are longer than any test."""


class Worker:
    """Ends an episode whenever told so; hands over its rows after ``slow_s`` seconds.

    Args:
        failing: the call raises.
    """

    def __init__(self, slow_s: float = 0.0, failing: bool = False) -> None:
        self.slow_s, self.failing = slow_s, failing
        self.calls = 0
        self._lines: list[str] = []

    def end(self, name: str, **more: Any) -> None:
        self._lines.append(json.dumps({"kind": "train", "name": name, **more}))

    async def take_rows(self) -> WorkerRows:
        self.calls += 1
        if self.failing:
            raise ValueError("these rows cannot be pickled")
        lines, self._lines = self._lines, []
        await asyncio.sleep(self.slow_s)
        return WorkerRows(lines)


def handle_of(worker: Worker) -> Any:
    mesh: Any = LocalMesh
    return mesh([worker])


def record_of(folder: Path, *workers: Worker) -> tuple[RolloutRecord, ActorPool[Any]]:
    pool: ActorPool[Any] = ActorPool("rollout worker", "rollout", dict(enumerate(map(handle_of, workers))))
    nobody: Any = None
    return RolloutRecord(nobody, pool, folder, LoggedGroups(0, 1), 160 << 20), pool


def recorded(folder: Path, test: Callable[[RolloutRecord], Coroutine[Any, Any, None]], *workers: Worker) -> list[str]:
    """Names of the rows on disk after ``test``."""
    record, _ = record_of(folder, *workers)
    run_virtual(test(record))
    record.close()
    return [row["name"] for row in rows_in(folder)]


def rows_in(folder: Path) -> list[dict[str, Any]]:
    pieces = pieces_of(folder / ROLLOUTS, "episodes")
    return [json.loads(line) for piece in pieces for line in piece.read_text().splitlines()]


@pytest.mark.parametrize("other", [Worker(failing=True), Worker(slow_s=NEVER)])
def test_a_worker_that_fails_or_hangs_costs_no_rows_of_others(
    other: Worker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = Worker()

    async def test(record: RolloutRecord) -> None:
        async with record.following():
            for name in "abc":
                good.end(name)
                await asyncio.sleep(3 * TAKE_S)
            good.end("d")

    assert recorded(tmp_path, test, good, other) == ["a", "b", "c", "d"]
    (line,) = [one.getMessage() for one in caplog.records]
    assert "rollout worker 1" in line and ("cannot be pickled" in line or not other.failing)
    assert other.failing or other.calls == 1


def test_a_worker_that_fails_again_after_a_success_is_named_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker()

    async def test(record: RolloutRecord) -> None:
        for worker.failing in (True, True, False, True):
            await record.take(TAKE_S)

    recorded(tmp_path, test, worker)
    assert len(caplog.records) == 2


def test_rows_that_come_late_are_written_and_the_worker_is_asked_again(tmp_path: Path) -> None:
    """As a checkpoint does while the worker is blocked: it takes what there is, in bounded time."""
    worker, other = Worker(slow_s=50.0), Worker()

    async def test(record: RolloutRecord) -> None:
        worker.end("early")
        await record.take(TAKE_S)
        other.end("meanwhile")
        worker.end("late")
        began = asyncio.get_running_loop().time()
        await record.take(TAKE_S)
        assert asyncio.get_running_loop().time() - began == pytest.approx(TAKE_S)
        positions = result_of(record.positions())
        assert positions[f"{ROLLOUTS}/episodes-000001.jsonl"] > 0
        await asyncio.sleep(120)
        assert worker.calls == 2

    assert recorded(tmp_path, test, worker, other) == ["meanwhile", "early", "late"]


def test_a_take_that_finds_another_one_also_brings_what_ended_after_that_began(tmp_path: Path) -> None:
    worker = Worker(slow_s=0.5)

    async def test(record: RolloutRecord) -> None:
        earlier = asyncio.create_task(record.take(TAKE_S))
        await asyncio.sleep(0.1)
        worker.end("ended meanwhile")
        await record.take(TAKE_S)
        positions = result_of(record.positions())
        assert positions[f"{ROLLOUTS}/episodes-000001.jsonl"] > 0
        await earlier

    assert recorded(tmp_path, test, worker) == ["ended meanwhile"]


def test_a_new_process_is_asked_in_place_of_the_one_that_never_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost, new = Worker(slow_s=NEVER), Worker()
    record, pool = record_of(tmp_path, lost)

    async def test() -> None:
        async with record.following():
            await asyncio.sleep(2 * TAKE_S)
            new.end("of the new one")
            pool.handles[0] = handle_of(new)
            began = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - began < LAST_S  # the old one is waited for no longer

    run_virtual(test())
    record.close()
    assert [row["name"] for row in rows_in(tmp_path)] == ["of the new one"]
    assert "rollout worker 0" in caplog.text  # whose rows are missing


def test_a_worker_that_hangs_or_was_stopped_holds_up_no_end(tmp_path: Path) -> None:
    """A clean exit has some seconds in all."""
    hung, stopped = Worker(slow_s=NEVER), Worker(slow_s=NEVER)
    record, pool = record_of(tmp_path, hung, stopped)

    async def test() -> None:
        async with record.following():
            await asyncio.sleep(2 * TAKE_S)
            began = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - began <= 2 * TAKE_S + LAST_S
        pool.handles.clear()
        began = asyncio.get_running_loop().time()
        await record.take(60.0)
        assert asyncio.get_running_loop().time() == began

    run_virtual(test())
    record.close()


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.floats(0, 9), st.integers(0, 2)), max_size=20),
    st.lists(st.floats(0, 15), min_size=3, max_size=3),
)
def test_each_row_is_written_once_in_the_order_of_its_worker(
    tmp_path_factory: pytest.TempPathFactory, ends: list[tuple[float, int]], slow: list[float]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    workers = [Worker(slow_s=seconds) for seconds in slow]

    async def test(record: RolloutRecord) -> None:
        async with record.following():
            for n, (pause, worker) in enumerate(ends):
                await asyncio.sleep(pause)
                workers[worker].end(f"{worker} {n:02}")
            await asyncio.sleep(2 * max(slow) + 2 * TAKE_S)

    found = recorded(folder, test, *workers)
    assert sorted(found, key=lambda name: name[0]) == sorted(f"{worker} {n:02}" for n, (_, worker) in enumerate(ends))


def test_the_newest_rows_are_bounded_in_number_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NEWEST_BYTES", 1000)
    worker = Worker()

    async def test(record: RolloutRecord) -> None:
        for n in range(3 * NEWEST):
            worker.end(str(n))
        await record.take(TAKE_S)
        assert [row["name"] for row in record.newest()()] == [str(n) for n in range(2 * NEWEST, 3 * NEWEST)]
        for n in range(3):
            worker.end(f"long {n}", text="x" * 400)
        await record.take(TAKE_S)
        assert [row["name"] for row in record.newest()()] == ["long 1", "long 2"]

    assert len(recorded(tmp_path, test, worker)) == 3 * NEWEST + 3


def test_rows_that_a_slow_disk_has_no_room_for_are_counted_and_later_ones_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUED_BYTES", 1000)
    worker = Worker()
    written = threading.Event()

    async def test(record: RolloutRecord) -> None:
        append = record.episodes.append

        def slow(*lines: str) -> bool:
            happened(written, "the slow disk")
            if "unwritable" in lines[0]:
                raise ValueError("a disk that fails in a way of its own")
            return append(*lines)

        monkeypatch.setattr(record.episodes, "append", slow)
        for name in ("first", "unwritable", "no room"):
            worker.end(name, text="x" * 400)
            await record.take(TAKE_S)
        assert record.lost == 1
        written.set()
        result_of(record.positions())
        worker.end("later", text="x" * 900)  # the room of those before is free again
        await record.take(TAKE_S)
        assert record.lost == 1

    assert recorded(tmp_path, test, worker) == ["first", "later"]
