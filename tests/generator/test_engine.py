"""A dense engine: sampling, versions, commits in flight, and commits that go wrong."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import CommitError, EngineStopped, GenerationError, WeightMismatch
from monarch_rl.generator.commit import CommitReport
from monarch_rl.generator.engine import Engine
from monarch_rl.generator.requests import BusyClock
from monarch_rl.generator.sglang_engine import io_structs
from monarch_rl.generator.sglang_format import RequestFormat, read_reason, sampling_params
from monarch_rl.model.messages import Message, ParsedReply
from monarch_rl.rollout.play import EpisodeRunner
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.tasks.task import Policy, Task
from tests.generator.conftest import SETTINGS
from tests.generator.helpers import (
    LOGPROB_BOUND,
    PART_TOKENS,
    LoopThread,
    RunningRequests,
    Staging,
    check_nothing_is_served,
    check_parts,
    checksums_of,
    next_version,
    reference_logprobs,
    watched,
    weights_in,
)
from tests.patience import until

pytestmark = pytest.mark.core


def start(engine: Engine, count: int, tokens: int, **sampling: object) -> RunningRequests:
    wanted = Sampling(max_new_tokens=tokens, **sampling)  # type: ignore[arg-type]
    return RunningRequests.start(engine, [[5, 6, 7, 8 + i] for i in range(count)], wanted)


async def generate(engine: Engine, count: int, tokens: int, **sampling: object) -> list[Completion]:
    return await start(engine, count, tokens, **sampling).completions()


def prompts(completions: list[Completion]) -> list[tuple[list[int], Completion]]:
    return [([5, 6, 7, 8 + i], completion) for i, completion in enumerate(completions)]


async def commit_seed(engine: Engine, staging: Staging, folder: Path, seed: int) -> dict[str, object]:
    """Commit the next version, made from ``seed``; returns its weights."""
    weights = next_version(weights_in(folder), seed)
    version = engine.requests.version + 1
    staging.fill(version, weights)
    await staging.commit(engine, version, checksums_of(weights))
    return weights  # type: ignore[return-value]


def test_warnings_of_the_process_are_still_logged(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """SGLang would set the root logger to errors only."""
    logging.getLogger("monarch_rl").warning("a warning")
    assert "a warning" in caplog.text


def test_arrays_have_the_contracts_types(engine: Engine, run: LoopThread) -> None:
    (completion,) = run(generate(engine, 1, 7))
    assert len(completion.token_ids) == len(completion.logprobs) == len(completion.policy_versions) == 7
    assert completion.token_ids.dtype == np.int32
    assert completion.logprobs.dtype == np.float32
    assert completion.policy_versions.dtype == np.int32
    assert completion.finish_reason == "length"


def test_a_stop_token_ends_the_turn_and_is_part_of_it(engine: Engine, run: LoopThread) -> None:
    (whole,) = run(generate(engine, 1, 12, temperature=0.0))
    stop = int(whole.token_ids[5])
    first = int(np.flatnonzero(whole.token_ids == stop)[0])
    (stopped,) = run(generate(engine, 1, 12, temperature=0.0, stop_token_ids=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == whole.token_ids[: first + 1].tolist()


def test_tokens_arrive_in_parts_except_in_short_answers(engine: Engine, run: LoopThread) -> None:
    size = PART_TOKENS
    lengths = (3 * size + 5, 2 * size, 10 * size, size, size - 1, 1)
    before = engine.requests.generated_tokens, engine.requests.finished_requests

    async def scenario() -> tuple[list[list[Completion]], list[Completion]]:
        running = RunningRequests.start(engine, [[5] for _ in lengths], *[Sampling(max_new_tokens=n) for n in lengths])
        return running.parts, await running.completions()

    arrived, completions = run(scenario())
    for parts, completion in zip(arrived, completions, strict=True):
        check_parts(parts, completion)
    assert [[len(part.token_ids) for part in parts] for parts in arrived] == [[size] * n for n in (3, 1, 9, 0, 0, 0)]
    counted = engine.requests.generated_tokens - before[0], engine.requests.finished_requests - before[1]
    assert counted == (sum(lengths), len(lengths)), "parts are counted with their answer"


def test_logprobs_are_those_of_the_tempered_distribution(engine: Engine, run: LoopThread) -> None:
    first, second = run(generate(engine, 1, 1, seed=3)), run(generate(engine, 1, 1, seed=3, temperature=0.5))
    many = run(generate(engine, 1, 1, temperature=1e-3))
    assert many[0].logprobs[0] > -0.1  # a cold distribution is nearly certain of its sample
    if first[0].token_ids[0] == second[0].token_ids[0]:
        assert first[0].logprobs[0] != second[0].logprobs[0]


def test_seeded_samples_repeat_and_unseeded_ones_do_not(engine: Engine, run: LoopThread) -> None:
    async def three() -> list[list[int]]:
        asked = [Sampling(max_new_tokens=20, seed=seed) for seed in (11, 11, 12)]
        return [(await engine.generate([9, 8, 7], sampling)).token_ids.tolist() for sampling in asked]

    once, repeated, other = run(three())
    assert once == repeated != other
    free = run(generate(engine, 2, 20)) + run(generate(engine, 2, 20))
    assert len({tuple(c.token_ids.tolist()) for c in free}) == 4


def test_seeded_and_free_requests_run_in_one_batch(engine: Engine, run: LoopThread) -> None:
    async def mixed() -> list[Completion]:
        seeds = [5, None, 5, None]
        return await asyncio.gather(*[engine.generate([3, 4], Sampling(max_new_tokens=30, seed=s)) for s in seeds])

    one, free, same, also_free = (c.token_ids.tolist() for c in run(mixed()))
    assert one == same
    assert len({tuple(one), tuple(free), tuple(also_free)}) == 3


def test_refused_requests_report_why(engine: Engine, run: LoopThread) -> None:
    with pytest.raises(GenerationError, match="1024"):
        run(generate(engine, 1, 2000))


def test_logprobs_agree_with_transformers(engine: Engine, run: LoopThread, models: dict[str, Path]) -> None:
    """In float32, within LOGPROB_BOUND. The end of the next test checks it after five updates in flight."""
    sampled = run(generate(engine, 8, 40))
    if engine.requests.version:
        pytest.skip("the engine serves other weights than the folder's by now")
    for completion, reference in zip(sampled, reference_logprobs(models["qwen3"], prompts(sampled)), strict=True):
        assert np.abs(completion.logprobs - reference).max() < LOGPROB_BOUND


def test_sequences_continue_across_commits(
    engine: Engine, run: LoopThread, models: dict[str, Path], staging: Staging
) -> None:
    """8 sequences decode across five commits: none is lost or truncated, each token has the version that sampled it."""
    folder, before = models["qwen3"], engine.requests.version

    async def scenario() -> list[Completion]:
        running = start(engine, 8, 700)
        for seed in range(5):
            await running.wait_for_tokens()
            await commit_seed(engine, staging, folder, seed)
        return await running.completions()

    completions = run(scenario())
    seen = set()
    for completion in completions:
        assert len(completion.token_ids) == 700
        assert (np.diff(completion.policy_versions) >= 0).all()
        seen |= set(completion.policy_versions.tolist())
    assert seen == set(range(before, before + 6))
    fresh = run(generate(engine, 8, 40))
    assert {v for c in fresh for v in c.policy_versions.tolist()} == {before + 5}
    weights = next_version(weights_in(folder), 4)
    for completion, reference in zip(fresh, reference_logprobs(folder, prompts(fresh), weights), strict=True):
        assert np.abs(completion.logprobs - reference).max() < LOGPROB_BOUND


def test_a_new_request_never_starts_from_older_keys_and_values(
    engine: Engine, run: LoopThread, models: dict[str, Path], staging: Staging
) -> None:
    """The same long prompt before and after a commit: its prefix is computed again with the new weights."""
    prompt, greedy = list(range(10, 410)), Sampling(max_new_tokens=8, temperature=0.0)

    async def around() -> Completion:
        await engine.generate(prompt, greedy)
        await commit_seed(engine, staging, models["qwen3"], 21)
        return await engine.generate(prompt, greedy)

    after = run(around())
    weights = next_version(weights_in(models["qwen3"]), 21)
    (reference,) = reference_logprobs(models["qwen3"], [(prompt, after)], weights)
    assert np.abs(after.logprobs - reference).max() < LOGPROB_BOUND


def test_a_commit_of_the_same_weights_changes_nothing(
    engine: Engine, run: LoopThread, models: dict[str, Path], staging: Staging
) -> None:
    async def rounds() -> list[tuple[list[int], list[float]]]:
        answers = []
        for _ in range(5):
            await commit_seed(engine, staging, models["qwen3"], 33)
            completion = await engine.generate([4, 4, 4], Sampling(max_new_tokens=30, seed=1))
            answers.append((completion.token_ids.tolist(), completion.logprobs.tolist()))
        return answers

    answers = run(rounds())
    assert all(answer == answers[0] for answer in answers)


def test_a_flipped_bit_is_found_and_nothing_is_served(
    engine: Engine, run: LoopThread, models: dict[str, Path], staging: Staging
) -> None:
    weights = next_version(weights_in(models["qwen3"]), 50)
    version = engine.requests.version + 1
    staging.fill(version, weights)
    name = "model.layers.1.self_attn.k_proj.weight"
    place = staging.byte(version, name, 77)
    place ^= 16

    async def flipped() -> tuple[str, asyncio.Task[Completion]]:
        with pytest.raises(WeightMismatch) as caught:
            await staging.commit(engine, version, checksums_of(weights))
        waiting = asyncio.ensure_future(engine.generate([5], Sampling(max_new_tokens=3)))
        await asyncio.sleep(0)  # it starts to wait
        await check_nothing_is_served(engine)
        assert not waiting.done()
        return str(caught.value), waiting

    message, waiting = run(flipped())
    assert f"1 of {len(weights)} tensors differ from the trainer's: {name}." in message
    place ^= 16

    async def repaired() -> Completion:
        await staging.commit(engine, version, checksums_of(weights))
        return await waiting

    assert run(repaired()).policy_versions.tolist() == [version] * 3


def test_a_version_that_cannot_be_loaded_stays_unserved(
    engine: Engine, run: LoopThread, models: dict[str, Path], staging: Staging
) -> None:
    weights = weights_in(models["qwen3"])
    fewer = {name: x for name, x in weights.items() if "q_norm" not in name}
    partial = Staging(fewer)

    async def refused() -> None:
        version = engine.requests.version + 1
        partial.fill(version, fewer)
        with pytest.raises(CommitError, match="q_norm"):
            await partial.commit(engine, version, checksums_of(fewer))
        staging.fill(version, weights)
        await staging.commit(engine, version, checksums_of(weights))

    run(refused())


def test_an_older_version_is_refused(engine: Engine, run: LoopThread, staging: Staging) -> None:
    if not engine.requests.version:
        pytest.skip("no version has been committed yet")
    served = engine.requests.version
    with pytest.raises(ValueError, match=rf"\b{served - 1}\b.*\b{served}\b"):
        run(staging.commit(engine, served - 1, {}))


def test_an_engine_rolls_back_to_a_version_of_another_trainer(
    engine: Engine, run: LoopThread, models: dict[str, Path], staging: Staging
) -> None:
    """Requests of the previous trainer fail, also if they wait for a place; then the engine serves on."""
    weights = weights_in(models["qwen3"])

    async def back() -> None:
        await commit_seed(engine, staging, models["qwen3"], 61)
        await commit_seed(engine, staging, models["qwen3"], 62)
        places = engine._sglang.running_requests
        running = RunningRequests.start(engine, [[5, i] for i in range(places + 2)], Sampling(max_new_tokens=1000))
        await until(lambda: engine.requests.clock.requests >= places, "requests in all places")
        version = engine.requests.version - 1
        engine.requests.reset_versions()
        failed = await asyncio.gather(*running.tasks, return_exceptions=True)
        assert {str(error) for error in failed} == {"the trainer whose policy was asked is lost"}
        staging.fill(version, weights)
        await staging.commit(engine, version, checksums_of(weights))
        assert engine.requests.version == version and not engine.requests.clock.requests
        assert (await generate(engine, 1, 3))[0].policy_versions.tolist() == [version] * 3

    run(back())


def test_checksums_of_other_tensors_are_refused_and_serving_continues(
    engine: Engine, run: LoopThread, models: dict[str, Path], staging: Staging
) -> None:
    checksums = checksums_of(weights_in(models["qwen3"])) | {"lm_head.bias": 0}
    version = engine.requests.version
    tensors = len(staging.manifest.tensors)
    with pytest.raises(ValueError, match=rf"\b{tensors + 1}\b.*\b{tensors}\b"):
        run(staging.commit(engine, version + 1, checksums))
    assert run(generate(engine, 1, 3))[0].policy_versions.tolist() == [version] * 3


def test_a_commit_reports_its_cost(engine: Engine, run: LoopThread, models: dict[str, Path], staging: Staging) -> None:
    """The parts of a pause add up to it; the pause is short compared to the messages of the whole commit."""
    weights = weights_in(models["qwen3"])

    async def commit() -> list[CommitReport]:
        generating = asyncio.ensure_future(generate(engine, 8, 300))
        reports = []
        for _ in range(10):
            staging.fill(engine.requests.version + 1, weights)
            reports.append(await staging.commit(engine, engine.requests.version + 1, checksums_of(weights)))
        await generating
        return reports

    for report in run(commit()):
        assert report.nbytes == sum(x.nbytes for x in weights.values())
        assert 0 < report.copy_seconds + report.checksum_seconds <= report.paused_seconds < report.seconds
        assert 0 < report.verification_share < 1
        print(report, f"messages {report.messages_seconds * 1e3:.2f} ms")


def test_a_cancelled_request_is_ended_and_waits_are_named(
    engine: Engine, run: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancel() -> None:
        reasons = watched(engine, "finished_reasons", monkeypatch)
        running = RunningRequests.start(engine, [[5], [6, 7]], Sampling(max_new_tokens=1000))
        await running.wait_for_tokens()
        waits = [(wait.what, wait.on) for wait in engine.requests.waits()]
        assert waits == [(f"new tokens after {n} prompt tokens", "the engine of generator 0") for n in (1, 2)]
        for task in running.tasks:
            task.cancel()
        await asyncio.wait(running.tasks)
        assert not engine.requests.waits() and not engine.requests.clock.requests

        def both_ended() -> bool:
            return sum(reason is not None and reason["type"] == "abort" for reason in reasons) == 2

        await until(both_ended, "SGLang to end both")

    run(cancel())


def test_an_idle_engine_uses_no_cpu(engine: Engine, run: LoopThread) -> None:
    """While this process spins, so that polling for messages would show as CPU time of the engine."""
    run(generate(engine, 1, 4))
    (pid,) = engine.child_pids
    process = psutil.Process(pid)
    before, began = sum(process.cpu_times()[:2]), time.thread_time()
    while (spun_s := time.thread_time() - began) < 1.0:
        pass
    assert sum(process.cpu_times()[:2]) - before < 0.25 * spun_s


def test_a_process_holds_one_engine(engine: Engine, run: LoopThread) -> None:
    with pytest.raises(RuntimeError, match="already has an engine"):
        run(Engine.start("anything", SETTINGS))


def test_a_fork_finds_its_shared_turns_in_the_prefix_cache(
    engine: Engine, run: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An episode that forks after two turns: each branch computes only its own new tokens."""
    template: Any = CharacterTemplate()
    cached = watched(engine, "cached_tokens", monkeypatch)

    async def episode(item: Any, policy: Policy) -> list[float]:
        await policy.reply("a question of some length", max_new_tokens=20)
        await policy.reply("and another one")
        cached.clear()
        branches = [policy.fork() for _ in range(4)]
        await asyncio.gather(*(branch.reply(f"{number}") for number, branch in enumerate(branches)))
        return [0.0, 1.0, 2.0, 3.0]

    generator: Any = EngineHandle(engine)
    runner = EpisodeRunner(generator, template, RolloutSettings(max_new_tokens=30))
    sequences = run(runner.play(Task(lambda cursor: cursor, episode), 0, "", Sampling(30), group=0))
    assert [sequence.reward for sequence in sequences] == [0.0, 1.0, 2.0, 3.0]
    shared = sum(len(turn.token_ids) for turn in sequences[0].turns[:2])
    assert all(sequence.fork == (0, 2) and len(sequence.turns) == 3 for sequence in sequences[1:])
    assert len(cached) >= 4 and min(cached) >= shared - 1  # the last sampled token was not read before


