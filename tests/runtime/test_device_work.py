"""Time limits of GPU operations: against a plain reference, and operations with a limit of their own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.runtime import device_work
from monarch_rl.runtime.device_work import (
    CAPTURE_S,
    COMPILATION_S,
    FACTOR,
    FEWEST_TOKENS,
    FIRST_S,
    FLOOR_S,
    DeviceWork,
    GpuOperation,
)
from tests.patience import join, run

Operations = list[tuple[str, int, float, bool]]
"""Kind, tokens, seconds, and whether something was compiled during the operation."""
operations = st.lists(
    st.tuples(
        st.sampled_from(["a micro-batch", "an optimiser step"]),
        st.integers(0, 100_000),
        st.floats(0.0, 10_000.0),
        st.booleans(),
    ),
    max_size=20,
)


class Clock:
    """A clock that the test sets."""

    now = 1.0

    def __call__(self) -> float:
        return self.now


@given(operations)
def test_an_operation_may_take_three_times_the_longest_time_per_token_and_at_least_the_floor(
    done: Operations,
) -> None:
    clock, before = Clock(), list[tuple[str, float, bool]]()
    work = DeviceWork(clock=clock)
    for kind, tokens, seconds, compiled in done:
        work.begin(kind, tokens)
        assert work.operation is not None
        own = [(a_token, special) for other, a_token, special in before if other == kind]
        # The first operation of a kind without compilation loads kernels, and is not compared with.
        usual = [a_token for a_token, special in own if not special]
        counted = max(tokens, FEWEST_TOKENS)
        expected = max(FLOOR_S, FACTOR * max(usual[1:]) * counted) if usual[1:] else FIRST_S
        assert (work.operation.what, work.operation.since) == (f"{kind} of {tokens} tokens", clock.now)
        assert limit_of(work) == pytest.approx(expected)
        if compiled:
            work.extend("compilation", COMPILATION_S)
            assert limit_of(work) >= COMPILATION_S
        clock.now += seconds
        work.end()
        before.append((kind, seconds / counted, compiled))


def test_compilation_capture_and_saves_have_their_own_limits_and_names() -> None:
    changes: list[GpuOperation | None] = []
    clock = Clock()
    work = DeviceWork(changes.append, clock)
    work.extend("compilation", COMPILATION_S)  # no operation is in progress
    assert changes == []
    work.begin("a copy of the weights")
    clock.now = 5.0
    work.extend("compilation", COMPILATION_S)
    clock.now = 7.0
    work.extend("CUDA graph capture", CAPTURE_S)
    work.begin("a save", limit_s=4000.0)
    work.cancel()
    assert changes == [
        GpuOperation("a copy of the weights", 1.0, FIRST_S),
        GpuOperation("a copy of the weights, with compilation", 5.0, COMPILATION_S),
        GpuOperation("a copy of the weights, with CUDA graph capture", 7.0, COMPILATION_S),
        GpuOperation("a save", 7.0, 4000.0),
        None,
    ]


class Event:
    """A mark on a device; the test sets when the device passes it."""

    passed = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.passed


def test_a_passed_mark_is_a_sign_of_life() -> None:
    """Afterwards the longest time between two marks counts, not that of an operation."""
    events: list[Event] = []

    def make() -> Event:
        events.append(Event())
        return events[-1]

    clock = Clock()
    work = DeviceWork(clock=clock, make_mark=make)

    def enqueue(blocks: int) -> None:
        work.begin("a micro-batch", 1000)
        for _ in range(blocks):
            work.mark()

    def run(seconds: float) -> None:
        for event in events:
            clock.now += seconds
            event.passed = True
            assert work.operation is not None and work.operation.since == clock.now
        events.clear()

    for _ in range(3):  # 400 s each, 100 s per block
        enqueue(4)
        run(100.0)
        work.end()
    enqueue(4)
    assert work.operation is not None and work.operation.since == clock.now
    assert work.operation.limit_s == pytest.approx(FACTOR * 400.0)
    clock.now += 100.0
    events[0].passed = True
    assert work.operation.limit_s == FACTOR * 100.0 and work.operation.since == clock.now
    clock.now += 250.0
    events[2].passed = True  # out of order: no progress of the device
    assert clock.now - work.operation.since == 250.0
    events[1].passed = True
    assert work.operation.since == clock.now and work.operation.limit_s == FACTOR * 250.0
    # Marks enqueued before another operation began are passed during that operation.
    work.begin("an optimiser step")
    clock.now += 5.0
    events[3].passed = True
    assert work.operation is not None and (work.operation.since, work.operation.limit_s) == (clock.now, FIRST_S)


def test_a_failed_operation_does_not_affect_later_limits() -> None:
    clock = Clock()
    work = DeviceWork(clock=clock)
    for _ in range(3):
        work.begin("a micro-batch", 1000)
        work.end()
    work.begin("a micro-batch", 1000)
    clock.now += 1e6
    work.cancel()
    work.begin("a micro-batch", 1000)
    assert work.operation is not None and work.operation.limit_s == FLOOR_S


@pytest.fixture
def device() -> Iterator[DeviceWork]:
    device_work.use_device("cuda")
    work = device_work.work()
    assert work is not None
    yield work
    device_work.use_device("cpu")


def limit_of(work: DeviceWork) -> float:
    assert work.operation is not None
    return work.operation.limit_s


def test_a_compiler_started_by_the_thread_extends_the_limit_of_its_operation(device: DeviceWork) -> None:
    with device_work.operation("a micro-batch", 10):
        other = threading.Thread(target=lambda: subprocess.run(["true"], check=True))
        other.start()
        join(other)
        assert limit_of(device) == FIRST_S, "processes of other threads compile nothing for this operation"
        subprocess.run(["true"], check=True)
        assert limit_of(device) == COMPILATION_S
    assert device_work.operation_in_progress() is None


def test_compilation_and_capture_by_torch_extend_the_limit(device: DeviceWork) -> None:
    """By torch's callbacks: they exist, and accept our functions."""
    import torch._dynamo.callback as callback

    device_work.use_device("cuda")
    work = device_work.work()
    assert work is not None
    for trigger, what in (("CUDAGRAPH_RECORDING", "CUDA graph capture"), ("DYNAMO", "compilation")):
        compiling = callback.callback_handler.install_callbacks(callback.CallbackTrigger[trigger], "0/0")
        with device_work.operation("a micro-batch", 10), compiling:
            assert work.operation is not None and work.operation.what == f"a micro-batch of 10 tokens, with {what}"
    assert callback.callback_handler.start_callbacks.count(device_work._on_compile_start) == 1


def test_an_operation_that_raises_ends(device: DeviceWork) -> None:
    with pytest.raises(ZeroDivisionError), device_work.operation("a micro-batch", 10):
        raise ZeroDivisionError
    assert device.operation is None


def test_operations_on_a_cpu_are_not_recorded() -> None:
    device_work.use_device("cpu")
    with device_work.operation("a micro-batch", 10):
        assert device_work.work() is None and device_work.operation_in_progress() is None


def test_device_work_needs_no_torch() -> None:
    """Every process of a run imports it."""
    code = "import sys, monarch_rl.runtime.device_work; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code]).returncode == 0
