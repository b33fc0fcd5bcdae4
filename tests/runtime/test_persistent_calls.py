"""Calls over one persistent port: no other port leaks, no answer is lost or mixed up, errors reach the waiters."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import monarch.actor
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, Channel, context, this_host

from monarch_rl.errors import DeadlineExceeded
from monarch_rl.runtime import persistent_channel, wait_registry
from monarch_rl.runtime.cluster import STATE_DEADLINE_S
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint, persistent_endpoint
from monarch_rl.runtime.persistent_calls import ResilientActor
from monarch_rl.runtime.persistent_channel import caller_of
from tests.patience import patiently, result_of, until

LOST_S = STATE_DEADLINE_S + 60
"""Maximum seconds for a loss to be noticed (see ``STATE_DEADLINE_S``)."""
MANY = 4000
"""Number of calls. With a port per call, caller and actor together would grow by about 2 KB per call."""
TOGETHER = 20
"""Calls per turn of the event loop."""
GROWTH_BYTES = 250
"""Maximum per call and process: less than a third of the growth with a port per call, but above random variation."""


class CannotTravel(Exception):
    """It can be pickled, but not unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class Unreadable:
    """Raises when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _fail_to_read, ()


def _fail_to_read() -> None:
    raise RuntimeError("this cannot be read here")


class Answerer(ResilientActor):
    def __init__(self) -> None:
        self._started: list[int] = []
        self._cleaned_up = False

    @persistent_endpoint
    async def echo(self, value: int, turns: int = 0) -> int:
        self._started.append(value)
        for _ in range(turns):
            await asyncio.sleep(0)
        return value

    @persistent_endpoint
    async def started(self) -> list[int]:
        started, self._started = self._started, []
        return started

    @persistent_endpoint
    async def fail(self, rank: int = 0) -> int:
        if context().message_rank.rank == rank:
            raise ValueError(f"rank {rank} has no answer")
        return rank

    @persistent_endpoint
    async def fail_oddly(self) -> None:
        raise CannotTravel("two", "words")

    @persistent_endpoint
    async def unreadable(self, argument: object = None) -> object:
        return Unreadable()

    @persistent_endpoint
    async def hang(self) -> None:
        await asyncio.Event().wait()

    @persistent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    @persistent_endpoint
    async def rss(self) -> int:
        return int(psutil.Process().memory_info().rss)

    @concurrent_endpoint
    async def native(self) -> int:
        return 1

    @concurrent_endpoint
    async def callers(self) -> list[str]:
        return [caller_of(channel)[0] for channel in vars(self)["_callers"].senders]

    @concurrent_endpoint
    async def break_ports(self) -> None:
        for sender in vars(self)["_callers"].senders.values():
            sender._port = BrokenPort()

    @persistent_endpoint
    async def hang_with_file(self, path: str) -> None:
        Path(f"{path}.begun").touch()
        try:
            await asyncio.Event().wait()
        finally:
            Path(path).write_text("" if self._cleaned_up else "before the clean-up")

    async def __cleanup__(self, exc: Exception | None) -> None:
        self._cleaned_up = True


class BrokenPort:
    """A port over which nothing can be sent."""

    def send(self, _: object) -> None:
        raise OSError("the port is broken")


class Caller(ResilientActor):
    """Calls an answerer under a name of the run."""

    @concurrent_endpoint
    async def ask(self, name: str, answerer: Any) -> int:
        wait_registry.register(name)
        return int(await answerer.echo.call_one(1))


@asynccontextmanager
async def answerers(count: int = 1) -> AsyncIterator[Any]:
    monarch.actor.unhandled_fault_hook = lambda failure: None  # the default interrupts pytest
    processes = this_host().spawn_procs(per_host={"gpus": count}, name="answerers")
    try:
        yield processes.spawn("answerer", Answerer)
    finally:
        await within(300, processes.stop(), "the answerers to stop")


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await within(500, test(), "the test")

    asyncio.run(bounded())


async def _awaited(call: Awaitable[Any]) -> Any:
    return await call


def next_port() -> int:
    """The number of a newly opened port: a mailbox counts its ports."""
    return int(Channel[int].open()[0]._port_ref.port_id.index)


@pytest.mark.core
def test_concurrent_calls_are_batched_and_leak_nothing() -> None:
    """Each message opens a port that Monarch frees; a native call of Monarch opens another one, which leaks."""

    async def many(actor: Any) -> None:
        for first in range(0, MANY, TOGETHER):
            await asyncio.gather(*(actor.echo.call_one(first + index) for index in range(TOGETHER)))
        await actor.started.call_one()

    async def test() -> None:
        async with answerers() as actor:
            await many(actor)
            before, there, port = psutil.Process().memory_info().rss, await actor.rss.call_one(), next_port()
            await many(actor)
            assert next_port() - port <= MANY // TOGETHER + 3
            assert psutil.Process().memory_info().rss - before < MANY * GROWTH_BYTES
            assert await actor.rss.call_one() - there < MANY * GROWTH_BYTES
            port = next_port()
            await asyncio.gather(*(asyncio.ensure_future(_awaited(actor.native.call_one())) for _ in range(TOGETHER)))
            assert next_port() > port + TOGETHER, "native calls of Monarch no longer leak ports"

    run(test)


def test_all_actors_of_a_mesh_answer_by_rank() -> None:
    async def test() -> None:
        async with answerers(2) as actors:
            pids = await actors.pid.call()
            assert len(set(pids.values())) == 2
            assert [place["gpus"] for place, _ in pids.items()] == [0, 1]
            alone = [await actors.slice(gpus=rank).pid.call_one() for rank in range(2)]
            assert alone == list(pids.values())
            with pytest.raises(ValueError):
                await actors.pid.call_one()
            with pytest.raises(ActorError, match="rank 1 has no answer"):
                await actors.fail.call(1)

    run(test)


def test_an_error_has_its_traceback_and_affects_no_other_call() -> None:
    """Also an error that cannot be pickled, and arguments or a result that cannot be unpickled."""

    async def test() -> None:
        async with answerers() as actor:
            waiting = asyncio.ensure_future(actor.hang.call_one())
            with pytest.raises(ActorError, match=r"(?s)answerer\.fail .*in fail\n.*ValueError: rank 0") as caught:
                await actor.fail.call_one()
            assert isinstance(caught.value.exception, ValueError)
            with pytest.raises(ActorError, match=r"(?s)in fail_oddly\n.*CannotTravel: two words") as odd:
                await actor.fail_oddly.call_one()
            assert "CannotTravel: two words" in str(odd.value.exception)
            with pytest.raises(ActorError, match=r"(?s)answerer\.unreadable .*this cannot be read here"):
                await actor.unreadable.call_one(Unreadable())
            with pytest.raises(RuntimeError, match="^this cannot be read here$"):
                await actor.unreadable.call_one()
            assert not waiting.done() and await actor.echo.call_one(1) == 1
            waiting.cancel()

    run(test)


@pytest.mark.core
def test_a_killed_process_ends_only_its_own_calls() -> None:
    async def test() -> None:
        async with answerers(2) as actors:
            killed, other = actors.slice(gpus=0), actors.slice(gpus=1)
            pid = await killed.pid.call_one()
            pending = [asyncio.ensure_future(call) for call in (killed.hang.call_one(), actors.hang.call())]
            unaffected = asyncio.ensure_future(other.hang.call_one())
            await killed.echo.call_one(0)
            os.kill(pid, signal.SIGKILL)
            # A process killed while Monarch polls its state is noticed later, with another message.
            message = r"(?s)answerer\.{}\(\).*(sig=9|crashed)"
            for call in pending:
                with pytest.raises(SupervisionError, match=message.format("hang")):
                    await patiently(call, "a loss to be noticed", LOST_S)
            with pytest.raises(SupervisionError, match=message.format("pid")):
                await patiently(asyncio.ensure_future(killed.pid.call_one()), "a loss to be noticed", LOST_S)
            assert await other.echo.call_one(3) == 3 and not unaffected.done()
            unaffected.cancel()

    run(test)


def test_an_error_of_a_lost_process_does_not_retain_its_waiters() -> None:
    """Also for native calls of Monarch, whose futures reference the error where Python's collector cannot see it."""

    class Mine:
        pass

    async def ask(call: Callable[[], Awaitable[Any]], had: list[weakref.ref[Mine]]) -> None:
        mine = Mine()
        had.append(weakref.ref(mine))
        with contextlib.suppress(SupervisionError):
            await within(LOST_S, call(), "an answer", on="the answerer")
            pytest.fail("a killed process has answered")

    async def ask_and_keep_the_call(call: Callable[[], Awaitable[Any]], had: list[weakref.ref[Mine]]) -> None:
        mine, asked = Mine(), call()
        had.append(weakref.ref(mine))
        with contextlib.suppress(SupervisionError):
            await within(LOST_S, asked, "an answer", on="the answerer")
            pytest.fail("a killed process has answered")

    async def test() -> None:
        async with answerers() as actor:
            os.kill(await actor.pid.call_one(), signal.SIGKILL)
            had: list[weakref.ref[Mine]] = []
            for _ in range(2):  # the first one loses the channel to the actor
                await ask(actor.pid.call_one, had)
                await ask(actor.native.call_one, had)
                await ask_and_keep_the_call(actor.pid.call_one, had)
            gc.collect()
            assert [mine() for mine in had] == [None] * 6

    run(test)


