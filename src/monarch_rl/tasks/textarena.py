"""Games of textarena (MIT; ``pip install "monarch_rl[textarena]"``): single-player, against a function, or self-play.

    TextArena("FrozenLake-v0")
    TextArena("TicTacToe-v0", opponent=random_move)
    TextArena("TicTacToe-v0", players=2)

Each player is shown what is new since its last turn, without its own moves. The game describes the format of moves,
ends by its own rules, including after an invalid move, and rewards its players.
"""

from __future__ import annotations

import difflib
import importlib
import random
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from monarch_rl.tasks.orders import Seeds
from monarch_rl.tasks.task import Outcome, Policy, Task

Opponent = Callable[[str, random.Random], str | Awaitable[str]]
"""``opponent(observation, random number generator) -> move``; or a coroutine function, which may ask another model."""
MOST_MOVES = 200
"""Default maximum of moves in a game, of all players together."""
SHOWN = 8
"""Number of games that an error message lists."""
_MOVE = re.compile(r"'(\[[^\]]+\])'")
"""Format in which games list the available moves."""


def random_move(observation: str, rng: random.Random) -> str:
    """An opponent that makes a random move of those listed last, for games such as TicTacToe and ConnectFour.

    Raises ValueError if the game lists none.
    """
    listed = [line for line in observation.splitlines() if _MOVE.search(line)]
    if not listed:
        raise ValueError(f"the game lists no moves to choose from: {observation[-200:]!r}")
    return rng.choice(_MOVE.findall(listed[-1]))


class TextArena(Task):
    """Games of textarena, with the game's own rewards. Items are seeds.

    With an opponent, the policy is player 0, 1, ... in turn, by the seed. Without one it is all players; with several
    players, each has its own seat, ``player 0`` and so on.

    Args:
        game: id of a game, without the suffixes for its observations (``-raw``, ``-train``).
        opponent: makes the moves of all other players, which it can distinguish only by the observation.
        players: number of players; 0 means one, or two with an opponent.
        system: system message; "" for none.
        most_moves: maximum moves of all players together; after that the reward is 0.
        held_out: number of held-out games.
        name: name for metrics; "" means the id of the game.
    """

    def __init__(
        self,
        game: str,
        *,
        opponent: Opponent | None = None,
        players: int = 0,
        system: str = "",
        most_moves: int = MOST_MOVES,
        held_out: int = 0,
        name: str = "",
    ) -> None:
        episode = _GameEpisode(game, opponent, players or (1 if opponent is None else 2), system, most_moves)
        seeds = Seeds()
        sets: dict[str, Sequence[int]] = {"held_out": seeds.held_out(held_out)} if held_out else {}
        super().__init__(
            seeds.training,
            episode.run,
            sets,
            name or game,
            warm_up=episode.warm_up,
            check=episode.check,
            # A game that is won has 1. In self-play one seat wins what another loses.
            success_reward=1.0 if opponent is not None or players <= 1 else None,
            probe=False,
        )


