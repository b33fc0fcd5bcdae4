"""Side streams, on a recording device."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from monarch_rl.runtime.streams import SideStream, SideThread, finish_current, finish_device, on_side_stream
from tests.patience import happened
from tests.recorded_streams import DEFAULT, Record, RecordedDevice

CPU = torch.device("cpu")


@pytest.fixture
def device() -> Iterator[RecordedDevice]:
    recorded = RecordedDevice()
    with recorded.in_place_of_cuda():
        yield recorded


def test_a_block_runs_on_its_stream_and_waits_only_for_that_stream(device: RecordedDevice) -> None:
    x, stream = torch.zeros(4), SideStream(CPU)
    with device.recording():
        x.add_(1)
        with stream.use():
            x.add_(1)
        x.add_(1)
    assert [(r.stream, r.op, r.waits_for) for r in device.records] == [
        (DEFAULT, "add_", ""),
        ("stream 1", "add_", ""),
        ("stream 1", "synchronize", "stream 1"),
        (DEFAULT, "add_", ""),
    ]


def test_a_block_that_raises_does_not_wait_for_work_that_may_never_end(device: RecordedDevice) -> None:
    with pytest.raises(RuntimeError, match="aborted"), SideStream(CPU).use():
        raise RuntimeError("aborted")
    assert not device.records and device.current == DEFAULT


def test_each_thread_has_its_own_stream(device: RecordedDevice) -> None:
    async def go() -> None:
        threads = [SideThread(name, CPU) for name in ("one", "two")]
        with device.recording():
            for side in threads * 2:
                await side.run(torch.zeros(3).add_, 1)
        for side in threads:
            side.close()

    asyncio.run(go())
    added = [(r.thread, r.stream) for r in device.records if r.op == "add_"]
    assert added == [("one_0", "stream 1"), ("two_0", "stream 2")] * 2


def test_streams_are_reused_once_they_are_idle(device: RecordedDevice) -> None:
    """Torch is asked for few streams even if threads come and go: after 32 it would share one between two threads."""
    used: list[str] = []

    async def go() -> None:
        for number in range(100):
            side = SideThread("side", CPU)
            await side.run(lambda: used.append(device.current))
            side.close()
            side.close()
            side._executor.shutdown()
            if number == 50:
                device.hangs.set()
                with on_side_stream(CPU):
                    used.append(device.current)
                device.hangs.clear()
        held, released = threading.Event(), threading.Event()
        late, last = SideThread("late", CPU), SideThread("last", CPU)

        def hold() -> None:
            used.append(device.current)
            held.set()
            happened(released, "permission to end")

        running = asyncio.ensure_future(late.run(hold))
        await asyncio.to_thread(happened, held, "the call to begin")
        late.close()
        other = SideThread("other", CPU)
        assert other.stream._stream.name != used[-1], "the running call still uses it"
        released.set()
        await running
        for side in (last, other):
            side.close()

    asyncio.run(go())
    assert set(used[:51]) == {"stream 1"} and used[51] == "stream 2"
    assert set(used[52:]) <= {"stream 1", "stream 2"}


def test_a_wait_ends_at_its_deadline_or_on_request(device: RecordedDevice) -> None:
    stream, stop = SideStream(CPU), threading.Event()
    assert stream.wait(time.monotonic(), stop)
    device.hangs.set()
    assert not stream.wait(time.monotonic() + 0.01, stop)
    threading.Timer(0.01, stop.set).start()
    assert not stream.wait(time.monotonic() + 600, stop)
    threading.Timer(0.01, device.hangs.clear).start()
    assert stream.wait(time.monotonic() + 600, threading.Event())


def test_finishing_the_current_stream_does_not_finish_the_device(device: RecordedDevice) -> None:
    finish_current(CPU)
    finish_device(CPU)
    name = threading.current_thread().name
    assert device.records == [
        Record(name, DEFAULT, "synchronize", DEFAULT),
        Record(name, DEFAULT, "synchronize", "the device"),
    ]


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    stream = SideStream(CPU)
    with stream.use():
        pass
    assert stream.wait(time.monotonic(), threading.Event())
    finish_current(CPU)
    finish_device(CPU)