class EngineHandle:
    """The engine in the role of a worker's generator handle."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        return await self._engine.generate(list(prompt_ids), sampling)


def test_requests_in_flight_fail_when_the_engine_stops(engine: Engine, run: LoopThread) -> None:
    """The last test with this module's engine."""

    async def stop() -> int:
        running = RunningRequests.start(engine, [[5]], Sampling(max_new_tokens=1000))
        await running.wait_for_tokens()
        (pid,) = engine.child_pids
        await engine.shutdown()
        await engine.shutdown()
        with pytest.raises(EngineStopped, match="was stopped"):
            await running.completions()
        with pytest.raises(EngineStopped, match="was stopped"):
            await engine.generate([5], Sampling())
        return pid

    assert not psutil.pid_exists(run(stop()))


def test_a_model_that_cannot_be_loaded_raises_in_this_process(
    models: dict[str, Path], run: LoopThread, tmp_path: Path
) -> None:
    """SGLang itself would end this process by a signal."""
    (tmp_path / "config.json").write_text((models["qwen3"] / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(RuntimeError, match="scheduler died|exit code"):
        run(Engine.start(str(tmp_path), SETTINGS))
    assert not [p for p in psutil.Process().children(recursive=True) if "scheduler" in p.name()]
    gc.collect()  # it would wait forever for sockets that are left open


@pytest.mark.parametrize(
    "kind",
    [
        Sampling(max_new_tokens=5),
        Sampling(temperature=0.0, stop_token_ids=(3, 9)),
        Sampling(seed=7, temperature=0.7, top_k=20, top_p=0.9),
        Sampling(top_k=5, min_p=0.1),
    ],
)
def test_a_request_equals_the_one_that_sglang_would_build(engine: Engine, run: LoopThread, kind: Sampling) -> None:
    """Also the second request of its kind, which is a copy of the first with other ids, seed and length."""
    manager, requests = engine._sglang.manager, RequestFormat(engine._sglang.manager)

    async def of_sglang(ids: list[int], sampling: Sampling, seed: int | None) -> dict[str, Any]:
        params = sampling_params(sampling) | ({} if seed is None else {"sampling_seed": seed})
        request = io_structs().GenerateReqInput(
            input_ids=ids,
            sampling_params=params,
            return_logprob=True,
            return_sampling_mask=sampling.truncated,
            cache_salt="3",
            rid="r",
        )
        request.normalize_batch_and_arguments()
        manager._set_default_priority(request)
        manager._init_req_state(request)
        try:
            return fields_of(await manager._tokenize_one_request(request))
        finally:
            del manager.rid_to_state["r"]

    def fields_of(tokenized: Any) -> dict[str, Any]:
        fields = msgspec.structs.asdict(tokenized) | {"time_stats": None}
        return fields | {"sampling_params": msgspec.structs.asdict(tokenized.sampling_params)}

    async def compare() -> None:
        for ids, sampling, seed in (
            ([5, 6, 7], kind, kind.seed),
            ([9] * 40, replace(kind, max_new_tokens=11), None if kind.seed is None else 12345),
        ):
            made = requests.tokenized("r", ids, sampling, seed, "3")
            assert fields_of(made) == await of_sglang(ids, sampling, seed)

    run(compare())


def test_an_aborted_request_raises_the_engines_message() -> None:
    with pytest.raises(GenerationError, match="out of memory"):
        read_reason({"type": "abort", "message": "out of memory"})


def test_busy_seconds_exclude_pauses_and_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("monarch_rl.generator.requests.time.perf_counter", lambda: now[0])
    clock = BusyClock()
    for seconds, event in (
        (5, clock.enter),
        (1, clock.enter),
        (2, clock.pause),
        (9, clock.leave),
        (9, clock.resume),
        (4, clock.leave),
        (7, clock.enter),
        (1, clock.leave),
    ):
        now[0] += seconds
        event()
    assert clock.seconds == 1 + 2 + 4 + 1
    assert clock.request_seconds == 1 + 2 * 2 + 4 + 1


class CharacterTemplate:
    """A chat template with one id per character."""

    stop_token_ids: tuple[int, ...] = ()
    system = ""

    def token_texts(self) -> list[str]:
        return list(map(chr, range(500)))

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def opening(self, messages: list[Message], tools: None) -> list[int]:
        return [ord(character) for message in messages for character in message.content]

    def between(self, messages: list[Message], tools: None, end: int | None, thinking: bool) -> list[int]:
        return self.opening(messages, tools)

    def cut_while_thinking(self, token_ids: list[int], tools: None) -> bool:
        return False

    def read(self, ids: list[int], tools: None, stop: tuple[str, ...]) -> ParsedReply:
        return ParsedReply("", "")
