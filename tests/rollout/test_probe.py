"""The run of one item before the engines start, with a stand-in for the model."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

from monarch_rl.episode.failure import UNUSABLE, Failure
from monarch_rl.errors import ProbeFailed
from monarch_rl.rollout import probe as probing
from monarch_rl.rollout.frozen import FrozenModel
from monarch_rl.rollout.probe import ANSWER, probe, run_item, sent
from monarch_rl.rollout.remote_judge import RemoteJudge
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.tasks.environment import Environment
from monarch_rl.tasks.mixture import Mixture
from monarch_rl.tasks.questions import Questions
from monarch_rl.tasks.task import Outcome, Policy, Task
from tests.patience import patiently

SETTINGS = RolloutSettings(max_new_tokens=8)
ROWS = [{"question": f"question {number}"} for number in range(8)]
JUDGE = RemoteJudge("http://127.0.0.1:9", "judge", retries=0)


def place(function: Any) -> str:
    return f"{__file__}:{inspect.getsourcelines(function)[1]}"


def run(task: Task, item: Any = ROWS[0]) -> list[Failure]:
    return run_item(task, item, SETTINGS.group_size, SETTINGS)


def text(row: Any, answer: str) -> Any:
    return "1.0"


def nothing(row: Any, answer: str) -> Any:
    return None


def not_a_number(row: Any, answer: str) -> Any:
    return float("nan")


def pair(row: Any, answer: str) -> Any:
    return 1.0, {"format": 1.0}


def part_of_text(row: Any, answer: str) -> Any:
    return {"format": "yes"}


async def late(row: Any, answer: str) -> Any:
    return "1.0"


def not_awaited(row: Any, answer: str) -> Any:
    return late(row, answer)


class Scores:
    def __call__(self, row: Any, answer: str) -> Any:
        return [1.0]


@pytest.mark.parametrize("reward", [text, nothing, not_a_number, pair, part_of_text, late, not_awaited])
def test_a_value_that_is_no_reward_is_reported_with_the_function_that_returned_it(reward: Any) -> None:
    (failure,) = run(Questions(ROWS, reward))
    assert failure.reason == f"score {UNUSABLE}"
    assert failure.place == place(reward) and f"{reward.__name__} ({failure.place})" in failure.report
    assert "Item 0" in failure.report and "question 0" in failure.report


def test_a_callable_object_is_reported_with_its_call() -> None:
    (failure,) = run(Questions(ROWS, Scores()))
    assert failure.place == place(Scores.__call__) and "Scores" in failure.report


async def returns_text(item: Any, policy: Policy) -> Any:
    await policy.reply("x")
    return "right"


async def returns_too_much(item: Any, policy: Policy) -> Any:
    await policy.seat("white").reply("x")
    return {"white": 1.0, "black": 1.0}


@pytest.mark.parametrize("episode", [returns_text, returns_too_much])
def test_an_unusable_value_of_an_episode_is_reported_with_its_function(episode: Any) -> None:
    (failure,) = run(Task(lambda cursor: cursor, episode))
    assert failure.reason == f"episode {UNUSABLE}" and failure.place == place(episode)


def one_for_all(item: Any, outcomes: list[Outcome]) -> Any:
    return [1.0]


async def texts(item: Any, outcomes: list[Outcome]) -> Any:
    return ["1.0"] * len(outcomes)


@pytest.mark.parametrize("function", [one_for_all, texts])
def test_rewards_that_do_not_fit_the_group_are_reported_with_their_function(function: Any) -> None:
    (failure,) = run(Questions(ROWS, lambda row, answer: 1.0, group_rewards=function))
    assert UNUSABLE in failure.reason and failure.place == place(function)


def of_trl(completions: list[str], **columns: Any) -> list[float]:
    return [1.0]


async def without_policy(item: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "task"),
    [
        (of_trl, lambda: Questions(ROWS, of_trl)),  # type: ignore[arg-type]
        (without_policy, lambda: Task(lambda cursor: cursor, without_policy)),  # type: ignore[arg-type]
        (without_policy, lambda: Questions(ROWS, good, group_rewards=without_policy)),  # type: ignore[arg-type]
    ],
)
def test_a_function_that_takes_other_arguments_is_refused_with_its_name_and_place(function: Any, task: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{function.__name__} ({place(function)})")):
        task()


async def scores_wrongly(item: Any, policy: Policy) -> Outcome:
    return await policy.in_scorer(good, (await policy.reply("x")).text)


def test_a_score_that_is_called_with_other_arguments_is_reported_with_its_place() -> None:
    (failure,) = run(Task(lambda cursor: cursor, scores_wrongly))
    assert failure.place == place(good) and "TypeError" in failure.reason


async def rewards_a_turn_by_text(item: Any, policy: Policy) -> Any:
    (await policy.reply("a")).reward = "good"  # type: ignore[assignment]
    return 1.0


def test_an_unusable_reward_of_a_turn_is_an_error_with_its_line() -> None:
    (failure,) = run(Task(lambda cursor: cursor, rewards_a_turn_by_text))
    assert UNUSABLE in failure.reason and "turn" in failure.reason, "which the probe refuses"
    line = rewards_a_turn_by_text.__code__.co_firstlineno + 1
    assert failure.place == f"{__file__}:{line}" and failure.place in failure.report


async def plays(item: Any, policy: Policy) -> Any:
    """All that a policy can do."""
    policy.read({"role": "system", "content": "Play."})
    first = await policy.reply("a", stop="is", tools=[lambda_free])
    assert first.text == "The answer " and first.finish_reason == "stop"
    first.reward = policy.in_scorer(lambda_free, 1)
    branches = [policy.fork(), policy.fork(turns=1, tokens=1)]
    for branch in branches:
        await branch.reply("" if branch.turns else "b") if branch is branches[0] else await branch.reply()
    return [{"part": 1.0}, Outcome(0.5)]


def lambda_free(x: int) -> float:
    """Return it.

    Args:
        x: a number.
    """
    return float(x)


async def endless(item: Any, policy: Policy) -> float:
    while (await policy.reply("Try again: ")).text:
        pass
    return 1.0


async def asks_a_judge(row: Any, answer: str) -> float:
    return float(bool(await JUDGE.reply(answer)))


async def asks_a_frozen_model(row: Any, answer: str) -> float:
    return float(bool(await FrozenModel("judge", "none", "key", 100).reply(answer)))


async def judged_group(item: Any, outcomes: Sequence[Outcome]) -> list[float]:
    return [await asks_a_judge(item, outcome.answer) for outcome in outcomes]


@pytest.mark.parametrize(
    "task",
    [
        Questions(ROWS, lambda row, answer: {"right": float(answer == ANSWER)}),
        Task(lambda cursor: cursor, plays),
        Task(lambda cursor: cursor, endless),
        Questions(ROWS, asks_a_judge),
        Questions(ROWS, asks_a_frozen_model),
        Questions(ROWS, lambda row, answer: 1.0, group_rewards=judged_group),
    ],
    ids=["question", "seats and forks", "endless", "judge", "frozen model", "judge of a group"],
)
def test_nothing_is_reported_where_nothing_is_wrong(task: Task) -> None:
    assert run(task) == []


def touchy(row: Any, answer: str) -> float:
    return float(row["missing"])


def good(row: Any, answer: str) -> float:
    return float(answer == ANSWER)


def test_a_mixture_is_probed_in_a_scoring_process_and_environments_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task once, and its held-out item: an exception is a warning, a value that is not a reward an error."""

    def make(seed: int) -> Any:
        raise AssertionError("the environment was made")

    monkeypatch.setattr(touchy, "__module__", "__main__")  # as a function in the recipe's own file
    monkeypatch.setattr(sys.modules["__main__"], "touchy", touchy, raising=False)
    raising = Questions(ROWS, touchy, held_out=2, name="raising")
    environment = Environment(make, str, held_out=2)
    fine = Questions(ROWS, good, held_out=2, name="fine")

    async def warnings(*tasks: Task) -> list[str]:
        mixture = Mixture({Mixture(dict.fromkeys(tasks, 1.0), name="inner"): 1.0, environment: 1.0})
        return await patiently(probe(mixture, SETTINGS), "the probe")

    (warning,) = asyncio.run(warnings(fine, raising))
    assert "task raising, a training item" in warning and "KeyError" in warning and 'float(row["missing"])' in warning
    assert "--no-probe" in warning
    with pytest.raises(ProbeFailed, match="task wrong") as failed:
        asyncio.run(warnings(fine, Questions(ROWS, text, name="wrong")))
    assert place(text) in str(failed.value)
    rows = [row | {"grader": Uncopied("a")} for row in ROWS]
    with pytest.raises(ProbeFailed, match=r"task uncopied.*argument"):
        asyncio.run(warnings(Task(rows.__getitem__, endless, name="uncopied")))