def test_ended_event_loops_leave_nothing_on_either_side() -> None:
    def call_on_a_loop_of_its_own(actor: Any) -> None:
        async def call() -> None:
            wait_registry.name_loop("the watch")
            assert await actor.echo.call_one(1) == 1

        asyncio.run(call())

    async def test() -> None:
        async with answerers() as actor:
            await actor.echo.call_one(0)
            before = len(persistent_channel._reply_ports)
            for _ in range(3):
                await asyncio.to_thread(call_on_a_loop_of_its_own, actor)
            gc.collect()
            assert (len(persistent_channel._reply_ports), len(vars(actor)["_channels"])) == (before, 1)
            assert await actor.callers.call_one() == ["", "the watch"], (
                "the previous caller is forgotten when another one arrives"
            )

    run(test)


def test_a_send_error_reaches_the_waiters() -> None:
    """On both sides: it is raised in a callback of the event loop, which would only log it while callers wait."""

    async def test() -> None:
        async with answerers() as actor:
            hanging = asyncio.ensure_future(actor.hang.call_one())
            assert await actor.echo.call_one(1) == 1
            channel = vars(actor)["_channels"][asyncio.get_running_loop()]
            send, channel._send_messages = channel._send_messages, nothing_can_be_sent
            with pytest.raises(OSError, match="nothing can be sent"):
                await patiently(actor.echo.call_one(2))
            channel._send_messages = send
            assert await actor.echo.call_one(3) == 3 and not hanging.done()
            await actor.break_ports.call_one()
            for call in (actor.echo.call_one(4), hanging):
                with pytest.raises(ActorError, match="the port is broken"):
                    await patiently(call)
            assert await patiently(_awaited(actor.echo.call_one(5))) == 5

    run(test)


