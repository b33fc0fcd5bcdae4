"""Real environments of other libraries: gymnasium, games of textarena, an OpenEnv server."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from monarch_rl.errors import InfrastructureFailed
from monarch_rl.runtime.network import free_port
from monarch_rl.tasks.environment import Environment, as_shown
from monarch_rl.tasks.openenv import OpenEnv
from monarch_rl.tasks.orders import HELD_OUT
from monarch_rl.tasks.task import Outcome, Reply, Task
from monarch_rl.tasks.textarena import TextArena, random_move
from tests import patience


class Scripted:
    """A policy whose replies are a function of the message before them."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        self._answer = answer
        self.reward_so_far = 0.0
        self.given: list[str] = []
        self._seats: dict[str, Scripted] = {}

    def seat(self, name: str) -> Scripted:
        return self._seats.setdefault(name, Scripted(self._answer))

    def read(self, message: Any) -> None:
        self.given.append(message["content"])

    async def reply(self, message: Any = (), **_: Any) -> Reply:
        self.given.append(message)
        await asyncio.sleep(0)  # other episodes run meanwhile
        return Reply(self._answer(message), [1], np.zeros(1, np.float32), "stop")


@pytest.mark.parametrize(
    ("observation", "shown"),
    [
        ("a wall", "a wall"),
        (np.int64(3), "3"),
        ((np.int64(14), 10, False), "[14, 10, false]"),
        (np.array([0.1, 0.25], np.float32), "[0.1, 0.25]"),
        ({"agent": np.array([1, 2]), "é": None}, '{"agent": [1, 2], "é": null}'),
    ],
    ids=repr,
)
def test_an_observation_is_shown_as_text_or_json(observation: Any, shown: str) -> None:
    assert as_shown(observation, {}) == shown


def test_an_observation_that_json_does_not_have_needs_a_function_of_its_own() -> None:
    for observation in object(), float("nan"), b"a":
        with pytest.raises(ValueError, match="show="):
            as_shown(observation, {})


def run_episode(task: Task, item: Any, answer: Callable[[str], str]) -> tuple[Any, Scripted]:
    return run_together(task, [item], answer)[0]


def run_together(task: Task, items: list[Any], answer: Callable[[str], str]) -> list[tuple[Any, Scripted]]:
    async def run() -> list[tuple[Any, Scripted]]:
        policies = [Scripted(answer) for _ in items]
        episodes: list[Any] = [task.episode(*pair) for pair in zip(items, policies, strict=True)]
        return list(zip(await asyncio.gather(*episodes), policies, strict=True))

    return asyncio.run(run())


# ---- reset and step ---------------------------------------------------------------------------------------------

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
SHORTEST = ["right", "right", "down", "down", "down", "right"]
"""Through gymnasium's FrozenLake of 4 x 4."""


def lake(_seed: int) -> Any:
    import gymnasium

    return gymnasium.make("FrozenLake-v1", is_slippery=False)


def move_of(text: str) -> int:
    if text not in MOVES:
        raise ValueError(f"{text!r} is no move")
    return MOVES[text]


def by_place(observation: str) -> str:
    """The next move of the shortest path, by the current position."""
    return {"0": "right", "1": "right", "2": "down", "6": "down", "10": "down", "14": "right"}[observation]


def test_a_gymnasium_environment_runs_to_its_end() -> None:
    task = Environment(lake, move_of, system="Cross the lake.", held_out=3, name="lake")
    outcome, policy = run_episode(task, task.items(7), by_place)
    assert outcome == Outcome(1.0, info={"steps": 6, "end": "terminated"})
    assert policy.given == ["Cross the lake.", "0", "1", "2", "6", "10", "14"]
    fell, _ = run_episode(task, 0, lambda observation: "down" if observation in ("0", "4") else "right")
    assert fell.reward == 0 and fell.info["end"] == "terminated"
    lost, _ = run_episode(Environment(lake, move_of, no_action_reward=-1.0), 0, lambda _: "away")
    assert lost == Outcome(-1.0, info={"steps": 1, "end": "no action: 'away' is no move"})
    walked, _ = run_episode(Environment(lake, move_of, most_steps=5), 0, lambda _: "left")
    assert walked.info == {"steps": 5, "end": "most_steps"}
    held_out = task.held_out_items()
    assert [held_out[index] for index in range(len(held_out))] == [HELD_OUT, HELD_OUT + 1, HELD_OUT + 2]
    again = cloudpickle.loads(cloudpickle.dumps(task))
    assert run_episode(again, again.items(7), by_place)[0] == outcome


