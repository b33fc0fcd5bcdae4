"""The waits, heartbeats and progress that a process reports about itself."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

import monarch_rl
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.monitor import is_user_code, own_report
from monarch_rl.runtime.wait_registry import WAITS_PER_PROCESS, Wait
from monarch_rl.watch.process_poller import LoopLag
from tests.patience import happened, join, wait_until


@pytest.fixture(autouse=True)
def nobody() -> Iterator[None]:
    """Tests share this process, so each must leave the registry empty."""
    assert not wait_registry.heartbeats() and not wait_registry.waits()
    yield
    assert not wait_registry.heartbeats() and not wait_registry.waits()


def test_waiters_are_distinguished_by_their_event_loops() -> None:
    async def act(name: str) -> str:
        wait_registry.register(name)
        await asyncio.sleep(0)
        current = wait_registry.current_name()
        wait_registry.unregister(name)
        return current

    names: dict[str, str] = {}

    def run(name: str) -> None:
        names[name] = asyncio.run(act(name))

    threads = [threading.Thread(target=run, args=[name]) for name in ("buffer", "generator 1")]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert names == {"buffer": "buffer", "generator 1": "generator 1"}


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_loop_that_has_ended_is_not_blocked(cancelled: bool) -> None:
    """Whether its tasks were cancelled, as by ``asyncio.run``, or only left behind."""

    async def act() -> None:
        wait_registry.register("buffer")
        await asyncio.sleep(0)
        assert set(wait_registry.heartbeats()) == {"buffer"}

    async def leave() -> None:
        wait_registry.unregister("buffer")

    if cancelled:
        asyncio.run(act())
    else:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(act())
        loop.close()
    assert not wait_registry.heartbeats()
    if cancelled:
        asyncio.run(leave())
    else:  # its task can no longer be cancelled
        wait_registry._heartbeats.clear()


def test_a_wait_of_a_thread_has_the_name_of_its_process() -> None:
    async def act() -> str:
        wait_registry.register("trainer rank 0")
        name = await asyncio.to_thread(wait_registry.current_name)
        wait_registry.unregister("trainer rank 0")
        return name

    assert asyncio.run(act()) == "trainer rank 0"
    assert wait_registry.current_name().startswith("process ")


def test_the_oldest_distinct_waits_on_a_process_are_reported() -> None:
    async def act() -> list[Wait]:
        stack = [wait_registry.waiting(f"token {i}", on="generator 0") for i in range(50) for _ in range(3)]
        stack.append(wait_registry.waiting("a slot", on="buffer"))
        for block in stack:
            block.__enter__()
        waits = wait_registry.waits()
        for block in reversed(stack):
            block.__exit__(None, None, None)
        return waits

    waits = asyncio.run(act())
    assert [wait.what for wait in waits] == [f"token {i}" for i in range(WAITS_PER_PROCESS)] + ["a slot"]


def test_an_actor_can_add_waits_that_it_does_not_await() -> None:
    async def act() -> list[Wait]:
        lease = Wait("buffer", "group 327", "rollout worker 2", time.monotonic(), 60.0)
        wait_registry.register("buffer", more_waits=lambda: [lease])
        try:
            return await asyncio.to_thread(wait_registry.waits)
        finally:
            wait_registry.unregister("buffer")

    assert [(wait.what, wait.on) for wait in asyncio.run(act())] == [("group 327", "rollout worker 2")]


def test_a_blocked_loop_is_reported_while_it_is_blocked_and_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    lag, blocked, seen = LoopLag(), threading.Event(), threading.Event()

    async def act() -> list[float]:
        wait_registry.register("trainer rank 0")
        heartbeat, thread = wait_registry.heartbeats()["trainer rank 0"]
        assert thread == threading.get_ident()
        await asyncio.sleep(2 * wait_registry.BEAT_S)
        assert heartbeat.take_lags()
        blocked.set()
        assert seen.wait(600), "nobody noticed it"  # an actor must not block like this
        await asyncio.sleep(2 * wait_registry.BEAT_S)
        lags = heartbeat.take_lags()
        wait_registry.unregister("trainer rank 0")
        return lags

    lags: list[float] = []
    lines, first = inspect.getsourcelines(act)
    (line,) = [first + number for number, text in enumerate(lines) if "seen.wait" in text]
    thread = threading.Thread(target=lambda: lags.extend(asyncio.run(act())))
    thread.start()
    try:
        happened(blocked, "the loop to be blocked")
        (heartbeat, _) = wait_registry.heartbeats()["trainer rank 0"]
        wait_until(lambda: heartbeat.overdue_s() >= 0.5, "a beat that is overdue")
        wait_until(lambda: own_report().blocked_at, "a report of the line")
        report = own_report()
    finally:
        seen.set()
    join(thread)
    assert max(lags) >= 0.5
    assert report.blocked_at == f"{__file__}:{line}" and report.blocked_s >= wait_registry.PAUSE_S
    assert not own_report().blocked_at
    for _ in range(2):
        lag.name_line("trainer rank 0", report)
    assert caplog.text.count(f"{report.blocked_at} blocks the event loop of trainer rank 0") == 1


def test_code_in_a_folder_whose_name_begins_like_the_packages_is_the_users() -> None:
    package, frames = Path(monarch_rl.__file__).parent, list[FrameType]()
    for file in (package / "tasks" / "task.py", package.with_name("monarch_rl_mine") / "recipe.py"):
        exec(compile("frames.append(currentframe())", file, "exec"), {"frames": frames, **vars(inspect)})
    assert [is_user_code(frame) for frame in frames] == [False, True]


def test_progress_is_counted_by_kind() -> None:
    progress = wait_registry.progress_by_kind()
    before = progress["group submitted"].count if "group submitted" in progress else 0
    began = time.monotonic()
    wait_registry.progress("group submitted")
    wait_registry.progress("group submitted")
    ended = time.monotonic()
    record = wait_registry.progress_by_kind()["group submitted"]
    assert record.count == before + 2
    assert began <= record.last <= ended  # clock: an order, and no duration
