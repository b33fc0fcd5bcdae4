"""Every spelling of a message is read alike; what the template reads reaches it, and what cannot be kept is refused."""

from __future__ import annotations

import datetime
import json
from collections import namedtuple
from dataclasses import make_dataclass
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pydantic
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage

from monarch_rl.errors import ChatError
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.conversation import Conversation
from monarch_rl.model.messages import Message, ToolCall, as_messages, as_row, assistant, system, tool, user
from tests.model.chat_helpers import SOURCES, TAGGED, write_model
from tests.model.test_conversation import template, whole

Row = dict[str, Any]
WORDS = st.text(st.sampled_from('the answer is 42\n:"é好🙂<|'), min_size=1, max_size=8).map(lambda text: f"a{text}z")
VALUES = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | WORDS, lambda one: st.lists(one, max_size=2))


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """A conversation in OpenAI's form: arguments as mappings, keys without values left out."""
    found: list[Row] = [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    found.append({"role": "user", "content": draw(WORDS)})
    for number in range(draw(st.integers(0, 2))):
        row: Row = {"role": "assistant", "content": draw(WORDS)}
        if draw(st.booleans()):
            row["reasoning_content"] = draw(WORDS)
        answers: list[Row] = [{"role": "user", "content": draw(WORDS)}]
        if draw(st.booleans()):
            names = [f"call-{number}-{index}" for index in range(draw(st.integers(1, 2)))]
            arguments = [draw(st.dictionaries(WORDS, VALUES, max_size=2)) for _ in names]
            row["tool_calls"] = [
                {"type": "function", "id": name, "function": {"name": draw(WORDS), "arguments": argument}}
                for name, argument in zip(names, arguments, strict=True)
            ]
            row["content"] = draw(st.just("") | WORDS)
            answers = [
                {"role": "tool", "content": draw(WORDS), "tool_call_id": name, "name": draw(WORDS)} for name in names
            ]
        found += [row, *answers]
    return found


class Model(pydantic.BaseModel):
    """Any pydantic model."""

    model_config = pydantic.ConfigDict(extra="allow")


KINDS = ("mapping", "pydantic", "dataclass", "slots", "named tuple", "properties", "object")


def as_object(kind: str, value: Any) -> Any:
    """``value`` with each mapping but a call's arguments as an object of this kind."""
    if isinstance(value, list):
        return [as_object(kind, item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {key: item if key == "arguments" else as_object(kind, item) for key, item in value.items()}
    if kind == "pydantic":
        return Model(**fields)
    if kind in ("dataclass", "slots"):
        return make_dataclass("Fields", fields, slots=kind == "slots")(**fields)
    if kind == "named tuple":
        return namedtuple("Fields", fields)(**fields)  # type: ignore[misc]
    if kind == "properties":
        getters = {key: property(partial(lambda item, _: item, item)) for key, item in fields.items()}
        return type("Fields", (), {"__slots__": (), **getters})()
    return SimpleNamespace(**fields) if kind == "object" else fields


def spelled(draw: Any, row: Row) -> Any:
    """Another spelling of the same message."""
    row = json.loads(json.dumps(row))
    for call in row.get("tool_calls", []):
        if draw(st.booleans()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        if draw(st.booleans()):
            call |= call.pop("function")
    if "reasoning_content" in row:
        row[draw(st.sampled_from(["reasoning_content", "reasoning", "thinking"]))] = row.pop("reasoning_content")
    content, place = row["content"], draw(st.integers(0, len(row["content"])))
    spellings = [content, [{"type": "text", "text": part} for part in (content[:place], content[place:])]]
    row["content"] = draw(st.sampled_from(spellings + [None] * (not content)))
    if draw(st.booleans()):
        row = {"tool_calls": None, "name": None, "refusal": None, "annotations": []} | row
    return as_object(draw(st.sampled_from(KINDS)), row)


def ids_or_refusal(chat: ChatTemplate, messages: Any) -> list[int] | str:
    try:
        return Conversation(chat).add(messages)
    except ChatError as error:
        return str(error)


@pytest.mark.parametrize("name", [*SOURCES, ""])
@settings(max_examples=30, deadline=None)
@given(data=st.data(), conversation=rows())
def test_all_spellings_give_the_same_ids_which_are_those_of_transformers(
    name: str, data: st.DataObject, conversation: list[Row]
) -> None:
    """Or the same refusal, if the template does not read calls or thoughts."""
    chat = template(name)
    found = ids_or_refusal(chat, conversation)
    assert ids_or_refusal(chat, [spelled(data.draw, row) for row in conversation]) == found
    assert ids_or_refusal(chat, as_messages(conversation)) == found
    assert ids_or_refusal(chat, map(as_row, as_messages(conversation))) == found
    unread = [key for key in ("tool_calls", "reasoning_content") if any(key in row for row in conversation)]
    roles = {row["role"] for row in conversation}
    if name == "qwen3" or not (unread or (name == "folded" and "tool" in roles)):
        event("rendered")
        text = whole(chat, conversation) if name else "".join(row["content"] for row in conversation)
        assert found == chat._plain(text)
    else:
        assert isinstance(found, str) and any(key in found for key in (*unread, "tool"))


@pytest.mark.parametrize("content", ["I look.", None])
@pytest.mark.parametrize("thought", ["hm", None])
def test_an_answer_of_the_openai_package_is_read_with_its_calls_and_thought(
    content: str | None, thought: str | None
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    row = {"role": "assistant", "content": content, "tool_calls": [call], "reasoning_content": thought}
    expected = Message(
        "assistant", content or "", (ToolCall("weather", {"city": "Oslo"}, "c1"),), None, None, thought or ""
    )
    answer = ChatCompletionMessage.model_validate(row)
    assert as_messages(answer) == as_messages(answer.model_dump()) == as_messages([row]) == [expected]


def test_arguments_may_have_values_of_numpy() -> None:
    call = {"function": {"name": "look", "arguments": {"at": np.arange(2)}}}
    (message,) = as_messages({"role": "assistant", "content": None, "tool_calls": np.array([call])})
    assert message.tool_calls == (ToolCall("look", {"at": [0, 1]}),)


CALL = {"function": {"name": "look", "arguments": {}}}


@pytest.mark.parametrize("arguments", [None, "", " ", {}])
def test_a_call_may_have_no_arguments(arguments: Any) -> None:
    (message,) = as_messages({"role": "assistant", "tool_calls": [{"name": "look", "arguments": arguments}]})
    assert message.tool_calls == (ToolCall("look"),)


Role = Enum("Role", {"USER": "user"}, type=str)


@pytest.mark.parametrize("row", [{"role": Role.USER, "content": "?"}, Message(Role.USER, "?")], ids=["mapping", "own"])  # type: ignore[arg-type]
def test_members_of_enumerations_are_their_values(row: Any) -> None:
    (message,) = as_messages([row])
    assert message == user("?") and type(message.role) is str


@pytest.mark.parametrize("kind", KINDS[:-2])
def test_an_attribute_of_an_object_that_the_template_does_not_read_is_refused(kind: str) -> None:
    row = as_object(kind, {"role": "user", "content": "?", "images": "a.png"})
    with pytest.raises(ChatError, match="images"):
        Conversation(template("qwen3")).add([row])


@pytest.mark.parametrize(
    ("row", "culprits"),
    [
        ({"role": "user", "content": "?", "images": ["a.png"]}, ["images", "user", "Images"]),
        ({"role": "user", "content": "?", "reasoning_content": "hm"}, ["reasoning_content", "user"]),
        ({"role": "user", "content": "?", "name": "Eve"}, ["name", "user"]),
        ({"role": "assistant", "content": "!", "weight": 0}, ["weight", "assistant"]),
        ({"role": "assistant", "content": "", "function_call": {"name": "a"}}, ["function_call"]),
        ({"role": "assistant", "content": "", "reasoning": {"effort": "high"}}, ["message 1 (assistant)", "reasoning"]),
        ({"role": "assistant", "content": "", "reasoning": "a", "thinking": "b"}, ["reasoning and thinking"]),
        ({"role": "assistant", "content": None}, ["message 1 (assistant)", "None"]),
        ({"role": "user", "content": [{"type": "image_url", "text": "a"}]}, ["message 1 (user)", "image_url"]),
        ({"role": "user", "content": [{"type": "text", "text": "a", "source": "b"}]}, ["source"]),
        ({"role": "user", "content": float("nan")}, ["message 1 (user)", "nan"]),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, ["message 1 (user)", "'text': None"]),
        ({"role": "user", "content": [{}, "a"]}, ["message 1 (user)", "{}"]),
        *(
            ({"role": "tool", "content": content}, ["message 1 (tool)", culprit, "json.dumps"])
            for content, culprit in [
                ({"rain": True}, "rain"),
                ([0.5, 0.25], "0.5"),
                ([None], "None"),
                ([["a"]], "['a']"),
                (["Oslo", "Bergen"], "'Oslo'"),
                ({"Oslo"}, "'Oslo'"),
                (bytearray(b"rain"), "114"),
                (np.arange(1, 3), "int64(1)"),
                (np.array(3), "array(3)"),
                ([datetime.date(2026, 5, 1)], "2026, 5, 1"),
                (pd.DataFrame({"rain": [1]}), "'rain'"),
            ]
        ),
        ({"role": "tool", "content": "caf\udce9"}, ["message 1 (tool)", r"caf\udce9"]),
        ({"role": "tool", "content": "!", "name": float("nan")}, ["message 1 (tool)", "name", "nan"]),
        ({"role": "tool", "content": "!", "place": {"a": {1}}}, ["message 1 (tool)", "place.a", "set"]),
        ({"role": "tool", "content": "!", 1: 2}, ["message 1 (tool)", "key 1"]),
        ({"role": "human", "content": "?"}, ["message 1", "human"]),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "hm"}}]}, ["look", "hm"]),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "[1]"}}]}, ["look", "[1]"]),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"a": {1}}}}]},
            ["look", "set"],
        ),
        ({"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}, ["not a tool call"]),
        ({"role": "assistant", "tool_calls": [CALL | {"thought": "hm"}]}, ["look", "thought"]),
        ({"role": "assistant", "tool_calls": [CALL | {"id": 7}]}, ["id", "look", "7"]),
        ({"role": "assistant", "tool_calls": [ToolCall("look", {}, 7)]}, ["id", "look", "7"]),  # type: ignore[arg-type]
        ({"role": "assistant", "tool_calls": [ToolCall(None)]}, ["name", "None"]),  # type: ignore[arg-type]
        ({"role": "assistant", "tool_calls": [CALL | {"name": "go"}]}, ["name", "go", "look"]),
        ({"role": "assistant", "tool_calls": [{"name": "look", "arguments": False}]}, ["look", "False"]),
        ({"role": "assistant", "tool_calls": [CALL | {"id": "a\ud83d"}]}, [r"a\ud83d"]),
        ({"role": "assistant", "tool_calls": [{"name": "a\ud83d", "arguments": {}}]}, [r"a\ud83d"]),
        ({"role": "assistant", "tool_calls": ["look()"]}, ["not a tool call", "look()"]),
        ({"role": "assistant", "tool_calls": "look()"}, ["tool_calls", "look()"]),
    ],
    ids=ascii,
)
def test_what_cannot_be_kept_is_refused_by_name(row: Row, culprits: list[str]) -> None:
    conversation = Conversation(template("qwen3"))
    with pytest.raises(ChatError) as caught:
        conversation.add([user("?"), row])
    assert all(culprit in str(caught.value) for culprit in culprits), caught.value
    assert (conversation.ids, conversation.messages) == ([], [])


