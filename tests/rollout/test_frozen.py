"""Episodes that ask a frozen model or a remote judge besides their policy. The engines are stand-ins."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from monarch_rl.episode.episode import Episode
from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import GenerationError, JudgeFailed, RequestLost
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.messages import assistant, user
from monarch_rl.rollout import frozen
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.frozen import FrozenModel, connect_frozen_models
from monarch_rl.rollout.play import EpisodeRunner
from monarch_rl.runtime import wait_registry
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.tasks.task import Policy
from tests.model.chat_helpers import write_model
from tests.model.test_tool_calls import CALLS, TOOLS, WITH_TOOLS
from tests.rollout.test_play import SETTINGS, Echo, task


class Engines:
    """Answers ``text`` after ``seconds``, or raises; records its requests."""

    def __init__(self, template: ChatTemplate, text: str = "yes", seconds: float = 0.0) -> None:
        ids = [*template.tokenizer.encode(text), template.tokenizer.eos_token_id]
        n = len(ids)
        self._answer = Completion(np.array(ids, np.int32), np.full(n, -0.5, np.float32), np.zeros(n, np.int32), "stop")
        self._seconds = seconds
        self.error: Exception | None = None
        self.asked: list[tuple[list[int], Sampling, int]] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        self.asked.append((list(prompt_ids), sampling, group))
        await asyncio.sleep(self._seconds)
        if self.error is not None:
            raise self.error
        return self._answer

    async def call(self, group: int, what: str, call: Callable[[Any], Awaitable[Any]]) -> Any:
        raise AssertionError(what)

    def update_replicas(self, paused: Any, lost: Any) -> None: ...

    def replace(self, replica: int, handle: Any) -> None: ...


@pytest.fixture(autouse=True)
def no_engines() -> Iterator[None]:
    yield
    frozen._connected.clear()


@pytest.fixture
def template(model: str) -> ChatTemplate:
    return ChatTemplate(model)


@pytest.fixture
def judge(tmp_path: Path) -> FrozenModel:
    """Its tokenizer and template differ from the policy's."""
    return FrozenModel("judge", write_model(tmp_path / "judge", "qwen3"), "judge-1", 64, request_deadline_s=100.0)


async def run_episode(generator: Any, template: ChatTemplate, episode: Any, group: int = 3) -> Episode:
    runner = EpisodeRunner(generator, template, SETTINGS)
    (sequence,) = await runner.play(task(episode), 7, "", Sampling(), group)
    return sequence


def test_requests_to_a_judge_never_enter_the_episode(template: ChatTemplate, judge: FrozenModel) -> None:
    """Token for token, the episode equals the one without a judge; the judge uses its own template."""

    def episode(asks: bool) -> Any:
        async def turns(item: Any, policy: Policy) -> float:
            for message in ("guess", "again"):
                if asks:
                    verdict = await judge.reply([{"role": "user", "content": "right?"}], stop="no")
                    assert verdict.text == "yes"
                await policy.reply(message)
                if asks:
                    talk = judge.conversation()
                    await asyncio.gather(judge.reply("a"), judge.reply("b", temperature=0.5), talk.reply("c"))
                    await talk.reply("d")
            return 1.0

        return turns

    async def test() -> None:
        own = ChatTemplate(judge.model)
        engines = Engines(own)
        await connect_frozen_models([(judge, engines)])
        echo = Echo(template, "8")
        asking, plain = [await run_episode(echo, template, episode(asks)) for asks in (True, False)]
        for name in ("token_ids", "trainable", "policy_versions"):
            assert np.array_equal(getattr(asking, name), getattr(plain, name)), name
        assert len(asking.turns) == len(plain.turns) == 2
        assert echo.prompts[:2] == echo.prompts[2:]
        prompts = [own.decode(ids) for ids, *_ in engines.asked]
        assert prompts[0] == "<|im_start|>user\nright?<|im_end|>\n<|im_start|>assistant\n"
        assert prompts[-1].startswith("<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nyes")
        assert prompts[-1].endswith("<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n")
        assert {group for *_, group in engines.asked} == {3}, "requests of a group go to one replica"
        assert [sampling.temperature for _, sampling, _ in engines.asked[1:4]] == [0.0, 0.5, 0.0]

    asyncio.run(test())


def test_the_episode_clock_stops_while_judges_answer(template: ChatTemplate, judge: FrozenModel) -> None:
    """In virtual time. Its own code may take 0.2 s: 50 s of judges, including two at once, are not counted; the time
    after them is."""

    async def patient(item: Any, policy: Policy) -> float:
        await policy.reply("a")
        await asyncio.sleep(0.15)
        await asyncio.gather(judge.reply("x"), short_then_judge())
        await asyncio.sleep(0.15)
        return 1.0

    async def short_then_judge() -> None:
        await asyncio.sleep(0.01)
        await judge.reply("y")

    async def slow(item: Any, policy: Policy) -> float:
        await policy.reply("a")
        await judge.reply("x")
        await asyncio.sleep(0.3)
        return 1.0

    async def test() -> None:
        await connect_frozen_models([(judge, Engines(ChatTemplate(judge.model), seconds=50.0))])
        assert (await run_episode(Echo(template, "8"), template, patient)).reward == 1.0
        with pytest.raises(EpisodeFailed, match=r"own code.* 0\.2 s"):
            await run_episode(Echo(template, "8"), template, slow)

    waits = len(wait_registry.waits())
    run_virtual(test())
    assert len(wait_registry.waits()) == waits


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (GenerationError("too long"), "frozen model judge refused a request"),
        (RequestLost("engine gone"), "frozen model judge lost a request"),
        (None, "frozen model judge did not answer in time"),
    ],
)
def test_a_failed_judge_fails_the_episode_unless_its_code_handles_it(
    template: ChatTemplate, judge: FrozenModel, error: Exception | None, reason: str
) -> None:
    async def asking(item: Any, policy: Policy) -> float:
        await policy.reply("a")
        return float((await judge.reply("right?")).text == "yes")

    async def doing_without(item: Any, policy: Policy) -> float:
        try:
            return await asking(item, policy)
        except JudgeFailed as failed:
            assert failed.reason == reason
            return 0.25

    async def test() -> None:
        engines = Engines(ChatTemplate(judge.model), seconds=0.0 if error else 1e6)
        engines.error = error
        await connect_frozen_models([(judge, engines)])
        with pytest.raises(EpisodeFailed) as failed:
            await run_episode(Echo(template, "8"), template, asking)
        assert failed.value.reason == reason
        assert failed.value.tokens > 0, "its sampled tokens are counted"
        assert (await run_episode(Echo(template, "8"), template, doing_without)).reward == 0.25

    run_virtual(test())


