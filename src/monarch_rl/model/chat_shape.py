"""Finds the text that a chat template writes around a turn of the policy, by rendering sentinels once at start.

A template is a program: it may raise for a role, or drop a message silently. So everything that a run may need of it is
tried here, before any episode: each role gets a sentence that has to appear in the rendered text.
"""

from __future__ import annotations

import itertools
import json
import os.path
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_rl.errors import ChatError

TURN_SENTINEL = "[[ the turn that the policy sampled ]]"
"""Placeholder for the policy's turn where only the text around it is needed."""
SENTINEL = "[[ a sentence that must not be lost ]]"
"""Placeholder for another message. Neither placeholder contains anything that JSON or trimming would change."""
THINKING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Tags with which templates mark thoughts."""
Row = dict[str, Any]
"""A message as templates read it."""
Render = Callable[[Sequence[Row], bool], str]
"""Renders messages, with or without the prompt for the policy's next turn. Raises ChatError."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The text that a template writes around a turn, and the roles that it cannot render."""

    closing: str
    """Text after every turn, whatever comes next."""
    end: str
    """The end token in ``closing``, which the policy itself samples if the turn was not cut; "" if there is none."""
    generation_prompt: str
    """Text that opens a turn."""
    thinking: tuple[str, str] | None
    """The tags around thoughts; None if the template has none."""
    end_of_thinking: str
    """Text between a thought and the answer."""
    calls_first: bool
    """Whether a tool message must follow an assistant message with structured calls."""
    refusals: dict[str, str]
    """Roles that the template cannot render, each with the reason."""

    def after(self, text: str, end: str) -> str:
        """The text to append after a turn, without the end token that the policy sampled.

        Args:
            text: the template's text after the turn: :attr:`closing` and more, or, after calls, a continuation of the
                turn.
            end: the sampled end token, which replaces the template's; "" for a turn that was cut.
        """
        if end and self.end and text.startswith(self.closing):
            return text[self.closing.index(self.end) + len(self.end) :]
        return text.removeprefix(end)


def user_row(content: str = ".") -> Row:
    """A user message."""
    return {"role": "user", "content": content}


def find_shape(render: Render, source: str, end_tokens: Sequence[str], special: Sequence[str]) -> Shape:
    """Find a template's shape.

    Args:
        render: renders messages with the template.
        source: the template's text.
        end_tokens: the texts of the tokens that end a turn according to the tokenizer and ``generation_config.json``.
        special: the texts of all special tokens.

    Raises:
        ChatError: the template loses messages of users or of the policy, or cannot continue after a turn.
    """
    opening = [user_row(SENTINEL)]
    before, prompt = render(opening, False), render(opening, True)
    if SENTINEL not in prompt:
        raise ChatError(
            "the chat template loses user messages; it may be written for images, not for plain text: give the "
            "tokenizer another chat template"
        )
    closing = _closing(render, special)
    ends = [token for token in end_tokens if token in closing] or [token for token in special if token in closing]
    thinking = next((tags for tags in THINKING_TAGS if tags[1] in source), None)
    system = _refusal(
        render, [{"role": "system", "content": SENTINEL}, user_row(TURN_SENTINEL)], SENTINEL, TURN_SENTINEL
    )
    tool, calls_first = _tool_refusal(render, closing)
    return Shape(
        closing,
        min(ends, key=closing.index, default=""),
        prompt[len(os.path.commonprefix([before, prompt])) :],
        thinking,
        _end_of_thinking(render, *thinking) if thinking else "",
        calls_first,
        {role: reason for role, reason in (("system", system), ("tool", tool)) if reason},
    )


def _closing(render: Render, special: Sequence[str]) -> str:
    """The text after a turn that is the same whether or not another message follows."""
    base = [user_row(), {"role": "assistant", "content": TURN_SENTINEL}]
    continued = render([*base, user_row(SENTINEL)], True)
    if not 0 <= continued.find(TURN_SENTINEL) < continued.find(SENTINEL):
        raise ChatError(
            "the chat template loses turns before the last one: give the tokenizer a chat template that keeps them"
        )
    last, after = render(base, False).partition(TURN_SENTINEL)[2], continued.partition(TURN_SENTINEL)[2]
    closing = os.path.commonprefix([last, after[: after.index(SENTINEL)]])
    for text, token in itertools.product((last, after), special):  # do not end within a special token
        starts = range(max(0, len(closing) - len(token) + 1), len(closing))
        closing = closing[: next((start for start in starts if text.startswith(token, start)), None)]
    if last and not closing:
        raise ChatError(
            f"the chat template ends the last turn with {last[:20]!r} and an earlier one with {after[:20]!r}, so a "
            "conversation cannot grow by appending alone: give the tokenizer another chat template"
        )
    return closing