TEXT_CALLS = TAGGED.replace(
    "{{ '<|start|>'",
    "{% if m.content is none %}{% for c in m.tool_calls %}"
    "{{ '<|start|>' + c.function.name + '(' + c.function.arguments + ')<|end|>' }}{% endfor %}{% endif %}"
    "{{ '' if m.content is none else '<|start|>'",
    1,
)
"""Renders calls only beside None, and their arguments only as text, as DeepSeek-V3's template does."""


def test_calls_have_the_form_that_the_template_renders(tmp_path: Any) -> None:
    chat = ChatTemplate(write_model(tmp_path, "tagged", TEXT_CALLS))
    for arguments in ({"city": "Oslo é"}, '{"city":"Oslo é"}'):
        for content in ("", None):
            call = {"type": "function", "id": "c", "function": {"name": "look", "arguments": arguments}}
            row = {"role": "assistant", "content": content, "tool_calls": [call]}
            ids = Conversation(chat).add([user("?"), row, user("?")])
            call["function"] = {"name": "look", "arguments": '{"city": "Oslo é"}'}
            question = {"role": "user", "content": "?"}
            assert ids == chat._plain(whole(chat, [question, row | {"content": None}, question]))


READS_ALL = TAGGED.replace("+ m['content']", "+ (m.name or '') + (m.place or '') + m['content']")