class Counting:
    """Its methods are coroutines, as in an environment behind a connection; each step has reward 1."""

    closed = 0

    async def reset(self, *, seed: int) -> Any:
        await asyncio.sleep(0)
        return seed, {}

    async def step(self, action: str) -> Any:
        if action == "3":
            raise RuntimeError("the server is gone")
        return int(action) + 1, 1, False, int(action) == 8, {}

    async def close(self) -> None:
        Counting.closed += 1


def test_an_environment_is_closed_however_its_episode_ends_and_may_be_asynchronous() -> None:
    task = Environment(lambda seed: Counting(), str)  # type: ignore[arg-type, return-value]
    assert run_episode(task, 5, str)[0] == Outcome(4.0, info={"steps": 4, "end": "truncated"})
    with pytest.raises(RuntimeError, match="the server is gone"):
        run_episode(task, 0, str)
    assert Counting.closed == 2
    policy = Scripted(str)

    async def cancelled() -> None:
        running: asyncio.Future[Any] = asyncio.ensure_future(task.episode(4, policy))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(cancelled())
    assert Counting.closed == 3
    with pytest.raises(ValueError, match="most_steps"):
        Environment(lake, move_of, most_steps=0)


# ---- textarena --------------------------------------------------------------------------------------------------


def first_move(observation: str) -> str:
    return re.findall(r"'(\[\d\])'", observation.splitlines()[-1])[0]


def test_concurrent_games_depend_only_on_their_seeds_and_leave_global_randomness_alone() -> None:
    task = TextArena("TicTacToe-v0", opponent=random_move, held_out=2)
    assert "You are Player 0 in Tic Tac Toe" in task.check()[0]
    seeds = [task.items(cursor) for cursor in range(12)]
    alone = [run_episode(task, seed, first_move) for seed in seeds]
    random.seed(5)
    together = run_together(task, seeds, first_move)
    assert random.random() == random.Random(5).random()
    assert [outcome for outcome, _ in together] == [outcome for outcome, _ in alone]
    assert [policy.given for _, policy in together] == [policy.given for _, policy in alone]
    assert {outcome.reward for outcome, _ in alone} >= {1.0, -1.0}
    assert {outcome.info["player"] for outcome, _ in alone} == {0, 1}
    for outcome, policy in alone:
        own = "X" if outcome.info["player"] == 1 else "O"
        assert f"you will be '{own}'" in policy.given[0] and "Tic Tac Toe" not in "".join(policy.given[1:])
        assert outcome.info["reason"] and 3 <= outcome.info["moves"] <= 9


def test_a_game_ends_by_its_rules_and_a_single_player_game_needs_no_opponent() -> None:
    task = TextArena("TicTacToe-v0", opponent=random_move)
    outcome, policy = run_episode(task, 0, lambda _: "I pass")
    assert outcome.reward == -1 and "format" in outcome.info["reason"] and len(policy.given) == 2
    poker, _ = run_episode(TextArena("KuhnPoker-v0", opponent=lambda *_: "[fold]"), 1, lambda _: "[bet]")
    assert poker.reward in (1.0, -1.0) and poker.info["reason"]
    lake = TextArena("FrozenLake-v0")
    crossed, policy = run_episode(lake, 3, lambda _: "[right]")
    assert crossed.info["player"] == 0 and len(policy.given) == crossed.info["moves"]
    endless, _ = run_episode(TextArena("FrozenLake-v0", most_moves=1), 3, lambda _: "[right]")
    assert endless == Outcome(0.0, info={"player": 0, "moves": 1, "reason": "most_moves"})
    again = cloudpickle.loads(cloudpickle.dumps(lake))
    assert run_episode(again, 3, lambda _: "[right]")[0] == crossed


def test_a_policy_that_plays_all_players_has_a_seat_for_each() -> None:
    """Each seat reads only what is new for it, and has the reward of its player."""
    task = TextArena("TicTacToe-v0", players=2, system="Win.")
    outcomes, policy = run_episode(task, 4, first_move)
    assert {seat: outcome.reward for seat, outcome in outcomes.items()} == {"player 0": 1.0, "player 1": -1.0}
    assert outcomes["player 0"].info["moves"] == 7 and not policy.given
    for number in range(2):
        given = policy.seat(f"player {number}").given
        assert given[0] == "Win." and f"You are Player {number}" in given[1] and len(given) == 5 - number
        assert f"[Player {number}]" not in "".join(given) and f"Player {1 - number} placed" in given[2]
    asked: list[str] = []

    async def opponent(observation: str, rng: random.Random) -> str:
        asked.append(observation)
        return random_move(observation, rng)

    against, _ = run_episode(TextArena("TicTacToe-v0", opponent=opponent), 4, first_move)
    assert against == run_episode(TextArena("TicTacToe-v0", opponent=random_move), 4, first_move)[0] and asked


