"""Ids that only grow equal the template's rendering of the whole conversation, wherever the template allows it."""

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
"""The end token of each template; ``words`` has none."""


@functools.cache
def template(name: str, thinking: bool | None = None, system_prompt: str = "") -> ChatTemplate:
    options = {} if thinking is None else {"enable_thinking": thinking}
    return ChatTemplate(write_model(Path(tempfile.mkdtemp()), name), options, system_prompt)


@dataclass
class SampledTurn:
    """One turn: the messages before it, and its sampled tokens."""

    messages: list[Message]
    context: list[int]
    sampled: list[int]
    text: str
    """Text of the turn, without its end token."""
    how: str
    """``stop``, ``length``, or ``string``."""


def run_turns(
    chat: ChatTemplate, turns: list[tuple[list[Message], list[str], str]], end: str
) -> tuple[Conversation, list[SampledTurn]]:
    """Run turns whose parts are encoded one by one, since a policy may sample ids that no tokenizer would produce."""
    conversation, rollout = Conversation(chat), []
    for messages, parts, how in turns:
        context = conversation.add(messages)
        ends = how == "stop" and end
        sampled = [token for part in [*parts, *([end] if ends else [])] for token in chat._plain(part)]
        conversation.replied(sampled, "length" if how == "length" else "stop")
        ending = how if ends or how != "stop" else "string"
        rollout.append(SampledTurn(messages, context, sampled, "".join(parts), ending))
    return conversation, rollout


def row_of(message: Message) -> dict[str, Any]:
    return {"role": message.role, "content": message.content}


def messages_in(chat: ChatTemplate, context: list[int]) -> str:
    """The text of the ids before a Qwen3 turn, after the first start of a message."""
    return chat.decode(context).partition("<|im_start|>")[2]


def whole(chat: ChatTemplate, rows: list[dict[str, Any]]) -> str:
    """The rendering of the template by transformers."""
    text: str = chat.tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=True, **chat.options)
    return text


def grown(chat: ChatTemplate, rollout: list[SampledTurn], last: list[Message]) -> tuple[str, list[int]] | None:
    """The template's rendering of the whole conversation, and where turns begin and end in it. None if the rendering of
    more turns does not start with that of fewer turns and the sampled text."""
    rows: list[dict[str, Any]] = []
    before, places = "", []
    for turn in rollout:
        rows += map(row_of, turn.messages)
        text = whole(chat, rows)
        if not text.startswith(before):
            return None
        reply = turn.text
        thinks = chat.options and (text + reply).rfind("<think>") > (text + reply).rfind("</think>")
        if thinks and turn.how != "stop":
            reply = reply + "\n</think>\n\n"
        places += [len(text), len(text) + len(turn.text)]
        rows.append({"role": "assistant", "content": reply})
        before = text + reply
    rows += map(row_of, last)
    text = whole(chat, rows)
    return (text, places) if text.startswith(before) else None


WORDS = st.text(st.sampled_from("the answer is 42\n:é好🙂<|"), max_size=12)
MESSAGES = st.one_of(
    st.lists(st.builds(user, WORDS), min_size=1, max_size=1),
    st.lists(st.builds(tool, WORDS.map(lambda text: text + ".")), min_size=1, max_size=2),
)


@st.composite
def parts(draw: st.DrawFn) -> list[str]:
    """A turn: a closed thought, a truncated one, or none; then the answer."""
    solid = WORDS.map(str.strip).filter(bool)  # Qwen3's template strips newlines
    thought = ["<think>", "\n", *draw(st.lists(solid, min_size=1, max_size=2))]
    kind = draw(st.sampled_from(["closed", "closed", "closed", "truncated", "none"]))
    answer = draw(
        st.sampled_from([["the an", "swer"], ["what a ques", "tion"], [draw(solid), draw(WORDS), draw(solid)]])
    )
    return {"closed": [*thought, "\n", "</think>", "\n\n", *answer], "truncated": thought, "none": answer}[kind]


TURNS = st.lists(
    st.tuples(MESSAGES, parts(), st.sampled_from(["stop", "stop", "length", "string"])), min_size=1, max_size=4
)


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=60, deadline=None)
@given(
    turns=TURNS,
    last=MESSAGES,
    opening=st.lists(st.builds(system, WORDS.filter(str.strip)), max_size=1),
    thinking=st.booleans(),
)
def test_sampled_ids_are_kept_and_the_text_equals_the_templates_rendering(
    name: str,
    turns: list[tuple[list[Message], list[str], str]],
    last: list[Message],
    opening: list[Message],
    thinking: bool,
) -> None:
    chat = template(name, thinking if name == "qwen3" else None)
    if name == "qwen3":  # which drops thoughts after a user message
        turns = [([tool("3.")] if thinking else messages, parts, how) for messages, parts, how in turns]
    if name == "folded":  # which refuses tools
        turns, last = [([user("?")], parts, how) for _, parts, how in turns], [user("!")]
    turns[0] = [*opening, user("begin")], turns[0][1], turns[0][2]
    conversation, rollout = run_turns(chat, turns, END.get(name, ""))
    context = conversation.add(last)

    expected = [*itertools.chain.from_iterable(turn.context + turn.sampled for turn in rollout), *context]
    assert conversation.ids == expected
    text = chat.decode(conversation.ids)
    reference = grown(chat, rollout, last)
    event("stable" if reference else "not stable")
    if name == "qwen3":  # new messages are rendered as in the whole, even if older turns are not
        rows = [row for turn in rollout for row in (*map(row_of, turn.messages), {"role": "assistant", "content": "."})]
        assert whole(chat, [*rows, *map(row_of, last)]).endswith("<|im_start|>" + messages_in(chat, context))
    if reference is None:
        return
    assert text == reference[0]
    ids = chat._plain(reference[0])
    if all(ids[: len(prefix)] == prefix for prefix in (chat._plain(reference[0][:place]) for place in reference[1])):
        same = [chat._plain(turn.text) == turn.sampled[: len(turn.sampled) - (turn.how == "stop")] for turn in rollout]
        event("as a tokenizer splits it" if all(same) else "as no tokenizer splits it")
        assert (conversation.ids == ids) == all(same)


ENDINGS = ["stop", "length", "string"]


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize(
    ("name", "conversation", "last"),
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
def test_growing_conversations_equal_the_templates_rendering(
    name: str, conversation: list[list[Message]], last: list[Message], how: str
) -> None:
    """Examples that show that the property above is not vacuous."""
    chat = template(name, True if name == "qwen3" else None)
    thought = "<think>\nhm\n</think>\n\n" if name == "qwen3" else ""
    turns = [(messages, [thought + "the answer"], how) for messages in conversation]
    run, rollout = run_turns(chat, turns, END.get(name, ""))
    run.add(last)
    reference = grown(chat, rollout, last)
    assert reference is not None
    assert run.ids == chat._plain(reference[0])
