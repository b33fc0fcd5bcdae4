"""Virtual time: in order, without waiting, and never a silent hang."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.runtime.deadlines import DeadlineExceeded, now, within
from monarch_rl.simulate.clock import NothingLeft, run_virtual


def test_an_hour_takes_no_time() -> None:
    async def hour() -> float:
        for _ in range(3600):
            await asyncio.sleep(1.0)
        return now()

    started = time.process_time()
    assert run_virtual(hour()) == pytest.approx(3600)
    assert time.process_time() - started < 1.0


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=20))
def test_timers_ring_in_order_at_their_time(delays: list[float]) -> None:
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

    with pytest.raises(DeadlineExceeded, match="waited 600 s, .* for nobody"):
        run_virtual(wait())


def test_what_would_hang_is_an_error() -> None:
    async def wait() -> None:
        await asyncio.sleep(5)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NothingLeft, match="at 5 s of virtual time everybody waits"):
        run_virtual(wait())


def test_a_thread_is_not_outrun_by_the_clock() -> None:
    async def go() -> float:
        timer = asyncio.ensure_future(asyncio.sleep(1))
        assert await asyncio.to_thread(sum, [1, 2]) == 3
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 1, 0)
        assert now() == 0
        await timer
        return now()

    assert run_virtual(go()) == 1
