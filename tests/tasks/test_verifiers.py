"""Real environments of verifiers, run through the policy with scripted replies."""

from __future__ import annotations

import importlib.util
import inspect
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch_rl.episode.episode import Episode
from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import JudgeFailed
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.messages import as_messages
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.play import EpisodeRunner
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.tasks import verifiers
from monarch_rl.tasks.verifiers import Verifiers
from tests.model.chat_helpers import write_model

needs_verifiers = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None,
    reason="verifiers 0.1.10 is not installed: pip install 'monarch_rl[verifiers]'",
)
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
ROWS = [{"question": f"6 * {n}?", "answer": str(6 * n)} for n in range(5)]


def right(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"].strip() == answer)


def brief(completion: Any) -> float:
    return float(len(completion[-1]["content"]) < 5)


def one_turn(**more: Any) -> Any:
    import verifiers as vf
    from datasets import Dataset

    rubric = vf.Rubric(funcs=[right, brief], weights=[1.0, 0.5])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), system_prompt="Be brief.", rubric=rubric, **more)


def multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: one.
        b: the other.
    """
    return a * b


def with_tools() -> Any:
    import verifiers as vf
    from datasets import Dataset

    rows = [{"question": "6 * 7?", "answer": "42"}]
    return vf.ToolEnv(tools=[multiply], max_turns=4, dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))


def test_messages_have_no_keys_that_a_data_set_adds() -> None:
    from datasets import Dataset

    calls = [{"function": {"name": "look", "arguments": arguments}} for arguments in ({"city": "Oslo"}, {"day": 1})]
    messages: Any = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    turns: Any = verifiers._Turns(None)  # type: ignore[arg-type]
    assert as_messages(turns._new(Dataset.from_list([{"prompt": messages}])[0]["prompt"])) == as_messages(messages)


class Scripted:
    """Generates the texts in turn, and records what the engine saw."""

    def __init__(self, template: ChatTemplate, texts: list[str]) -> None:
        self._ids = [template.tokenizer.encode(text + "<|im_end|>") for text in texts]
        self.seen: list[list[int]] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        ids = self._ids[len(self.seen)][: sampling.max_new_tokens]
        self.seen.append([*prompt_ids, *ids])
        n = len(ids)
        return Completion(np.asarray(ids), np.full(n, -0.5, np.float32), np.zeros(n, int), "stop")


@pytest.fixture
def template(tmp_path: Path) -> ChatTemplate:
    return ChatTemplate(write_model(tmp_path, "qwen3"))


def run_episode(
    template: ChatTemplate, make: Callable[[], Any], texts: list[str], limit: int | None = None
) -> tuple[Episode, Scripted]:
    task, engine = Verifiers(make), Scripted(template, texts)
    runner = EpisodeRunner(engine, template, RolloutSettings(), None, limit)
    (result,) = run_virtual(runner.play(task, 0, task.items(0), Sampling(100), 0))
    return result, engine


async def judged(completion: Any) -> float:
    raise RuntimeError("the judge") from JudgeFailed("remote judge could not be reached")


class Unavailable:
    """As verifiers 0.1.10 scores: a reward function that raises counts as 0."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self.funcs = list(functions)
        self.rubric = self

    async def rollout(self, *_: Any) -> dict[str, Any]:
        completion = [{"content": "42"}]
        return {"error": None, "trajectory": [], "completion": completion, "stop_condition": "", "is_truncated": False}

    async def score_rollout(self, state: dict[str, Any]) -> None:
        state["metrics"] = {}
        for function in self.funcs:
            try:
                assert list(inspect.signature(function).parameters) == ["completion"]
                found = function(completion=state["completion"])
                state["metrics"][function.__name__] = await found if inspect.isawaitable(found) else found
            except Exception:
                state["metrics"][function.__name__] = 0.0
        state["reward"] = sum(state["metrics"].values())