def test_a_reward_head_rates_the_whole_conversation_by_its_own_template(judge: FrozenModel) -> None:
    rm = replace(judge, labels=1)
    rated: list[list[int]] = []

    class Heads(Engines):
        async def call(self, group: int, what: str, call: Callable[[Any], Awaitable[Any]]) -> Any:
            return await call(SimpleNamespace(rewards=SimpleNamespace(call_one=self.rate)))

        async def rate(self, ids: list[int]) -> np.ndarray:
            rated.append(ids)
            return np.array([0.5] * len(rated), np.float32)

    async def test() -> None:
        own = ChatTemplate(rm.model)
        await connect_frozen_models([(rm, Heads(own))])
        conversation = [user("2 + 3 ="), assistant("5")]
        assert await rm.reward(conversation) == 0.5
        text = own.decode(rated[0])  # Qwen3's template adds empty thoughts
        assert text.startswith("<|im_start|>user\n2 + 3 =<|im_end|>\n<|im_start|>assistant\n")
        assert text.endswith("5<|im_end|>\n"), "no prompt for another turn"
        with pytest.raises(ValueError, match="judge returns 2 "):
            await rm.reward(conversation)
        for asked in (rm.reply("x"), rm.logprobs([1, 2])):
            with pytest.raises(ValueError, match="cannot generate"):
                await asked
        await connect_frozen_models([(judge, Heads(own))])
        with pytest.raises(ValueError, match="no reward head"):
            await judge.reward(conversation)

    asyncio.run(test())


def test_the_format_of_a_judges_calls_can_be_set(tmp_path: Path) -> None:
    """Required for tools if its template does not reveal the format."""
    judge = FrozenModel("judge", write_model(tmp_path, "tagged", WITH_TOOLS), "judge-1", 10_000)

    async def test() -> None:
        engines = Engines(ChatTemplate(judge.model), CALLS["pythonic"])
        await connect_frozen_models([(judge, engines)])
        with pytest.raises(ValueError, match="tool parser"):
            await judge.reply("1+2?", tools=TOOLS)
        await connect_frozen_models([(replace(judge, tool_parser="pythonic"), engines)])
        (call,) = (await judge.reply("1+2?", tools=TOOLS)).tool_calls
        assert (call.name, call.arguments, call.error) == ("add", {"a": 1}, "")

    asyncio.run(test())


def test_a_prompt_without_room_for_an_answer_is_never_sent(template: ChatTemplate, judge: FrozenModel) -> None:
    async def test() -> None:
        engines = Engines(ChatTemplate(judge.model))
        await connect_frozen_models([(judge, engines)])
        with pytest.raises(JudgeFailed, match=" 64 "):
            await judge.reply("word " * 200)
        assert not engines.asked
        await judge.reply("word " * 5, max_new_tokens=1000)
        ((ids, sampling, _),) = engines.asked
        assert len(ids) + sampling.max_new_tokens == 64

    asyncio.run(test())


def test_code_of_a_finished_episode_cannot_ask_a_judge(template: ChatTemplate, judge: FrozenModel) -> None:
    left: list[asyncio.Task[None]] = []
    messages = list[str]()

    async def later() -> None:
        await asyncio.sleep(1.0)
        try:
            await judge.reply("x")
        except RuntimeError as error:
            messages.append(str(error))

    async def episode(item: Any, policy: Policy) -> float:
        left.append(asyncio.ensure_future(later()))
        await policy.reply("a")
        return 1.0

    async def test() -> None:
        engines = Engines(ChatTemplate(judge.model))
        await connect_frozen_models([(judge, engines)])
        await run_episode(Echo(template, "8"), template, episode)
        await left[0]
        assert messages == ["the episode is over"] and not engines.asked

    run_virtual(test())


def test_a_frozen_model_pickles_and_reports_why_it_cannot_be_asked(judge: FrozenModel) -> None:
    assert pickle.loads(pickle.dumps(judge)) == judge

    async def test() -> None:
        with pytest.raises(RuntimeError, match=r"'judge'.*run\.start"):
            await judge.reply("x")
        foreign = replace(judge, foreign="3 tokens differ")
        for asked in (foreign.logprobs([1, 2]), foreign.top_logprobs([1, 2], 2)):
            with pytest.raises(ValueError, match="3 tokens differ"):
                await asked

    asyncio.run(test())