def test_a_call_that_a_columnar_format_has_padded_is_read_as_it_was_written() -> None:
    function = {"name": "look", "arguments": {"city": "Oslo"}}
    text = {"name": "look", "arguments": '{"city": "Oslo"}'}
    for call in (text | {"function": {"name": None, "arguments": None}}, text | {"function": function}):
        (message,) = as_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert message.tool_calls == (ToolCall("look", {"city": "Oslo"}),)


@pytest.mark.parametrize(
    "content", [np.array(["a", "b"]), (text for text in "ab"), ["a", "b"]], ids=["array", "gen", "list"]
)
def test_texts_in_any_sequence_are_one_text(content: Any) -> None:
    (message,) = as_messages([{"role": "user", "content": content}])
    assert message.content == "ab"


def test_other_keys_reach_a_template_that_reads_them(tmp_path: Any) -> None:
    chat = ChatTemplate(write_model(tmp_path, "tagged", READS_ALL))
    row = {"role": "user", "content": "?", "name": "Eve", "place": "Oslo"}
    text = chat.decode(Conversation(chat).add(row))
    assert text == whole(chat, [row]) and "EveOslo?" in text


def test_a_call_without_an_id_has_none_in_the_template() -> None:
    (message,) = as_messages({"role": "assistant", "content": None, "tool_calls": [CALL]})
    assert as_row(message)["tool_calls"] == [{"type": "function", **CALL}]


