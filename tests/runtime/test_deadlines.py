from __future__ import annotations

import asyncio
import pickle
import time

import pytest

from monarch_rl.runtime.deadlines import DeadlineExceeded, within


async def never() -> None:
    await asyncio.Event().wait()


async def answer() -> int:
    return 42


async def fail() -> None:
    raise LookupError("no such group")


def test_passes_on_the_result_and_the_error() -> None:
    assert asyncio.run(within(1.0, answer(), "the answer")) == 42
    with pytest.raises(LookupError, match="no such group"):
        asyncio.run(within(1.0, fail(), "the answer"))


def test_names_who_waits_for_what_since_when() -> None:
    async def trainer_step() -> None:
        await within(0.01, never(), "a batch for version 3 from the buffer")

    with pytest.raises(DeadlineExceeded) as caught:
        asyncio.run(trainer_step())
    message = str(caught.value)
    assert "trainer_step" in message and "0.01 s" in message and "since" in message
    assert message.endswith("for a batch for version 3 from the buffer")
    assert isinstance(caught.value, TimeoutError)


def test_the_error_crosses_processes() -> None:
    error = DeadlineExceeded("a waited 1 s for b", "b", 1.0)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.what, copy.seconds) == ("a waited 1 s for b", "b", 1.0)


def test_an_awaitable_that_ignores_its_cancellation_cannot_hold_the_waiter() -> None:
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async def wait() -> float:
        before = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await within(0.01, stubborn(), "nothing")
        waited = time.monotonic() - before
        release.set()
        return waited

    assert asyncio.run(wait()) < 5


def test_a_cancelled_waiter_cancels_what_it_waits_for() -> None:
    async def wait() -> bool:
        inner = asyncio.get_running_loop().create_task(never())
        waiter = asyncio.create_task(within(60, inner, "nothing"))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.wait({inner}, timeout=5)
        return inner.cancelled()

    assert asyncio.run(wait())