def test_a_judge_that_is_away_is_no_reward_of_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(completion: Any) -> float:
        raise KeyError("no judge is to blame")

    monkeypatch.setattr(verifiers, "_without_handlers", lambda make: make())
    policy: Any = None

    async def reward(*functions: Callable[..., Any]) -> Any:
        return await Verifiers(lambda: Unavailable(*functions)).episode({}, policy)

    assert run_virtual(reward(brief, broken)).reward == 1.0
    with pytest.raises(RuntimeError, match="judge"):
        run_virtual(reward(brief, judged))


@needs_verifiers
def test_a_verifiers_environment_runs_and_is_scored_by_its_rubric(template: ChatTemplate) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    task = pickle.loads(pickle.dumps(ByValue(Verifiers(one_turn)))).load()
    items = [task.items(cursor) for cursor in range(10)]
    assert sorted(item["answer"] for item in items[:5]) == sorted(row["answer"] for row in ROWS)
    assert items == [task.items(cursor) for cursor in range(10)]
    row = items[0]
    result, engine = run_episode(template, one_turn, [row["answer"]])
    assert (result.reward, result.parts) == (1.5, {"right": 1.0, "brief": 1.0, "num_turns": 1.0})
    assert result.messages[0]["content"] == "Be brief." and result.info["stop"] == "max_turns_reached"
    assert result.token_ids.tolist() == engine.seen[0] and result.num_trainable == len(row["answer"]) + 1
    assert run_episode(template, one_turn, [""])[0].parts["right"] == 0.0, "an empty answer is scored"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@needs_verifiers
def test_verifiers_tools_are_called_between_turns_and_nothing_is_tokenised_again(template: ChatTemplate) -> None:
    result, engine = run_episode(template, with_tools, [CALL, "<tool_call>\nhm\n</tool_call>", "42"])
    assert result.reward == 1.0 and result.parts["multiply_calls"] == 1.0 and result.parts["total_tool_calls"] == 2.0
    assert [message["role"] for message in result.messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert result.messages[2]["content"] == "42" and "multiply" in template.decode(engine.seen[0])
    assert engine.seen[1][: len(engine.seen[0])] == engine.seen[0]
    assert result.token_ids.tolist() == engine.seen[2]


@needs_verifiers
def test_a_full_context_ends_an_episode_with_the_rubrics_reward(template: ChatTemplate) -> None:
    opening = len(run_episode(template, with_tools, ["42"])[1].seen[0])
    result, _ = run_episode(template, with_tools, [CALL, "42"], limit=opening + 60)
    assert (result.finish_reason, result.reward, result.info["stop"]) == ("context", 0.0, "prompt_too_long")


@needs_verifiers
def test_a_changed_conversation_is_refused_and_reported(template: ChatTemplate) -> None:
    import verifiers as vf
    from datasets import Dataset

    class Forgets(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [{"role": "user", "content": "again"}]

        async def get_prompt_messages(self, state: Any) -> Any:
            return (await super().get_prompt_messages(state))[-1:] if state["trajectory"] else state["prompt"]

    forgetting = Forgets(max_turns=3, dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[right]))
    with pytest.raises(EpisodeFailed) as failed:
        run_episode(template, lambda: forgetting, ["1", "2"])
    assert failed.value.reason == "episode raised ValueError" and "changed earlier messages" in failed.value.report


@needs_verifiers
def test_invalid_settings_of_verifiers_are_refused() -> None:
    from datasets import Dataset

    assert Verifiers(one_turn).check()[0].startswith("Be brief.\n6 * ")
    with pytest.raises(ValueError, match="no eval_dataset"):
        Verifiers(one_turn, held_out=2).check()
    task = Verifiers(lambda: one_turn(eval_dataset=Dataset.from_list(ROWS[:2])), held_out=2)
    task.check()
    assert [row["answer"] for row in (task.held_out["held_out"][0], task.held_out["held_out"][1])] == ["0", "6"]
    with pytest.raises(ValueError, match="eval_dataset has 2 rows"):
        Verifiers(lambda: one_turn(eval_dataset=Dataset.from_list(ROWS[:2])), held_out=3).check()


def test_without_verifiers_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("verifiers", "verifiers.envs.environment"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=r"pip install \"monarch_rl\[verifiers\]\""):
        Verifiers(one_turn).check()
