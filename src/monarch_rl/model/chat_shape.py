"""What a chat template writes around a turn of the policy, found by rendering sentinels once, before any play.

A template is a program. It may raise for a role, or drop a message without a word. Whatever it is asked for later is
therefore tried here first: each role gets a sentence that it has to show.
"""

from __future__ import annotations

import itertools
import os.path
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_rl.model.messages import ChatError

DRAWN = "[[ the turn that the policy drew ]]"
"""Stands for the policy's turn where only the text around it is wanted."""
SENTINEL = "[[ a sentence that must not be lost ]]"
"""Has nothing in it that JSON or trimming would change."""
THINKING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""By which templates mark thoughts."""
Row = dict[str, Any]
"""A message as templates read it."""
Render = Callable[[Sequence[Row], bool], str]
"""The template's text of some messages, with or without the prompt for the policy's next turn. Raises ChatError."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a template writes around a turn, and which roles it cannot write."""

    closing: str
    """What follows a turn, whatever comes next."""
    end: str
    """The end token in ``closing``, which a turn that ended has already drawn; "" if there is none."""
    generation_prompt: str
    """What opens a turn."""
    thinking: tuple[str, str] | None
    """The tags around thoughts, if the template knows them."""
    end_of_thinking: str
    """What the template writes between a thought and the answer."""
    calls_first: bool
    """Whether a tool's message must follow a turn that is given as calls."""
    refusals: dict[str, str]
    """By role: why this template cannot be used with it."""

    def after(self, text: str, end: str) -> str:
        """What is left of the text after a turn.

        Args:
            text: what the template writes there: :attr:`closing` and more, or, after calls, what goes on with the turn.
            end: the end token that was drawn, which stands in for the template's own; "" for a turn that was cut.
        """
        if end and self.end and text.startswith(self.closing):
            return text[self.closing.index(self.end) + len(self.end) :]
        return text.removeprefix(end)


def user_row(content: str = ".") -> Row:
    """A user's message."""
    return {"role": "user", "content": content}


def find_shape(render: Render, source: str, end_tokens: Sequence[str], special: Sequence[str]) -> Shape:
    """Find a template's shape.

    Args:
        render: the template.
        source: its text.
        end_tokens: the texts of the tokens that are known to end a turn.
        special: the texts of all special tokens.

    Raises:
        ChatError: the template loses what users or the policy say, or cannot go on after a turn.
    """
    opening = [user_row(SENTINEL)]
    before, prompt = render(opening, False), render(opening, True)
    if SENTINEL not in prompt:
        raise ChatError("the chat template loses what the user says; it may be made for images, not for plain text")
    closing = _closing(render, special)
    ends = [token for token in end_tokens if token in closing] or [token for token in special if token in closing]
    thinking = next((tags for tags in THINKING_TAGS if tags[1] in source), None)
    system = _refusal(render, [{"role": "system", "content": SENTINEL}, user_row(DRAWN)], SENTINEL, DRAWN)
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
    """What follows a turn, whether or not something comes after it."""
    base = [user_row(), {"role": "assistant", "content": DRAWN}]
    continued = render([*base, user_row(SENTINEL)], True)
    if not 0 <= continued.find(DRAWN) < continued.find(SENTINEL):
        raise ChatError("the chat template loses the turns before the last: use it for one turn, or another template")
    last, after = render(base, False).partition(DRAWN)[2], continued.partition(DRAWN)[2]
    closing = os.path.commonprefix([last, after[: after.index(SENTINEL)]])
    for text, token in itertools.product((last, after), special):  # not half of a special token
        starts = range(max(0, len(closing) - len(token) + 1), len(closing))
        closing = closing[: next((start for start in starts if text.startswith(token, start)), None)]
    if last and not closing:
        raise ChatError(
            f"the chat template ends the last turn with {last[:20]!r} and an earlier one with {after[:20]!r}, so that "
            "a conversation cannot only grow: give the tokenizer another chat template"
        )
    return closing


def _tool_refusal(render: Render, closing: str) -> tuple[str, bool]:
    """Why tool messages cannot be rendered, "" if they can; and whether they must follow a turn that is given as calls,
    because the template writes them in another way, or not at all, after one that is given as text."""
    answer: Row = {"role": "tool", "content": SENTINEL, "name": "tool", "tool_call_id": "call00000"}
    drawn = [user_row(), {"role": "assistant", "content": DRAWN}, answer]
    refusal = _refusal(render, drawn, DRAWN, SENTINEL)
    if _refusal(render, [user_row(DRAWN), calls_row([answer]), answer], DRAWN, SENTINEL):
        return refusal, False
    text = after_calls(render, [answer], closing)
    if text is None:
        return refusal and "it writes a call in another way once it is answered", False
    return "", bool(refusal) or render(drawn, True).partition(DRAWN)[2] != text


def after_calls(render: Render, rows: Sequence[Row], closing: str) -> str | None:
    """The text between a turn and the next one where the turn is given as calls; None if what the template writes for
    the calls changes once they are answered."""
    answers = [row for row in rows if row["role"] == "tool"]
    base = [user_row(), calls_row(answers)]
    before, text = render(base, False), render([*base, *rows], True)
    if not text.startswith(before):
        return None
    return text[len(before) - len(closing) if before.endswith(closing) else len(before) :]


def calls_row(answers: Sequence[Row]) -> Row:
    """A turn that calls the tools which give these answers."""
    calls = [
        {"type": "function", "id": row["tool_call_id"], "function": {"name": row["name"], "arguments": {}}}
        for row in answers
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _refusal(render: Render, rows: Sequence[Row], first: str, then: str) -> str:
    """Why these messages cannot be rendered; "" if they can. ``first`` has to stand before ``then``, each once."""
    try:
        text = render(rows, True)
    except ChatError as error:
        return str(error)
    if text.count(first) == text.count(then) == 1 and text.index(first) < text.index(then):
        return ""
    return "it drops such a message without an error, or writes it somewhere else"


def _end_of_thinking(render: Render, opens: str, closes: str) -> str:
    """What stands between a thought and the answer in a turn that the template writes."""
    thought = {"role": "assistant", "content": DRAWN, "reasoning_content": SENTINEL}
    inline = {"role": "assistant", "content": f"{opens}\n{SENTINEL}\n{closes}\n\n{DRAWN}"}
    for row in (thought, inline):
        try:
            text = render([user_row(), row], False)
        except ChatError:
            continue
        between = text.partition(SENTINEL)[2].partition(DRAWN)[0]
        if closes in between:
            return between
    return f"\n{closes}\n\n"
