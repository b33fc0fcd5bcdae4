"""Every reachable state of a small buffer, breadth first: up to 3 groups, 2 workers, lag up to 2, every window; and
with groups that are trained up to three times.

A state is a core and its surroundings: which worker runs which group, and which workers were lost. Tokens are sampled
by the oldest or the newest version that the premise allows (from the one published when the group was admitted to the
newest trained one): the lag depends on these two alone.

From every state the run also returns once to a checkpoint of it: what was begun or trained after the checkpoint is
gone then, but workers that were in progress may still submit.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from monarch_rl.buffer.core import BufferCore
from monarch_rl.buffer.ledger import STALE
from monarch_rl.episode.serialization import SerializedGroup
from tests.buffer.helpers import core, packed

GROUPS, WORKERS, LOSSES = 3, 2, 2


@dataclass(frozen=True)
class State:
    """Who runs what: ``(group, attempt)`` of each worker that has one."""

    core: BufferCore
    attempts: tuple[tuple[int, int] | None, ...] = (None,) * WORKERS
    lost: tuple[tuple[int, int], ...] = ()
    losses: int = 0
    generation: int = 0
    published_at: dict[int, int] = field(default_factory=dict)
    uses: tuple[int, ...] = (0,) * GROUPS
    """Batches that each group was trained in."""

    def key(self) -> Any:
        state = self.core.state()
        live = tuple(
            ((one[0], *one[3:7]), self.core.groups._live[one[0]].group is None)
            for one in state["live"]  # in queue order
            if self._live(one[0])
        )
        oldest = tuple((g, _oldest(one)) for g, one in self.core.groups._live.items())
        batch = self.core._batch
        taken = tuple((one.group_id, _oldest(one), one.times_trained, one.place) for one in batch[1]) if batch else ()
        counts = self.core.counts()
        totals = (counts.trained, tuple(sorted(counts.dropped.items())), tuple(self.core._unpublished.items()))
        versions = (self.core.version, self.core.published_version, tuple(sorted(self.published_at.items())))
        outside = self.attempts, self.lost, self.losses, self.generation, self.uses
        return live, oldest, taken, totals, versions, outside, tuple(self.core.groups._idle)

    def _live(self, group_id: int) -> bool:
        return group_id in self.core.groups._live


def _oldest(one: Any) -> int | None:
    return one.group.oldest_version if one.group else None


@pytest.fixture(autouse=True)
def groups_are_read_from_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_rl.buffer.groups.SerializedGroup.read", lambda group: group)


@functools.cache
def sampled_group(group_id: int, attempt: int, version: int) -> SerializedGroup:
    return packed(group_id, [version], attempt=attempt)


def clone(state: State) -> State:
    groups = [one.group for one in state.core.groups]
    groups += state.core._batch[0].groups if state.core._batch else []
    return replace(
        state,
        core=copy.deepcopy(state.core, {id(group): group for group in groups}),  # groups never change
        published_at=dict(state.published_at),
    )


def successors(state: State) -> Iterator[tuple[bool, State]]:
    """``(whether this is progress, the state after)`` for each possible event: losses and drops are not progress."""

    def with_attempt(after: State, worker: int, attempt: tuple[int, int] | None) -> State:
        return replace(after, attempts=tuple(attempt if w == worker else old for w, old in enumerate(after.attempts)))

    for worker, attempt in enumerate(state.attempts):
        if attempt is None:
            if state.core.groups.admitted < GROUPS or state.core.groups._idle:
                after = clone(state)
                ticket = after.core.admit()
                if ticket is not None:
                    after.published_at.setdefault(ticket.group_id, after.core.published_version)
                    yield True, with_attempt(after, worker, (ticket.group_id, ticket.attempt))
            continue
        for version in {state.published_at[attempt[0]], state.core.version}:
            after = clone(state)
            after.core.submit(sampled_group(*attempt, version))
            yield True, with_attempt(after, worker, None)
        after = clone(state)
        after.core.drop(attempt[0], "score raised", attempt=attempt[1])
        yield False, with_attempt(after, worker, None)
        if state.losses < LOSSES:
            after = clone(state)
            assert after.core.requeue([attempt[0]]) == [attempt[0]]
            after = replace(after, lost=(*after.lost, attempt), losses=after.losses + 1)
            yield False, with_attempt(after, worker, None)
    for attempt in state.lost:
        after = clone(state)
        assert not after.core.submit(sampled_group(*attempt, state.core.version))
        yield False, replace(after, lost=tuple(other for other in state.lost if other != attempt))
    if state.core._batch is None:
        after = clone(state)
        if after.core.take(after.core.version) is not None:
            yield True, after
    else:
        after = clone(state)
        trained = [group.group_id for group in state.core._batch[0].groups]
        after.core.trained(after.core.version + 1)
        yield True, replace(after, uses=tuple(n + (g in trained) for g, n in enumerate(state.uses)))
    for version in range(state.core.published_version + 1, state.core.version + 1):
        after = clone(state)
        after.core.published(version)
        yield True, after


def rolled_back_to(state: State) -> State:
    """The run resumes from a checkpoint of this state, whatever happened since."""
    core = BufferCore.restore(state.core.groups_per_step, state.core.settings, _as_bytes(state.core), generation=1)
    core.slots = state.core.slots
    return State(core, losses=state.losses, generation=1, published_at=state.published_at, uses=state.uses)


def _as_bytes(core: BufferCore) -> dict[str, Any]:
    """The core's state, with the groups themselves instead of their bytes, which these groups do not have."""
    groups = {one.group_id: one.group for one in core.groups} | {
        group.group_id: group for group in (core._batch[0].groups if core._batch else [])
    }
    state = core.state()
    live = [(*place, None if data is None else groups[place[0]]) for *place, data in state["live"]]
    return state | {"live": live, "slots": core.settings.slots_for(core.groups_per_step)}


