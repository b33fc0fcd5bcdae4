"""Episodes without actors: generators and environments are stand-ins."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import random
import socket
import threading
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from http.client import HTTPMessage
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch_rl.episode.episode import Episode
from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import (
    ChatError,
    ContextFull,
    DeadlineExceeded,
    InfrastructureFailed,
    JudgeFailed,
    SamplingMaskMissing,
    SandboxFailed,
    ScorerBroken,
    ScoringFailed,
)
from monarch_rl.generator.dispatcher import Dispatcher
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.conversation import Conversation
from monarch_rl.model.messages import Message, user
from monarch_rl.rollout import policy as policy_module
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.evaluation import EpisodeResult, Evaluation, EvaluationPlan
from monarch_rl.rollout.play import EpisodeRunner, all_or_none
from monarch_rl.rollout.policy import episode_seed, line_seed
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.statistics import Statistics
from monarch_rl.runtime import wait_registry
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.tasks.task import MOST_INFO_BYTES, Outcome, Policy, Reply, Task, as_outcome
from tests import patience
from tests.model.chat_helpers import write_model
from tests.model.test_conversation import template as chat_template
from tests.rollout.helpers import CHARACTERS
from tests.rollout.test_statistics import sampled

T = TypeVar("T")
SETTINGS = RolloutSettings(episode_deadline_s=0.2)


class Echo:
    """Generates ``text`` and, if it ends, the stop token; records its prompts."""

    def __init__(self, template: ChatTemplate, text: str, ends: bool = True) -> None:
        self.prompts: list[list[int]] = []
        ids = template.opening([user(text)]) + list(template.stop_token_ids) * ends
        n = len(ids)
        reason = "stop" if ends else "length"
        self.completion = Completion(np.asarray(ids), np.full(n, -0.5), np.full(n, 4), reason)

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        self.prompts.append(list(prompt_ids))
        await asyncio.sleep(0)  # as a generator that asks a replica
        return self.completion


def task(episode: Any, **more: Any) -> Task:
    return Task(lambda cursor: cursor, episode, **more)


async def guessing(item: Any, policy: Policy) -> Outcome:
    """Two turns, each with a reward."""
    heard = [(await policy.reply("guess")).text, (await policy.reply("again")).text]
    parts = {"format": 0.5, "turn 1": 1.0, "turn 2": 1.0}
    return Outcome(1.0, parts, {"guesses": len(heard), "heard": heard})


def raising(error: Exception) -> Any:
    async def episode(item: Any, policy: Policy) -> float:
        await policy.reply("guess")
        raise error

    return episode


async def hanging(item: Any, policy: Policy) -> float:
    await asyncio.Event().wait()
    return 1.0


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """In virtual time: a deadline passes only on a coroutine that hangs."""
    return run_virtual(coroutine)


def run_episode(
    generator: Any,
    template: ChatTemplate,
    episode: Any,
    item: Any = "",
    sampling: Sampling | None = None,
    group: int = 0,
    limit: int | None = None,
    scorer: Any = None,
    **more: Any,
) -> Episode:
    runner = EpisodeRunner(generator, template, SETTINGS, scorer, limit)
    (result,) = run(runner.play(task(episode, **more), 7, item, sampling or Sampling(), group))
    return result


@pytest.fixture
def template(model: str) -> ChatTemplate:
    return ChatTemplate(model)


def test_a_single_turn_keeps_the_sampled_ids(template: ChatTemplate) -> None:
    async def episode(item: str, policy: Policy) -> float:
        return float((await policy.reply(item)).text == "12")

    echo = Echo(template, "12")
    episode_: Episode = run_episode(echo, template, episode, item="3 * 4 =")
    assert (episode_.reward, episode_.finish_reason, len(episode_.turns)) == (1.0, "stop", 1)
    prompt = template.opening([user("3 * 4 =")])
    assert episode_.token_ids.tolist() == prompt + echo.completion.token_ids.tolist()
    assert episode_.trainable.tolist() == [False] * len(prompt) + [True] * 3
    assert echo.prompts == [prompt]


def test_turns_are_never_tokenised_again(template: ChatTemplate) -> None:
    echo = Echo(template, "8", ends=False)
    episode = run_episode(echo, template, guessing)
    assert (episode.reward, episode.info) == (1.0, {"guesses": 2, "heard": ["8", "8"]})
    assert episode.parts == {"format": 0.5, "turn 1": 1.0, "turn 2": 1.0}
    assert template.plain(episode.token_ids.tolist()) == "guess8again8"
    first, second = echo.prompts
    assert second[: len(first)] == first
    assert episode.token_ids.tolist() == second + echo.completion.token_ids.tolist()


def test_the_longest_running_episode_of_some_groups_is_described(template: ChatTemplate) -> None:
    echo, ends = Echo(template, "8"), asyncio.Event()

    async def episode(turns: int, policy: Policy) -> float:
        for _ in range(turns):
            await policy.reply("no: ")
        await ends.wait()
        return 1.0

    async def test() -> None:
        runner, letters = EpisodeRunner(echo, template, SETTINGS), task(episode, name="letters")
        playing = [
            asyncio.ensure_future(runner.play(letters, index, turns, Sampling(), group))
            for index, turns, group in ((7, 2, 0), (8, 5, 0), (9, 9, 1), (3, 1, -4))
        ]
        await asyncio.sleep(0.1)
        longest, held_out = runner.longest([0]), runner.longest(None)
        assert longest is not None and held_out is not None
        assert (longest.item, longest.group, longest.turns, longest.task) == (8, 0, 5, "letters")
        turn = len(template.opening([user("no: ")])) + len(echo.completion.token_ids)
        assert longest.tokens == 5 * turn
        assert longest.in_own_code and longest.seconds > 0
        assert (held_out.item, held_out.turns) == (3, 1) and runner.longest([5]) is None
        ends.set()
        await asyncio.gather(*playing)
        assert runner.longest([0, 1]) is None

    run(test())


@pytest.mark.parametrize("read_first", [False, True])
def test_a_refused_message_leaves_the_policy_unchanged(template: ChatTemplate, read_first: bool) -> None:
    async def episode(item: Any, policy: Policy) -> float:
        await policy.reply("one ")
        if read_first:
            policy.read("two ")
        for refused in ("refused ", [{"role": "user", "content": 3}]):
            with pytest.raises(ValueError, match=r"opening|text"):
                await policy.reply(refused, tools=[add])
        await policy.reply("three ")
        return 1.0

    result = run_episode(Echo(template, "8", ends=False), template, episode)
    assert template.plain(result.token_ids.tolist()) == f"one 8{'two ' * read_first}three 8"


def test_a_failure_shows_the_last_question_before_the_first_turn(template: ChatTemplate) -> None:
    def failing(*messages: Message, again: str = "") -> Any:
        async def episode(item: Any, policy: Policy) -> float:
            for message in messages[:-1]:
                policy.read(message)
            await policy.reply(messages[-1])
            if again:
                await policy.reply(again)
            raise KeyError

        return episode

    def prompt(*messages: Message, again: str = "") -> str | None:
        with pytest.raises(EpisodeFailed) as failed:
            run_episode(Echo(template, "8", ends=False), template, failing(*messages, again=again))
        return failed.value.prompt

    rules, hint, question = Message("system", "Be brief."), Message("user", "Hint."), Message("user", "2 + 2?")
    assert prompt(question) == prompt(rules, question, again="Sure?") == prompt(rules, hint, question) == "2 + 2?"
    assert prompt(rules) == "Be brief."


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def test_a_chat_template_with_a_tool(tmp_path: Path) -> None:
    """The ids equal those of a standalone conversation; calls are parsed, and answers passed back."""
    template = ChatTemplate(write_model(tmp_path, "qwen3"))
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
    sampled = [template.tokenizer.encode(text + "<|im_end|>") for text in (call, "7")]

    class Scripted:
        async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
            assert prompt_ids == alone.ids[: len(prompt_ids)]
            ids = sampled[len(prompt_ids) > opening]
            return Completion(np.asarray(ids), np.full(len(ids), -0.5), np.full(len(ids), 4), "stop")

    async def episode(item: Any, policy: Policy) -> float:
        reply = await policy.reply(item, tools=[add])
        (asked,) = reply.tool_calls
        answer = await policy.reply(asked.answer(str(add(**asked.arguments))))
        return float(answer.text == "7")

    alone = Conversation(template)
    opening = len(alone.add("3 + 4?", [add]))
    (asked,) = alone.replied(sampled[0], "stop").tool_calls
    alone.add([asked.answer("7")])
    alone.replied(sampled[1], "stop")
    result = run_episode(Scripted(), template, episode, item="3 + 4?", sampling=Sampling(100))
    assert result.reward == 1.0
    assert result.token_ids.tolist() == alone.ids


def test_the_prompt_of_a_failed_turn_moves_to_the_next_turn(template: ChatTemplate) -> None:
    """Whatever ends the turn, the trainer gets the ids that the engine sees."""
    echo = Echo(template, "8", ends=False)

    class Hanging:
        async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
            if len(prompt_ids) <= 5:
                await asyncio.Event().wait()
            return await echo.generate(prompt_ids, sampling, group)

    async def episode(item: Any, policy: Policy) -> float:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(policy.reply("abc"), 0.01)
        for wrong in (0, 2.5, 10**6):
            with pytest.raises((TypeError, ValueError)):
                await policy.reply("not seen", max_new_tokens=wrong)  # type: ignore[arg-type]
        await policy.reply("def")
        return 1.0

    result = run_episode(Hanging(), template, episode)
    (prompt,) = echo.prompts
    assert template.plain(prompt) == "abcdef"
    assert result.token_ids.tolist() == [*prompt, *echo.completion.token_ids.tolist()]


def test_a_loop_that_catches_everything_does_not_block_the_worker(template: ChatTemplate) -> None:
    async def episode(item: Any, policy: Policy) -> float:
        for turn in range(1000):
            with suppress(ContextFull):
                await policy.reply(f"{turn}")
        return 1.0

    async def beside() -> int:
        turns, running = 0, asyncio.ensure_future(runner.play(task(episode), 7, "", Sampling(), 0))
        while not running.done():
            await asyncio.sleep(0)
            turns += 1
        (result,) = await running
        assert result.finish_reason == "context"
        return turns

    runner = EpisodeRunner(Echo(template, "8"), template, SETTINGS, None, 12)
    assert run(beside()) > 900


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(1.0, {"a": float("nan")}),
        Outcome(1.0, {"a": "2"}),  # type: ignore[dict-item]
        Outcome(1.0, info={"x": float("inf")}),
        Outcome(1.0, info=None),  # type: ignore[arg-type]
        Outcome(1.0, info={"trace": "x" * MOST_INFO_BYTES}),
        {str(part): 0.0 for part in range(1000)},
        1e300,
        -1e300,
        {"a": 1e300, "b": -1e300},
    ],
    ids=["NaN", "text", "infinity", "nothing", "too long", "too many", "large", "small", "large part"],
)
def test_parts_and_infos_that_cannot_be_used_are_refused(outcome: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        as_outcome(outcome)


def test_the_size_of_infos_is_bounded() -> None:
    """To the byte, as in the header of an episode: the memory bound of the buffer counts them."""
    longest = {"trace": "é" * 10_920 + "xxx"}
    assert len(json.dumps(longest)) == MOST_INFO_BYTES and as_outcome(Outcome(1.0, info=longest)).info == longest
    with pytest.raises(ValueError, match="65,537 bytes .* 65,536"):
        as_outcome(Outcome(1.0, info={"trace": longest["trace"] + "x"}))


def test_no_part_has_the_name_of_another_metric() -> None:
    """The names of all metrics of an evaluation or a batch are reserved."""
    plan = EvaluationPlan(samples=2, temperature=1.0)
    completed: list[EpisodeResult] = [[sampled(1.0)], [sampled(1.0)]]
    evaluation = Evaluation.of(plan, [0], [("sums", completed)], {"sums": 1.0})
    names = [name.removeprefix("held_out/") for name in evaluation.metrics() if name != "held_out/score"]
    assert len(names) > 10
    for name in [*names, "mean"]:
        with pytest.raises(ValueError, match=f"'{name}'"):
            as_outcome({name: 1.0})
    assert as_outcome({"accurate": 1.0, "rewarded": 0.5, "pass": 0.0}).reward == 1.5


def test_read_messages_precede_the_next_turn_and_trailing_ones_are_omitted(template: ChatTemplate) -> None:
    async def episode(item: Any, policy: Policy) -> dict[str, float]:
        policy.read("a")
        policy.read([Message("user", "b"), {"role": "tool", "content": "c"}])
        await policy.reply()
        policy.read("d")
        await policy.reply("e")
        policy.read("f")
        return {"right": 0.75, "short": 0.5}

    result = run_episode(Echo(template, "8", ends=False), template, episode)
    assert template.plain(result.token_ids.tolist()) == "abc8de8"
    assert (result.reward, result.parts) == (1.25, {"right": 0.75, "short": 0.5})  # the sum of named parts


TEXTS = st.text(st.sampled_from("ab 1"), max_size=5)


@pytest.mark.parametrize(
    ("name", "thinking"), [("", None), ("qwen3", True), ("qwen3", False), ("llama3", None), ("smollm2", None)]
)
@given(
    script=st.lists(
        st.tuples(st.lists(TEXTS, max_size=2), TEXTS, st.booleans(), st.booleans()), min_size=1, max_size=6
    ),
    limit=st.none() | st.integers(10, 100),
    rng=st.randoms(use_true_random=False),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_the_trainer_gets_the_engines_prompts_and_samples_bit_for_bit(
    template: ChatTemplate,
    name: str,
    thinking: bool | None,
    script: list[tuple[list[str], str, bool, bool]],
    limit: int | None,
    rng: random.Random,
) -> None:
    """Random conversations of users and tools, with and without prompts, ended by stop, length and context."""
    seen, completions = list[list[int]](), list[Completion]()
    chat = chat_template(name, thinking) if name else template
    ends = list(chat.stop_token_ids) if name else []
    others = [index for index in range(len(chat.tokenizer) if name else len(CHARACTERS)) if index not in ends]

    class Random:
        """Generates random ids, as a policy may that tokenises text differently from the template."""

        async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
            seen.append(list(prompt_ids))
            n = rng.randint(1, sampling.max_new_tokens)
            ids = [rng.choice(others) for _ in range(n)]
            stops = n < sampling.max_new_tokens
            if stops and ends and rng.random() < 0.7:  # else a stop string has ended it
                ids[-1] = rng.choice(ends)
            logprobs, versions = [-rng.random() for _ in ids], [rng.randrange(4) for _ in ids]
            arrays = np.asarray(ids), np.asarray(logprobs, np.float32), np.asarray(versions)
            completions.append(Completion(*arrays, "stop" if stops else "length"))
            return completions[-1]

    async def episode(item: Any, policy: Policy) -> float:
        for read, asked, short, greedy in script:
            for text in read:
                policy.read(Message("tool" if name and seen and rng.random() < 0.5 else "user", text))
            await policy.reply(asked, max_new_tokens=2 if short else None, temperature=0.0 if greedy else None)
        return 1.0

    try:
        result = run_episode(Random(), chat, episode, sampling=Sampling(6), limit=limit)
    except EpisodeFailed as failed:
        assert failed.reason == "no turn of the episode can be trained" or not seen
        return
    ids = result.token_ids.tolist()
    assert limit is None or len(ids) <= limit
    assert len(result.turns) == len(seen) and (len(seen) == len(script) or result.finish_reason == "context")
    end = 0
    for turn, prompt, completion, (_, _, _, greedy) in zip(result.turns, seen, completions, script, strict=False):
        assert ids[: len(prompt)] == prompt and prompt[:end] == ids[:end]
        end = len(prompt) + len(completion.token_ids)
        assert ids[len(prompt) : end] == completion.token_ids.tolist()
        n = len(completion.token_ids)
        assert turn.trainable[-n:].all() == (not greedy) and not turn.trainable[:-n].any()
        if not greedy:
            assert turn.logprobs[-n:].tobytes() == completion.logprobs.tobytes()
            assert turn.policy_versions[-n:].tolist() == completion.policy_versions.tolist()
    assert end == len(ids)


@pytest.mark.parametrize(
    ("episode", "reason"),
    [
        (raising(KeyError("x")), "episode raised KeyError"),
        (raising(ScoringFailed("score took over 1 s")), "score took over 1 s"),
        (hanging, "the episode's own code took over 0.2 s"),
    ],
)
def test_an_error_in_episode_code_fails_only_its_episode(template: ChatTemplate, episode: Any, reason: str) -> None:
    with pytest.raises(EpisodeFailed) as failure:
        run_episode(Echo(template, "8"), template, episode)
    assert failure.value.reason == reason


def replies(opening: Any, result: Any = 1.0) -> Any:
    """An episode as a newcomer might write it."""

    async def episode(item: Any, policy: Policy) -> Any:
        await policy.reply(opening)
        return result

    return episode


async def exits(item: Any, policy: Policy) -> float:
    raise SystemExit(3)


async def cancels(item: Any, policy: Policy) -> float:
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await asyncio.sleep(0)
    return 1.0


async def silent(item: Any, policy: Policy) -> float:
    return 1.0


async def twice_at_once(item: Any, policy: Policy) -> float:
    await asyncio.gather(policy.reply("a"), policy.reply("b"))
    return 1.0


UNUSABLE = "episode returned an unusable value"


@pytest.mark.parametrize(
    ("episode", "reason", "advice"),
    [
        (replies([{"role": "user"}]), "episode raised ChatError", "which is not text"),
        (replies(None), "episode raised ChatError", "None is not a message"),
        (replies(""), "episode raised ValueError", "the first turn has no prompt"),
        (replies(7), "episode raised ChatError", "7 is not a message"),
        (replies("guess", None), UNUSABLE, "return a number"),
        (replies("guess", float("nan")), UNUSABLE, "is nan"),
        (replies("guess", "1"), UNUSABLE, "is text"),
        (replies("guess", Outcome("1")), UNUSABLE, "is text"),  # type: ignore[arg-type]
        (replies("guess", {"right": None}), UNUSABLE, "return a number"),
        (replies("guess", {}), UNUSABLE, "an empty dictionary"),
        (replies("guess", Outcome(1.0, info={"file": asyncio})), UNUSABLE, "JSON serializable"),
        (exits, "episode raised SystemExit", "SystemExit: 3"),
        (cancels, "episode was cancelled by its own code", ""),
        (twice_at_once, "episode raised RuntimeError", "the policy is generating a turn"),
    ],
)
def test_an_unusable_episode_fails_with_a_reason_and_advice(
    template: ChatTemplate, episode: Any, reason: str, advice: str
) -> None:
    with pytest.raises(EpisodeFailed) as failure:
        run_episode(Echo(template, "8"), template, episode)
    assert failure.value.reason == reason and advice in failure.value.report


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_episode_that_ends_before_the_policys_turn_has_its_reward_and_no_tokens(
    template: ChatTemplate, temperature: float
) -> None:
    async def lost(item: Any, policy: Policy) -> Outcome:
        policy.read("your opponent forfeits")
        return Outcome(1.0, {"moves": 0.0}, {"why": "forfeit"})

    result = run_episode(Echo(template, "8"), template, lost, sampling=Sampling(temperature=temperature))
    assert (result.turns, result.reward, result.parts, result.info) == ([], 1.0, {"moves": 0.0}, {"why": "forfeit"})


class OutOfReach(httpx.ConnectError, ValueError):
    pass


def caused(error: Exception) -> Exception:
    outer = RuntimeError("the judge did not answer")
    outer.__cause__ = error
    return outer


def answered(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "http://judge")
    return httpx.HTTPStatusError("an error", request=request, response=httpx.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "infrastructure"),
    [
        (JudgeFailed("remote judge could not be reached"), True),
        (JudgeFailed("remote judge answered with status 400", infrastructure=False), False),
        (SandboxFailed("no namespaces"), True),
        (InfrastructureFailed("the shop's server"), True),
        (ConnectionResetError(), True),
        (OutOfReach("no route"), True),
        (caused(httpx.ReadTimeout("late")), True),
        (socket.gaierror(-2, "unknown name"), True),
        (URLError(OSError("refused")), True),
        (HTTPError("http://judge", 503, "busy", HTTPMessage(), None), True),
        (HTTPError("http://judge", 404, "no such page", HTTPMessage(), None), False),
        (answered(429), True),
        (answered(500), False),  # it may be an answer to what the policy sent
        (ScoringFailed("score raised SandboxFailed", infrastructure=True), True),
        (ScoringFailed("score raised KeyError"), False),
        (KeyError("answer"), False),
        (FileNotFoundError("rows.jsonl"), False),
        (caused(KeyError("answer")), False),
    ],
    ids=repr,
)
@pytest.mark.parametrize("of_turn", [False, True])
def test_a_service_that_is_away_is_told_from_the_episodes_own_errors(
    template: ChatTemplate, error: Exception, infrastructure: bool, of_turn: bool
) -> None:
    async def judged() -> float:
        raise error

    async def episode(item: Any, policy: Policy) -> float:
        reply = await policy.reply("guess")
        if not of_turn:
            return await judged()
        reply.reward = judged()
        return 1.0

    with pytest.raises(EpisodeFailed) as failed:
        run_episode(Echo(template, "8"), template, episode)
    assert failed.value.infrastructure == infrastructure


def test_an_episode_that_is_not_a_coroutine_function_is_refused_by_its_task() -> None:
    class Episode:
        async def __call__(self, item: Any, policy: Policy) -> float:
            return 1.0

        async def method(self, item: Any, policy: Policy) -> float:
            return 1.0

    def forgotten(item: Any, policy: Policy) -> float:
        return 1.0

    async def yielding(item: Any, policy: Policy) -> Any:
        yield 1.0

    for episode in (silent, Episode(), Episode().method, functools.partial(silent), functools.partial(Episode())):
        assert task(task(episode).episode).episode is episode
    wrong: Any
    for wrong in (forgotten, yielding, functools.partial(forgotten), None, Episode):
        for make in (task, task(silent).with_episode):
            with pytest.raises(ValueError, match="async def episode"):
                make(wrong)


@pytest.mark.parametrize("queue", ["", "7 calls wait for the 2 scoring processes of the worker"])
@pytest.mark.parametrize("of_turn", [False, True])
def test_queued_scores_are_not_blamed_on_the_episode(template: ChatTemplate, queue: str, of_turn: bool) -> None:
    """Unless the episode spent most of the time elsewhere."""

    class Scorer:
        async def score(self, *_: Any) -> Outcome:
            await asyncio.Event().wait()
            return Outcome(1.0)

    async def scored(item: Any, policy: Policy) -> Any:
        reply = await policy.reply("a")
        if not of_turn:
            return await policy.in_scorer(len, "")
        reply.reward = policy.in_scorer(len, "")
        return 1.0

    async def busy(item: Any, policy: Policy) -> Any:
        await policy.reply("a")
        await asyncio.sleep(0.8 * SETTINGS.episode_deadline_s)
        return await policy.in_scorer(len, "")

    def failure(episode: Any) -> EpisodeFailed:
        scorer: Any = Scorer()
        scorer.queue = queue
        runner = EpisodeRunner(Echo(template, "8"), template, SETTINGS, scorer)
        with pytest.raises(EpisodeFailed) as failed:
            run(runner.play(task(episode), 7, "", Sampling(), 0))
        return failed.value

    own = "the episode's own code took over 0.2 s"
    assert failure(scored).reason == ("scores had no process within 0.2 s" if queue else own)
    assert not queue or queue in failure(scored).report and "--rollout.scorer-processes" in failure(scored).report
    assert failure(busy).reason == own


def line_of(function: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    (found,) = [first + number for number, line in enumerate(lines) if text in line]
    return found


def test_a_failure_reports_its_line_item_and_answer(template: ChatTemplate) -> None:
    async def typo(item: Any, policy: Policy) -> float:
        await policy.reply(item)
        return {"x": 1.0}["y"]

    with pytest.raises(EpisodeFailed) as raised:
        run_episode(Echo(template, "8"), template, typo, item="p" * 1000)
    failure, line = raised.value.failure, line_of(typo, "return")
    assert failure.kind == ("episode raised KeyError", f"{__file__}:{line}")
    traceback, item, answer = failure.report.rsplit("\n", 2)
    assert traceback.splitlines()[:2] == [
        "Traceback (most recent call last):",
        f'  File "{__file__}", line {line}, in typo',
    ]
    assert traceback.endswith("KeyError: 'y'")
    assert item.startswith("Item 7, prompt: 'ppp") and "[... 700 characters ...]" in item
    assert answer == "Answer: '8'"

    with pytest.raises(EpisodeFailed) as late:
        run_episode(Echo(template, "8"), template, hanging)
    line = line_of(hanging, "await")
    assert late.value.place == f"{__file__}:{line}"
    assert f'  File "{__file__}", line {line}, in hanging' in late.value.report
    assert "--rollout.episode-deadline-s" in late.value.report


class Silent:
    """Never answers."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        await asyncio.Event().wait()
        raise AssertionError