class _GameEpisode:
    """The episode of a seed."""

    def __init__(self, game: str, opponent: Opponent | None, players: int, system: str, most_moves: int) -> None:
        self._game, self._opponent, self._players = game, opponent, players
        self._system, self._most_moves = system, most_moves

    def warm_up(self) -> None:
        """Import textarena."""
        _textarena()

    def check(self) -> list[str]:
        """The first prompts. Raises ValueError saying what to change."""
        if self._opponent is not None and self._players < 2:
            raise ValueError(
                f"there is an opponent, but only {self._players} player: leave the opponent out, or set TextArena "
                "players=2"
            )
        if self._game not in _registry():
            raise ValueError(f"textarena has no game {self._game!r}; it has {_alike(self._game)}")
        try:
            return [_Game(self._game, 0, self._players).observe()[1]]
        except Exception as error:  # games may raise anything
            raise ValueError(
                f"{self._game} cannot start with {self._players} players ({type(error).__name__}: {error}). If it "
                "needs another number of players, set TextArena players= or an opponent"
            ) from error

    async def run(self, seed: int, policy: Policy) -> Outcome | dict[str, Outcome]:
        """Play the game of a seed; with several seats, returns an outcome for each that had a turn."""
        rng = random.Random(f"opponent {seed}")
        seats = self._seats(seed, policy)
        started: list[int] = []
        game = _Game(self._game, seed, self._players)
        over = False
        while not over and game.moves < self._most_moves:
            player, observation = game.observe()
            if player in seats:
                if player not in started:
                    started.append(player)
                    if self._system:
                        seats[player].read({"role": "system", "content": self._system})
                move = (await seats[player].reply(observation)).text
            else:
                assert self._opponent is not None  # without one, all players have seats
                move = await _awaited(self._opponent(observation, rng))
            over = game.play(move)
        outcomes = {player: game.outcome(player, over) for player in seats if player in started or len(seats) == 1}
        if len(seats) == 1:
            return next(iter(outcomes.values()))
        return {_seat(player): outcome for player, outcome in outcomes.items()}

    def _seats(self, seed: int, policy: Policy) -> dict[int, Policy]:
        """Policies by player, without the opponent's players."""
        if self._opponent is not None or self._players == 1:
            return {seed % self._players: policy}
        return {player: policy.seat(_seat(player)) for player in range(self._players)}


def _seat(player: int) -> str:
    return f"player {player}"


async def _awaited(move: str | Awaitable[str]) -> str:
    return move if isinstance(move, str) else await move  # waits: EpisodeRunner has a deadline for it


class _Game:
    """A game in progress.

    textarena uses the global ``random`` generator. Each game swaps in its own state while it computes, so that
    concurrent games depend only on their seeds and do not affect other users of the generator.
    """

    def __init__(self, game: str, seed: int, players: int) -> None:
        textarena = _textarena()
        self._own_move = textarena.ObservationType.PLAYER_ACTION
        self._state = random.Random(seed).getstate()
        self.moves = 0
        with self._random():
            self._game = textarena.make(f"{game}-raw")
            self._game.reset(num_players=players, seed=seed)

    @contextmanager
    def _random(self) -> Iterator[None]:
        outer_state = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(outer_state)

    def observe(self) -> tuple[int, str]:
        """The player whose turn it is, and the messages that are new to that player."""
        with self._random():
            player, messages = self._game.get_observation()
        names = self._game.state.role_mapping
        lines = [
            text if sender < 0 else f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in messages
            if (sender, kind) != (player, self._own_move)
        ]
        return player, "\n".join(lines)

    def play(self, move: str) -> bool:
        """Make a move; returns whether the game is over."""
        self.moves += 1
        with self._random():
            over, _ = self._game.step(action=move)
        return bool(over)

    def outcome(self, player: int, over: bool) -> Outcome:
        """Outcome of the game for a player; the reward is 0 if the game is not over."""
        info = {"player": player, "moves": self.moves}
        if not over:
            return Outcome(0.0, info=info | {"reason": "most_moves"})
        with self._random():
            rewards, reports = self._game.close()
        return Outcome(float(rewards[player]), info=info | {"reason": str(reports[player].get("reason", ""))})


def _textarena() -> Any:
    """The textarena module, which has all games in one registry. Raises ValueError if it cannot be imported."""
    try:
        return importlib.import_module("textarena")
    except ImportError as error:
        raise ValueError(f'textarena cannot be imported ({error}): pip install "monarch_rl[textarena]"') from error


def _alike(game: str) -> str:
    """Some games, those with a similar name first."""
    known = [name for name in _registry() if not name.endswith(("-raw", "-train"))]
    alike = difflib.get_close_matches(game, known, SHOWN)
    return ", ".join([*alike, *(name for name in sorted(known) if name not in alike)][:SHOWN]) + ", ..."


def _registry() -> dict[str, Any]:
    registry: dict[str, Any] = _textarena().envs.registration.ENV_REGISTRY
    return registry
