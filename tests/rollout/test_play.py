"""Episodes without actors: a generator and environments made for the test."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from typing import Any, TypeVar

import numpy as np
import pytest

from monarch_rl.episode.episode import Episode
from monarch_rl.episode.sampling import Completion, DrawLost, Sampling
from monarch_rl.rollout.play import EpisodeFailed, EpisodePlayer, all_or_none, episode_seed
from monarch_rl.rollout.scoring import ScorerBroken, ScoringFailed
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.tokenizer import Tokenizer
from monarch_rl.runtime.deadlines import DeadlineExceeded
from monarch_rl.tasks.task import Item, Message, Score, SingleTurn, StepResult

T = TypeVar("T")
SETTINGS = RolloutSettings(max_turns=3, environment_deadline_s=0.2, generate_deadline_s=0.2)


class Echo:
    """Draws ``text`` and, if it ends, the stop token; keeps the prompts it was given."""

    def __init__(self, tokenizer: Tokenizer, text: str, ends: bool = True) -> None:
        self.prompts: list[list[int]] = []
        ids = tokenizer.render([Message("user", text)]) + list(tokenizer.stop_token_ids) * ends
        n = len(ids)
        reason = "stop" if ends else "length"
        self.completion = Completion(np.asarray(ids), np.full(n, -0.5), np.full(n, 4), reason)

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        self.prompts.append(list(prompt_ids))
        return self.completion


class Guessing:
    """Ends after two turns, rewards each."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    async def reset(self) -> list[Message]:
        return [Message("user", "guess")]

    async def step(self, text: str) -> StepResult:
        self.heard.append(text)
        turn = len(self.heard)
        parts = {"format": 0.25, f"turn {turn}": 1.0}
        return StepResult(0.5, turn == 2, [Message("user", "again")], {"guesses": turn}, parts)


class Raising(Guessing):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def step(self, text: str) -> StepResult:
        raise self._error


class Hanging(Guessing):
    async def reset(self) -> list[Message]:
        await asyncio.Event().wait()
        return []


def run(awaitable: Awaitable[T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(awaitable, 30)

    return asyncio.run(bounded())


@pytest.fixture
def tokenizer(model: str) -> Tokenizer:
    return Tokenizer(model)


def test_single_turn_keeps_the_drawn_ids(tokenizer: Tokenizer) -> None:
    async def score(text: str) -> Score:
        return Score(float(text == "12"))

    echo = Echo(tokenizer, "12")
    episode: Episode = run(EpisodePlayer(echo, tokenizer, SETTINGS).play(SingleTurn("3 * 4 =", score), Sampling(), 0))
    assert (episode.reward, episode.finish_reason, len(episode.turns)) == (1.0, "stop", 1)
    prompt = tokenizer.render([Message("user", "3 * 4 =")])
    assert episode.token_ids.tolist() == prompt + echo.completion.token_ids.tolist()
    assert episode.trainable.tolist() == [False] * len(prompt) + [True] * 3
    assert echo.prompts == [prompt]


def test_turns_are_never_tokenised_again(tokenizer: Tokenizer) -> None:
    environment, echo = Guessing(), Echo(tokenizer, "8", ends=False)
    episode = run(EpisodePlayer(echo, tokenizer, SETTINGS).play(environment, Sampling(), 0))
    assert environment.heard == ["8", "8"]
    assert (episode.reward, episode.info) == (1.0, {"guesses": 2})
    assert episode.parts == {"format": 0.5, "turn 1": 1.0, "turn 2": 1.0}  # summed by name
    assert tokenizer.decode(episode.token_ids.tolist()) == "guess8again8"
    first, second = echo.prompts
    assert second[: len(first)] == first
    assert episode.token_ids.tolist() == second + echo.completion.token_ids.tolist()


def test_max_turns_ends_an_episode(tokenizer: Tokenizer) -> None:
    settings = RolloutSettings(max_turns=1)
    episode = run(EpisodePlayer(Echo(tokenizer, "8"), tokenizer, settings).play(Guessing(), Sampling(), 0))
    assert (len(episode.turns), episode.reward) == (1, 0.5)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (Raising(KeyError("x")), "environment's step raised KeyError"),
        (Raising(ScoringFailed("score took over 1 s")), "score took over 1 s"),
        (Hanging(), "environment's reset took over 0.2 s"),
    ],
)
def test_the_environment_costs_its_episode(tokenizer: Tokenizer, environment: Guessing, reason: str) -> None:
    with pytest.raises(EpisodeFailed) as failure:
        run(EpisodePlayer(Echo(tokenizer, "8"), tokenizer, SETTINGS).play(environment, Sampling(), 0))
    assert failure.value.reason == reason


