"""Games of textarena (MIT; ``pip install "monarch_rl[textarena]"``): of one player, against a function, or self-play.

    TextArena("FrozenLake-v0")
    TextArena("TicTacToe-v0", opponent=random_move)
    TextArena("TicTacToe-v0", players=2)

Each player is told what is new since its last turn, without its own moves, which it knows. The game says what a move
looks like, ends by its rules, an invalid move included, and rewards its players.
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
"""``opponent(what it is told, its random numbers) -> its move``; or a coroutine, which may ask another model."""
MOST_MOVES = 200
"""Of all players in a game, unless the task says how many."""
SHOWN = 8
"""Games that a refusal names."""
_MOVE = re.compile(r"'(\[[^\]]+\])'")
"""How games list the moves that there are."""


def random_move(told: str, draw: random.Random) -> str:
    """An opponent: one of the moves that it was told last, such as those of TicTacToe and ConnectFour.

    Raises ValueError where the game lists none.
    """
    listed = [line for line in told.splitlines() if _MOVE.search(line)]
    if not listed:
        raise ValueError(f"the game lists no moves: {told[-200:]!r}")
    return draw.choice(_MOVE.findall(listed[-1]))


class TextArena(Task):
    """Games of textarena, whose rewards are the game's. Items are seeds.

    With an opponent, the policy is player 0, 1, ... in turn. Without one it plays all players, each of several at its
    own seat, ``player 0`` and so on.

    Args:
        game: an id of textarena, without the endings for its observations (``-raw``, ``-train``).
        opponent: plays the other players, each told apart by nothing but what it is told.
        players: of a game; 0 is one, or two with an opponent.
        system: the system message; "" is none.
        most_moves: of all players, at most; then the game is worth 0.
        held_out: games that are held out.
        name: for metrics; "" is the game's.
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
        playing = _Playing(game, opponent, players or (1 if opponent is None else 2), system, most_moves)
        seeds = Seeds()
        sets: dict[str, Sequence[int]] = {"held_out": seeds.held_out(held_out)} if held_out else {}
        super().__init__(seeds.training, playing.play, sets, name or game, warm_up=playing.warm_up, check=playing.check)


class _Playing:
    """How a seed is played."""

    def __init__(self, game: str, opponent: Opponent | None, players: int, system: str, most_moves: int) -> None:
        self._game, self._opponent, self._players = game, opponent, players
        self._system, self._most_moves = system, most_moves

    def warm_up(self) -> None:
        """Import textarena."""
        _textarena()

    def check(self) -> list[str]:
        """The first prompts. Raises ValueError saying what to change."""
        if self._opponent is not None and self._players < 2:
            raise ValueError(f"an opponent, but {self._players} player: leave it out, or give TextArena players=2")
        if self._game not in _registry():
            raise ValueError(f"textarena has no game {self._game!r}; it has {_alike(self._game)}")
        try:
            return [_Game(self._game, 0, self._players).told()[1]]
        except Exception as error:  # games raise what they like
            raise ValueError(
                f"a game of {self._game} cannot begin with {self._players} players ({type(error).__name__}: {error}). "
                "If its rules ask for others, give TextArena players= or an opponent"
            ) from error

    async def play(self, seed: int, policy: Policy) -> Outcome | dict[str, Outcome]:
        """The game of a seed; with several seats, an outcome for each that had a turn."""
        draw = random.Random(f"opponent {seed}")
        seats = self._seats(seed, policy)
        played: list[int] = []
        game = _Game(self._game, seed, self._players)
        over = False
        while not over and game.moves < self._most_moves:
            player, told = game.told()
            if player in seats:
                if player not in played:
                    played.append(player)
                    if self._system:
                        seats[player].read({"role": "system", "content": self._system})
                move = (await seats[player].reply(told)).text
            else:
                assert self._opponent is not None  # without one, all players have seats
                move = await _awaited(self._opponent(told, draw))
            over = game.play(move)
        outcomes = {player: game.outcome(player, over) for player in seats if player in played or len(seats) == 1}
        if len(seats) == 1:
            return next(iter(outcomes.values()))
        return {_seat(player): outcome for player, outcome in outcomes.items()}

    def _seats(self, seed: int, policy: Policy) -> dict[int, Policy]:
        """Who plays, by player, but for the opponent."""
        if self._opponent is not None or self._players == 1:
            return {seed % self._players: policy}
        return {player: policy.seat(_seat(player)) for player in range(self._players)}


def _seat(player: int) -> str:
    return f"player {player}"


async def _awaited(move: str | Awaitable[str]) -> str:
    return move if isinstance(move, str) else await move  # waits: the player has a deadline for it


class _Game:
    """A game that goes on. textarena draws from the one generator of the process's ``random``, which each game has to
    itself while it computes; so games side by side are those of their seeds, and nobody else's numbers change."""

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
        others = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(others)

    def told(self) -> tuple[int, str]:
        """Whose turn it is, and what is new for that player."""
        with self._random():
            player, heard = self._game.get_observation()
        names = self._game.state.role_mapping
        lines = [
            text if sender < 0 else f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in heard
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
        """What the game was worth to a player; 0 if it is not over."""
        info = {"player": player, "moves": self.moves}
        if not over:
            return Outcome(0.0, info=info | {"reason": "most_moves"})
        with self._random():
            rewards, said = self._game.close()
        return Outcome(float(rewards[player]), info=info | {"reason": str(said[player].get("reason", ""))})


def _textarena() -> Any:
    """The library, which keeps all its games in one registry. Raises ValueError if it cannot be imported."""
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
