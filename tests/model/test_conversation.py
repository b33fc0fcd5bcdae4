"""Ids that only grow are the template's own rendering of the whole, wherever the template lets a conversation grow."""

from __future__ import annotations

import functools
import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.conversation import Conversation
from monarch_rl.model.messages import Message, system, tool, user
from tests.model.chat_helpers import SOURCES, write_model

END = {"qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "smollm2": "<|im_end|>", "tagged": "<|end|>", "folded": "</s>"}
"""With what each template closes a turn; ``words`` closes it without a token."""


@functools.cache
def template(name: str, thinking: bool | None = None, system_prompt: str = "") -> ChatTemplate:
    options = {} if thinking is None else {"enable_thinking": thinking}
    return ChatTemplate(write_model(Path(tempfile.mkdtemp()), name), options, system_prompt)


@dataclass
class Rolled:
    """One turn: what was said before it, and what was drawn."""

    said: list[Message]
    context: list[int]
    drawn: list[int]
    text: str
    """Of the turn, without its end token."""
    how: str
    """``stop``, ``length``, or ``string``."""


def play(
    chat: ChatTemplate, turns: list[tuple[list[Message], list[str], str]], end: str
) -> tuple[Conversation, list[Rolled]]:
    """Play turns, each drawn in pieces that are encoded one by one, as a policy may draw what no tokenizer would."""
    conversation, played = Conversation(chat), []
    for said, pieces, how in turns:
        context = conversation.add(said)
        ends = how == "stop" and end
        drawn = [token for piece in [*pieces, *([end] if ends else [])] for token in chat._plain(piece)]
        conversation.replied(drawn, "length" if how == "length" else "stop")
        played.append(Rolled(said, context, drawn, "".join(pieces), how if ends or how != "stop" else "string"))
    return conversation, played


def row_of(message: Message) -> dict[str, Any]:
    return {"role": message.role, "content": message.content}


def said_in(chat: ChatTemplate, context: list[int]) -> str:
    """Of the ids before a turn of Qwen3's: what follows the first start of a message."""
    return chat.decode(context).partition("<|im_start|>")[2]


def whole(chat: ChatTemplate, rows: list[dict[str, Any]]) -> str:
    """The template's own rendering, by transformers."""
    text: str = chat.tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=True, **chat.options)
    return text


def grown(chat: ChatTemplate, played: list[Rolled], last: list[Message]) -> tuple[str, list[int]] | None:
    """What the template makes of the whole conversation, and where turns begin and end in it; None where what it writes
    for more turns does not begin with what it writes for fewer and with what was drawn."""
    rows: list[dict[str, Any]] = []
    before, places = "", []
    for turn in played:
        rows += map(row_of, turn.said)
        text = whole(chat, rows)
        if not text.startswith(before):
            return None
        drawn = turn.text
        thinks = chat.options and (text + drawn).rfind("<think>") > (text + drawn).rfind("</think>")
        if thinks and turn.how != "stop":
            drawn = drawn + "\n</think>\n\n"
        places += [len(text), len(text) + len(turn.text)]
        rows.append({"role": "assistant", "content": drawn})
        before = text + drawn
    rows += map(row_of, last)
    text = whole(chat, rows)
    return (text, places) if text.startswith(before) else None


WORDS = st.text(st.sampled_from("the answer is 42\n:é好🙂<|"), max_size=12)
SAID = st.one_of(
    st.lists(st.builds(user, WORDS), min_size=1, max_size=1),
    st.lists(st.builds(tool, WORDS.map(lambda text: text + ".")), min_size=1, max_size=2),
)


@st.composite
def pieces(draw: st.DrawFn) -> list[str]:
    """A turn: a thought that is closed, a thought that is cut, or none; then what it says."""
    solid = WORDS.map(str.strip).filter(bool)  # Qwen3's template takes newlines away
    thought = ["<think>", "\n", *draw(st.lists(solid, min_size=1, max_size=2))]
    kind = draw(st.sampled_from(["closed", "closed", "closed", "cut", "none"]))
    says = draw(st.sampled_from([["the an", "swer"], ["what a ques", "tion"], [draw(solid), draw(WORDS), draw(solid)]]))
    return {"closed": [*thought, "\n", "</think>", "\n\n", *says], "cut": thought, "none": says}[kind]