def test_a_variable_that_cannot_be_copied_is_named_with_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = graded_by(Uncopied("a"))
    monkeypatch.setattr(good, "warm_up", lambda: reads({}, "a"), raising=False)
    for task in (
        Questions(ROWS, reads, name="graded"),
        Questions(ROWS, good, name="graded"),  # by its warm_up
        Environment(lambda seed: reads, str, name="graded"),
    ):
        with pytest.raises(TypeError, match="task graded .*grader: "):
            sent(Mixture({Task(ROWS.__getitem__, endless, name="fine"): 1.0, task: 1.0}))


class Uncopied:
    """Like the templates of jinja2: it is pickled, but not unpickled."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> Any:
        return Uncopied, ()


def graded_by(grader: Uncopied) -> Any:
    def reward(row: Any, answer: str) -> float:
        return float(answer == grader.text)

    return reward


def needs_an_answer(row: Any, answer: str) -> float:
    return float(answer == row["answer"])


def test_a_held_out_item_is_probed_too() -> None:
    rows = [{"question": str(number), "answer": "4"} for number in range(4)]
    task = Questions(rows, needs_an_answer, held_out={"test": [{"question": "unanswered"}]})
    (warning,) = asyncio.run(patiently(probe(task, SETTINGS), "the probe"))
    assert "a held-out item: " in warning and "KeyError: 'answer'" in warning and "'unanswered'" in warning


def hangs(row: Any, answer: str) -> float:
    while True:
        pass


def fails() -> None:
    raise OSError("no data")


def test_a_hanging_reward_is_a_warning_and_a_failing_warm_up_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "PROBE_S", 1.0)
    (warning,) = asyncio.run(patiently(probe(Questions(ROWS, hangs), SETTINGS), "the probe"))
    assert "took over" in warning and "in hangs" in warning and "deadline-s" not in warning
    good.warm_up = fails  # type: ignore[attr-defined]
    try:
        with pytest.raises(ProbeFailed, match=r"warm_up: .* raised OSError(.|\n)*no data"):
            asyncio.run(patiently(probe(Questions(ROWS, good), SETTINGS), "the probe"))
    finally:
        del good.warm_up  # type: ignore[attr-defined]


async def waits_forever(item: Any, policy: Policy) -> float:
    await asyncio.Event().wait()
    return 1.0


def test_an_item_for_which_others_left_little_time_is_not_said_to_take_long() -> None:
    async def failures() -> list[Failure]:
        scorer = Scorer(1, probing.PROBE_S)
        try:
            task, ends = Task(lambda cursor: cursor, waits_forever), time.monotonic() + 1
            return await patiently(probing._failures(task, [(0, 1)], SETTINGS, scorer, ends), "the probe")
        finally:
            await asyncio.to_thread(scorer.close)

    assert asyncio.run(failures()) == []


def test_a_machine_without_a_fork_server_is_a_warning() -> None:
    """The recipe's file is never imported again, as a spawned process would: it may launch without a guard."""
    (warning,) = asyncio.run(patiently(probe(Questions(ROWS, good), SETTINGS, "none"), "the probe"))
    assert "fork server" in warning


def test_a_first_item_that_cannot_be_made_is_an_error() -> None:
    def items(cursor: int) -> Any:
        raise KeyError("no such file")

    with pytest.raises(ProbeFailed, match=r"items(.|\n)*no such file"):
        asyncio.run(patiently(probe(Task(items, endless), SETTINGS), "the probe"))
