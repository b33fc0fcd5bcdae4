"""Limits of a template are reported at once; a turn is parsed and closed as the template would."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.errors import ChatError, SettingsError
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.conversation import Conversation
from monarch_rl.model.messages import Message, Messages, ToolCall, assistant, system, tool, user
from monarch_rl.model.tokens import check_templates, template_warning
from tests.model.chat_helpers import SOURCES, TAGGED, write_model


def chat(folder: Path, name: str, options: Mapping[str, Any] | None = None, **more: Any) -> ChatTemplate:
    return ChatTemplate(write_model(folder, name), options, **more)


def text(conversation: Conversation) -> str:
    return conversation.template.decode(conversation.ids)


def test_without_a_template_contents_are_joined(tmp_path: Path) -> None:
    conversation = Conversation(chat(tmp_path, ""))
    conversation.add([system("Add. "), user("1 + 2 =")])
    sampled = conversation.template._plain("3</s>")
    assert conversation.replied(sampled, "stop").text == "3"
    conversation.add(user(" next"))
    assert text(conversation) == "Add. 1 + 2 =3</s> next"
    assert conversation.template.stop_token_ids == (sampled[-1],)


@pytest.mark.parametrize("name", [*SOURCES, ""])
def test_a_given_turn_is_rendered_and_ended_by_the_template(tmp_path: Path, name: str) -> None:
    """So a supervised answer equals what an engine would have generated after the same prompt."""
    options = {"enable_thinking": False} if name == "qwen3" else {}
    template = chat(tmp_path, name, options)
    opening, turn = Conversation(template).add("what a question"), template.turn("the answer is 3")
    rows = [{"role": "user", "content": "what a question"}, {"role": "assistant", "content": "the answer is 3"}]
    whole = "what a questionthe answer is 3"
    if name:
        whole = template.tokenizer.apply_chat_template(rows, tokenize=False, **options)
    assert turn[-1] in template.stop_token_ids
    assert whole.startswith(template.decode([*opening, *turn] if template.shape().end else [*opening, *turn[:-1]]))


def test_options_reach_the_template_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    conversation = Conversation(chat(tmp_path, "qwen3", {"enable_thinking": False}))
    conversation.add(user("1+2?"))
    assert text(conversation).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    with pytest.raises(ChatError, match="enable_thinkin; .*enable_thinking,"):
        chat(tmp_path, "qwen3", {"enable_thinkin": False})
    with pytest.raises(ChatError, match="enable_thinking; .*bos_token"):
        chat(tmp_path, "llama3", {"enable_thinking": False})


def test_a_system_message_that_the_template_rejects_is_refused(tmp_path: Path) -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TAGGED
    )
    write_model(tmp_path, "tagged", source)
    conversation = Conversation(ChatTemplate(str(tmp_path)))
    with pytest.raises(ChatError, match="system messages: .*System role not supported"):
        conversation.add([system("Be brief."), user("?")])


SKIPS_TOOLS = TAGGED.replace("messages %}", "messages if m['role'] != 'tool' %}", 1)
"""Drops tool messages silently."""


def test_tool_messages_that_the_template_drops_are_refused(tmp_path: Path) -> None:
    template = ChatTemplate(write_model(tmp_path, "tagged", SKIPS_TOOLS))
    with pytest.raises(ChatError, match="tool messages: .*drops"):
        template.require("user", "tool")
    template.require("user", "system", "assistant")
    conversation = Conversation(template)
    conversation.add(user("?"))
    conversation.replied(template._plain("!<|end|>"), "stop")
    ids = list(conversation.ids)
    with pytest.raises(ChatError, match="drops"):
        conversation.add(tool("42"))
    assert conversation.ids == ids
    conversation.add(user("so?"))


LAST_ONLY = "{{ '<|start|>' + messages[-1]['content'] + '<|end|>' }}"
FOR_IMAGES = "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"
ENDS_DIFFERENTLY = (
    "{% for m in messages %}{% set last = loop.last and m.role == 'assistant' %}"
    "{{ m.content + ('</s>' if last else '<|end|>') }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (LAST_ONLY, "loses turns before the last"),
        (FOR_IMAGES, "loses user messages"),
        (ENDS_DIFFERENTLY, "'</s>' and an earlier one with '<|end|>"),
    ],
)
def test_templates_that_cannot_render_a_conversation_are_refused(tmp_path: Path, source: str, sentence: str) -> None:
    with pytest.raises(ChatError) as caught:
        ChatTemplate(write_model(tmp_path, "tagged", source))
    assert sentence in str(caught.value)


def test_content_that_is_not_text_is_refused(tmp_path: Path) -> None:
    conversation = Conversation(chat(tmp_path, "tagged"))
    image = {"role": "user", "content": [{"type": "image", "url": "cat.png"}, {"type": "text", "text": "What is it?"}]}
    with pytest.raises(ChatError, match="Images"):
        conversation.add([image])
    with pytest.raises(ChatError, match="system, user, assistant, tool"):
        conversation.add([{"role": "human", "content": "?"}])
    with pytest.raises(ChatError, match="not a message"):
        conversation.add(3)  # type: ignore[arg-type]
    with pytest.raises(ChatError, match="role and content"):
        conversation.add([{"content": "?"}])


@dataclass
class OwnMessage:
    role: str
    content: str


@pytest.mark.parametrize(
    "messages",
    [
        "What is?",
        OwnMessage("user", "What is?"),
        [OwnMessage("user", "What is?")],
        {"role": "user", "content": "What is?"},
        [{"role": "user", "content": [{"type": "text", "text": "What"}, {"type": "text", "text": " is?"}]}],
    ],
)
def test_messages_come_in_several_forms(tmp_path: Path, messages: Messages) -> None:
    conversation = Conversation(chat(tmp_path, "tagged"))
    conversation.add(messages)
    assert conversation.messages == [user("What is?")]


@pytest.mark.parametrize("name", ["qwen3", "tagged"])
def test_a_turn_truncated_inside_a_thought_is_closed_before_the_next_message(tmp_path: Path, name: str) -> None:
    """Only where the template supports thoughts."""
    conversation = Conversation(chat(tmp_path, name))
    conversation.add(user("1+2?"))
    sampled = conversation.template._plain("<think>\nWell, 1")
    reply = conversation.replied(sampled, "length")
    context = conversation.template.decode(conversation.add(user("Go on.")))
    if name == "qwen3":
        assert (reply.thinking, reply.text) == ("Well, 1", "")
        assert context.startswith("\n</think>\n\n<|im_end|>\n<|im_start|>user\nGo on.")
    else:
        assert (reply.thinking, reply.text) == ("", "<think>\nWell, 1")
        assert context.startswith("<|end|>\n<|start|>user\nGo on.")


OPEN_THOUGHT = TAGGED.replace("assistant\n'", "assistant\n<think>\n'").replace(
    "m['content']", "m['content'].split('</think>')[-1]"
)
"""The prompt opens a thought, and thoughts of earlier turns are dropped."""


def test_a_thought_that_the_prompt_opens_is_closed_and_read(tmp_path: Path) -> None:
    template = ChatTemplate(write_model(tmp_path, "tagged", OPEN_THOUGHT))
    for sampled, how, thinking, answer, closes in (
        ("hm\n</think>\n\n3<|end|>", "stop", "hm", "3", "\n"),
        ("hm\n</think>\n\n3", "length", "hm", "3", "<|end|>\n"),
        ("hm", "length", "hm", "", "\n</think>\n\n<|end|>\n"),
    ):
        conversation = Conversation(template)
        conversation.add(user("1+2?"))
        reply = conversation.replied(template._plain(sampled), how)
        assert (reply.thinking, reply.text) == (thinking, answer)
        assert template.decode(conversation.add(user("So?"))).startswith(closes + "<|start|>user\nSo?")


def test_any_sampled_end_token_replaces_the_one_of_the_template(tmp_path: Path) -> None:
    template = chat(tmp_path, "qwen3")
    assert template.decode(template.stop_token_ids) in ("<|endoftext|><|im_end|>", "<|im_end|><|endoftext|>")
    for end in "<|im_end|>", "<|endoftext|>":
        conversation = Conversation(template)
        conversation.add(user("1+2?"))
        assert conversation.replied(template._plain("3" + end), "stop").text == "3"
        conversation.add(user("2+2?"))
        assert text(conversation).endswith(f"3{end}\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")


ROLE_ENDS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)


def test_a_role_that_ends_the_turn_is_not_written_twice(tmp_path: Path) -> None:
    """As in GLM, whose turns end with the token that opens the next message."""
    special = {"role_ends": ["</s>", "<|user|>", "<|assistant|>", "<|tool|>"]}
    folder = write_model(tmp_path, "role_ends", ROLE_ENDS, end="<|user|>", special=special["role_ends"])
    template = ChatTemplate(folder)
    for end, how, next_message in ("<|user|>", "stop", "2+2?"), ("", "length", "<|user|>2+2?"):
        conversation = Conversation(template)
        conversation.add(user("1+2?"))
        conversation.replied(template._plain("3" + end), how)
        assert template.decode(conversation.add(user("2+2?"))) == next_message + "<|assistant|>"


AFTER_CALLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% set called = messages[loop.index0 - 1].tool_calls %}"
    "{% if not called %}{{ raise_exception('no call before this answer') }}{% endif %}"
    "{{ '<|start|>' + called[0].function.name + '\n' + m.content + '<|end|>\n' }}"
    "{% else %}{{ '<|start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls %}{{ '{' + call.function.name + '}' }}{% endfor %}{{ '<|end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
"""Renders the answer of a tool only after a call of it, under the name of the call."""


def test_tool_answers_that_require_a_call_are_rendered_after_a_call(tmp_path: Path) -> None:
    template = ChatTemplate(write_model(tmp_path, "tagged", AFTER_CALLS))
    for sampled, how, closes in ("{add}<|end|>", "stop", "\n"), ("{add}", "length", "<|end|>\n"):
        conversation = Conversation(template)
        conversation.add(user("1+2?"))
        conversation.replied(template._plain(sampled), how)
        with pytest.raises(ChatError, match="name of the tool"):
            conversation.add(tool("3"))
        context = conversation.add(ToolCall("add", id="call00000").answer("3"))
        assert template.decode(context) == closes + "<|start|>add\n3<|end|>\n<|start|>assistant\n"


CONTINUES = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '[' + m.content + ']' }}{% else %}"
    "{{ '<|start|>' + m.role + '\n' + m.content + ('(call)' if m.tool_calls else '<|end|>\n') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|start|>assistant\n' }}{% endif %}"
)
"""The answer of a tool is inside the turn that called it, which continues after it."""


def test_a_tool_answer_inside_the_calling_turn_is_rendered_there(tmp_path: Path) -> None:
    template = ChatTemplate(write_model(tmp_path, "tagged", CONTINUES))
    conversation = Conversation(template)
    conversation.add(user("1+2?"))
    conversation.replied(template._plain("(call)"), "length")
    rows = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "", "tool_calls": [1]}]
    whole = template.tokenizer.apply_chat_template(
        [*rows, {"role": "tool", "content": "3"}], tokenize=False, add_generation_prompt=True
    )
    conversation.add(ToolCall("add").answer("3"))
    assert text(conversation) == whole


def test_messages_can_be_read_without_a_turn(tmp_path: Path) -> None:
    conversation = Conversation(chat(tmp_path, "tagged"))
    conversation.read(system("Add."))
    conversation.read([user("1+2?"), assistant("3")])
    conversation.add(user("2+2?"))
    assert text(conversation) == (
        "<|start|>system\nAdd.<|end|>\n<|start|>user\n1+2?<|end|>\n<|start|>assistant\n3<|end|>\n"
        "<|start|>user\n2+2?<|end|>\n<|start|>assistant\n"
    )


def test_a_truncated_turn_can_be_followed_by_another_without_a_message(tmp_path: Path) -> None:
    conversation = Conversation(chat(tmp_path, "tagged"))
    conversation.add(user("1+2?"))
    conversation.replied(conversation.template._plain("It is"), "length")
    assert conversation.template.decode(conversation.add()) == "<|end|>\n<|start|>assistant\n"


def test_turns_strictly_alternate(tmp_path: Path) -> None:
    conversation = Conversation(chat(tmp_path, "tagged"))
    with pytest.raises(ChatError, match="no turn"):
        conversation.replied([1], "stop")
    conversation.add(user("1+2?"))
    with pytest.raises(ChatError, match="turn is open"):
        conversation.add(user("2+2?"))


def test_a_fork_shares_the_past_and_diverges(tmp_path: Path) -> None:
    template = chat(tmp_path, "tagged")
    conversation = Conversation(template)
    conversation.add(user("1+2?"))
    fork, before = conversation.fork(), list(conversation.ids)
    conversation.replied(template._plain("3<|end|>"), "stop")
    fork.replied(template._plain("4"), "length")
    conversation.add(user("Sure?"))
    fork.add(user("Sure?"))
    assert conversation.ids[: len(before)] == fork.ids[: len(before)] == before
    assert (
        text(fork).removeprefix(template.decode(before))
        == "4<|end|>\n<|start|>user\nSure?<|end|>\n<|start|>assistant\n"
    )
    assert [message.content for message in conversation.messages] == ["1+2?", "3", "Sure?"]
    assert [message.content for message in fork.messages] == ["1+2?", "4", "Sure?"]


def test_cached_openings_are_not_shared(tmp_path: Path) -> None:
    template = chat(tmp_path, "tagged")
    first, second = Conversation(template), Conversation(template)
    ids = first.add(user("1+2?"))
    ids.append(0)
    assert second.add(user("1+2?")) == ids[:-1]


def test_text_ends_before_a_stop_string_and_has_no_special_tokens(tmp_path: Path) -> None:
    conversation = Conversation(chat(tmp_path, "tagged"))
    conversation.add(user("1+2?"))
    sampled = conversation.template._plain("It<|start|> is 3. Next: 4")
    reply = conversation.replied(sampled, "stop", stop=[" Next:"])
    assert (reply.text, reply.raw) == ("It is 3.", "It<|start|> is 3. Next: 4")
    assert conversation.ids[-len(sampled) :] == sampled
    assert conversation.messages[-1] == Message("assistant", reply.raw)


def test_a_turn_ends_at_the_end_tokens_of_every_file(tmp_path: Path) -> None:
    """Engines stop at those of both configs."""
    write_model(tmp_path, "qwen3")
    plain = ChatTemplate(str(tmp_path))
    ids = {token: plain.tokenizer.convert_tokens_to_ids(token) for token in ("<think>", "</think>")}
    assert not {*ids.values()} & {*plain.stop_token_ids}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": ids["<think>"]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids["</think>"]]}))
    assert {*ChatTemplate(str(tmp_path)).stop_token_ids} == {*ids.values(), *plain.stop_token_ids}


def test_a_turn_ends_at_the_end_token_of_a_template_for_tools_too(tmp_path: Path) -> None:
    """As of Llama 3.1, whose calls end with a token of their own. A template that cannot be rendered has no end."""
    write_model(tmp_path, "tagged", special=["<|end|>", "<|start|>", "<|call|>"])
    plain = ChatTemplate(str(tmp_path))
    (call,) = plain._plain("<|call|>")
    (tmp_path / "additional_chat_templates").mkdir()
    for source, stops in ((TAGGED.replace("<|end|>", "<|call|>"), {call}), ("{{ tools | length }}", set())):
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(source)
        assert {*ChatTemplate(str(tmp_path)).stop_token_ids} == {*plain.stop_token_ids} | stops


def test_a_template_that_transformers_would_not_find_is_refused(tmp_path: Path) -> None:
    """It ignores the one in tokenizer_config.json if there are named ones, and those of processors and sub-folders."""
    write_model(tmp_path, "tagged")
    default, named = tmp_path / "chat_template.jinja", tmp_path / "additional_chat_templates"
    named.mkdir()
    (named / "tool_use.jinja").write_text("TOOLS " + TAGGED)
    assert ChatTemplate(str(tmp_path)).opening([user("?")])
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TAGGED}))
    default.unlink()
    with pytest.raises(ValueError, match=r"tool_use\.jinja: .*ignores .*chat_template\.jinja"):
        ChatTemplate(str(tmp_path))
    (named / "default.jinja").write_text(TAGGED)
    assert ChatTemplate(str(tmp_path)).opening([user("?")])
    shutil.rmtree(named)
    assert ChatTemplate(str(tmp_path)).opening([user("?")])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ChatTemplate(str(tmp_path)).shape().closing == ""  # a model without a template
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TAGGED}))
    with pytest.raises(ValueError, match=r"chat_template\.json: "):
        ChatTemplate(str(tmp_path))


def test_two_different_templates_are_warned_about(tmp_path: Path) -> None:
    write_model(tmp_path, "tagged")
    assert template_warning(tmp_path) == ""
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for stated, warned in ((TAGGED + "\n", False), (TAGGED + "!", True)):
        for form in (stated, [{"name": "default", "template": stated}, {"name": "rag", "template": "?"}]):
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": form}))
            assert ("chat_template.jinja" in template_warning(tmp_path)) == warned
    assert ChatTemplate(str(tmp_path)).shape().closing.startswith("<|end|>")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "default.jinja").write_text("?" + TAGGED)
    assert template_warning(tmp_path).startswith(f"{tmp_path / 'additional_chat_templates' / 'default.jinja'} and ")
    assert ChatTemplate(str(tmp_path)).tokenizer.chat_template.startswith("?"), "transformers takes it"


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("tokenizer_config.json", [{"name": "tool_use", "template": TAGGED}], "default chat template"),
        ("tokenizer_config.json", [TAGGED], "must be text, or a list"),
        ("tokenizer_config.json", 5, "must be text, or a list"),
        ("chat_template.jinja", "é".encode("latin1"), "UTF-8"),
    ],
)
def test_templates_that_cannot_be_read_are_named(tmp_path: Path, file: str, content: Any, problem: str) -> None:
    write_model(tmp_path, "")
    if isinstance(content, bytes):
        (tmp_path / file).write_bytes(content)
    else:
        settings = json.loads((tmp_path / file).read_text())
        (tmp_path / file).write_text(json.dumps(settings | {"chat_template": content}))
    with pytest.raises(SettingsError, match=problem) as refused:
        check_templates(tmp_path)
    assert str(refused.value).startswith(str(tmp_path / file))
