"""The timeline of a process: spans as the union of what happens at once."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.runtime import timeline, wait_registry
from monarch_rl.runtime.timeline import RING, SHORTEST_S, Kind, Span, Timeline
from tests.patience import join, wait_until

Key = tuple[str, Kind, str]
TICK = 2.0**-10
"""Seconds, about a millisecond: sums of it have no rounding errors."""


class Clock:
    """A clock that is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[Key, str, int | None, float, float]]:
    """Things that began and ended: lane, kind and awaited party, what, step, begin and end; all times differ."""
    count = draw(st.integers(1, 12))
    times = draw(st.lists(st.integers(1, 160), min_size=2 * count, max_size=2 * count, unique=True))
    history = []
    for first, second in zip(times[::2], times[1::2], strict=True):
        key: Key = ("a", "work", "") if draw(st.booleans()) else ("a", "wait", draw(st.sampled_from("bc")))
        step = draw(st.sampled_from([None, 1])) if key[1] == "work" else None
        begin, end = sorted((first * TICK, second * TICK))
        history.append((key, draw(st.sampled_from("xy")), step, begin, end))
    return history


def unions(history: list[tuple[Key, str, int | None, float, float]]) -> dict[Key, list[Span]]:
    """What is to be recorded: per key the union of its intervals, named after what began first."""
    found: dict[Key, list[Span]] = defaultdict(list)
    for key, what, step, begin, end in sorted(history, key=lambda thing: thing[3]):
        spans = found[key]
        last = spans[-1] if spans else None
        equal = last is not None and (last.what, last.step) == (what, step)
        if last is not None and (begin < last.end or (equal and begin - last.end < SHORTEST_S)):
            spans[-1] = last._replace(end=max(last.end, end))
        else:
            spans.append(Span(key[0], key[1], what, step, key[2], begin, end))
    return found


def recorded(
    history: list[tuple[Key, str, int | None, float, float]], takes: list[tuple[int, float]]
) -> dict[Key, list[Span]]:
    """The spans of a timeline whose spans are taken at some ticks, cut at some length, and in the end."""
    clock, spans = Clock(), list[Span]()
    own = Timeline(clock)
    events: list[tuple[float, int, int]] = [(at * TICK, 2, number) for number, (at, _) in enumerate(takes)]
    for number, (_, _, _, begin, end) in enumerate(history):
        events += [(begin, 0, number), (end, 1, number)]
    for at, event, number in sorted(events):
        clock.now = at
        if event == 2:
            spans += own.take(takes[number][1])[0]
            continue
        (lane, kind, on), what, step, *_ = history[number]
        if event == 0:
            own.begin(lane, kind, what, on, step)
        else:
            own.end(lane, kind, on)
    clock.now += 1
    last, dropped = own.take()
    assert not dropped and not own._current, "nothing is under way"
    found: dict[Key, list[Span]] = defaultdict(list)
    for span in spans + last:
        found[span.lane, span.kind, span.on].append(span)
    return found


@settings(max_examples=150, deadline=None)
@given(histories(), st.lists(st.tuples(st.integers(0, 160), st.just(math.inf)), max_size=4))
def test_what_happens_at_once_is_one_span(
    history: list[tuple[Key, str, int | None, float, float]], takes: list[tuple[int, float]]
) -> None:
    """However often the spans are taken."""
    expected = {
        key: long
        for key, spans in unions(history).items()
        if (long := [span for span in spans if span.end - span.begin >= SHORTEST_S or span.step is not None])
    }
    assert recorded(history, takes) == expected


@settings(max_examples=100, deadline=None)
@given(histories(), st.lists(st.tuples(st.integers(0, 160), st.sampled_from([0.0, 20 * TICK])), max_size=5))
def test_a_span_that_lasts_is_recorded_in_parts(
    history: list[tuple[Key, str, int | None, float, float]], takes: list[tuple[int, float]]
) -> None:
    found = recorded(history, takes)
    for key, wholes in unions(history).items():
        parts = found.pop(key, [])
        assert all(first.end <= second.begin for first, second in pairwise(parts))
        for part in parts:
            assert any(whole.begin <= part.begin and part.end <= whole.end for whole in wholes)
        missing_s = sum(whole.end - whole.begin for whole in wholes) - sum(part.end - part.begin for part in parts)
        assert missing_s <= SHORTEST_S * (len(wholes) + 3 * len(takes)), "only short ones are left out"
    assert not found


def test_spans_that_nobody_takes_are_bounded_and_counted() -> None:
    clock = Clock()
    own = Timeline(clock)
    for number in range(RING + 10):
        with own.span("update", "trainer rank 0", number):
            clock.now += 1
        clock.now += 1
    assert len(own._events) < RING
    spans, dropped = own.take()
    assert [span.step for span in spans] == list(range(10, RING + 10)) and dropped == 10
    assert own.take() == ([], 0)


def test_threads_may_record_the_same_wait() -> None:
    own = Timeline()

    def record() -> None:
        for _ in range(2000):
            own.begin("a", "wait", "x", "b")
            own.end("a", "wait", "b")

    threads = [threading.Thread(target=record) for _ in range(3)]
    for thread in threads:
        thread.start()
    spans = []
    while any(thread.is_alive() for thread in threads):
        spans += own.take(cut_s=0.0)[0]
    for thread in threads:
        join(thread)
    spans += own.take(cut_s=0.0)[0]
    assert not own._events and not any(current.count for current in own._current.values())
    assert all(first.end <= second.begin for first, second in pairwise(spans))


def test_a_wait_of_the_registry_is_in_the_timeline() -> None:
    on = "a party of this test"

    def taken() -> list[Span]:
        return [span for span in timeline.take(cut_s=0.0)[0] if span.on == on]

    with wait_registry.waiting("the batch of step 3", on):
        (span, *_) = wait_until(taken, "a span of the wait")
    assert (span.lane, span.kind, span.what) == (wait_registry.current_name(), "wait", "the batch of step 3")