class Broken(Guessing):
    """Answers as the author of a first environment might."""

    def __init__(self, opening: Any, result: Any) -> None:
        super().__init__()
        self._opening, self._result = opening, result

    async def reset(self) -> list[Message]:
        return self._opening  # type: ignore[no-any-return]

    async def step(self, text: str) -> StepResult:
        return self._result  # type: ignore[no-any-return]


OPENING = [Message("user", "guess")]


@pytest.mark.parametrize(
    ("environment", "reason", "advice"),
    [
        (Broken([{"role": "user"}], None), "environment's reset returned what cannot be rendered", "list of Message"),
        (Broken(None, None), "environment's reset returned what cannot be rendered", "list of Message"),
        (Broken(OPENING, None), "environment's step returned what cannot be used", "return a StepResult"),
        (Broken(OPENING, 1.0), "environment's step returned what cannot be used", "return a StepResult"),
        (Broken(OPENING, StepResult(float("nan"), True)), "environment's step returned what cannot be used", "is nan"),
        (Broken(OPENING, StepResult("1", True)), "environment's step returned what cannot be used", "TypeError"),  # type: ignore[arg-type]
        (
            Broken(OPENING, StepResult(1.0, False, ["more"])),  # type: ignore[list-item]
            "environment's step returned what cannot be rendered",
            "list of Message",
        ),
    ],
)
def test_what_an_environment_returns_costs_its_episode_if_it_cannot_be_used(
    tokenizer: Tokenizer, environment: Guessing, reason: str, advice: str
) -> None:
    with pytest.raises(EpisodeFailed) as failure:
        run(EpisodePlayer(Echo(tokenizer, "8"), tokenizer, SETTINGS).play(environment, Sampling(), 0))
    assert failure.value.reason == reason and advice in failure.value.report


def test_a_coroutine_that_is_none_costs_its_episode(tokenizer: Tokenizer) -> None:
    class Plain(Guessing):
        def reset(self) -> list[Message]:  # type: ignore[override]
            return OPENING

    plain: Any = Plain()
    with pytest.raises(EpisodeFailed) as failure:
        run(EpisodePlayer(Echo(tokenizer, "8"), tokenizer, SETTINGS).play(plain, Sampling(), 0))
    assert failure.value.reason == "environment's reset raised TypeError" and "coroutine" in failure.value.report


