from __future__ import annotations

import asyncio
import pickle
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.errors import DeadlineExceeded, ProcessLost
from monarch_rl.runtime import deadlines, wait_registry
from monarch_rl.runtime.deadlines import Patience, lose, now, within
from monarch_rl.simulate.clock import run_virtual
from tests.patience import patiently, until


async def never() -> None:
    await asyncio.Event().wait()


async def answer() -> int:
    return 42


async def fail() -> None:
    raise LookupError("no such group")


def test_within_returns_the_result_or_raises_the_error() -> None:
    assert asyncio.run(within(60.0, answer(), "the answer")) == 42
    with pytest.raises(LookupError, match="no such group"):
        asyncio.run(within(60.0, fail(), "the answer"))


def test_the_error_names_the_waiter_what_it_waits_for_and_since_when() -> None:
    async def trainer_step() -> None:
        await within(0.01, never(), "a batch for version 3 from the buffer")

    with pytest.raises(DeadlineExceeded) as caught:
        asyncio.run(trainer_step())
    message = str(caught.value)
    assert "trainer_step" in message and "0.01 s" in message and "since" in message
    assert message.endswith("for a batch for version 3 from the buffer")
    assert isinstance(caught.value, TimeoutError)


def test_the_error_names_the_flag_that_sets_the_deadline() -> None:
    with pytest.raises(DeadlineExceeded, match=r"--patience") as caught:
        asyncio.run(within(0.01, never(), "a version", flag="patience"))
    assert caught.value.what == "a version"


def test_the_error_can_be_pickled() -> None:
    error = DeadlineExceeded("a waited 1 s for b", "b", 1.0)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.what, copy.seconds) == ("a waited 1 s for b", "b", 1.0)


def test_a_lost_process_ends_only_the_waits_on_it_and_at_once() -> None:
    async def run() -> list[object]:
        stats = "the stats of generator 1"
        waits: list[Any] = [within(60.0, never(), stats, on="generator 1") for _ in range(2)]
        waits += [within(0.2, never(), "generator 10", on="generator 10"), within(0.2, never(), "generator 1")]
        waits += [within(60.0, answer(), "an answer", on="generator 1")]
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        await asyncio.sleep(0)  # they have begun
        lose("generator 1", "killed by signal 9")
        later = within(0.2, never(), "its successor", on="generator 1")
        return await asyncio.gather(*tasks, later, return_exceptions=True)

    *lost, other, nameless, answered, successor = asyncio.run(run())
    for error in lost:
        assert isinstance(error, ProcessLost)
        assert str(error).endswith("for the stats of generator 1: generator 1 is lost, killed by signal 9")
        assert isinstance(pickle.loads(pickle.dumps(error)), ProcessLost)
    assert answered == 42 or isinstance(answered, ProcessLost)  # depends on whether it had begun to compute its answer
    for error in (other, nameless, successor):
        assert type(error) is DeadlineExceeded


def test_an_awaitable_that_ignores_its_cancellation_cannot_block_the_waiter() -> None:
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async def wait() -> None:
        with pytest.raises(DeadlineExceeded):
            await within(0.01, stubborn(), "nothing")
        release.set()  # it cannot have ended before

    asyncio.run(patiently(wait(), "the waiter"))


def test_a_cancelled_waiter_cancels_its_awaitable() -> None:
    async def wait() -> bool:
        inner = asyncio.get_running_loop().create_task(never())
        waiter = asyncio.create_task(within(60, inner, "nothing"))
        await asyncio.sleep(0)
        waiter.cancel()
        await until(inner.done, "the end of the awaited task")
        return inner.cancelled()

    assert asyncio.run(wait())


def test_a_wait_is_visible_from_other_threads_while_it_lasts() -> None:
    async def trainer_step() -> tuple[list[wait_registry.Wait], list[wait_registry.Wait]]:
        wait_registry.register("trainer rank 1")
        try:
            waiter = asyncio.create_task(within(60, never(), "the batch of step 41", on="buffer"))
            await asyncio.sleep(0)
            seen = await asyncio.to_thread(wait_registry.waits)
            waiter.cancel()
            await until(waiter.done, "the end of the wait")
            return seen, wait_registry.waits()
        finally:
            wait_registry.unregister("trainer rank 1")

    began = time.monotonic()
    (wait,), after = asyncio.run(trainer_step())
    ended = time.monotonic()
    assert (wait.waiter, wait.what, wait.on, wait.deadline_s) == (
        "trainer rank 1",
        "the batch of step 41",
        "buffer",
        60,
    )
    assert began <= wait.since <= ended  # clock: an order, and no duration
    assert after == []


def test_the_error_names_the_actor_of_its_event_loop() -> None:
    async def trainer_step() -> None:
        wait_registry.register("trainer rank 1")
        try:
            await within(0.01, never(), "a batch", on="buffer")
        finally:
            wait_registry.unregister("trainer rank 1")

    with pytest.raises(DeadlineExceeded, match=r"^trainer rank 1 .*trainer_step"):
        asyncio.run(trainer_step())


SECONDS = st.floats(0, 1e4)


@given(st.lists(SECONDS, max_size=30), st.floats(0.1, 1e4), SECONDS, st.floats(1, 20), st.integers(1, 25))
def test_patience_starts_at_the_ceiling_and_becomes_a_multiple_of_the_longest_recent_step(
    steps: list[float], ceiling: float, floor: float, factor: float, memory: int
) -> None:
    patience = Patience(ceiling, floor_s=floor, factor=factor, memory=memory)
    assert patience.limit_s == ceiling
    for number, seconds in enumerate(steps, 1):
        patience.record(seconds)
        wanted = factor * max(steps[:number][-memory:])
        assert patience.limit_s == pytest.approx(sorted([wanted, floor, ceiling])[1] if floor <= ceiling else ceiling)


def test_patience_records_only_successful_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(monotonic=lambda: clock.now))
    patience = Patience(100, floor_s=0, factor=2)
    with pytest.raises(LookupError), patience.step() as limit:
        assert limit == 100
        clock.now += 7.0
        raise LookupError
    assert patience.limit_s == 100
    with patience.step():
        clock.now += 3.0
    assert patience.limit_s == 6.0


def test_patience_refuses_an_invalid_ceiling() -> None:
    with pytest.raises(ValueError, match="ceiling_s.* 0"):
        Patience(0)


@given(st.lists(st.tuples(st.floats(0, 2000), st.floats(1e-3, 1000)), min_size=1, max_size=30))
def test_waits_that_share_timers_end_on_time_or_slightly_later(waits: list[tuple[float, float]]) -> None:
    """In virtual time: waits of any start and length."""

    async def wait_all() -> None:
        async def wait(begins_s: float, seconds: float) -> None:
            await asyncio.sleep(begins_s)
            began = now()
            with pytest.raises(DeadlineExceeded):
                await within(seconds, asyncio.Event().wait(), "nothing")
            passed = now() - began
            assert seconds - 1e-6 <= passed <= seconds + min(seconds / 64, wait_registry.PAUSE_S / 2) + 1e-6

        await asyncio.gather(*(wait(*each) for each in waits))

    run_virtual(wait_all())
