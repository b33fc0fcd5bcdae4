"""Waits of tests count only time in which the waiting process ran, not time in which the machine stood still."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest

from tests import patience
from tests.patience import COUNTED_S, Impatient, Patience, patiently, until, wait_until


def test_a_standstill_of_the_waiter_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    waited = Patience("a thing", seconds=1.0)
    for _ in range(3):
        now += 40.0
        waited.tick()
    now += COUNTED_S
    waited.tick()
    now += 0.01
    with pytest.raises(Impatient, match="a thing"):
        waited.tick()


def test_a_missed_deadline_names_the_wait() -> None:
    with pytest.raises(Impatient, match="a train"):
        wait_until(lambda: False, "a train", seconds=0.1)
    with pytest.raises(Impatient, match="a train"):
        asyncio.run(until(lambda: False, lambda: "a train", seconds=0.1))
    with pytest.raises(Impatient, match="a train"):
        patience.happened(threading.Event(), "a train", seconds=0.1)


def test_an_awaitable_that_is_not_done_in_time_is_cancelled() -> None:
    async def test() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with pytest.raises(Impatient):
            await patiently(future, seconds=0.1)
        assert future.cancelled()

    asyncio.run(test())


def test_results_errors_and_exit_codes_are_passed_on() -> None:
    async def failing() -> None:
        raise TimeoutError("its own")

    async def coming() -> int:
        return 3

    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(patiently(failing()))
    assert asyncio.run(patiently(coming())) == 3
    done = patience.run([sys.executable, "-c", "import sys; print(1); print(2, file=sys.stderr); sys.exit(3)"])
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "2\n", 3)
    with pytest.raises(Impatient):
        patience.run([sys.executable, "-c", "import time; time.sleep(100)"], seconds=0.1)