def _tool_refusal(render: Render, closing: str) -> tuple[str, bool]:
    """Returns why tool messages cannot be rendered ("" if they can), and whether they must follow structured calls.

    They must if the template renders them differently, or not at all, after a turn that is given as text.
    """
    answer: Row = {"role": "tool", "content": SENTINEL, "name": "tool", "tool_call_id": "call00000"}
    as_text = [user_row(), {"role": "assistant", "content": TURN_SENTINEL}, answer]
    refusal = _refusal(render, as_text, TURN_SENTINEL, SENTINEL)
    if _refusal(render, [user_row(TURN_SENTINEL), calls_row([answer]), answer], TURN_SENTINEL, SENTINEL):
        return refusal, False
    text = after_calls(render, [answer], closing)
    if text is None:
        return refusal and "it renders a call differently once it is answered", False
    return "", bool(refusal) or render(as_text, True).partition(TURN_SENTINEL)[2] != text


def after_calls(render: Render, rows: Sequence[Row], closing: str) -> str | None:
    """The text between a turn that is given as structured calls and the next turn.

    None if the template renders the calls differently once they are answered.
    """
    answers = [row for row in rows if row["role"] == "tool"]
    base = [user_row(), calls_row(answers)]
    before, text = render(base, False), render([*base, *rows], True)
    if not text.startswith(before):
        return None
    return text[len(before) - len(closing) if before.endswith(closing) else len(before) :]


def calls_row(answers: Sequence[Row]) -> Row:
    """An assistant message with structured calls that have these answers."""
    calls = [
        {"type": "function", "id": row["tool_call_id"], "function": {"name": row["name"], "arguments": {}}}
        for row in answers
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a template renders the calls of a message that is given."""

    content: str | None = ""
    """The content of a message that has only calls: templates such as DeepSeek-V3's render calls only beside None."""
    as_text: bool = False
    """Whether arguments are JSON text, which templates such as DeepSeek-V3's insert as it is."""


def find_call_form(render: Render) -> CallForm:
    """The first form in which the template renders a call with its arguments; the default if there is none."""
    for as_text, content in itertools.product((False, True), ("", None)):
        arguments: Any = {"argument": SENTINEL}
        function = {"name": TURN_SENTINEL, "arguments": json.dumps(arguments) if as_text else arguments}
        call = {"type": "function", "id": "call00000", "function": function}
        try:
            text = render([user_row(), {"role": "assistant", "content": content, "tool_calls": [call]}], False)
        except ChatError:
            continue
        if TURN_SENTINEL in text and SENTINEL in text:
            return CallForm(content, as_text)
    return CallForm()


def _refusal(render: Render, rows: Sequence[Row], first: str, then: str) -> str:
    """Why these messages cannot be rendered; "" if they can.

    ``first`` and ``then`` must each appear once in the rendered text, in this order.
    """
    try:
        text = render(rows, True)
    except ChatError as error:
        return str(error)
    if text.count(first) == text.count(then) == 1 and text.index(first) < text.index(then):
        return ""
    return "it drops such a message without an error, or renders it in another place"


def _end_of_thinking(render: Render, opens: str, closes: str) -> str:
    """The text between a thought and the answer in an assistant message that the template renders."""
    thought = {"role": "assistant", "content": TURN_SENTINEL, "reasoning_content": SENTINEL}
    inline = {"role": "assistant", "content": f"{opens}\n{SENTINEL}\n{closes}\n\n{TURN_SENTINEL}"}
    for row in (thought, inline):
        try:
            text = render([user_row(), row], False)
        except ChatError:
            continue
        between = text.partition(SENTINEL)[2].partition(TURN_SENTINEL)[0]
        if closes in between:
            return between
    return f"\n{closes}\n\n"