class SilentReplica:
    """Accepts requests and never answers one."""

    def __init__(self) -> None:
        self.answer = self.generate = self

    async def call_one(self, connection: str, port: Any) -> None:
        await asyncio.Event().wait()

    def broadcast(self, connection: str, requests: bytes) -> None: ...


class BrokenScorer:
    async def score(self, function: Any, *args: Any) -> Outcome:
        raise ScorerBroken("gone")


async def stubborn(item: Any, policy: Policy) -> float:
    """Suppresses every error."""
    with suppress(Exception):
        await policy.reply("guess")
    with suppress(Exception):
        await policy.in_scorer(float, "1")
    return 1.0


def test_an_infrastructure_error_is_raised_unchanged_even_if_episode_code_catches_it(
    template: ChatTemplate,
) -> None:
    settings = replace(SETTINGS, generate_deadline_s=0.2)
    replica: Any = SilentReplica()
    for episode in (guessing, stubborn):
        runner = EpisodeRunner(Dispatcher([replica], settings.generate_limit_s), template, settings)
        with pytest.raises(DeadlineExceeded, match=r"generator 0 .* group 5 .*--patience"):
            run(runner.play(task(episode), 7, "", Sampling(), 5))
    with pytest.raises(ScorerBroken):
        run_episode(Echo(template, "8"), template, stubborn, scorer=BrokenScorer())


