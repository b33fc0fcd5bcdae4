"""Virtual time: in order, without waiting, and never a silent hang."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.errors import DeadlineExceeded, NothingLeft
from monarch_rl.runtime import starvation
from monarch_rl.runtime.deadlines import now, within
from monarch_rl.simulate.clock import run_virtual


def test_an_hour_takes_no_time() -> None:
    async def hour() -> float:
        for _ in range(3600):
            await asyncio.sleep(1.0)
        return now()

    assert run_virtual(hour()) == pytest.approx(3600)  # a real hour would exceed the limit of a test


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=20))
def test_timers_fire_in_order_at_their_time(delays: list[float]) -> None:
    rang: list[tuple[float, int]] = []

    async def ring(i: int) -> None:
        await asyncio.sleep(delays[i])
        assert now() == pytest.approx(delays[i], abs=1e-6)
        rang.append((delays[i], i))

    async def go() -> None:
        await asyncio.gather(*map(ring, range(len(delays))))

    run_virtual(go())
    assert [delay for delay, _ in rang] == sorted(delays)


def test_deadlines_pass_in_virtual_time() -> None:
    async def wait() -> None:
        await within(600, asyncio.get_running_loop().create_future(), "nobody")

    with pytest.raises(DeadlineExceeded, match="600 s.* nobody"):
        run_virtual(wait())


def test_deadlines_in_virtual_time_do_not_inspect_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if both clocks are equal, as in the first minutes after boot."""

    def look() -> starvation.Look:
        raise AssertionError("the machine was inspected")

    async def wait() -> float:
        await asyncio.sleep(5.0)
        with pytest.raises(DeadlineExceeded):
            await within(600, asyncio.get_running_loop().create_future(), "nobody")
        return now()

    monkeypatch.setattr("time.monotonic", lambda: 5.0)
    monkeypatch.setattr(starvation, "look", look)
    assert run_virtual(wait()) == pytest.approx(605, rel=1 / 64)


def test_a_wait_that_would_hang_is_an_error() -> None:
    async def wait() -> None:
        await asyncio.sleep(5)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NothingLeft, match="5 s"):
        run_virtual(wait())


def test_the_clock_waits_for_threads() -> None:
    async def go() -> float:
        timer = asyncio.ensure_future(asyncio.sleep(1))
        assert await asyncio.to_thread(sum, [1, 2]) == 3
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 1, 0)
        assert now() == 0
        await timer
        return now()

    assert run_virtual(go()) == 1
