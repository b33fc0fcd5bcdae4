"""A model's chat template: text to ids, only ever for what is new."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from monarch_rl.model.chat_shape import DRAWN, Row, Shape, after_calls, find_shape, user_row
from monarch_rl.model.messages import ChatError, Message, ParsedReply, Role
from monarch_rl.model.reply_reader import PARSERS_KEPT, ReplyReader, special_tokens
from monarch_rl.model.tools import ToolSet

OPENINGS_KEPT = 16
"""Rendered openings that are kept; those of a group are asked for at about the same time."""
JOINED = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The template of a model that has none: contents are joined."""


class ChatTemplate:
    """The chat template of a model, checked.

    Args:
        folder: a Hugging Face folder with a tokenizer, as :func:`~monarch_rl.model.folder.resolve_model` returns it. A
            model without a chat template gets one that joins contents.
        options: what the template's own variables are set to, such as ``{"enable_thinking": False}``.
        system: a system message for every conversation that does not open with one; "" for none.
        tool_parser: SGLang's name of the format in which the model writes calls, such as ``hermes`` or ``llama3``; ""
            lets SGLang tell by the template.

    Raises:
        OSError: there is no tokenizer in the folder.
        ChatError: the template has no such option, cannot render a system message that is set, or loses messages.
    """

    def __init__(
        self, folder: str, options: Mapping[str, Any] | None = None, system: str = "", tool_parser: str = ""
    ) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.options = dict(options or {})
        self.system, self.tool_parser = system, tool_parser
        self._openings: dict[str, list[int]] = {}
        """The last few."""
        self._tools_checked: set[str] = set()
        """By their keys."""
        self._shapes: dict[str, Shape] = {}
        """By the template's source."""
        self._variables = dict(self.tokenizer.special_tokens_map) | self.options
        self._check_options()
        tokens = {*_end_tokens(folder), self.tokenizer.eos_token_id} - {None}
        self._end_tokens = [self.tokenizer.decode([token]) for token in sorted(tokens)]
        own_end = self._plain(self.shape().end)
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({*tokens, *own_end}))
        """Ids that end a turn: the tokenizer's, those of ``generation_config.json``, and the template's."""
        if system:
            self.require("system")

    def require(self, *roles: Role, tools: ToolSet | None = None) -> None:
        """Raise ChatError if messages of these roles cannot be rendered, or such tools cannot be used: says why."""
        shape = self.shape(tools)
        for role in roles:
            if role in shape.refusals:
                raise ChatError(
                    f"this model's chat template cannot be used with {role} messages: {shape.refusals[role]}. Write "
                    "them as user messages, or give the tokenizer another chat template"
                )
        if tools is None or tools.key in self._tools_checked:
            return
        rows = [user_row()]
        if self._render(rows, True, tools) == self._render(rows, True, None, self._source(tools)):
            raise ChatError(
                "this model's chat template has no place for tools: describe them in the system prompt, or give the "
                "tokenizer another chat template"
            )
        self._reply_reader.parser(tools)
        if len(self._tools_checked) >= PARSERS_KEPT:
            self._tools_checked.clear()
        self._tools_checked.add(tools.key)

    def shape(self, tools: ToolSet | None = None) -> Shape:
        """What the template writes around a turn."""
        source = self._source(tools)
        if source not in self._shapes:
            self._shapes[source] = find_shape(
                lambda rows, prompt: self._render(rows, prompt, None, source),
                source,
                self._end_tokens,
                special_tokens(self.tokenizer),
            )
        return self._shapes[source]

    def opening(self, messages: Sequence[Message], tools: ToolSet | None = None, prompt: bool = True) -> list[int]:
        """The ids that open a conversation, up to and with the prompt for the policy's first turn. Without ``prompt``:
        those of a whole conversation after which nobody speaks, which a reward head rates."""
        key = repr((messages, tools and tools.key, prompt))
        ids = self._openings.pop(key, None)
        if ids is None:
            self.require(*_roles(messages), tools=tools)
            text = self._render([_row(message) for message in messages], prompt, tools)
            ids = self.tokenizer.encode(text, add_special_tokens=not self.tokenizer.chat_template)
        self._openings[key] = ids  # the last one used comes last
        if len(self._openings) > OPENINGS_KEPT:
            del self._openings[next(iter(self._openings))]
        return list(ids)

    def between(self, messages: Sequence[Message], tools: ToolSet | None, end: int | None, thinking: bool) -> list[int]:
        """The ids between a turn of the policy and its next one.

        Args:
            messages: what is said between the two.
            tools: those that the conversation was opened with.
            end: the end token that the turn drew, which stands in for the template's own; None if it was cut.
            thinking: whether the turn was cut inside a thought, which is closed first.
        """
        self.require(*_roles(messages))
        shape, rows = self.shape(tools), [_row(message) for message in messages]
        if shape.calls_first and rows and rows[0]["role"] == "tool":
            text = self._after_calls(rows, tools, shape)
        else:
            base = [user_row(), {"role": "assistant", "content": DRAWN}]
            text = self._render([*base, *rows], True, tools).partition(DRAWN)[2]
            if not text.startswith(shape.closing):
                raise ChatError(
                    "the chat template closes a turn in another way before these messages than before others"
                )
        text = shape.after(text, "" if end is None else self.tokenizer.decode([end]))
        return self._encode(shape.end_of_thinking + text if thinking else text)

    def turn(self, text: str) -> list[int]:
        """The ids of a turn that says ``text`` and ends, as an engine would draw it: tokenised by itself."""
        return [*self._plain(text), *(self._plain(self.shape().end) or self.stop_token_ids[:1])]

    def read(self, token_ids: Sequence[int], tools: ToolSet | None = None, stop: Sequence[str] = ()) -> ParsedReply:
        """What a turn says.

        Args:
            token_ids: those drawn, with the end token if there is one.
            tools: in which calls are looked up; without, nothing is read as a call.
            stop: stop strings; the text ends before the first one in it.
        """
        return self._reply_reader.read(token_ids, self.shape(tools), tools, stop)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some ids, special tokens included."""
        text: str = self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return text

    def plain(self, token_ids: Sequence[int]) -> str:
        """The text of some ids without special tokens."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def token_texts(self) -> list[str]:
        """The text of each id by itself. Takes a second for 150,000 ids."""
        texts: list[str] = self.tokenizer.batch_decode([[index] for index in range(len(self.tokenizer))])
        return texts

    def cut_while_thinking(self, token_ids: Sequence[int], tools: ToolSet | None = None) -> bool:
        """Whether a turn that was cut was cut inside a thought."""
        shape = self.shape(tools)
        return shape.thinking is not None and self._reply_reader.thinks(self._reply_reader.raw(token_ids), shape)

    @cached_property
    def _reply_reader(self) -> ReplyReader:
        return ReplyReader(self.tokenizer, frozenset(self.stop_token_ids), self.tool_parser, self._source)

    def _after_calls(self, rows: list[Row], tools: ToolSet | None, shape: Shape) -> str:
        """The text between a turn and the next one, for a template that writes tool messages only after calls."""
        if any(row["role"] == "tool" and "name" not in row for row in rows):
            raise ChatError("this model's chat template needs the name of the tool that answers: use call.answer(...)")
        rows = [{"tool_call_id": "call00000", **row} if row["role"] == "tool" else row for row in rows]
        text = after_calls(lambda said, prompt: self._render(said, prompt, tools), rows, shape.closing)
        if text is None:
            raise ChatError("the chat template writes a call in another way once it is answered")
        return text

    def _source(self, tools: ToolSet | None = None) -> str:
        """The template's text. A tokenizer may have one for conversations with tools."""
        if not self.tokenizer.chat_template:
            return JOINED
        source: str = self.tokenizer.get_chat_template(None, tools and tools.schemas)
        return source

    def _render(self, rows: Sequence[Row], prompt: bool, tools: ToolSet | None, source: str = "") -> str:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, _ = render_jinja_template(
                [list(rows)],
                tools=tools.schemas if tools is not None else None,
                chat_template=source or self._source(tools),
                add_generation_prompt=prompt,
                **self._variables,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            roles = ", ".join(row["role"] for row in rows)
            raise ChatError(f"the chat template refuses a conversation of roles {roles}: {error}") from error
        text: str = texts[0]
        return text

    def _encode(self, text: str) -> list[int]:
        """The ids of text that follows a turn. What comes after an end token may be split in another way than what
        opens a text, so it is encoded after one."""
        if self._anchor is not None:
            token, before = self._anchor
            ids = self._plain(before + text)
            if ids[0] == token:
                return ids[1:]
        return self._plain(text)

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    @cached_property
    def _anchor(self) -> tuple[int, str] | None:
        """An end token and its text, if the text is that one token."""
        for token in self.stop_token_ids:
            text = self.tokenizer.decode([token])
            if self._plain(text) == [token]:
                return token, text
        return None

    def _check_options(self) -> None:
        """Raise ChatError for an option that the template does not read."""
        from jinja2 import meta
        from transformers.utils.chat_template_utils import _compile_jinja_template

        if not self.options:
            return
        environment = _compile_jinja_template(self._source()).environment
        known = meta.find_undeclared_variables(environment.parse(self._source()))
        if unknown := sorted(set(self.options) - known):
            rest = sorted(known - {"messages", "tools", "add_generation_prompt", "raise_exception"})
            raise ChatError(
                f"this model's chat template has no option {', '.join(unknown)}; it reads {', '.join(rest) or 'none'}"
            )


def _roles(messages: Sequence[Message]) -> list[Role]:
    return sorted({message.role for message in messages})


def _row(message: Message) -> Row:
    row: Row = {"role": message.role, "content": message.content}
    if message.tool_calls:
        row["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    for key in ("name", "tool_call_id"):
        if (value := getattr(message, key)) is not None:
            row[key] = value
    return row


def _end_tokens(folder: str) -> list[int]:
    path = Path(folder) / "generation_config.json"
    if not path.is_file():
        return []
    ids = json.loads(path.read_text()).get("eos_token_id")
    return ids if isinstance(ids, list) else [] if ids is None else [ids]