def test_only_its_own_time_stops_an_episode_and_it_generates_nothing_afterwards(template: ChatTemplate) -> None:
    """Its turns take longer than its own code may, and it ignores its cancellation."""
    after = list[str]()

    class Slow(Echo):
        async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
            await asyncio.sleep(50.0)
            return await super().generate(prompt_ids, sampling, group)

    async def episode(item: Any, policy: Policy) -> float:
        await policy.reply("a")
        await asyncio.sleep(0.15)
        await policy.reply("b")
        await asyncio.sleep(0.15)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            try:
                await policy.reply("c")
            except RuntimeError as error:
                after.append(str(error))
        return 1.0

    slow = Slow(template, "8")
    waits = len(wait_registry.waits())

    async def test() -> None:
        with pytest.raises(EpisodeFailed, match=r"own code.* 0\.2 s"):
            runner = EpisodeRunner(slow, template, SETTINGS)
            await runner.play(task(episode), 0, "", Sampling(), 0)
        while not after:
            await asyncio.sleep(0)

    run(test())
    assert len(slow.prompts) == 2 and after == ["the episode is over"]
    assert len(wait_registry.waits()) == waits  # none is left behind


def test_a_full_context_ends_an_episode_with_its_reward_so_far(template: ChatTemplate) -> None:
    echo = Echo(template, "8")  # generates two tokens
    limit = len("guess") + 2 + len("again")  # no room for a token of the second turn
    sampling = Sampling(max_new_tokens=2)

    async def counting(item: Any, policy: Policy) -> float:
        for message in ("guess", "again", "again"):
            await policy.reply(message)
            policy.reward_so_far += 0.25
        return 1.0

    episode = run_episode(echo, template, counting, sampling=sampling, limit=limit)
    assert (episode.finish_reason, episode.reward, len(episode.turns)) == ("context", 0.25, 1)
    assert episode.num_tokens == len("guess") + 2
    guessed = run_episode(echo, template, guessing, sampling=sampling, limit=limit, full_context_reward=-1.0)
    assert (guessed.finish_reason, guessed.reward) == ("context", -1.0)
    whole = run_episode(echo, template, guessing, sampling=sampling, limit=limit + 2)
    assert (whole.finish_reason, whole.reward, whole.num_tokens) == ("stop", 1.0, limit + 2)