def check(state: State) -> None:
    """Invariants 1 to 3, and at depth 0 the sixth."""
    buffer, counts = state.core, state.core.counts()
    if state.generation:  # of the previous generation; its versions may exist again or not
        for group_id, version in itertools.product(range(GROUPS), range(GROUPS + 1)):
            if group_id in buffer.groups._attempts or buffer.groups.get(group_id) is None:
                assert not buffer.submit(sampled_group(group_id, 0, version))
    assert STALE not in counts.dropped, "the bound did not hold by structure"
    assert max(state.uses) <= buffer.settings.replay
    assert counts.trained == sum(n > 0 for n in state.uses)
    held = counts.playing + counts.complete + counts.taken + counts.again + counts.unpublished
    assert counts.slots == held + (counts.slots_free or 0)
    ended = counts.trained + sum(counts.dropped.values())
    assert counts.admitted == ended + counts.playing + counts.complete + counts.taken
    assert counts.playing == sum(attempt is not None for attempt in state.attempts) + len(buffer.groups._idle)
    assert all(one.overtaken <= (buffer.window or 0) for one in buffer.groups)
    if buffer._batch is not None:
        lags = [
            buffer.version - version
            for g in buffer._batch[0].groups
            for e in g.episodes
            for version in e.tokens_by_version
        ]
        assert min(lags) >= 0 and max(lags) <= (buffer.settings.max_policy_lag or 0)


def explore(first: State) -> int:
    """Check every state that can be reached; returns their number."""
    seen, waiting = {first.key()}, deque([first])
    while waiting:
        state = waiting.popleft()
        check(state)
        has_progress = False
        for progress, after in successors(state):
            has_progress |= progress
            if (key := after.key()) not in seen:
                seen.add(key)
                waiting.append(after)
        if state.generation == 0 and (key := (back := rolled_back_to(state)).key()) not in seen:
            seen.add(key)
            waiting.append(back)
        if not has_progress:  # then all is done, except groups that are too few for a batch
            counts = state.core.counts()
            assert counts.admitted == GROUPS, counts
            assert counts.complete + counts.again < state.core.groups_per_step, counts
            assert counts.playing == counts.taken == counts.unpublished == 0, counts
    return len(seen)


CASES = [(k, lag, window, 1) for k in (1, 2) for lag in (0, 1, 2) for window in range(min(lag * k, GROUPS - 1) + 1)]
CASES += [(1, 1, 0, 2), (2, 1, 0, 2), (1, 2, 1, 2), (1, 2, 0, 3)]


def marked(k: int, lag: int, window: int, replay: int) -> Any:
    """A case; those with many states are slow, and those with the most are not in every run."""
    marks = [pytest.mark.slow] if (k, lag) == (2, 1) or (lag, replay) in ((2, 1), (2, 3)) else []
    if marks and (lag, replay) != (2, 1):
        marks.append(pytest.mark.core)
    return pytest.param(k, lag, window, replay, marks=marks)


@pytest.mark.parametrize(("k", "lag", "window", "replay"), [marked(*case) for case in CASES])
def test_every_state_satisfies_the_invariants_and_allows_progress(k: int, lag: int, window: int, replay: int) -> None:
    states = explore(State(core(k, lag, window=window, replay=replay)))
    print(f"{k} groups per step, lag <= {lag}, window {window}, {replay} batches per group: {states} states")
    assert states > 50


TIGHT = [(1, 0, 0, 1), (2, 0, 0, 1), (1, 1, 0, 1), (1, 1, 1, 1), (1, 1, 0, 2), (2, 1, 0, 2)]


@pytest.mark.parametrize(("k", "lag", "window", "replay"), [marked(*case) for case in TIGHT])
def test_one_slot_more_would_break_the_bound(k: int, lag: int, window: int, replay: int) -> None:
    buffer = core(k, lag, window=window, replay=replay)
    assert buffer.slots is not None
    buffer.slots += 1
    with pytest.raises(AssertionError, match="bound"):
        explore(State(buffer))