def nothing_can_be_sent(*_: object) -> None:
    raise OSError("nothing can be sent")


def test_pending_calls_end_before_the_clean_up_of_their_actor(tmp_path: Path) -> None:
    async def test() -> None:
        async with answerers() as actor:
            call = asyncio.ensure_future(actor.hang_with_file.call_one(str(tmp_path / "ended")))
            await until((tmp_path / "ended.begun").exists, "the call to begin")
        assert (tmp_path / "ended").read_text() == "before the clean-up"
        call.cancel()

    run(test)


def test_a_replaced_caller_is_forgotten() -> None:
    """A new caller with its name replaces it; its pending calls are cancelled."""

    async def test() -> None:
        async with answerers() as actor:
            await actor.echo.call_one(0)
            for _ in range(3):
                processes = this_host().spawn_procs(per_host={"gpus": 1}, name="callers")
                caller: Any = processes.spawn("caller", Caller)
                assert await caller.ask.call_one("rollout worker 7", actor) == 1
                await within(300, processes.stop(), "the caller to stop")
                assert await actor.callers.call_one() == ["", "rollout worker 7"]
            assert await actor.echo.call_one(1) == 1

    run(test)


def test_a_late_answer_is_dropped() -> None:
    async def test() -> None:
        async with answerers() as actor:
            with pytest.raises(DeadlineExceeded, match="an answer"):
                await within(0.01, actor.hang.call_one(), "an answer", on="the answerer")
            late = actor.echo.call_one(5, 1000)
            late.cancel()
            assert await actor.echo.call_one(6, 2000) == 6

    run(test)


def test_calls_without_an_event_loop_use_monarch() -> None:
    monarch.actor.unhandled_fault_hook = lambda failure: None
    processes = this_host().spawn_procs(per_host={"gpus": 1}, name="answerers")
    actor: Any = processes.spawn("answerer", Answerer)
    try:
        assert actor.echo.call_one(4).get(timeout=300) == 4
    finally:
        processes.stop().get(timeout=300)


Plan = list[tuple[int, int, bool]]
"""For each call: turns of the event loop before it, turns that it takes, and whether it is abandoned."""


@pytest.mark.core
def test_in_any_order_calls_start_in_order_and_each_gets_its_own_answer() -> None:
    calls = st.tuples(st.integers(0, 3), st.integers(0, 30), st.booleans())

    async def execute(actor: Any, plan: Plan) -> None:
        made = []
        for value, (pause, turns, abandoned) in enumerate(plan):
            for _ in range(pause):
                await asyncio.sleep(0)
            call = asyncio.ensure_future(actor.echo.call_one(value, turns))
            made.append((value, call, abandoned))
            if abandoned:
                call.cancel()
        for value, call, abandoned in made:
            if not abandoned:
                assert await call == value
        assert await actor.started.call_one() == list(range(len(plan)))

    async def test() -> None:
        async with answerers() as actor:
            loop = asyncio.get_running_loop()

            @settings(max_examples=40, deadline=None)
            @given(plan=st.lists(calls, max_size=40))
            def any_order(plan: Plan) -> None:
                result_of(asyncio.run_coroutine_threadsafe(execute(actor, plan), loop), "all answers")

            await asyncio.to_thread(any_order)

    run(test)


def test_a_loss_names_the_call_that_it_ends() -> None:
    from monarch_rl.runtime.persistent_calls import _named

    lost = _named(SupervisionError("Endpoint call pool.attend() failed, because"), "update")
    assert isinstance(lost, SupervisionError) and re.fullmatch(r"Endpoint call pool\.update\(\) failed, .*", str(lost))
    other = ValueError("no loss")
    assert _named(other, "update") is other