def test_an_episode_that_asks_for_ever_ends_after_the_most_turns_as_with_a_full_context(template: ChatTemplate) -> None:
    echo = Echo(template, "8")

    async def asking(item: Any, policy: Policy) -> float:
        while True:
            await policy.reply("no: ")
            policy.reward_so_far += 0.25

    async def catching(item: Any, policy: Policy) -> list[float]:
        """A fork from the middle has turns left; the policy itself has none, whatever it is asked."""
        for _ in range(3):
            await policy.reply("no: ")
        for _ in range(2):
            with pytest.raises(ContextFull, match=r"max-turns"):
                await policy.reply("no: ")
        fork = policy.fork(turns=2)
        assert (await fork.reply("again: ")).text == "8"
        with pytest.raises(ContextFull):
            await fork.reply("again: ")
        return [0.5, 1.0]

    def play(episode: Any, max_turns: int) -> list[Episode]:
        runner = EpisodeRunner(echo, template, replace(SETTINGS, max_turns=max_turns))
        return run(runner.play(task(episode), 7, "", Sampling(), 0))

    (ended,) = play(asking, 3)
    assert (ended.finish_reason, ended.reward, len(ended.turns)) == ("turns", 0.75, 3)
    assert template.plain(ended.token_ids.tolist()) == "no: 8" * 3
    assert [(one.finish_reason, one.reward) for one in play(catching, 3)] == [("turns", 0.5), ("turns", 1.0)]
    (whole,) = play(guessing, 2)
    assert (whole.finish_reason, whole.reward) == ("stop", 1.0), "as many turns as allowed, and not one more"
    statistics = Statistics("rollout worker 0")
    statistics.add_episodes([[ended], [whole]])
    assert (statistics.stats().turn_limits, statistics.stats().full_contexts) == (1, 0)


