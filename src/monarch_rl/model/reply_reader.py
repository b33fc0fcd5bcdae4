"""What a turn of the policy says: its text, thoughts and calls, read from the ids drawn."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from monarch_rl.model.chat_shape import Shape
from monarch_rl.model.messages import ParsedReply, ToolCall
from monarch_rl.model.tool_calls import CallParser
from monarch_rl.model.tools import ToolSet

PARSERS_KEPT = 64
"""Sets of tools whose parsers are remembered; a run has a few."""


def special_tokens(tokenizer: Any) -> list[str]:
    """The texts of all special tokens, also of those that have no name such as ``eos_token``."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *added]))


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop strings in it."""
    places = [place for string in stop if (place := text.find(string)) >= 0]
    return text[: min(places)] if places else text


class ReplyReader:
    """Reads turns.

    Args:
        tokenizer: transformers'.
        stop_token_ids: those that end a turn.
        tool_parser: as in :class:`~monarch_rl.model.chat.ChatTemplate`.
        source: the template's text, by the tools of a conversation.
    """

    def __init__(
        self, tokenizer: Any, stop_token_ids: frozenset[int], tool_parser: str, source: Callable[[ToolSet], str]
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._tool_parser = tool_parser
        self._source = source
        self._parsers: dict[str, CallParser] = {}
        """By the key of a set of tools."""

    def read(self, token_ids: Sequence[int], shape: Shape, tools: ToolSet | None, stop: Sequence[str]) -> ParsedReply:
        """What a turn says; see :meth:`ChatTemplate.read`."""
        raw = self.raw(token_ids)
        text = cut_at_stop(raw, stop)
        thinking = ""
        if shape.thinking is not None:
            thinking, text = self._split(text, shape)
        calls: tuple[ToolCall, ...] = ()
        if tools is not None:
            text, calls = self.parser(tools).parse(text)
        return ParsedReply(raw, self._special.sub("", text), thinking, calls)

    def raw(self, token_ids: Sequence[int]) -> str:
        """The text of a turn without its end token."""
        ids = list(token_ids)
        if ids and ids[-1] in self._stop_token_ids:
            del ids[-1]
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text

    def thinks(self, raw: str, shape: Shape) -> bool:
        """Whether a turn ends inside a thought."""
        opens, closes = shape.thinking or ("", "")
        text = shape.generation_prompt + raw
        return text.rfind(opens) > text.rfind(closes)

    def _split(self, raw: str, shape: Shape) -> tuple[str, str]:
        """A turn's thought, and what it says after."""
        opens, closes = shape.thinking or ("", "")
        if self.thinks(raw, shape):
            before, found, thought = raw.rpartition(opens)
            return (thought if found else raw).strip("\n"), before if found else ""
        thought, found, text = raw.partition(closes)
        if not found:
            return "", raw
        return thought.partition(opens)[2].strip("\n") if opens in thought else thought.strip("\n"), text.lstrip("\n")

    def parser(self, tools: ToolSet) -> CallParser:
        """What reads calls of these tools. Raises ChatError if SGLang does not know how they are written."""
        parser = self._parsers.get(tools.key)
        if parser is None:
            if len(self._parsers) >= PARSERS_KEPT:
                self._parsers.clear()
            parser = CallParser(tools, self._tool_parser, self._source(tools), self._tokenizer)
            self._parsers[tools.key] = parser
        return parser

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Special tokens in text; a pattern that is nowhere if there are none."""
        tokens = sorted(special_tokens(self._tokenizer), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
