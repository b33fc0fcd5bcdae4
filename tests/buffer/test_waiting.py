from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

import pytest

from monarch_rl.buffer.waiting import WaitQueue
from monarch_rl.runtime import starvation
from monarch_rl.runtime.starvation import CoreTime, Look
from monarch_rl.simulate.clock import run_virtual
from tests.patience import patiently

WAIT_S = 600.0


def test_waits_are_served_in_order_and_no_other_is_tried() -> None:
    async def test() -> None:
        queue, free, tried, order = WaitQueue(alike=True), 0, 0, list[int]()

        def served(who: int) -> bool:
            nonlocal free, tried
            tried += 1
            if not free:
                return False
            free -= 1
            order.append(who)
            return True

        waits = [asyncio.ensure_future(queue.wait(partial(served, who), WAIT_S)) for who in range(100)]
        await asyncio.sleep(0)
        free, tried = 3, 0
        queue.serve()
        assert (order, tried) == ([0, 1, 2], 4)
        free = 97
        queue.serve()
        assert all(await asyncio.gather(*waits)) and order == list(range(100))

    run_virtual(test())


def test_a_wait_that_is_over_takes_nothing() -> None:
    async def test() -> None:
        queue, given = WaitQueue(), list[str]()
        free = False

        def served() -> bool:
            if free:
                given.append("it")
            return free

        assert not await queue.wait(served, 0.01)
        cancelled = asyncio.ensure_future(queue.wait(served, WAIT_S))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        free = True
        queue.serve()
        assert given == []
        assert await queue.wait(served, WAIT_S) and given == ["it"]

    run_virtual(test())


def test_all_are_tried_if_they_are_not_alike_or_on_demand() -> None:
    async def test(alike: bool) -> None:
        queue, able = WaitQueue(alike), set[int]()
        waits = [asyncio.ensure_future(queue.wait(partial(able.__contains__, who), WAIT_S)) for who in range(3)]
        await asyncio.sleep(0)
        able.add(1)
        queue.serve()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [wait.done() for wait in waits] == [False, not alike, False]
        queue.serve(everybody=True)
        assert await waits[1]
        able |= {0, 2}
        queue.serve()
        assert all(await asyncio.gather(*waits))

    run_virtual(test(alike=False))
    run_virtual(test(alike=True))


def test_an_exception_is_raised_to_the_wait_that_caused_it() -> None:
    async def test() -> None:
        queue, wrong = WaitQueue(), False

        def served() -> bool:
            if wrong:
                raise ValueError("no such version")
            return False

        wait = asyncio.ensure_future(queue.wait(served, WAIT_S))
        await asyncio.sleep(0)
        wrong = True
        queue.serve()
        with pytest.raises(ValueError, match="no such version"):
            await wait

    run_virtual(test())


def starved_look() -> Look:
    """A process that has been ready to run since the machine started, and never had a core."""
    return Look(time.monotonic(), {1: CoreTime(0.0, time.monotonic())})


def never() -> bool:
    return False


def test_a_machine_without_cores_stretches_the_deadline_and_preserves_the_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starvation, "look", starved_look)

    async def test() -> None:
        queue, free, order = WaitQueue(alike=True), False, list[int]()

        def served(who: int) -> bool:
            if free:
                order.append(who)
            return free

        # clock: the product's own deadline, which has to be stretched
        waits = [asyncio.ensure_future(queue.wait(partial(served, who), 2.0)) for who in range(3)]
        await asyncio.sleep(3.0)  # by the wall clock the deadline is over; by its own clock it passes after 20 s
        assert not any(wait.done() for wait in waits)
        free = True
        queue.serve()
        assert await asyncio.gather(*waits) == [True] * 3 and order == [0, 1, 2]

    asyncio.run(test())


@pytest.mark.parametrize("seconds", [0.0, 0.01, 1.5])
def test_a_deadline_passes_on_a_machine_with_cores(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starvation, "look", lambda: Look(time.monotonic(), {1: CoreTime(0.0, 0.0)}))
    assert not asyncio.run(patiently(WaitQueue().wait(never, seconds)))


def test_virtual_time_has_no_starvation(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> Look:
        raise AssertionError("nobody looks at real processes in virtual time")

    monkeypatch.setattr(starvation, "look", look)

    async def seconds(served: Callable[[], bool]) -> float:
        began = asyncio.get_running_loop().time()
        assert not await WaitQueue().wait(served, 600.0)
        return asyncio.get_running_loop().time() - began

    assert run_virtual(seconds(never)) == pytest.approx(600.0)