def test_a_turn_is_limited_to_the_remaining_context(template: ChatTemplate) -> None:
    class Longest:
        """Generates as many tokens as it may."""

        async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
            n = sampling.max_new_tokens
            return Completion(np.full(n, prompt_ids[0]), np.zeros(n), np.zeros(n), "length")

    reasons = list[str]()

    async def episode(item: Any, policy: Policy) -> float:
        for _ in range(2):
            reply = await policy.reply("x")
            reasons.append(reply.finish_reason)
        with pytest.raises(ContextFull):
            await policy.reply("x")
        return len(reply.token_ids)

    result = run_episode(Longest(), template, episode, sampling=Sampling(max_new_tokens=3), limit=7)
    assert reasons == ["length", "context"] and (result.reward, result.num_tokens) == (2.0, 7)
    assert result.finish_reason == "context"


def test_a_first_prompt_without_room_fails_the_episode(template: ChatTemplate) -> None:
    echo = Echo(template, "8")
    with pytest.raises(EpisodeFailed, match=" 5 tokens") as failure:
        run_episode(echo, template, guessing, limit=5)
    assert failure.value.tokens == 0 and failure.value.prompt == "guess"


def test_a_turn_may_have_its_own_sampling_and_is_not_trained_at_another_temperature(template: ChatTemplate) -> None:
    asked = list[Sampling]()

    class Asked(Echo):
        async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
            asked.append(sampling)
            return await super().generate(prompt_ids, sampling, group)

    async def episode(item: Any, policy: Policy) -> float:
        await policy.reply("a", temperature=0.0)
        await policy.reply("b", max_new_tokens=5)
        return 1.0

    result = run_episode(Asked(template, "8"), template, episode, sampling=Sampling(9, 1.0))
    assert [(sampling.temperature, sampling.max_new_tokens) for sampling in asked] == [(0.0, 9), (1.0, 5)]
    assert [turn.trainable.tolist() for turn in result.turns] == [[False] * 3, [False, True, True]]
    assert result.turns[0].policy_versions.tolist() == [-1] * 3 and not result.turns[0].logprobs.any()

    async def greedy(item: Any, policy: Policy) -> float:
        await policy.reply("a", temperature=0.0)
        return 1.0

    with pytest.raises(EpisodeFailed, match="no turn"):
        run_episode(Echo(template, "8"), template, greedy)
    assert run_episode(Echo(template, "8"), template, greedy, sampling=Sampling(9, 0.0)).reward == 1.0


