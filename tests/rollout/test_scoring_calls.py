"""Calls of pools whose processes may be stopped: which calls wait in vain. In virtual time."""

from __future__ import annotations

import asyncio
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest
from pebble import ProcessPool

from monarch_rl.rollout.scoring import PendingCalls
from monarch_rl.simulate.clock import run_virtual

LIMIT_S = 0.4


async def ends(calls: PendingCalls, pool: ProcessPool, future: asyncio.Future[Any]) -> str:
    try:
        await calls.ends(future, pool, LIMIT_S, LIMIT_S / 4, lambda: None)
    except BrokenProcessPool as error:
        return str(error)
    return "ended"


def test_later_calls_do_not_prove_that_a_process_works() -> None:
    async def test() -> None:
        loop, calls, pool = asyncio.get_running_loop(), PendingCalls(), ProcessPool(1)
        futures = [loop.create_future() for _ in range(40)]
        waiting = [asyncio.ensure_future(ends(calls, pool, future)) for future in futures]
        for future in futures[1:]:
            if waiting[0].done():
                break
            await asyncio.sleep(LIMIT_S / 8)
            future.set_result(None)
        assert f" {LIMIT_S:g} s" in await waiting[0]
        assert await waiting[1] == "ended" and not futures[-1].done(), "it did not wait for all others"
        for task in waiting:
            task.cancel()

    run_virtual(test())


def test_earlier_calls_prove_that_the_pool_works() -> None:
    async def test() -> None:
        loop, calls, pool, other = asyncio.get_running_loop(), PendingCalls(), ProcessPool(1), ProcessPool(1)
        before = [loop.create_future() for _ in range(3)]
        waiting = [asyncio.ensure_future(ends(calls, pool, future)) for future in before]
        waiting.append(asyncio.ensure_future(ends(calls, other, loop.create_future())))
        last = loop.create_future()
        waiting.append(asyncio.ensure_future(ends(calls, pool, last)))
        began = loop.time()
        for future in before:
            await asyncio.sleep(LIMIT_S / 2)
            future.set_result(None)
        assert f" {LIMIT_S:g} s" in await waiting[-1]
        waited_s = loop.time() - began
        assert waited_s >= 2.5 * LIMIT_S, "it waited longer, because others came before it"

    run_virtual(test())


def test_calls_of_an_abandoned_pool_end_at_once_and_calls_of_other_pools_continue() -> None:
    async def test() -> None:
        loop, calls, given_up, other = asyncio.get_running_loop(), PendingCalls(), ProcessPool(1), ProcessPool(1)
        lost, surviving = loop.create_future(), loop.create_future()
        waiting = [asyncio.ensure_future(ends(calls, *of)) for of in ((given_up, lost), (other, surviving))]
        await asyncio.sleep(0)
        calls.give_up(given_up)
        assert "given up" in await waiting[0] and not waiting[1].done()
        surviving.set_result(None)
        assert await waiting[1] == "ended"

    run_virtual(test())


def test_an_exception_of_a_call_is_left_to_the_caller() -> None:
    async def test() -> None:
        calls, future = PendingCalls(), asyncio.get_running_loop().create_future()
        future.set_exception(TimeoutError())
        assert await ends(calls, ProcessPool(1), future) == "ended"
        with pytest.raises(TimeoutError):
            future.result()

    run_virtual(test())
