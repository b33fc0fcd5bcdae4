"""What a worker records of its episodes."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.episode.episode import Group
from monarch_rl.episode.failure import KINDS
from monarch_rl.episode.logged import LoggedGroups
from monarch_rl.episode.sampling import Sampling
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.messages import ToolCall, assistant
from monarch_rl.rollout import record as module
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.play import EpisodeRunner
from monarch_rl.rollout.record import EpisodeRecord, KindLimit, PendingLines
from monarch_rl.rollout.run_tools import run_tools
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.tasks.task import Policy, Task
from tests.rollout.test_transcripts import Ids, sampled_episode

TEMPLATE: Any = Ids()
LOGGED = LoggedGroups(1, 20, seed=1)


def rows_of(record: EpisodeRecord) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.take().lines]


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(0, 100))
def test_lines_within_the_bound_are_held_and_others_counted(sizes: list[int], most: int) -> None:
    pending, held, lost = PendingLines(most), list[str](), 0
    for place, size in enumerate(sizes):
        if place % 7 == 6:
            assert pending.take() == (held, lost)
            held, lost = [], 0
        line = "x" * size
        pending.add(line)
        if sum(map(len, held)) + size <= most:
            held.append(line)
        else:
            lost += 1
    assert pending.take() == (held, lost) and pending.take() == ([], 0)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, KINDS + 3)), max_size=60))
def test_a_kind_never_exceeds_its_limit_in_an_interval(events: list[tuple[float, int]]) -> None:
    moment, accepted = 0.0, list[tuple[float, int]]()
    limit = KindLimit(3, 60.0, lambda: moment)
    seen = set[int]()
    for wait, kind in events:
        moment += wait
        first = kind not in seen and len(seen) < KINDS
        seen.add(kind)
        if limit.accepts(kind):
            accepted.append((moment, kind))
        else:
            assert not first, "the first of a kind is recorded"
    for kind in seen:
        times = [at for at, of in accepted if of == kind]
        # An interval begins with an event, so any 60 s overlap at most two of them.
        assert all(sum(begin <= at < begin + 60 for at in times) <= 6 for begin in times)


def test_dropped_groups_and_failures_are_recorded_up_to_a_limit_and_all_of_logged_groups() -> None:
    assert {group_id % 2 for group_id in range(40) if group_id in LOGGED} == {0, 1}

    async def test() -> None:
        record, dropped = EpisodeRecord("worker", TEMPLATE, LOGGED), dict[str, set[int]]()
        logged = [group_id for group_id in range(40) if group_id in LOGGED]
        for group_id in range(40):
            group = Group(group_id, group_id, [sampled_episode(), sampled_episode()], task="sums")
            await record.add_failed(EpisodeFailed("no"), 2, group_id, 0, "sums", group_id, {"n": group_id})
            await record.add_group(group, {"n": group_id}, "too easy" if group_id % 2 else "")
        taken = record.take()
        for row in map(json.loads, taken.lines):
            dropped.setdefault(row["kind"], set()).add(row["group"])
            if "item" in row:
                assert row["item"] == {"n": row["group"]}
            assert {"text_ends" in turn for turn in row["turns"]} <= {row["kind"] == "train"}
        others = [group_id for group_id in range(40) if group_id not in logged]
        odd = [group_id for group_id in others if group_id % 2]
        assert dropped["failed"] == {*logged, *others[: module.PER_KIND]}
        assert dropped["dropped"] == {*(one for one in logged if one % 2), *odd[: module.PER_KIND]}
        assert dropped.get("train", set()) == {one for one in logged if one % 2 == 0}
        assert taken.skipped == len(others) - module.PER_KIND + 2 * (len(odd) - module.PER_KIND)
        with_item = [row["group"] for row in map(json.loads, taken.lines) if "item" in row]
        assert len(with_item) == len(set(with_item)) == len(set().union(*dropped.values()))
        assert taken.cpu_s > 0 and record.take() == ([], 0, 0, 0.0)

    run_virtual(test())


def test_an_episode_that_cannot_be_recorded_is_counted_and_costs_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        record = EpisodeRecord("worker", TEMPLATE, LoggedGroups(0, 1))
        episodes = [sampled_episode(), sampled_episode()]
        episodes[1].info["itself"] = episodes[1].info  # as a stage may set it
        for _ in range(2):
            await record.add_group(Group(0, 0, episodes, task="sums"), None, "too easy")
        taken = record.take()
        assert (taken.lost, taken.lines) == (4, [])

    run_virtual(test())
    assert len([one for one in caplog.records if "worker cannot record" in one.getMessage()]) == 1


def test_values_of_keys_in_the_environment_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "correct horse")

    async def test() -> None:
        record = EpisodeRecord("worker", TEMPLATE, LoggedGroups(0, 1))
        episodes = [sampled_episode()]
        episodes[0].info["printed"] = "JUDGE_API_KEY=correct horse"
        await record.add_group(Group(0, 0, episodes, task="sums"), {"seen": "correct horse"}, "too easy")
        (row,) = map(json.loads, record.take().lines)
        assert row["info"]["printed"] == f"JUDGE_API_KEY={'*' * 13}" and row["item"] == {"seen": "*" * 13}

    asyncio.run(test())


def test_lines_that_a_thread_makes_are_added_by_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise those of two groups, and of the controller's call, could be lost or counted twice."""
    changed, decoded = set[int](), set[int]()

    class Changes:
        def __setattr__(self, name: str, value: object) -> None:
            changed.add(threading.get_ident())
            super().__setattr__(name, value)

    class Watched(Changes, EpisodeRecord):
        pass

    class WatchedLines(Changes, PendingLines):
        pass

    class Watching(Ids):
        def decode(self, token_ids: list[int]) -> str:
            decoded.add(threading.get_ident())
            return super().decode(token_ids)

    monkeypatch.setattr(module, "PendingLines", WatchedLines)
    monkeypatch.setattr(module, "INLINE_TOKENS", 0)

    async def test() -> None:
        template: Any = Watching()
        record = Watched("worker", template, LoggedGroups(1, 1))
        await asyncio.gather(*(record.add_group(Group(n, n, [sampled_episode()], task="sums"), n) for n in range(20)))
        taken = record.take()
        assert {row["item"] for row in map(json.loads, taken.lines)} == set(range(20)) and taken.cpu_s > 0

    asyncio.run(test())
    assert changed == {threading.get_ident()} and decoded and threading.get_ident() not in decoded


