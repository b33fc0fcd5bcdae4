"""Text of control tokens in messages, which is encoded as ordinary text: only the template writes control tokens.

A tokenizer turns the text ``<|im_end|>`` into that token wherever it finds it, so a web page that a tool returns could
end its message and open another one. Here such text gets a mark after its first character before the template renders
it, and the rendered text is split at the marks and encoded in pieces, none of which contains the whole text of a token.
A tokenizer that writes a space after each special token (that of Llama 2) writes one at the marks, too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

MARK = "\ufdd0"
"""One of Unicode's noncharacters, which no template trims. It is repeated until the messages do not contain it."""


class ControlText:
    """Finds and marks the text of control tokens.

    Args:
        tokens: their texts. Those of one character cannot be marked and are left alone, as is whitespace.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        texts = sorted({text for text in tokens if len(text) > 1 and not text.isspace()}, key=len, reverse=True)
        self._starts = tuple({text[:2] for text in texts})
        """Searched first: a tokenizer may have hundreds of control tokens, and nearly no text has any."""
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def occurs_in(self, text: str) -> bool:
        """Whether the text of a control token occurs in ``text``."""
        return any(start in text for start in self._starts) and self._pattern.search(text) is not None

    def mark(self, value: Any, mark: str) -> Any:
        """``value``, JSON of any kind, with ``mark`` inside each text of a control token."""
        if isinstance(value, str):
            while self.occurs_in(value):  # again, because tokens may overlap
                value = self._pattern.sub(lambda found: found[0][0] + mark + found[0][1:], value)
            return value
        if isinstance(value, dict):
            return {self.mark(key, mark): self.mark(item, mark) for key, item in value.items()}
        return [self.mark(item, mark) for item in value] if isinstance(value, list | tuple) else value


def unused_mark(texts: Iterable[str]) -> str:
    """A mark that occurs in none of ``texts``, escaped or not."""
    joined = "\n".join(texts)
    return next(
        mark for count in itertools.count(1) if (mark := MARK * count) not in joined and _escaped(mark) not in joined
    )


def split_at(mark: str, text: str) -> list[str]:
    """The pieces of a rendered text. A template that writes a mapping as Python's repr, or as ASCII, escapes the marks
    in it."""
    return text.replace(_escaped(mark), mark).split(mark)


def _escaped(mark: str) -> str:
    return ascii(mark)[1:-1]


def texts_of(value: Any) -> Iterable[str]:
    """All texts in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, _WITH_TEXT):  # there may be thousands of numbers
                yield from texts_of(item)


_WITH_TEXT = (str, dict, list, tuple)