def line_of(function: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    (found,) = [first + number for number, line in enumerate(lines) if text in line]
    return found


def test_a_failure_shows_its_author_where_it_was_with_the_item_and_the_answer(tokenizer: Tokenizer) -> None:
    with pytest.raises(EpisodeFailed) as raised:
        environment = Raising(KeyError("x"))
        run(EpisodePlayer(Echo(tokenizer, "8"), tokenizer, SETTINGS).play(environment, Sampling(), 0))
    raised.value.item = Item(7, "p" * 1000, "", {})
    failure, line = raised.value.failure, line_of(Raising.step, "raise")
    assert failure.kind == ("environment's step raised KeyError", f"{__file__}:{line}")
    traceback, item, answer = failure.report.rsplit("\n", 2)
    assert traceback.splitlines()[:2] == [
        "Traceback (most recent call last):",
        f'  File "{__file__}", line {line}, in step',
    ]
    assert traceback.endswith("KeyError: 'x'")
    assert item.startswith("Item 7, prompt: 'ppp") and "[... 700 characters ...]" in item
    assert answer == "Answer: '8'"

    with pytest.raises(EpisodeFailed) as late:
        run(EpisodePlayer(Echo(tokenizer, "8"), tokenizer, SETTINGS).play(Hanging(), Sampling(), 0))
    line = line_of(Hanging.reset, "await")
    assert late.value.place == f"{__file__}:{line}"
    assert f'  File "{__file__}", line {line}, in reset' in late.value.report
    assert "raise --rollout.environment-deadline-s" in late.value.report


def test_what_is_not_the_episodes_fault_is_raised_as_it_is(tokenizer: Tokenizer) -> None:
    class Silent:
        async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
            await asyncio.Event().wait()
            raise AssertionError

    with pytest.raises(DeadlineExceeded, match="turn 0 of an episode of group 5 from the generators"):
        run(EpisodePlayer(Silent(), tokenizer, SETTINGS).play(Guessing(), Sampling(), 5))
    with pytest.raises(ScorerBroken):
        run(EpisodePlayer(Echo(tokenizer, "8"), tokenizer, SETTINGS).play(Raising(ScorerBroken("gone")), Sampling(), 0))


def test_an_episode_that_outgrows_its_limit_fails_and_tells_what_was_drawn(tokenizer: Tokenizer) -> None:
    echo = Echo(tokenizer, "8")  # it draws two tokens
    limit = len("guess") + 2 + len("again") + 1  # too few for the second turn
    with pytest.raises(EpisodeFailed, match=f"prompt leaves no room within {limit} tokens") as failure:
        run(EpisodePlayer(echo, tokenizer, SETTINGS, limit).play(Guessing(), Sampling(max_new_tokens=2), 0))
    assert failure.value.tokens == 2
    episode = run(EpisodePlayer(echo, tokenizer, SETTINGS, limit + 1).play(Guessing(), Sampling(max_new_tokens=2), 0))
    assert episode.num_tokens == limit + 1


def test_seeds_differ_by_run_group_and_episode_and_repeat() -> None:
    seeds = {episode_seed(run_seed, g, e) for run_seed in range(3) for g in range(20) for e in range(8)}
    assert len(seeds) == 3 * 20 * 8
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds)
    assert episode_seed(1, 2, 3) == episode_seed(1, 2, 3) == 792521117
    assert episode_seed(None, 2, 3) is None


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


def test_routes_of_all_turns_are_asked_for_once_and_follow_each_other(tokenizer: Tokenizer) -> None:
    """Each turn asks from the token on that was not read before, and a turn with too few of them is refused."""

    class Routing:
        def __init__(self, lost: int) -> None:
            self.asked: list[tuple[int, int | None]] = []
            self.lost = lost

        async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
            self.asked.append((len(prompt_ids), sampling.expert_routes_from))
            drawn, start = 3, sampling.expert_routes_from
            assert start is not None and len(prompt_ids) >= drawn
            positions = np.arange(start, len(prompt_ids) + drawn - 1 - self.lost, dtype=np.uint8)
            expert_routes = np.broadcast_to(positions[:, None, None], (len(positions), 2, 4))
            ids = np.asarray(prompt_ids[:drawn], np.int32)
            return Completion(
                ids, np.zeros(drawn, np.float32), np.zeros(drawn, np.int32), "length", expert_routes=expert_routes
            )

    generator, sampling = Routing(lost=0), Sampling(max_new_tokens=3, expert_routes_from=0)
    episode = run(EpisodePlayer(generator, tokenizer, SETTINGS).play(Guessing(), sampling, 0))
    first, second = generator.asked
    assert first[1] == 0 and second[1] == first[0] + 2 and second[0] > first[0] + 3
    assert episode.expert_routes is not None and episode.expert_routes.shape == (episode.num_tokens - 1, 2, 4)
    np.testing.assert_array_equal(episode.expert_routes[:, 1, 2], np.arange(episode.num_tokens - 1))
    with pytest.raises(ValueError, match="turn 0 .* routes of .* were asked for"):
        run(EpisodePlayer(Routing(lost=1), tokenizer, SETTINGS).play(Guessing(), sampling, 0))


def test_a_lost_kept_set_costs_its_episode(tokenizer: Tokenizer) -> None:
    class Losing:
        async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
            raise DrawLost("the engine ended the request")

    with pytest.raises(EpisodeFailed, match="could not tell a token's kept set"):
        run(EpisodePlayer(Losing(), tokenizer, SETTINGS).play(Guessing(), Sampling(), 0))