@pytest.mark.parametrize("wrong", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"stop": [""]}])
def test_invalid_sampling_of_a_turn_is_refused(template: ChatTemplate, wrong: dict[str, Any]) -> None:
    async def episode(item: Any, policy: Policy) -> float:
        await policy.reply("a", **wrong)
        return 1.0

    with pytest.raises(EpisodeFailed, match="ValueError"):
        run_episode(Echo(template, "8"), template, episode)


@given(
    sampled=st.text(st.sampled_from("ab<>"), min_size=1, max_size=12),
    stop=st.lists(st.text(st.sampled_from("ab<>"), min_size=1, max_size=3), min_size=1, max_size=2),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_stop_string_ends_a_turn_at_the_token_that_completes_it(
    template: ChatTemplate, sampled: str, stop: list[str]
) -> None:
    """Also a stop string of several tokens. All sampled tokens up to its end are trained."""
    replies = list[Reply]()

    async def episode(item: Any, policy: Policy) -> float:
        replies.append(await policy.reply("q", stop=stop))
        return 1.0

    echo = Echo(template, sampled, ends=False)
    echo.completion.logprobs[:] = np.arange(len(sampled))
    result, (reply,) = run_episode(echo, template, episode), replies
    ends = [sampled.find(text) + len(text) for text in stop if text in sampled]
    length = min(ends) if ends else len(sampled)
    assert reply.token_ids == echo.completion.token_ids[:length].tolist()
    assert result.logprobs.tolist() == [0, *range(length)]
    starts = [sampled[:length].find(text) for text in stop if text in sampled[:length]]
    assert reply.text == (sampled[: min(starts)] if starts else sampled)
    assert reply.finish_reason == ("stop" if ends else "length")


def test_seeds_differ_by_run_group_and_episode_and_repeat() -> None:
    seeds = {episode_seed(run_seed, g, e) for run_seed in range(3) for g in range(20) for e in range(8)}
    assert len(seeds) == 3 * 20 * 8
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds)
    assert episode_seed(1, 2, 3) == episode_seed(1, 2, 3) == 792521117
    assert episode_seed(None, 2, 3) is None
    lines = {line_seed(seed, number) for seed in range(20) for number in range(1, 9)}
    assert len(lines) == 20 * 8 and line_seed(5, 0) == 5 and line_seed(None, 3) is None


