"""Rollout workers on a real mesh with a real buffer; only the generators are a stand-in."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pytest
from monarch.actor import ActorError, this_host

from monarch_rl.buffer.actor import Buffer
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.buffer.shards import ShardPlan
from monarch_rl.episode.episode import Group
from monarch_rl.episode.failure import Failure
from monarch_rl.episode.logged import LoggedGroups
from monarch_rl.episode.shard import PackedShard
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.rollout.evaluation import EvaluationPlan
from monarch_rl.rollout.policy import episode_seed
from monarch_rl.rollout.scoring import PRELOAD
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.stages import DropGroup, Stage
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.forking.fork_client import ADDRESS_VARIABLE
from monarch_rl.runtime.forking.fork_server import Preload, start_server
from monarch_rl.tasks.mixture import Mixture
from monarch_rl.tasks.reasoning_gym import TaskSource
from monarch_rl.tasks.task import Task
from tests.patience import LIMIT_S, exit_code, patiently
from tests.rollout import helpers, scores
from tests.rollout.helpers import (
    BRANCHING,
    BROKEN,
    SUMS,
    SUMS_TASK,
    TOUCHY,
    UNCOMPARED,
    WORDS,
    Handle,
    StandInGenerator,
    Worker,
)
from tests.rollout.test_scoring import wait_until_dead

WAIT_S = LIMIT_S


@dataclass
class System:
    buffer: Buffer
    generator: StandInGenerator
    workers: RolloutWorker


@dataclass
class Processes:
    shared: Any
    rollout: Any


@pytest.fixture(scope="module")
def fork_server() -> Iterator[None]:
    """As in a run, it forks the scoring processes, which would otherwise each import their data set."""
    name = f"monarch_rl-tests-{uuid.uuid4().hex}"
    server = start_server(name, [Preload(PRELOAD, ("reasoning_gym.factory", "monarch_rl.rollout.scoring"))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS_VARIABLE, name)
        yield
    assert server.stdin is not None
    server.stdin.close()
    exit_code(server)


@pytest.fixture(scope="module")
def processes(fork_server: None) -> Iterator[Processes]:
    """Two rollout processes and one for buffer and generator, for all tests: starting them takes seconds."""
    host = this_host()
    made = Processes(
        host.spawn_procs(per_host={"p": 1}, name="shared"), host.spawn_procs(per_host={"worker": 2}, name="rollout")
    )
    yield made
    made.rollout.stop().get(timeout=300)
    made.shared.stop().get(timeout=300)


@asynccontextmanager
async def system(
    processes: Processes,
    model: str,
    settings: RolloutSettings,
    task: Task = SUMS_TASK,
    max_policy_lag: int = 1,
    stages: Sequence[Stage] = (),
) -> AsyncIterator[System]:
    buffer = processes.shared.spawn("buffer", Buffer, 2, BufferSettings(max_policy_lag, window=0))
    generator = processes.shared.spawn("generator", StandInGenerator, ChatTemplate(model).stop_token_ids[0])
    mesh = processes.rollout.slice(worker=slice(0, settings.workers))
    workers = mesh.spawn(
        "workers", RolloutWorker, settings, ByValue(task), model, "", False, ByValue(stages), LoggedGroups(1, 2)
    )
    await within(WAIT_S, workers.setup.call(buffer, Handle(generator)), "the workers to set up")
    try:
        yield System(buffer, generator, workers)
    finally:
        await within(WAIT_S, workers.close.call(), "the workers to close")


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await patiently(test(), "the test", 500)

    asyncio.run(bounded())


async def take(system: System, version: int) -> PackedShard:
    """One step of a trainer that trains nothing."""
    shard = await system.buffer.take.call_one(version, 0, ShardPlan(1, 10_000), WAIT_S)
    await system.buffer.trained.call_one(version + 1)
    await system.generator.serve.call_one(version + 1)
    await system.buffer.published.call_one(version + 1)
    return shard


@pytest.mark.core
def test_groups_go_from_the_task_to_the_trainer(processes: Processes, model: str) -> None:
    settings = RolloutSettings(workers=2, concurrent_groups=3, group_size=4, seed=11)

    async def test() -> None:
        async with system(processes, model, settings) as s:
            running = asyncio.ensure_future(s.workers.run.call())
            shards = [await take(s, version) for version in range(4)]
            counts = await s.buffer.close.call_one()
            await within(WAIT_S, running, "the workers to hear of the end")
            assert counts.trained == 8 and not set(counts.dropped) - {"run ended"}
            source, template = TaskSource(SUMS), ChatTemplate(model)
            for version, shard in enumerate(shards):
                assert [len(rewards) for rewards in shard.rewards] == [4, 4]
                assert shard.tasks == [SUMS.name] * 2
                for (g, e, _), episode in zip(chain(*shard.places), chain(*shard.deserialize()), strict=True):
                    group_id = 2 * version + g
                    item = source.item(group_id)
                    text = template.plain(episode.token_ids.tolist())
                    answer = text.removeprefix(item.prompt)
                    assert text.startswith(item.prompt)
                    assert answer == str((episode_seed(11, group_id, e) or 0) % 10)  # in order, with these seeds
                    assert (episode.reward == 1.0) == (answer == item.answer)
                    assert (episode.parts["score"] == 1.0) == (answer == item.answer)
                    assert episode.policy_versions[episode.trainable].min() >= version - 1
            stats = list((await s.workers.stats.call()).values())
            assert {row.worker for row in stats} == {"rollout worker 0", "rollout worker 1"}
            assert sum(row.groups_put for row in stats) >= 8 and all(not row.failed for row in stats)
            assert sum(row.episodes for row in stats) * 2 == sum(row.tokens for row in stats)
            await check_rows(s, shards, template)

    run(test)


async def check_rows(system: System, shards: Sequence[PackedShard], template: ChatTemplate) -> None:
    """Workers have recorded the trained episodes of logged groups, each once and with all its tokens."""
    logged, source = LoggedGroups(1, 2), TaskSource(SUMS)
    rows = [
        json.loads(line) for of_worker in (await system.workers.take_rows.call()).values() for line in of_worker.lines
    ]
    trained = {shard.group_ids[g][0]: (g, shard) for shard in shards for g in range(2)}
    places = [(row["group"], row["episode"]) for row in rows if row["group"] in trained]
    assert sorted(places) == [
        (group_id, place) for group_id in sorted(trained) if group_id in logged for place in range(4)
    ]
    assert len(places) == len(shards) * 4 and all(row["group"] in logged for row in rows)
    for row in rows:
        user, assistant = row["messages"]
        item = source.item(row["task_index"])
        assert (row["kind"], row["attempt"], row["task"]) == ("train", 0, SUMS.name)
        assert ("item" in row) == (row["episode"] == 0)
        assert user == {"role": "user", "content": item.prompt}
        assert row.get("item", {"prompt": item.prompt})["prompt"] == item.prompt
        (turn,) = row["turns"]
        assert turn["read"] == row["prompt"] and turn["sampled"] == assistant["content"] + helpers.END
        assert template.plain(template.tokenizer.encode(row["prompt"])) == item.prompt
        assert sum(tokens for _, tokens in row["versions"]) == row["tokens"] == turn["tokens"] == 2
        assert row["worker"].startswith("rollout worker ") and row["began"] <= row["ended"]
        assert row["score_s"] > 0 == row["tool_s"]
        ids, ends = unpacked(turn["ids"], "<i4"), unpacked(turn["text_ends"], "<u4")
        assert template.decode(ids) == turn["sampled"] and ends == [1, 1 + len(helpers.END)]
        assert unpacked(turn["logprobs"], "<f4") == [-1.0, -1.0]
        assert sorted(unpacked(turn["token_versions"], "<i4")) == [v for v, n in row["versions"] for _ in range(n)]
        if row["group"] in trained:
            g, shard = trained[row["group"]]
            assert row["reward"] == shard.rewards[g][row["episode"]]
    again = await system.workers.take_rows.call()
    assert not any(one.lines for one in again.values()), "rows are handed over once"


def unpacked(text: str, dtype: str) -> list[Any]:
    found: list[Any] = np.frombuffer(base64.b64decode(text), dtype).tolist()
    return found


@pytest.mark.core
def test_scores_that_raise_or_hang_or_crash_fail_only_their_episode(processes: Processes, model: str) -> None:
    settings = RolloutSettings(concurrent_groups=1, group_size=10, score_deadline_s=3.0, scorer_processes=2)

    async def test() -> None:
        async with system(processes, model, settings, TOUCHY) as s:
            running = asyncio.ensure_future(s.workers.run.call())
            shard = await take(s, 0)  # the stand-in's digits are 1, 2, ..., 9, 0 in each group
            assert [sorted(rewards.tolist()) for rewards in shard.rewards] == [[4, 5, 6, 7, 8, 9]] * 2
            stats = await s.workers.stats.call_one()
            every_group = {
                "score raised KeyError",
                "score took over 3 s",
                "score ended its process",
                "score raised SystemExit",
            }
            assert stats.failed_tokens == 2 * sum(stats.failed.values())  # a digit and the end
            assert set(stats.failed) == every_group and sum(stats.failed.values()) >= 2 * len(every_group), stats.failed
            failures: list[Failure] = []
            while {failure.reason for failure in failures} != every_group:  # the buffer reports each kind once
                failures += (await s.buffer.failures.call_one(len(failures), WAIT_S)).failures
            assert len({failure.kind for failure in failures}) == len(failures)
            (raised,) = [failure for failure in failures if failure.reason == "score raised KeyError"]
            assert "Traceback (most recent call last):" in raised.report and scores.__file__ in raised.place
            assert "Item 0, prompt: " in raised.report and raised.report.endswith("Answer: '0'")
            rows = [json.loads(line) for line in (await s.workers.take_rows.call_one()).lines]
            failed = [row for row in rows if row["kind"] == "failed"]
            assert {row["failure"]["reason"] for row in failed} == every_group
            assert {(row["turns"][0]["sampled"][:1], row["finish_reason"]) for row in failed} <= {
                (digit, "failed") for digit in "0123"
            }
            found = [row["failure"] for row in failed if row["failure"]["reason"] == raised.reason]
            assert "Traceback (most recent call last):" in found[0]["report"] and found[0]["place"] == raised.place
            assert [row["item"]["prompt"] for row in failed if "item" in row][:1] == [TaskSource(SUMS).item(0).prompt]
            await s.buffer.close.call_one()
            await within(WAIT_S, running, "the worker to hear of the end")

    run(test)


async def _judge(item: Any, group: Group) -> None:
    """Group 0 hangs, group 1 raises, group 2 is dropped."""
    if group.group_id == 0:
        await asyncio.Event().wait()
    if group.group_id == 1:
        raise KeyError(item.answer)
    if group.group_id == 2:
        raise DropGroup("too easy")
    for episode in group.episodes:
        episode.reward += 10
        episode.fill_column("judge", episode.token_ids)


@pytest.mark.core
def test_stages_run_beside_rollouts_and_drop_only_their_group(processes: Processes, model: str) -> None:
    """One group runs at a time, and the first one stays in the stage: the others are rolled out, judged and trained.
    Its slot stays taken until the deadline of the stage."""
    settings = RolloutSettings(concurrent_groups=1, group_size=2)
    stage = Stage(_judge, fills=("judge",), concurrency=2, deadline_s=3.0, name="judge")

    async def test() -> None:
        async with system(processes, model, settings, max_policy_lag=2, stages=[stage]) as s:
            running = asyncio.ensure_future(s.workers.run.call())
            failures: list[Failure] = []
            while len(failures) < 2:
                failures += (await s.buffer.failures.call_one(len(failures), WAIT_S)).failures
            reasons = [failure.reason for failure in failures]
            assert reasons == ["stage judge raised KeyError", "stage judge took over 3 s"]
            assert all("_judge" in failure.report and __file__ in failure.place for failure in failures)
            shard = await take(s, 0)
            counts = await s.buffer.counts.call_one()
            assert counts.dropped == {
                "stage judge raised KeyError": 1,
                "stage judge: too easy": 1,
                "stage judge took over 3 s": 1,
            }
            assert counts.wasted_tokens == dict.fromkeys(counts.dropped, 4)  # two digits, two ends
            rows = [json.loads(line) for line in (await s.workers.take_rows.call_one()).lines]
            dropped = {row["group"]: row["dropped"] for row in rows if row["kind"] == "dropped"}
            assert dropped == {
                0: "stage judge took over 3 s",
                1: "stage judge raised KeyError",
                2: "stage judge: too easy",
            }
            assert min(rewards.min() for rewards in shard.rewards) >= 10
            assert shard.column_names == ("judge",)
            for episode in chain(*shard.deserialize()):
                assert episode.column("judge").tolist() == np.where(episode.trainable, episode.token_ids, 0).tolist()
            stats = await s.workers.stats.call_one()
            spent = stats.stages["judge"]
            assert spent.groups >= 5 and spent.seconds >= 3.0
            await s.buffer.close.call_one()
            await within(WAIT_S, running, "the worker to hear of the end")

    run(test)


@pytest.mark.core
def test_a_group_without_enough_episodes_is_dropped_and_its_slot_returns(processes: Processes, model: str) -> None:
    def digits(seed: int, group_id: int) -> list[int]:
        return [(episode_seed(seed, group_id, e) or 0) % 10 for e in range(2)]

    seed = next(s for s in range(100_000) if digits(s, 0) == [0, 0] and all(min(digits(s, g)) > 3 for g in (1, 2)))
    settings = RolloutSettings(concurrent_groups=2, group_size=2, seed=seed)

    async def test() -> None:
        async with system(processes, model, settings, TOUCHY, max_policy_lag=0) as s:
            running = asyncio.ensure_future(s.workers.run.call())
            shard = await s.buffer.take.call_one(0, 0, ShardPlan(1, 10_000), WAIT_S)
            assert [rewards.tolist() for rewards in shard.rewards] == [digits(seed, 1), digits(seed, 2)]
            counts = await s.buffer.counts.call_one()
            assert counts.dropped == {"score raised KeyError": 1}
            assert (await s.workers.stats.call_one()).groups_dropped == 1
            await s.buffer.close.call_one()
            await within(WAIT_S, running, "the worker to hear of the end")

    run(test)


@pytest.mark.core
def test_broken_episodes_drop_their_group_and_are_reported_at_once(processes: Processes, model: str) -> None:
    settings = RolloutSettings(concurrent_groups=4, group_size=2)

    async def test() -> None:
        async with system(processes, model, settings, BROKEN) as s:
            running = asyncio.ensure_future(s.workers.run.call())
            news = await within(WAIT_S, s.buffer.failures.call_one(0, WAIT_S), "the first failure")
            reason = "episode raised FileNotFoundError"
            assert [failure.reason for failure in news.failures] == [reason]
            assert 'No such file or directory: "/no such tool"' in news.failures[0].report.replace("'", '"')
            news = await within(WAIT_S, s.buffer.failures.call_one(1, WAIT_S), "the verdict")
            assert news.verdict is not None and news.verdict.reason.startswith(f"{reason}: ")
            assert news.verdict.place.startswith(f"{helpers.__file__}:")
            assert not running.done()
            evaluation = await s.workers.evaluate.call_one([0, 1])
            assert evaluation.failed == {reason: 2} and evaluation.first[reason].place == news.verdict.place
            await s.buffer.close.call_one()
            await within(WAIT_S, running, "the worker to hear of the end")

    run(test)


@pytest.mark.core
def test_each_task_of_a_mixture_runs_its_items_and_compares_its_groups(processes: Processes, model: str) -> None:
    settings = RolloutSettings(concurrent_groups=2, group_size=4, seed=3)
    mixture = Mixture({WORDS: 1, SUMS_TASK: 1})

    async def test() -> None:
        async with system(processes, model, settings, mixture) as s:
            running = asyncio.ensure_future(s.workers.run.call())
            shards = [await take(s, version) for version in range(4)]
            tasks = [task for shard in shards for task in shard.tasks]
            assert tasks == [mixture.owner_of(mixture.items(cursor))[0].name for cursor in range(8)]
            assert set(tasks) == {"words", SUMS.name}
            rewards = [of_group.tolist() for shard in shards for of_group in shard.rewards]
            turns = [of_group for shard in shards for of_group in shard.turn_rewards]
            digits = [[parts.get("digit") for parts in of_group] for shard in shards for of_group in shard.parts]
            for task, of_group, of_turns, answered in zip(tasks, rewards, turns, digits, strict=True):
                if task == "words":
                    assert sorted(of_group) == [0.0, 1.0, 2.0, 3.0]  # the rank of each episode in its group
                    assert of_turns == [[pytest.approx(digit / 10)] for digit in answered if digit is not None]
                else:
                    assert of_turns == [[None]] * 4
            evaluation = await s.workers.evaluate.call_one(list(range(6)))
            assert {item.task for item in evaluation.items} == {"words", SUMS.name}
            by_task = {name for name in evaluation.metrics() if name.startswith("held_out/words/")}
            assert by_task >= {f"held_out/words/{metric}" for metric in ("reward", "failed", "digit")}
            # Only one of the tasks has a success_reward.
            accuracies = {name for name in evaluation.metrics() if name.endswith("/accuracy")}
            assert accuracies == {f"held_out/{SUMS.name}/accuracy"}
            await s.buffer.close.call_one()
            await within(WAIT_S, running, "the worker to hear of the end")

    run(test)


@pytest.mark.core
def test_groups_whose_rewards_fail_are_dropped_and_reported_at_once(processes: Processes, model: str) -> None:
    async def test() -> None:
        async with system(processes, model, RolloutSettings(concurrent_groups=2, group_size=2), UNCOMPARED) as s:
            running = asyncio.ensure_future(s.workers.run.call())
            news = await within(WAIT_S, s.buffer.failures.call_one(0, WAIT_S), "the first failure")
            assert [failure.reason for failure in news.failures] == ["group rewards raised KeyError"]
            report = news.failures[0].report  # of one of the two concurrent groups
            assert "Traceback" in report and ("Item 0" in report or "Item 1" in report)
            news = await within(WAIT_S, s.buffer.failures.call_one(1, WAIT_S), "the verdict")
            assert news.verdict is not None and helpers.__file__ in news.verdict.place
            stats = await s.workers.stats.call_one()
            assert stats.failed["group rewards raised KeyError"] >= 2 and stats.groups_dropped >= 1
            await s.buffer.close.call_one()
            await within(WAIT_S, running, "the worker to hear of the end")

    run(test)


@pytest.mark.core
def test_a_broken_generator_ends_the_run(processes: Processes, model: str) -> None:
    async def test() -> None:
        async with system(processes, model, RolloutSettings(concurrent_groups=2, group_size=2)) as s:
            await s.generator.break_down.call_one("no weights")
            with pytest.raises(ActorError, match="no weights"):
                await within(WAIT_S, s.workers.run.call(), "the run to fail")

    run(test)


@pytest.mark.core
def test_evaluation_is_greedy_on_held_out_items_and_runs_during_training(processes: Processes, model: str) -> None:
    async def test() -> None:
        async with system(processes, model, RolloutSettings(concurrent_groups=2, group_size=2, seed=5)) as s:
            running = asyncio.ensure_future(s.workers.run.call())
            evaluation = await s.workers.evaluate.call_one(list(range(20)))
            held_out, template = TaskSource(SUMS, "held_out"), ChatTemplate(model)
            calls = [call for call in await s.generator.calls.call_one() if call[1].temperature == 0]
            prompts = {template.plain(prompt) for prompt, _, _ in calls}
            assert prompts == {held_out.item(i).prompt for i in range(20)}
            assert all(sampling.seed is None for _, sampling, _ in calls)
            assert evaluation.rewards.shape == (20, 1) and not evaluation.failed
            assert evaluation.accuracy == (evaluation.rewards == 1).mean()
            rows = [json.loads(line) for line in (await s.workers.take_rows.call_one()).lines]
            held_out_rows = {row["task_index"]: row for row in rows if row["kind"] == "held_out"}
            assert set(held_out_rows) == set(range(20))
            for index, row in held_out_rows.items():
                assert (row["group"], row["sample"], row["held_out"]) == (-1 - index, 0, "")
                assert row["version"] == [0, 0] and row["item"]["prompt"] == held_out.item(index).prompt
                assert row["reward"] == evaluation.rewards[index, 0] and "ids" not in row["turns"][0]
            await s.workers.close.call()
            await within(WAIT_S, running, "close to end the run")

    run(test)


@pytest.mark.core
def test_a_held_out_episode_has_the_same_share_as_one_of_a_group(processes: Processes, model: str) -> None:
    settings = RolloutSettings(concurrent_groups=2, group_size=2, max_sequences=7)

    async def test() -> None:
        async with system(processes, model, settings, BRANCHING) as s:
            evaluation = await s.workers.evaluate.call_one([0, 1])
            assert evaluation.rewards.tolist() == [[3.0], [3.0]]

    run(test)


@pytest.mark.core
def test_episodes_of_a_held_out_item_that_cannot_be_made_are_recorded(processes: Processes, model: str) -> None:
    async def test() -> None:
        async with system(processes, model, RolloutSettings(concurrent_groups=2, group_size=2), BRANCHING) as s:
            await s.workers.evaluate.call_one([4], EvaluationPlan("words", 2, 1.0))
            rows = [json.loads(line) for line in (await s.workers.take_rows.call_one()).lines]
            found = [(row["kind"], row["group"], row["held_out"], row["sample"]) for row in rows]
            assert sorted(found) == [("failed", -5, "words", sample) for sample in (0, 1)]
            assert {row["failure"]["reason"] for row in rows} == {"item raised IndexError when it was made"}
            assert (await s.workers.progress.call_one(None)).held_out == 2

    run(test)


@pytest.mark.core
def test_a_worker_that_is_set_up_again_abandons_its_episodes_and_serves_the_new_buffer(
    processes: Processes, model: str
) -> None:
    async def test() -> None:
        async with system(processes, model, RolloutSettings(concurrent_groups=2, group_size=2)) as s:
            await s.generator.hold.call_one(True)
            running = asyncio.ensure_future(s.workers.run.call())
            evaluating = asyncio.ensure_future(s.workers.evaluate.call_one([0, 1]))
            while len(await s.generator.calls.call_one()) < 6:
                assert not running.done() and not evaluating.done()
            other = processes.shared.spawn("other_buffer", Buffer, 2, BufferSettings(1, window=0))
            workers: Any = s.workers
            again = workers.setup.call(other, Handle(s.generator))
            await within(WAIT_S, again, "the worker to be set up again")
            await within(WAIT_S, running, "its episodes to end")
            with pytest.raises(ActorError, match="CancelledError"):
                await within(WAIT_S, evaluating, "the evaluation to end")
            await s.generator.hold.call_one(False)
            running = asyncio.ensure_future(s.workers.run.call())
            assert [len(rewards) for rewards in (await take(System(other, s.generator, s.workers), 0)).rewards] == [
                2,
                2,
            ]
            assert (await s.buffer.counts.call_one()).complete == 0
            await other.close.call_one()
            await within(WAIT_S, running, "the worker to hear of the end")
            assert (await s.workers.stats.call_one()).groups_put > 0
            await within(WAIT_S, workers.setup.call(s.buffer, Handle(s.generator)), "the worker to be set up again")
            stats = await s.workers.stats.call_one()
            assert stats.groups_put == stats.episodes == 0, "the checkpoint has the earlier counts"

    run(test)


@pytest.mark.core
def test_close_ends_the_run_while_the_generators_are_silent(processes: Processes, model: str) -> None:
    async def test() -> None:
        async with system(processes, model, RolloutSettings(concurrent_groups=2, group_size=2)) as s:
            await s.generator.hold.call_one(True)
            running = asyncio.ensure_future(s.workers.run.call())
            while len(await s.generator.calls.call_one()) < 4:
                assert not running.done()
            stats = await s.workers.stats.call_one()
            assert (stats.groups_playing, stats.groups_waiting) == (2, 0)
            await s.buffer.close.call_one()
            await within(WAIT_S, s.workers.close.call(), "close")
            await within(WAIT_S, running, "close to end the run")

    run(test)


def test_sigkill_of_a_worker_leaves_no_scorer(
    processes: Processes, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a fork server, scorers are children of the worker."""
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)

    async def test() -> None:
        settings = RolloutSettings(concurrent_groups=1, group_size=2)
        shared, mesh = processes.shared, this_host().spawn_procs(per_host={"worker": 1}, name="killed")
        try:
            buffer = shared.spawn("buffer", Buffer, 1, BufferSettings(0))
            generator = shared.spawn("generator", StandInGenerator, ChatTemplate(model).stop_token_ids[0])
            worker = mesh.spawn("workers", Worker, settings, ByValue(WORDS), model)
            await within(WAIT_S, worker.setup.call_one(buffer, Handle(generator)), "the worker to set up")
            pid = await worker.process_id.call_one()
            await within(WAIT_S, worker.evaluate.call_one([0, 1, 2, 3]), "an evaluation")
            children = [int(child) for child in _children(pid)]
            assert children
            os.kill(pid, signal.SIGKILL)
            for child in children:
                await asyncio.to_thread(wait_until_dead, child)
        finally:
            await within(WAIT_S, mesh.stop(), "the workers to stop")

    run(test)


def _children(pid: int) -> list[str]:
    children: list[str] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children") as file:
            children += file.read().split()
    return children
