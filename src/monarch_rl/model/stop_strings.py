"""Stop strings: where the first one ends among the tokens drawn.

SGLang's own ``stop`` needs an engine with a tokenizer, and looks back only as many tokens as the tokenizer makes of the
string, so that one drawn in smaller pieces is missed. The engines here are handed ids, and end a turn by
``stop_token_ids``. A stop string is found on this side, token by token, and what the engine drew after it is left out:
the ids of a turn do not depend on when the engine was told to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop strings in it."""
    places = [place for string in stop if (place := text.find(string)) >= 0]
    return text[: min(places)] if places else text


class StopStrings:
    """Finds where a stop string ends in a growing list of tokens. One object a turn.

    Args:
        stop: strings, none of them empty.
        decode: ids to text, special tokens included, such as ``ChatTemplate.decode``.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(self, stop: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        if not all(stop):
            raise ValueError("a stop string is empty: every turn would end before its first token")
        self._stop, self._decode = tuple(stop), decode
        self._window = max((len(string.encode()) for string in stop), default=0) + 4
        """Tokens in which a stop string and the character before it lie: a token has one byte or more."""
        self._ids: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> int | None:
        """Take tokens that were drawn next.

        Returns:
            How many tokens of the turn are kept, the one in which a stop string ends included; None if none has ended.
        """
        if not self._stop:
            return None
        seen = len(self._ids)
        self._ids += token_ids
        start = max(0, seen - self._window)
        if not self._holds(self._ids[start:]):
            return None
        for end in range(seen + 1, len(self._ids) + 1):
            if self._holds(self._ids[max(0, end - self._window) : end]):
                return end
        return None

    def _holds(self, token_ids: list[int]) -> bool:
        text = self._decode(token_ids)
        return any(string in text for string in self._stop)
