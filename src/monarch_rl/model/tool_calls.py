"""Calls in the text of a turn, read by SGLang's own parsers, and checked.

SGLang's parsers give nothing for a call that is not closed, is no JSON or names no tool, so that an environment cannot
tell it from silence. Here such a call is a :class:`~monarch_rl.model.messages.ToolCall` with an ``error``.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any, NamedTuple

from monarch_rl.model.messages import ChatError, ToolCall
from monarch_rl.model.tools import ToolSet

_UNREADABLE = "A tool call cannot be read: it is not closed, or is not written as the instructions say."


class CallParser:
    """Reads the calls of some tools.

    Args:
        tools: those that may be called.
        parser: SGLang's name of the format; "" lets SGLang tell by the template.
        source: the template's text.
        tokenizer: transformers'.

    Raises:
        ChatError: SGLang has no such parser, or cannot tell which the template needs.
    """

    def __init__(self, tools: ToolSet, parser: str, source: str, tokenizer: Any) -> None:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        _prepare()
        self._tools = tools
        name = parser or _detected(source, tokenizer)
        names = sorted(FunctionCallParser.ToolCallParserEnum)
        if name not in names:
            found = (
                f"SGLang has no parser {name!r}"
                if name
                else "SGLang cannot tell by the chat template how calls are written"
            )
            raise ChatError(f"{found}: set the tool parser to one of {', '.join(names)}")
        self._parser = FunctionCallParser([Tool.model_validate(schema) for schema in tools.schemas], name)
        self._openings = _openings(
            name, self._parser.detector, [schema["function"]["name"] for schema in tools.schemas]
        )

    def parse(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """What a turn says beside its calls, and the calls in order, without ids."""
        first = self._openings.first.search(text)
        attempts = 0 if first is None else len(self._openings.each.findall(text, first.start()))
        if not attempts and not self._parser.has_tool_call(text):
            return text, ()
        try:
            rest, items = self._parser.parse_non_stream(text)
        except Exception:  # of any kind: some parsers raise what Python's do for a call that is not written well
            rest, items = text, []
        calls = [self._call(item.name or "", item.parameters) for item in items]
        if len(calls) < max(attempts, 1):
            calls.append(ToolCall("", error=_UNREADABLE))
        if not items and first is not None:
            rest = text[: first.start()]
        return rest, tuple(calls)

    def _call(self, name: str, parameters: str) -> ToolCall:
        try:
            arguments = json.loads(parameters)
        except (ValueError, RecursionError):
            return ToolCall(name, error=f"The arguments of {name} are no JSON.")
        problem = self._tools.problem(name, arguments)
        return ToolCall(name, arguments if isinstance(arguments, dict) else {}, error=problem)


class _Openings(NamedTuple):
    """What calls begin with in a format."""

    first: re.Pattern[str]
    """The first one of a turn."""
    each: re.Pattern[str]
    """Any from there on."""


def _openings(name: str, detector: Any, tools: list[str]) -> _Openings:
    """Of a parser. A format that has no token for it is told by the names of the tools, as prose has brackets, too."""
    token = getattr(detector, "bot_token", "") or getattr(detector, "tool_call_start_token", "")
    opening = re.escape(token.strip().rstrip("[ "))
    if name == "llama3":  # where the token may be left out, and stands once before several calls
        each = re.compile(rf'(?:^|;|{opening})\s*\{{\s*"name"|{opening}')
        return _Openings(each, each)
    if opening:
        return _Openings(re.compile(opening), re.compile(opening))
    named = rf"\s*(?:{'|'.join(map(re.escape, tools))})\s*\("
    return _Openings(re.compile(rf"\[{named}"), re.compile(rf"(?:\[|\)\s*,){named}"))


def _detected(source: str, tokenizer: Any) -> str:
    """SGLang's name of the format that a template teaches; "" if it cannot tell."""
    from sglang.srt.parser.template_detection import detect_reasoning_pattern, detect_tool_call_parser

    forced, toggle = detect_reasoning_pattern(source)
    return detect_tool_call_parser(source, tokenizer, toggle, forced) or ""


def _prepare() -> None:
    """Have SGLang hand over calls of tools that do not exist, and not log each mistake of a policy."""
    from sglang.srt.environ import envs

    envs.SGLANG_FORWARD_UNKNOWN_TOOLS.set(True)
    logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)