@pytest.mark.parametrize("inline", [True, False])
def test_held_out_episodes_have_their_set_sample_and_versions(inline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INLINE_TOKENS", module.INLINE_TOKENS if inline else 0)

    async def test() -> list[dict[str, Any]]:
        record = EpisodeRecord("worker", TEMPLATE, LoggedGroups(0, 1))
        await record.add_held_out([sampled_episode()], "easy", 0, "sums", 3, {"n": 3})
        await record.add_held_out([sampled_episode()], "easy", 1, "sums", 3, {"n": 3})
        await record.add_held_out(EpisodeFailed("no", "a.py:1", "Traceback"), "easy", 2, "sums", 3, {"n": 3})
        await record.add_group(Group(0, 0, [sampled_episode()]), {})
        return rows_of(record)

    first, second, failed = asyncio.run(test())
    assert (first["kind"], first["group"], first["held_out"], first["version"]) == ("held_out", -4, "easy", [5, 7])
    assert first["item"] == {"n": 3} and "item" not in second and second["sample"] == second["rollout"] == 1
    assert (failed["kind"], failed["group"], failed["sample"]) == ("failed", -4, 2)
    assert failed["failure"] == {
        "reason": "no",
        "place": "a.py:1",
        "report": "Traceback",
        "infrastructure": False,
    }


def test_seconds_in_tools_are_counted_also_of_an_episode_that_fails(model: str) -> None:
    """In virtual time; the traceback of the episode's code is recorded."""

    async def wait() -> str:
        """Wait."""
        await asyncio.sleep(7.0)
        return "done"

    async def episode(item: Any, policy: Policy) -> float:
        await run_tools([ToolCall("wait", {}, "a"), ToolCall("wait", {}, "b")], [wait])
        raise KeyError(assistant("gone").content)

    async def test() -> list[dict[str, Any]]:
        template, generator = ChatTemplate(model), Any
        runner = EpisodeRunner(generator, template, RolloutSettings())  # type: ignore[arg-type]
        record = EpisodeRecord("worker", template, LoggedGroups(1, 1))
        with pytest.raises(EpisodeFailed) as raised:
            await runner.play(Task(lambda cursor: cursor, episode), 5, {"n": 5}, Sampling(), 2)
        await record.add_failed(raised.value, 1, 2, 0, "task", 5, {"n": 5})
        return rows_of(record)

    (row,) = run_virtual(test())
    assert row["tool_s"] == 7.0 and row["score_s"] == row["generate_s"] == 0.0
    assert row["failure"]["reason"] == "episode raised KeyError" and __file__ in row["failure"]["place"]
    assert "raise KeyError(assistant" in row["failure"]["report"]
    assert (row["group"], row["attempt"], row["episode"], row["item"]) == (2, 0, 1, {"n": 5})
