"""Parses a turn of the policy: text, thoughts and tool calls, from the sampled ids."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

from monarch_rl.errors import ChatError
from monarch_rl.model.chat_shape import Shape
from monarch_rl.model.messages import ParsedReply, ToolCall
from monarch_rl.model.tools import ToolSet
from monarch_rl.values import lone_surrogate, plain

PARSERS_CACHED = 64
"""Tool sets whose parsers are cached; a run has a few."""


def special_tokens(tokenizer: Any) -> list[str]:
    """The texts of all special tokens, including those without a name such as ``eos_token``."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *added]))


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    starts = [start for string in stop if (start := text.find(string)) >= 0]
    return text[: min(starts)] if starts else text


class ReplyReader:
    """Parses turns.

    Args:
        tokenizer: the model's transformers tokenizer.
        stop_token_ids: ids that end a turn.
        tool_parser: as in :class:`~monarch_rl.model.chat.ChatTemplate`.
        source: returns the template's text for a conversation with these tools.
    """

    def __init__(
        self, tokenizer: Any, stop_token_ids: frozenset[int], tool_parser: str, source: Callable[[ToolSet], str]
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._tool_parser = tool_parser
        self._source = source
        self._parsers: dict[str, CallParser] = {}
        """By tool set key."""

    def read(self, token_ids: Sequence[int], shape: Shape, tools: ToolSet | None, stop: Sequence[str]) -> ParsedReply:
        """Parse a turn; see :meth:`ChatTemplate.read`."""
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
        """The thought of a turn, and the text after it."""
        opens, closes = shape.thinking or ("", "")
        if self.thinks(raw, shape):
            before, found, thought = raw.rpartition(opens)
            return (thought if found else raw).strip("\n"), before if found else ""
        thought, found, text = raw.partition(closes)
        if not found:
            return "", raw
        return thought.partition(opens)[2].strip("\n") if opens in thought else thought.strip("\n"), text.lstrip("\n")

    def parser(self, tools: ToolSet) -> CallParser:
        """The parser for calls of these tools. Raises ChatError if SGLang does not know their format."""
        parser = self._parsers.get(tools.key)
        if parser is None:
            if len(self._parsers) >= PARSERS_CACHED:
                self._parsers.clear()
            parser = CallParser(tools, self._tool_parser, self._source(tools), self._tokenizer)
            self._parsers[tools.key] = parser
        return parser

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Matches special tokens; matches nothing if the tokenizer has none."""
        tokens = sorted(special_tokens(self._tokenizer), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")


# -- tool calls, parsed by SGLang's parsers and checked ---------------------------------------------------------------
# SGLang's parsers return nothing for a call that is not closed, is not JSON or names no tool, so an environment could
# not tell it from a turn without calls. Here such a call becomes a ``ToolCall`` with an ``error``.

_UNREADABLE = "A tool call cannot be read: it is not closed, or is not written as the instructions say."


class CallParser:
    """Parses the calls of a tool set.

    Args:
        tools: the tools that may be called.
        parser: SGLang's name of the format; "" has SGLang detect it from the template.
        source: the template's text.
        tokenizer: the model's transformers tokenizer.

    Raises:
        ChatError: SGLang has no such parser, or cannot detect which one the template needs.
    """

    def __init__(self, tools: ToolSet, parser: str, source: str, tokenizer: Any) -> None:
        load_parsers()
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        self._tools = tools
        name = parser or _detected(source, tokenizer)
        names = sorted(FunctionCallParser.ToolCallParserEnum)
        if name not in names:
            found = (
                f"SGLang has no parser {name!r}"
                if name
                else "SGLang cannot detect from the chat template how calls are written"
            )
            raise ChatError(f"{found}: set the tool parser to one of {', '.join(names)}")
        self._parser = FunctionCallParser([Tool.model_validate(schema) for schema in tools.schemas], name)
        self._openings = _openings(
            name, self._parser.detector, [schema["function"]["name"] for schema in tools.schemas]
        )

    def parse(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Split a turn into its text and its calls, in order and without ids."""
        first = self._openings.first.search(text)
        attempts = 0 if first is None else len(self._openings.each.findall(text, first.start()))
        if not attempts and not self._parser.has_tool_call(text):
            return text, ()
        try:
            rest, items = self._parser.parse_non_stream(text)
        except Exception:  # some parsers let any error of Python's own parsers through for a malformed call
            rest, items = text, []
        calls = [self._call(item.name or "", item.parameters) for item in items]
        if len(calls) < max(attempts, 1):
            calls.append(ToolCall("", error=_UNREADABLE))
        if not items and first is not None:
            rest = text[: first.start()]
        return rest, tuple(calls)

    def _call(self, name: str, parameters: str) -> ToolCall:
        if lone_surrogate(name):
            return ToolCall("", error=_UNREADABLE)
        try:
            arguments = plain(json.loads(parameters))  # refuses NaN, and halves of escaped emojis
        except (ValueError, RecursionError):
            return ToolCall(name, error=f"The arguments of {name} are not JSON.")
        problem = self._tools.problem(name, arguments)
        return ToolCall(name, arguments if isinstance(arguments, dict) else {}, error=problem)


class _Openings(NamedTuple):
    """Patterns for the start of a call in a format."""

    first: re.Pattern[str]
    """Matches the first call of a turn."""
    each: re.Pattern[str]
    """Matches any call from there on."""


def _openings(name: str, detector: Any, tools: list[str]) -> _Openings:
    """The patterns of an SGLang parser's format."""
    token = getattr(detector, "bot_token", "") or getattr(detector, "tool_call_start_token", "")
    opening = re.escape(token.strip().rstrip("[ "))
    if name == "llama3":  # the token is optional, and one token may precede several calls
        each = re.compile(rf'(?:^|;|{opening})\s*\{{\s*"name"|{opening}')
        return _Openings(each, each)
    if opening:
        return _Openings(re.compile(opening), re.compile(opening))
    # The format has no start token. Prose contains brackets, too, so require a tool's name.
    named = rf"\s*(?:{'|'.join(map(re.escape, tools))})\s*\("
    return _Openings(re.compile(rf"\[{named}"), re.compile(rf"(?:\[|\)\s*,){named}"))


def _detected(source: str, tokenizer: Any) -> str:
    """SGLang's name of the call format that a template teaches; "" if SGLang cannot detect it."""
    from sglang.srt.parser.template_detection import detect_reasoning_pattern, detect_tool_call_parser

    forced, toggle = detect_reasoning_pattern(source)
    return detect_tool_call_parser(source, tokenizer, toggle, forced) or ""


@cache
def load_parsers() -> None:
    """Import SGLang's parsers, which takes a second or more the first time, and have them return calls of unknown tools
    and not log every mistake of a policy."""
    import sglang.srt.function_call.function_call_parser
    import sglang.srt.parser.template_detection  # noqa: F401
    from sglang.srt.environ import envs

    envs.SGLANG_FORWARD_UNKNOWN_TOOLS.set(True)
    logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)
