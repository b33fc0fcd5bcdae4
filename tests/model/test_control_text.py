"""Text of control tokens in messages is encoded as text: the control tokens of a conversation are the template's."""

from __future__ import annotations

import functools
import logging
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.control_text import MARK
from monarch_rl.model.conversation import Conversation
from monarch_rl.model.messages import Message, assistant, system, tool, user
from tests.model.chat_helpers import ADDED_TOKENS, SOURCES, SPECIAL, write_model
from tests.model.test_conversation import END, template, whole

TOKENS = sorted({token for tokens in SPECIAL.values() for token in tokens} | set(ADDED_TOKENS))
TEXT = st.lists(
    st.sampled_from([*TOKENS, *TOKENS, "a", " b", "\n", "<", "<|im_", "end|>", "|>", "é🙂", MARK, ""]), max_size=5
).map("".join)


@functools.cache
def raw(name: str) -> ChatTemplate:
    return ChatTemplate(write_model(Path(tempfile.mkdtemp()), name), allow_control_tokens=True)


def control(chat: ChatTemplate, ids: list[int]) -> list[int]:
    return [token for token in ids if token in chat.tokenizer.added_tokens_decoder]


def text_of(rows: list[Message], name: str) -> str:
    """The rendering of transformers, to which the text of a control token is text."""
    if not name:
        return "".join(message.content for message in rows)
    return whole(raw(name), [{"role": message.role, "content": message.content} for message in rows])


@pytest.mark.parametrize("name", [*SOURCES, ""])
@settings(max_examples=40, deadline=None)
@given(texts=st.lists(TEXT, min_size=3, max_size=3), between=st.lists(TEXT, min_size=1, max_size=2))
def test_other_peoples_text_writes_no_control_token(name: str, texts: list[str], between: list[str]) -> None:
    """Decoding gives the text back, and the control ids are those of the same conversation with harmless contents."""
    later = user if name == "folded" else tool  # which refuses tools
    opening, last = [system(texts[0]), user(texts[1])], [later(f"{text}.") for text in between]
    chat = template(name)

    def grown(opening: list[Message], last: list[Message]) -> tuple[list[int], list[int]]:
        conversation = Conversation(chat)
        first = conversation.add(opening)
        conversation.replied(chat.turn("ok"), "stop")
        return first, conversation.add(last)

    found = grown(opening, last)
    harmless = grown(*([Message(message.role, "x") for message in messages] for messages in (opening, last)))
    assert [control(chat, ids) for ids in found] == [control(chat, ids) for ids in harmless]
    assert chat.decode(found[0]) == text_of(opening, name)
    rendered = text_of([*opening, assistant("ok"), *last], name)
    assert rendered.endswith(chat.decode(found[1])) and chat.decode(found[1])
    if not any(token in text for text in [*texts, *between, "".join(texts), "".join(between)] for token in TOKENS):
        assert found[0] == raw(name)._plain(text_of(opening, name))


@pytest.mark.parametrize("name", [*SOURCES, ""])
@settings(max_examples=10, deadline=None)
@given(texts=st.lists(TEXT, min_size=2, max_size=2))
def test_the_switch_gives_the_ids_of_transformers(name: str, texts: list[str]) -> None:
    chat, rows = raw(name), [system(texts[0]), user(texts[1])]
    assert Conversation(chat).add(rows) == chat._plain(text_of(rows, name))
    assert chat.turn("<think>a</think>b")[:-1] == chat._plain("<think>a</think>b") or not chat.shape().end


@pytest.mark.parametrize("name", END)
def test_an_assistant_message_keeps_its_tags_and_writes_no_end_of_a_turn(name: str) -> None:
    """Given in an opening, as the answer of a supervised row, or as the thought and call of a message."""
    chat = template(name)
    end, tags = END[name], "<think>\nhm\n</think>\n\n<tool_call>\n{}\n</tool_call>"
    ids = chat.turn(f"{tags}{end}more{end}")
    (end_id,) = chat._plain(end)
    assert ids.count(end_id) == 1 and ids[-1] == end_id
    assert chat.decode(ids[:-1]) == f"{tags}{end}more{end}"
    assert control(chat, ids[:-1]) == control(chat, chat._plain(tags))
    few_shot = Conversation(chat).add([user("?"), assistant(f"a{end}b"), user("?")])
    assert few_shot.count(end_id) == Conversation(chat).add([user("?"), assistant("ab"), user("?")]).count(end_id)


def test_thoughts_and_arguments_write_no_control_token() -> None:
    chat = template("qwen3")

    def opened(text: str) -> list[int]:
        call = {"id": "c", "function": {"name": "look", "arguments": {f"key {text}": [text]}}}
        row = {"role": "assistant", "content": "", "reasoning_content": f"a{text}b", "tool_calls": [call]}
        return Conversation(chat).add([user("?"), row, tool(text)])

    plain = opened("x")
    for text in ("</think>", "</tool_call><|im_end|>", "<|im_<|im_end|>end|>", f"{MARK}{MARK}<|im_end|>"):
        ids = opened(text)
        assert control(chat, ids) == control(chat, plain)
        assert chat.decode(ids).count(text) == chat.decode(plain).count(text) + 4


@pytest.mark.parametrize("form", ["string", "tojson(ensure_ascii=True)"])
def test_a_template_that_escapes_text_gives_the_ids_of_the_text(form: str, tmp_path: Path) -> None:
    """A mapping as Python's repr, or as ASCII: both escape characters that cannot be printed."""
    source = SOURCES["qwen3"].replace("tool_call.arguments | tojson", f"tool_call.arguments | {form}")
    chat = ChatTemplate(write_model(tmp_path, "qwen3", source))

    def opened(text: str) -> list[int]:
        call = {"id": "c", "function": {"name": "look", "arguments": {"key": text}}}
        return Conversation(chat).add([user("?"), {"role": "assistant", "content": "", "tool_calls": [call]}])

    ids, plain = opened("a<|im_end|>b"), opened("ab")
    assert control(chat, ids) == control(chat, plain)
    assert chat.decode(ids).replace("<|im_end|>b", "b") == chat.decode(plain).replace("<|im_end|>b", "b")


def test_added_tokens_that_are_ordinary_vocabulary_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """As the tags of HTML and the runs of spaces that some tokenizers have."""
    folder = write_model(tmp_path, "tagged")
    tokenizer = ChatTemplate(folder).tokenizer
    tokenizer.add_tokens(["<table>", "    ", "<|fim_prefix|>"])
    tokenizer.save_pretrained(folder)
    chat = ChatTemplate(folder)
    ids = Conversation(chat).add(user("<table>    a<|fim_prefix|>"))
    table, spaces, fill_in = (tokenizer.convert_tokens_to_ids(token) for token in ("<table>", "    ", "<|fim_prefix|>"))
    assert {table, spaces} <= set(ids) and fill_in not in ids


def test_the_first_text_of_a_control_token_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A recipe that writes control tokens of its own on purpose has to learn of the switch."""
    chat = ChatTemplate(write_model(tmp_path, "qwen3"))
    with caplog.at_level(logging.WARNING, "monarch_rl"):
        Conversation(chat).add(user("plain"))
        assert not caplog.records
        for text in ("<|im_end|>", "<|im_start|>"):
            Conversation(chat).add(user(text))
    (record,) = caplog.records
    assert "--rollout.allow-control-tokens" in record.getMessage() and "user" in record.getMessage()
