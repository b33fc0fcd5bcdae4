"""Environments of verifiers, real ones, played through the policy; what is drawn is scripted."""

from __future__ import annotations

import importlib.util
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
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.play import EpisodeRunner
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.simulate.clock import run_virtual
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


class Scripted:
    """Draws the texts in turn, and keeps what the engine saw."""

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


def play(
    template: ChatTemplate, make: Callable[[], Any], texts: list[str], limit: int | None = None
) -> tuple[Episode, Scripted]:
    task, engine = Verifiers(make), Scripted(template, texts)
    player = EpisodeRunner(engine, template, RolloutSettings(), None, limit)
    (played,) = run_virtual(player.play(task, 0, task.items(0), Sampling(100), 0))
    return played, engine


@needs_verifiers
def test_an_environment_of_verifiers_is_played_and_scored_by_its_rubric(template: ChatTemplate) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    task = pickle.loads(pickle.dumps(ByValue(Verifiers(one_turn)))).load()
    items = [task.items(cursor) for cursor in range(10)]
    assert sorted(item["answer"] for item in items[:5]) == sorted(row["answer"] for row in ROWS)
    assert items == [task.items(cursor) for cursor in range(10)]
    row = items[0]
    played, engine = play(template, one_turn, [row["answer"]])
    assert (played.reward, played.parts) == (1.5, {"right": 1.0, "brief": 1.0, "num_turns": 1.0})
    assert played.messages[0]["content"] == "Be brief." and played.info["stop"] == "max_turns_reached"
    assert played.token_ids.tolist() == engine.seen[0] and played.num_trainable == len(row["answer"]) + 1
    assert play(template, one_turn, [""])[0].parts["right"] == 0.0, "an empty answer is scored"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@needs_verifiers
def test_tools_of_verifiers_are_called_between_turns_and_nothing_is_tokenised_again(template: ChatTemplate) -> None:
    played, engine = play(template, with_tools, [CALL, "<tool_call>\nhm\n</tool_call>", "42"])
    assert played.reward == 1.0 and played.parts["multiply_calls"] == 1.0 and played.parts["total_tool_calls"] == 2.0
    assert [message["role"] for message in played.messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert played.messages[2]["content"] == "42" and "multiply" in template.decode(engine.seen[0])
    assert engine.seen[1][: len(engine.seen[0])] == engine.seen[0]
    assert played.token_ids.tolist() == engine.seen[2]


@needs_verifiers
def test_a_full_context_ends_it_with_the_rubrics_reward(template: ChatTemplate) -> None:
    opening = len(play(template, with_tools, ["42"])[1].seen[0])
    played, _ = play(template, with_tools, [CALL, "42"], limit=opening + 60)
    assert (played.finish_reason, played.reward, played.info["stop"]) == ("context", 0.0, "prompt_too_long")


@needs_verifiers
def test_what_goes_wrong_in_a_turn_is_shown_and_a_changed_conversation_refused(template: ChatTemplate) -> None:
    import verifiers as vf
    from datasets import Dataset

    class Forgets(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [{"role": "user", "content": "again"}]

        async def get_prompt_messages(self, state: Any) -> Any:
            return (await super().get_prompt_messages(state))[-1:] if state["trajectory"] else state["prompt"]

    forgetting = Forgets(max_turns=3, dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[right]))
    with pytest.raises(EpisodeFailed) as failed:
        play(template, lambda: forgetting, ["1", "2"])
    assert failed.value.reason == "episode raised ValueError" and "changed earlier messages" in failed.value.report


@needs_verifiers
def test_settings_of_verifiers_that_cannot_work_are_refused() -> None:
    from datasets import Dataset

    assert Verifiers(one_turn).check()[0].startswith("Be brief.6 * ")
    with pytest.raises(ValueError, match="no eval_dataset"):
        Verifiers(one_turn, held_out=2).check()
    task = Verifiers(lambda: one_turn(eval_dataset=Dataset.from_list(ROWS[:2])), held_out=2)
    task.check()
    assert [row["answer"] for row in (task.held_out["held_out"][0], task.held_out["held_out"][1])] == ["0", "6"]
    with pytest.raises(ValueError, match="eval_dataset has 2 rows"):
        Verifiers(lambda: one_turn(eval_dataset=Dataset.from_list(ROWS[:2])), held_out=3).check()


def test_without_verifiers_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("verifiers", "verifiers.envs.environment"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=r"pip install \"monarch_rl\[verifiers\]\""):
        Verifiers(one_turn).check()
