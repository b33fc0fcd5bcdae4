"""When a run does nothing but fail, and who is told of what failed."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.buffer.failures import MIN_GROUPS, FailureLog, FailureReports
from monarch_rl.episode.failure import KINDS, Failure, shortened
from monarch_rl.simulate.handles import LocalMesh

PATIENCE_S = 30.0


def test_the_first_batch_all_for_one_reason_is_the_end_and_the_reason_comes_first() -> None:
    log = FailureLog(32)
    log.note(Failure("score raised KeyError", "reward.py:3", "Traceback ..."))
    for _ in range(31):
        log.note_dropped("score raised KeyError", 1.0)
    assert log.news(1, 1.0, PATIENCE_S).verdict is None
    log.note_dropped("score raised KeyError", 1.0)
    verdict = log.news(1, 1.0, PATIENCE_S).verdict
    assert verdict is not None and verdict.report == "Traceback ..."
    assert str(verdict).startswith("score raised KeyError: all of the first 32 groups were dropped")


def test_several_reasons_and_failures_after_a_success_are_given_time() -> None:
    mixed, later = FailureLog(8), FailureLog(8)
    later.note_put()
    for number in range(100):
        mixed.note_dropped(f"score raised {('KeyError', 'ValueError')[number % 3 == 0]}", 5.0)
        later.note_dropped("score took over 10 s", 5.0)
    for log, reason in ((mixed, "score raised KeyError"), (later, "score took over 10 s")):
        assert log.news(0, 5.0 + PATIENCE_S - 0.1, PATIENCE_S).verdict is None
        verdict = log.news(0, 5.0 + PATIENCE_S, PATIENCE_S).verdict
        assert verdict is not None and verdict.reason.startswith(f"{reason}: for 30 s only groups were dropped")
    later.note_put()
    assert later.news(0, 1e6, PATIENCE_S).verdict is None


EVENTS = st.lists(st.sampled_from(["put", "a", "b"]), max_size=80)


@given(EVENTS, st.integers(1, 20), st.booleans())
def test_it_is_the_end_only_if_a_batchs_worth_failed_since_a_group_was_put(
    events: list[str], groups_per_step: int, long_ago: bool
) -> None:
    log = FailureLog(groups_per_step)
    for event in events:
        if event == "put":
            log.note_put()
        else:
            log.note_dropped(event, 0.0)
    since = events[len(events) - events[::-1].index("put") :] if "put" in events else events
    enough = len(since) >= max(groups_per_step, MIN_GROUPS)
    at_once = "put" not in events and len(set(since)) == 1
    moment = PATIENCE_S if long_ago else 0.0
    assert (log.news(0, moment, PATIENCE_S).verdict is not None) == (enough and (at_once or long_ago))


def test_each_kind_is_told_once_up_to_a_bound() -> None:
    log = FailureLog(8)
    for number in range(3 * KINDS):
        log.note(Failure("score raised KeyError", f"reward.py:{number // 2}", f"number {number}"))
    told = log.news(0, 0.0, PATIENCE_S).failures
    assert [failure.report for failure in told] == [f"number {2 * kind}" for kind in range(KINDS)]
    assert log.news(KINDS - 1, 0.0, PATIENCE_S).failures == told[-1:]
    assert log.news(KINDS, 0.0, PATIENCE_S).failures == []


def test_who_asks_waits_for_news() -> None:
    async def test() -> None:
        reports = LocalMesh([FailureReports(1)])
        asking = asyncio.ensure_future(reports.failures.call_one(0, PATIENCE_S))
        await asyncio.sleep(0)
        assert not asking.done()
        failure = Failure("score raised KeyError")
        await reports.note_failure.call_one(failure)
        assert (await asking).failures == [failure]
        asking = asyncio.ensure_future(reports.failures.call_one(1, PATIENCE_S))
        await asyncio.sleep(0)
        assert not asking.done()

    asyncio.run(test())


@given(st.text(max_size=200), st.integers(2, 100))
def test_long_texts_lose_their_middle(text: str, characters: int) -> None:
    short = shortened(text, characters)
    if len(text) <= characters:
        assert short == text
    else:
        half = characters // 2
        assert short.startswith(text[:half]) and short.endswith(text[-half:])
        assert len(short) <= characters + len(f" [... {len(text)} characters ...] ")