def test_a_thought_reaches_a_template_under_the_key_that_it_reads(tmp_path: Any) -> None:
    for key in ("reasoning", "thinking"):
        chat = ChatTemplate(
            write_model(
                tmp_path / key,
                "tagged",
                "{# for models of reasoning #}" + TAGGED.replace("'\n' +", f"(m.{key} or '') + '\n' +", 1),
            )
        )
        text = chat.decode(
            Conversation(chat).add([user("?"), {"role": "assistant", "content": "!", "reasoning_content": "hm"}])
        )
        assert text == whole(chat, [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", key: "hm"}])


def test_a_failure_of_a_tool_is_not_a_part_of_the_message() -> None:
    """So a conversation that is forked within a turn may be given the same answers again."""
    assert Message("tool", "3", failed="KeyError") == tool("3") and assistant("3") != tool("3")


@pytest.mark.parametrize(
    "rows",
    [[system("Hm."), system("Yes."), user("?")], [system("Hm.")], [user("?"), assistant("!"), system("Hm.")]],
    ids=len,
)
def test_a_system_message_that_a_template_drops_is_refused(rows: list[Message]) -> None:
    """The template writes the last one, with the next user message."""
    with pytest.raises(ChatError, match="'Hm.'"):
        Conversation(template("folded")).add(rows)
    for name in ("qwen3", "folded"):
        kept = [*rows, user("And?")] if name == "qwen3" else [system("Hm."), user("?"), system("Yes."), user("And?")]
        text = template(name).decode(Conversation(template(name)).add(kept))
        assert all(message.content in text for message in kept)


FIRST_ONLY = (
    "{% if messages[0]['role'] == 'system' %}{{ '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
    "{% endif %}{% for m in messages if m['role'] != 'system' %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
REWRITES = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'].replace('/no_think', '').rstrip() }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_only_what_a_template_drops_is_refused_wherever_it_stands(tmp_path: Any) -> None:
    dropping, rewriting = (
        ChatTemplate(write_model(tmp_path / name, "qwen3", source))
        for name, source in (("drops", FIRST_ONLY), ("rewrites", REWRITES))
    )
    conversation = Conversation(dropping)
    conversation.add([system("Yes."), user("?")])
    conversation.replied(dropping.turn("!"), "stop")
    with pytest.raises(ChatError, match="'Hm.'"):
        conversation.add([system("Hm."), user("And?")])
    for rows in ([system("Brief. /no_think")], [system("A /no_think B"), system("C"), user("?")]):
        assert "/no_think" not in rewriting.decode(Conversation(rewriting).add(rows))


def test_a_system_message_between_turns_that_a_template_drops_is_refused() -> None:
    conversation = Conversation(template("folded"))
    conversation.add("?")
    conversation.replied(template("folded").turn("!"), "stop")
    with pytest.raises(ChatError, match="'Hm.'"):
        conversation.add(system("Hm."))
    conversation.add([system("Hm."), user("And?")])