def test_impossible_games_are_refused() -> None:
    for task, message in (
        (TextArena("TicTacToe-v0", opponent=random_move, players=1), "1 player"),
        (TextArena("TicTacToe-v0"), "players="),
        (TextArena("TicTacTo-v0", opponent=random_move), "'TicTacTo-v0'.* TicTacToe-v0"),
    ):
        with pytest.raises(ValueError, match=message):
            task.check()
    with pytest.raises(ValueError, match="no moves"):
        random_move("You have a King.", random.Random(0))


# ---- OpenEnv ----------------------------------------------------------------------------------------------------

SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Environment, create_app
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    number: int

class Hint(Observation):
    text: str

class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.number, self.left = (seed or 0) % 10, 5
        return Hint(text="a number from 0 to 9", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **_):
        self.left -= 1
        right = action.number == self.number
        text = "right" if right else "larger" if action.number < self.number else "smaller"
        return Hint(text=text, done=right or not self.left, reward=float(right))

    @property
    def state(self):
        return State()

app = create_app(Guessing, Guess, Hint, env_name="guessing", max_concurrent_envs=8)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""
OPENENV = os.environ.get("OPENENV_PYTHON", "")
"""A Python that has openenv 0.10.0. It does not install beside this project (docs/tasks.md)."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    (tmp_path / "server.py").write_text(SERVER)
    running = subprocess.Popen([OPENENV, str(tmp_path / "server.py"), str(port)])
    try:
        url = f"http://127.0.0.1:{port}"

        def up() -> bool:
            assert running.poll() is None
            return asyncio.run(answers(url))

        patience.wait_until(up, "the server to answer", every_s=0.2)
        yield url
    finally:
        running.kill()
        patience.exit_code(running)


async def answers(url: str) -> bool:
    import aiohttp

    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(60)) as answer:
                return answer.status == 200
        except OSError:
            return False


def test_an_openenv_server_that_is_away_or_silent_is_no_fault_of_the_episode() -> None:
    task = Environment(lambda seed: OpenEnv(f"http://127.0.0.1:{free_port()}"), str)
    with pytest.raises(InfrastructureFailed, match="cannot be reached"):
        run_episode(task, 0, str)

    async def episode(handler: Any, deadline_s: float) -> None:
        from aiohttp import web

        app = web.Application()
        app.router.add_get("/ws", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port := free_port()).start()
        policy: Any = Scripted(str)
        try:
            await Environment(lambda seed: OpenEnv(f"http://127.0.0.1:{port}", deadline_s), str).episode(0, policy)
        finally:
            await runner.cleanup()

    async def hangs_up(request: Any) -> Any:
        from aiohttp import web

        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.close(message=b"out of memory")
        return socket

    async def is_silent(request: Any) -> Any:
        from aiohttp import web

        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.receive()
        return socket

    with pytest.raises(InfrastructureFailed, match="ended the session"):
        asyncio.run(episode(hangs_up, 600.0))
    with pytest.raises(InfrastructureFailed, match="did not answer reset"):
        asyncio.run(episode(is_silent, 0.2))


@pytest.mark.skipif(not OPENENV, reason="OPENENV_PYTHON names no Python that has openenv 0.10.0")
def test_sessions_of_an_openenv_server_run_concurrently(server: str) -> None:
    def guess(text: str) -> dict[str, Any]:
        return {"number": int(text)}

    def bisect() -> Callable[[str], str]:
        low, high = [0], [9]

        def answer(hint: str) -> str:
            if hint == "larger":
                low[0] = (low[0] + high[0]) // 2 + 1
            elif hint == "smaller":
                high[0] = (low[0] + high[0]) // 2 - 1
            return str((low[0] + high[0]) // 2)

        return answer

    task = Environment(lambda seed: OpenEnv(server), guess, lambda observation, _: str(observation["text"]))

    async def run() -> list[Any]:
        return await asyncio.gather(*(task.episode(seed, Scripted(bisect())) for seed in range(8)))  # type: ignore[arg-type]

    outcomes = asyncio.run(run())
    assert [outcome.reward for outcome in outcomes] == [1.0] * 8
    assert {outcome.info["end"] for outcome in outcomes} == {"terminated"}
    wrong = Environment(lambda seed: OpenEnv(server), lambda text: {"letter": text}, lambda observation, _: "")
    with pytest.raises(RuntimeError, match="step: "):
        run_episode(wrong, 0, str)
    with pytest.raises(OSError):
        run_episode(Environment(lambda seed: OpenEnv("http://127.0.0.1:9"), guess), 0, str)