def test_all_or_none_cancels_the_others() -> None:
    cancelled = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def fails() -> None:
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        run(all_or_none([waits(), fails(), waits()]))
    assert len(cancelled) == 2


def test_routes_of_all_turns_are_requested_once_and_are_contiguous(template: ChatTemplate) -> None:
    """Each turn requests routes from the first token that had none, and a turn with too few routes is refused."""

    class Routing:
        def __init__(self, lost: int) -> None:
            self.asked: list[tuple[int, int | None]] = []
            self.lost = lost

        async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
            self.asked.append((len(prompt_ids), sampling.expert_routes_from))
            n, start = 3, sampling.expert_routes_from
            assert start is not None and len(prompt_ids) >= n
            positions = np.arange(start, len(prompt_ids) + n - 1 - self.lost, dtype=np.uint8)
            expert_routes = np.broadcast_to(positions[:, None, None], (len(positions), 2, 4))
            ids = np.asarray(prompt_ids[:n], np.int32)
            return Completion(
                ids, np.zeros(n, np.float32), np.zeros(n, np.int32), "length", expert_routes=expert_routes
            )

    generator, sampling = Routing(lost=0), Sampling(max_new_tokens=3, expert_routes_from=0)
    episode = run_episode(generator, template, guessing, sampling=sampling)
    first, second = generator.asked
    assert first[1] == 0 and second[1] == first[0] + 2 and second[0] > first[0] + 3
    assert episode.expert_routes is not None and episode.expert_routes.shape == (episode.num_tokens - 1, 2, 4)
    np.testing.assert_array_equal(episode.expert_routes[:, 1, 2], np.arange(episode.num_tokens - 1))
    with pytest.raises(ValueError, match="routes .* turn 0 "):
        run_episode(Routing(lost=1), template, guessing, sampling=sampling)


