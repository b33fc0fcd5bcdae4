"""When failures end a run, and who is notified of them."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.buffer.actor import Buffer
from monarch_rl.buffer.failures import MIN_GROUPS, FailureLog, FailureReports
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.episode.failure import KINDS, Failure, shortened
from monarch_rl.simulate.handles import LocalMesh

PATIENCE_S = 30.0


class Groups:
    """Groups as the buffer sees them: admitted in order, submitted or dropped in any order."""

    def __init__(self, groups_per_step: int) -> None:
        self.log = FailureLog(groups_per_step)
        self.admitted = 0
        self.running: list[int] = []

    def admit(self, count: int = 1) -> None:
        self.running += range(self.admitted, self.admitted + count)
        self.admitted += count

    def submit(self, group_id: int) -> None:
        self.running.remove(group_id)
        self.log.note_submitted()

    def drop(self, group_id: int, reason: str, moment: float = 0.0) -> None:
        self.running.remove(group_id)
        self.log.note_dropped(group_id, reason, moment, self.admitted)

    def fail(self, reason: str, moment: float = 0.0) -> None:
        """Admit a group that is dropped before anything else happens."""
        self.admit()
        self.drop(self.running[-1], reason, moment)

    def verdict(self, moment: float = 0.0, known: int = 0) -> Failure | None:
        return self.log.news(known, moment, PATIENCE_S, self.running[0] if self.running else None).verdict


def test_a_first_batch_that_fails_for_one_reason_ends_the_run_with_that_reason() -> None:
    groups = Groups(32)
    groups.log.note(Failure("score raised KeyError", "reward.py:3", "Traceback ..."))
    for _ in range(31):
        groups.fail("score raised KeyError", 1.0)
    assert groups.verdict(1.0, known=1) is None
    groups.fail("score raised KeyError", 1.0)
    verdict = groups.verdict(1.0, known=1)
    assert verdict is not None and verdict.report == "Traceback ..."
    assert str(verdict).startswith("score raised KeyError: ") and " 32 groups" in str(verdict)


def test_different_reasons_and_failures_after_a_success_are_given_time() -> None:
    mixed, later = Groups(8), Groups(8)
    later.admit()
    later.submit(0)
    for number in range(100):
        mixed.fail(f"score raised {('KeyError', 'ValueError')[number % 3 == 0]}", 5.0)
        later.fail("score took over 10 s", 5.0)
    for groups, reason in ((mixed, "score raised KeyError"), (later, "score took over 10 s")):
        assert groups.verdict(5.0 + PATIENCE_S - 0.1) is None
        verdict = groups.verdict(5.0 + PATIENCE_S)
        assert verdict is not None and verdict.reason.startswith(f"{reason}: ") and " 30 s" in verdict.reason
    later.admit()
    later.submit(later.running[-1])
    assert later.verdict(1e6) is None


EVENTS = st.lists(st.sampled_from(["submitted", "a", "b"]), max_size=80)


@given(EVENTS, st.integers(1, 20), st.booleans())
def test_a_run_ends_only_if_a_batch_of_groups_failed_since_the_last_submission(
    events: list[str], groups_per_step: int, long_ago: bool
) -> None:
    """For groups that run one after another."""
    groups = Groups(groups_per_step)
    for event in events:
        if event == "submitted":
            groups.admit()
            groups.submit(groups.running[-1])
        else:
            groups.fail(event)
    needed = max(groups_per_step, MIN_GROUPS)
    since = events[len(events) - events[::-1].index("submitted") :] if "submitted" in events else events
    enough = len(since) >= needed
    immediate = "submitted" not in events and len(set(since[:needed])) == 1
    assert (groups.verdict(PATIENCE_S if long_ago else 0.0) is not None) == (enough and (immediate or long_ago))


def test_groups_that_fail_fast_do_not_end_a_run_while_good_ones_are_in_progress() -> None:
    """In the first step, and whenever all submitted groups have just been trained."""
    groups = Groups(8)
    groups.admit(16)
    for moment in range(1000):  # good groups take far longer than the patience
        while len(groups.running) < 16:
            groups.admit()
        for group_id in [one for one in groups.running if one % 2]:
            groups.drop(group_id, "prompt leaves no room within 5 tokens", float(moment))
        assert groups.verdict(float(moment)) is None
    groups.submit(0)
    for moment in range(1000, 2000):
        groups.fail("prompt leaves no room within 5 tokens", float(moment))
        assert groups.verdict(float(moment)) is None


def test_groups_in_progress_at_the_first_drop_are_waited_for() -> None:
    """Although those admitted before them have failed, for different reasons, for longer than the patience."""
    groups = Groups(8)
    groups.admit(10)
    for number in range(8):
        groups.drop(number, "ab"[number % 2], 10.0 * number)
        assert groups.verdict(10.0 * number) is None
    groups.drop(8, "a", 80.0)
    assert groups.verdict(80.0) is None
    groups.drop(9, "a", 90.0)
    assert groups.verdict(90.0) is not None


def test_a_group_admitted_among_failing_ones_is_waited_for() -> None:
    """Also if enough have failed before it."""
    groups = Groups(8)
    for number in range(8):
        groups.fail("ab"[number % 2])
    groups.admit()
    for moment in range(1000):
        groups.fail("a", float(moment))
        assert groups.verdict(float(moment)) is None
    groups.drop(8, "b", 1000.0)
    assert groups.verdict(1000.0) is not None


def test_a_run_of_slow_groups_that_all_fail_ends_although_some_are_always_in_progress() -> None:
    groups, moment = Groups(8), 0.0
    groups.admit()
    groups.submit(0)
    groups.admit(16)
    while groups.verdict(moment) is None:
        moment += 10.0
        assert moment <= 200.0, "16 groups of 100 s each have ended"
        groups.drop(groups.running[0], "score raised KeyError", moment)
        groups.admit()


@st.composite
def first_groups(draw: st.DrawFn) -> tuple[int, int, list[tuple[bool, int]]]:
    """Groups per step, slots, and for each group whether it is good and how long it runs."""
    groups_per_step = draw(st.integers(1, 12))
    count = max(groups_per_step, MIN_GROUPS)
    total = 3 * count
    turns = draw(st.lists(st.sampled_from([0, 1, 5, 40]), min_size=total, max_size=total))
    good = draw(st.sets(st.integers(0, total - 1), max_size=2))  # if there were many, one would soon be submitted
    return groups_per_step, draw(st.integers(1, 24)), [(number in good, turn) for number, turn in enumerate(turns)]


@given(first_groups(), st.booleans())
def test_the_first_groups_end_the_run_immediately_exactly_if_none_of_them_is_good(
    run: tuple[int, int, list[tuple[bool, int]]], all_fail: bool
) -> None:
    groups_per_step, slots, rollouts = run
    count = max(groups_per_step, MIN_GROUPS)
    if all_fail:
        rollouts[:count] = [(False, turns) for _, turns in rollouts[:count]]
    groups, ends, turn, any_submitted = Groups(groups_per_step), dict[int, int](), 0, False
    verdict = None
    while verdict is None and (groups.running or groups.admitted < len(rollouts)):
        while len(groups.running) < slots and groups.admitted < len(rollouts):
            ends[groups.admitted] = turn + rollouts[groups.admitted][1]
            groups.admit()
        for group_id in [one for one in groups.running if ends[one] <= turn]:
            if rollouts[group_id][0]:
                groups.submit(group_id)
                any_submitted = True
            else:
                groups.drop(group_id, "score raised KeyError")
            verdict = verdict or groups.verdict()
        turn += 1
    if any(good for good, _ in rollouts[:count]):
        assert verdict is None
    else:
        assert verdict is not None or any_submitted, (
            "a later group was good, and submitted before the first ones had failed"
        )


def test_each_kind_of_failure_is_reported_once_up_to_a_bound() -> None:
    log = FailureLog(8)
    for number in range(3 * KINDS):
        log.note(Failure("score raised KeyError", f"reward.py:{number // 2}", f"number {number}"))
    reported = log.news(0, 0.0, PATIENCE_S, None).failures
    assert [failure.report for failure in reported] == [f"number {2 * kind}" for kind in range(KINDS)]
    assert log.news(KINDS - 1, 0.0, PATIENCE_S, None).failures == reported[-1:]
    assert log.news(KINDS, 0.0, PATIENCE_S, None).failures == []


def test_a_call_for_failures_waits_until_there_are_new_ones() -> None:
    async def test() -> None:
        reports = LocalMesh([FailureReports(1, lambda: None)])
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


def test_the_buffer_knows_which_groups_are_still_in_progress() -> None:
    async def test() -> None:
        buffer = LocalMesh([Buffer(1, BufferSettings(max_policy_lag=8))])
        slow, *fast = await buffer.admit_many.call_one("worker", 2, PATIENCE_S)
        asking = asyncio.ensure_future(buffer.failures.call_one(0, PATIENCE_S))
        for _ in range(2 * MIN_GROUPS):
            await buffer.drop.call_one(fast[0].group_id, "score raised KeyError")
            fast = await buffer.admit_many.call_one("worker", 1, PATIENCE_S)
        await buffer.requeue.call_one("worker")
        # The group belongs to another worker now, or will soon.
        await buffer.drop.call_one(slow.group_id, "score raised KeyError", 0, slow.attempt)
        await asyncio.sleep(0)
        assert not asking.done()
        restarted = await buffer.admit.call_one("another", PATIENCE_S)
        assert restarted is not None and restarted.group_id == slow.group_id
        await buffer.drop.call_one(restarted.group_id, "score raised KeyError", 0, restarted.attempt)
        verdict = (await asking).verdict
        assert verdict is not None
        assert verdict.reason.startswith("score raised KeyError: ") and f" {MIN_GROUPS} groups" in verdict.reason

    asyncio.run(test())


def test_a_failure_reported_at_the_end_of_a_run_is_no_verdict() -> None:
    async def test() -> None:
        buffer = LocalMesh([Buffer(1, BufferSettings(max_policy_lag=8))])
        _, *fast = await buffer.admit_many.call_one("worker", 2, PATIENCE_S)
        for _ in range(2 * MIN_GROUPS):
            await buffer.drop.call_one(fast[0].group_id, "score raised KeyError")
            fast = await buffer.admit_many.call_one("worker", 1, PATIENCE_S)
        await buffer.close.call_one()
        failure = Failure("score raised KeyError")
        await buffer.note_failure.call_one(failure)
        news = await buffer.failures.call_one(0, PATIENCE_S)
        assert (news.failures, news.verdict) == ([failure], None)

    asyncio.run(test())


@given(st.text(max_size=200), st.integers(2, 100))
def test_long_texts_are_shortened_in_the_middle(text: str, characters: int) -> None:
    short = shortened(text, characters)
    if len(text) <= characters:
        assert short == text
    else:
        half = characters // 2
        assert short.startswith(text[:half]) and short.endswith(text[-half:])
        assert len(short) <= characters + len(f" [... {len(text)} characters ...] ")