TURNS = st.lists(
    st.tuples(SAID, pieces(), st.sampled_from(["stop", "stop", "length", "string"])), min_size=1, max_size=4
)


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=60, deadline=None)
@given(
    turns=TURNS,
    last=SAID,
    opening=st.lists(st.builds(system, WORDS.filter(str.strip)), max_size=1),
    thinking=st.booleans(),
)
def test_ids_are_those_drawn_and_the_whole_is_the_templates_own(
    name: str,
    turns: list[tuple[list[Message], list[str], str]],
    last: list[Message],
    opening: list[Message],
    thinking: bool,
) -> None:
    chat = template(name, thinking if name == "qwen3" else None)
    if name == "qwen3":  # which drops thoughts once a user speaks
        turns = [([tool("3.")] if thinking else said, drawn, how) for said, drawn, how in turns]
    if name == "folded":  # which refuses tools
        turns, last = [([user("?")], drawn, how) for _, drawn, how in turns], [user("!")]
    turns[0] = [*opening, user("begin")], turns[0][1], turns[0][2]
    conversation, played = play(chat, turns, END.get(name, ""))
    context = conversation.add(last)

    expected = [*itertools.chain.from_iterable(turn.context + turn.drawn for turn in played), *context]
    assert conversation.ids == expected
    text = chat.decode(conversation.ids)
    reference = grown(chat, played, last)
    event("stable" if reference else "not stable")
    if name == "qwen3":  # what is new reads as in the whole, also where older turns do not
        rows = [row for turn in played for row in (*map(row_of, turn.said), {"role": "assistant", "content": "."})]
        assert whole(chat, [*rows, *map(row_of, last)]).endswith("<|im_start|>" + said_in(chat, context))
    if reference is None:
        return
    assert text == reference[0]
    ids = chat._plain(reference[0])
    if all(ids[: len(prefix)] == prefix for prefix in (chat._plain(reference[0][:place]) for place in reference[1])):
        drawn = [chat._plain(turn.text) == turn.drawn[: len(turn.drawn) - (turn.how == "stop")] for turn in played]
        event("as a tokenizer splits it" if all(drawn) else "as no tokenizer splits it")
        assert (conversation.ids == ids) == all(drawn)


CUTS = ["stop", "length", "string"]


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize(
    ("name", "said", "last"),
    [
        ("smollm2", [[system("Add."), user("1+2?")], [user("2+2?")]], [tool("4.")]),
        ("smollm2", [[user("1+2?")], [tool("3."), tool("4.")]], [user("So?")]),
        ("llama3", [[system("Add."), user("1+2?")], [user("2+2?")]], [tool("4."), user("So?")]),
        ("qwen3", [[system("Add."), user("1+2?")], [tool("3."), tool("4.")]], [tool("5.")]),
        ("qwen3", [[user("1+2?")], [tool("3.")]], [tool("5."), tool("6.")]),
        ("tagged", [[user("1+2?")], [user("2+2?")]], [system("Now in words."), user("So?")]),
        ("folded", [[system("Add."), user("1+2?")], [user("2+2?")]], [user("So?")]),
        ("words", [[system("Add."), user("1+2?")], [tool("3.")]], [user("So?")]),
    ],
)
def test_these_conversations_grow_and_are_the_templates_own(
    name: str, said: list[list[Message]], last: list[Message], how: str
) -> None:
    """So that the property above is not one of nothing."""
    chat = template(name, True if name == "qwen3" else None)
    thought = "<think>\nhm\n</think>\n\n" if name == "qwen3" else ""
    turns = [(messages, [thought + "the answer"], how) for messages in said]
    conversation, played = play(chat, turns, END.get(name, ""))
    conversation.add(last)
    reference = grown(chat, played, last)
    assert reference is not None
    assert conversation.ids == chat._plain(reference[0])