def test_a_lost_sampling_mask_fails_its_episode(template: ChatTemplate) -> None:
    class Losing:
        async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
            raise SamplingMaskMissing("the engine ended the request")

    with pytest.raises(EpisodeFailed, match="sampling mask"):
        run_episode(Losing(), template, guessing)


def test_the_first_tools_of_a_worker_hold_up_no_other_episode(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's parsers are imported on a thread, once for all episodes that wait for them: here the import ends only
    after another episode has ended on the event loop."""
    ended, imports = threading.Event(), []

    @functools.cache
    def load_parsers() -> None:
        imports.append(threading.current_thread())
        patience.happened(ended, "the end of another episode", seconds=30)

    monkeypatch.setattr(policy_module, "load_parsers", load_parsers)

    async def with_tools(item: Any, policy: Policy) -> float:
        with pytest.raises(ChatError, match="does not render tools"):
            await policy.reply("3 + 4?", tools=[add])
        return float((await policy.reply("3 + 4?")).text == "8")

    async def without(item: Any, policy: Policy) -> float:
        await policy.reply("3 + 4?")
        ended.set()
        return 1.0

    async def test() -> None:
        runner = EpisodeRunner(Echo(template, "8", ends=False), template, RolloutSettings())
        episodes = (with_tools, with_tools, without)
        rollouts = [runner.play(task(episode), 0, "", Sampling(), 0) for episode in episodes]
        assert [episode.reward for (episode,) in await asyncio.gather(*rollouts)] == [1.0] * 3

    asyncio.run(test())
    assert len(imports) == 1 and imports[0] is not threading.main_thread()
