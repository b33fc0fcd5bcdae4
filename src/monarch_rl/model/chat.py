"""A model's chat template: renders and tokenises only what a conversation adds, never what it already holds."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from monarch_rl.errors import ChatError, SettingsError
from monarch_rl.model.chat_shape import (
    TURN_SENTINEL,
    CallForm,
    Row,
    Shape,
    after_calls,
    find_call_form,
    find_shape,
    user_row,
)
from monarch_rl.model.config import find_config
from monarch_rl.model.control_text import ControlText, split_at, texts_of, unused_mark
from monarch_rl.model.messages import Message, ParsedReply, Role, as_row
from monarch_rl.model.reply_reader import PARSERS_CACHED, ReplyReader, special_tokens
from monarch_rl.model.token_text import TokenText
from monarch_rl.model.tokens import END_FILES, check_templates, end_tokens
from monarch_rl.model.tools import ToolSet
from monarch_rl.values import lone_surrogate

logger = logging.getLogger("monarch_rl")
OPENINGS_CACHED = 16
"""Rendered openings in the cache. The episodes of a group share one and need it at about the same time."""
FALLBACK_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Template for a model without one: concatenates the contents."""


def _load_tokenizer(folder: str) -> Any:
    """The tokenizer that transformers makes of a model's folder. Raises SettingsError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of any kind: the files hold something that it does not expect
        reason = " ".join(str(error).split())
        raise SettingsError(
            f"{folder}: transformers cannot load the tokenizer ({type(error).__name__}: {reason:.300}). Copy or "
            "download its files again, or save them with the transformers of this environment"
        ) from error
    config = find_config(folder)
    if config is not None and config.supported and config.vocab_size < len(tokenizer):
        added = tokenizer.convert_ids_to_tokens(len(tokenizer) - 1)
        raise SettingsError(
            f"{folder}: as a {type(tokenizer).__name__}, the tokenizer has {len(tokenizer)} tokens, up to {added!r}, "
            f"but the model has {config.vocab_size} embeddings. Correct tokenizer_class in tokenizer_config.json"
        )
    return tokenizer


class ChatTemplate:
    """The chat template of a model, checked on construction.

    Args:
        folder: a Hugging Face folder with a tokenizer, as :func:`~monarch_rl.model.folder.resolve_model` finds it. A
            model without a chat template gets one that concatenates the contents.
        options: values of the template's own variables, such as ``{"enable_thinking": False}``.
        tool_parser: SGLang's name of the format in which the model writes calls, such as ``hermes`` or ``llama3``; ""
            has SGLang detect it from the template.
        allow_control_tokens: encode the text of a control token in a message as that token, as transformers does, and
            not as text.

    Raises:
        ValueError: transformers cannot load the tokenizer, or adds tokens to it for which the model has no embedding,
            or the folder has a chat template only where transformers does not look for one.
        ChatError: the template does not read an option, or loses messages.
    """

    def __init__(
        self,
        folder: str,
        options: Mapping[str, Any] | None = None,
        tool_parser: str = "",
        allow_control_tokens: bool = False,
    ) -> None:
        check_templates(Path(folder))
        self.tokenizer: Any = _load_tokenizer(folder)
        self.options = dict(options or {})
        self.tool_parser, self._allow_control_tokens = tool_parser, allow_control_tokens
        self._openings: dict[str, list[int]] = {}
        """Ids of the openings used last, least recently used first."""
        self._tools_checked: set[str] = set()
        """Keys of tool sets that the template can render."""
        self._shapes: dict[str, Shape] = {}
        """By template source."""
        self._call_forms: dict[str, CallForm] = {}
        """By template source."""
        self._warned = False
        """Whether the text of a control token in a message has been reported."""
        self._variables = dict(self.tokenizer.special_tokens_map) | self.options
        self._check_options()
        named = {token for file in END_FILES for token in end_tokens(Path(folder) / file)}
        tokens = {*named, self.tokenizer.eos_token_id} - {None}
        self._end_tokens = [self.tokenizer.decode([token]) for token in sorted(tokens)]
        own_ends = self._plain(self.shape().end)
        if isinstance(self.tokenizer.chat_template, dict) and (source := self.tokenizer.chat_template.get("tool_use")):
            with suppress(ChatError):  # it is raised if a conversation has tools
                own_ends += self._plain(self._shape_of(source).end)
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({*tokens, *own_ends}))
        """Ids that end a turn: from the tokenizer, ``config.json``, ``generation_config.json`` and the templates."""

    def require(self, *roles: Role, tools: ToolSet | None = None) -> None:
        """Raise ChatError, with the reason, if messages of these roles or these tools cannot be rendered."""
        shape = self.shape(tools)
        for role in roles:
            if role in shape.refusals:
                raise ChatError(
                    f"this model's chat template cannot render {role} messages: {shape.refusals[role]}. Write them as "
                    "user messages, or give the tokenizer another chat template"
                )
        if tools is None or tools.key in self._tools_checked:
            return
        rows = [user_row()]
        if self._render(rows, True, tools) == self._render(rows, True, None, self._source(tools)):
            raise ChatError(
                "this model's chat template does not render tools: describe them in the system prompt, or give the "
                "tokenizer another chat template"
            )
        self._reply_reader.parser(tools)
        if len(self._tools_checked) >= PARSERS_CACHED:
            self._tools_checked.clear()
        self._tools_checked.add(tools.key)

    def shape(self, tools: ToolSet | None = None) -> Shape:
        """The text that the template writes around a turn."""
        return self._shape_of(self._source(tools))

    def _shape_of(self, source: str) -> Shape:
        if source not in self._shapes:
            self._shapes[source] = find_shape(
                lambda rows, prompt: self._render(rows, prompt, None, source),
                source,
                self._end_tokens,
                special_tokens(self.tokenizer),
            )
        return self._shapes[source]

    def opening(self, messages: Sequence[Message], tools: ToolSet | None = None, prompt: bool = True) -> list[int]:
        """The ids that open a conversation, including the prompt for the policy's first turn.

        Args:
            messages: the messages of the opening.
            tools: the tools that the policy may call.
            prompt: False renders a finished conversation instead, without a prompt, for a reward head to rate.
        """
        key = repr((messages, tools and tools.key, prompt))
        ids = self._openings.pop(key, None)
        if ids is None:
            self.require(*_roles(messages), tools=tools)
            rows, tools, mark = self._rows(messages, tools)
            text = self._render(rows, prompt, tools)
            _check_system_messages(rows, text, lambda rows: self._render(rows, prompt, tools), opens=True)
            first, *rest = self._pieces(text, mark)
            ids = self.tokenizer.encode(first, add_special_tokens=not self.tokenizer.chat_template)
            ids += [token for piece in rest for token in self._encode(piece)]
        self._openings[key] = ids  # now the most recently used
        if len(self._openings) > OPENINGS_CACHED:
            del self._openings[next(iter(self._openings))]
        return list(ids)

    def between(self, messages: Sequence[Message], tools: ToolSet | None, end: int | None, thinking: bool) -> list[int]:
        """The ids between a turn of the policy and its next one.

        Args:
            messages: the messages between the two turns.
            tools: the tools that the conversation was opened with.
            end: the end token that the policy sampled, which replaces the template's; None if the turn was cut.
            thinking: whether the turn was cut inside a thought; the thought is then closed first.
        """
        self.require(*_roles(messages))
        shape = self.shape(tools)
        rows, tools, mark = self._rows(messages, tools)
        if shape.calls_first and rows and rows[0]["role"] == "tool":
            text = self._after_calls(rows, tools, shape)
            _check_system_messages(rows, text, lambda rows: self._after_calls(rows, tools, shape))
        else:
            base = [user_row(), {"role": "assistant", "content": TURN_SENTINEL}]

            def render(rows: Sequence[Row]) -> str:
                return self._render([*base, *rows], True, tools).partition(TURN_SENTINEL)[2]

            text = render(rows)
            if not text.startswith(shape.closing):
                raise ChatError(
                    f"this model's chat template closes a turn differently before {', '.join(_roles(messages))} "
                    "messages: give the tokenizer another chat template"
                )
            _check_system_messages(rows, text, render)
        text = shape.after(text, "" if end is None else self.tokenizer.decode([end]))
        pieces = self._pieces(shape.end_of_thinking + text if thinking else text, mark)
        return [token for piece in pieces for token in self._encode(piece)]

    def turn(self, text: str) -> list[int]:
        """The ids of a finished turn with this text, as an engine would generate it: ``text`` is tokenised alone and
        an end token follows. The text of a token that ends a turn or opens a message is encoded as text; those for
        thoughts and calls are the policy's own."""
        if problem := lone_surrogate(text):
            raise ChatError(f"{problem}: remove or replace it")
        first, *rest = [text]
        if self._turn_control.occurs_in(text):
            mark = unused_mark([text])
            first, *rest = self._turn_control.mark(text, mark).split(mark)
        ids = [*self._plain(first), *(token for piece in rest for token in self._encode(piece))]
        return [*ids, *(self._plain(self.shape().end) or self.stop_token_ids[:1])]

    def read(self, token_ids: Sequence[int], tools: ToolSet | None = None, stop: Sequence[str] = ()) -> ParsedReply:
        """Parse a turn.

        Args:
            token_ids: the sampled ids, including the end token if there is one.
            tools: the tools that calls may name; without, nothing is parsed as a call.
            stop: stop strings; the text ends before the first one in it.
        """
        return self._reply_reader.read(token_ids, self.shape(tools), tools, stop)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included."""
        text: str = self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return text

    def decode_with_ends(self, token_ids: Sequence[int]) -> tuple[str, np.ndarray]:
        """The text of these ids, special tokens included, and where each token ends in its UTF-8 bytes, as uint32: see
        :meth:`TokenText.decode`."""
        return self._token_text.decode(token_ids)

    def plain(self, token_ids: Sequence[int]) -> str:
        """The text of these ids, without special tokens."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def token_texts(self) -> list[str]:
        """The text of each id of the vocabulary, decoded alone. Takes a second for 150,000 ids."""
        texts: list[str] = self.tokenizer.batch_decode([[index] for index in range(len(self.tokenizer))])
        return texts

    def cut_while_thinking(self, token_ids: Sequence[int], tools: ToolSet | None = None) -> bool:
        """Whether a cut turn ends inside a thought."""
        shape = self.shape(tools)
        return shape.thinking is not None and self._reply_reader.thinks(self._reply_reader.raw(token_ids), shape)

    @cached_property
    def _token_text(self) -> TokenText:
        return TokenText(self.tokenizer)

    @cached_property
    def _reply_reader(self) -> ReplyReader:
        return ReplyReader(self.tokenizer, frozenset(self.stop_token_ids), self.tool_parser, self._source)

    @cached_property
    def _control(self) -> ControlText:
        """The control tokens: special tokens, and added ones that the template writes or that look like
        ``<|fim_prefix|>``. Other added tokens are ordinary vocabulary: Gemma's ``<table>``, runs of spaces."""
        if self._allow_control_tokens:
            return ControlText([])
        template = str(self.tokenizer.chat_template or "")
        added = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        written = [token for token in added if token in template or token.startswith(("<|", "<｜"))]
        return ControlText([*special_tokens(self.tokenizer), *written])

    @cached_property
    def _turn_control(self) -> ControlText:
        """The control tokens that no turn of the policy contains: those that end a turn or open a message."""
        if self._allow_control_tokens:
            return ControlText([])
        shape = self.shape()
        opens = [token for token in special_tokens(self.tokenizer) if token in shape.generation_prompt]
        ends = [self.decode([token]) for token in self.stop_token_ids]
        return ControlText({*ends, *opens} - set(shape.thinking or ()))

    def _rows(self, messages: Sequence[Message], tools: ToolSet | None) -> tuple[list[Row], ToolSet | None, str]:
        """Messages and tools as the template reads them, and the mark inside texts of control tokens; "" if there are
        none."""
        rows = [self._row(message, tools) for message in messages]
        found = [row["role"] for row in rows for key in row if self._has_control_text(row, key)]
        in_tools = tools is not None and self._control.occurs_in(tools.key)
        mark = ""
        if found or in_tools:
            mark = unused_mark([*texts_of(rows), tools.key if tools is not None else ""])
            rows = [{key: self._control_of(row, key).mark(row[key], mark) for key in row} for row in rows]
        if in_tools and tools is not None:
            tools = ToolSet(tuple(self._control.mark(tools.schemas, mark)), tools.functions)
        if found and not self._warned:
            self._warned = True
            logger.warning(
                "a %s message contains the text of a control token, which is encoded as ordinary text, here and in all "
                "messages (docs/chat.md). If your own code writes control tokens, set --rollout.allow-control-tokens",
                found[0],
            )
        return [_watched(row) for row in rows], tools, mark

    def _row(self, message: Message, tools: ToolSet | None) -> Row:
        """The message, with its thought under the key that the template reads, and its calls in the form."""
        row = as_row(message)
        if message.thinking:
            keys, source = ("reasoning_content", "reasoning", "thinking"), self._source(tools)
            key = next((key for key in keys if re.search(rf"[.'\"]{key}\b", source)), keys[0])
            row[key] = row.pop("reasoning_content")
        if message.tool_calls:
            form = self._call_form(self._source(tools))
            row["content"] = message.content or form.content
            for call in row["tool_calls"] if form.as_text else ():
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return row

    def _call_form(self, source: str) -> CallForm:
        if source not in self._call_forms:
            self._call_forms[source] = find_call_form(lambda rows, prompt: self._render(rows, prompt, None, source))
        return self._call_forms[source]

    def _has_control_text(self, row: Row, key: str) -> bool:
        return any(map(self._control_of(row, key).occurs_in, texts_of(row[key])))

    def _control_of(self, row: Row, key: str) -> ControlText:
        """The tokens that a value of a message must not write. The content of an assistant message is in the policy's
        own format, with its tags of thoughts and calls."""
        return self._turn_control if row["role"] == "assistant" and key == "content" else self._control

    def _pieces(self, text: str, mark: str) -> list[str]:
        """Rendered text, split inside the texts of control tokens that come from messages."""
        # Without a template contents are adjacent, so two of them may write a token together.
        if not self.tokenizer.chat_template and self._control.occurs_in(text):
            mark = mark or unused_mark([text])
            text = self._control.mark(text, mark)
        return split_at(mark, text) if mark else [text]

    def _after_calls(self, rows: list[Row], tools: ToolSet | None, shape: Shape) -> str:
        """The text between a turn and the next one, for a template that renders tool messages only after calls."""
        if any(row["role"] == "tool" and "name" not in row for row in rows):
            raise ChatError("this model's chat template needs the name of the tool that answers: use call.answer(...)")
        for row in rows:
            if row["role"] == "tool":
                row.setdefault("tool_call_id", "call00000")
        text = after_calls(lambda conversation, prompt: self._render(conversation, prompt, tools), rows, shape.closing)
        if text is None:
            raise ChatError(
                "this model's chat template renders a call differently once it is answered: give the tokenizer another "
                "chat template"
            )
        return text

    def _source(self, tools: ToolSet | None = None) -> str:
        """The template's text. A tokenizer may have a separate template for conversations with tools."""
        if not self.tokenizer.chat_template:
            return FALLBACK_TEMPLATE
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
            raise ChatError(f"the chat template refuses a conversation with roles {roles}: {error}") from error
        for row in rows:
            if isinstance(row, _WatchedRow) and (unread := ", ".join(row.unread)):
                raise ChatError(
                    f"this model's chat template does not read {unread} of {row['role']} messages: leave it out, say "
                    "it in the content, or give the tokenizer another chat template. Images, audio and video are not "
                    "supported"
                )
        text: str = texts[0]
        return text

    def _encode(self, text: str) -> list[int]:
        """The ids of text that follows a turn."""
        # A tokenizer may split text after an end token differently than text at the start, so encode it after one.
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
        """An end token whose text encodes to that one token, and the text."""
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
        variables = meta.find_undeclared_variables(environment.parse(self._source()))
        if unknown := sorted(set(self.options) - variables):
            rest = sorted(variables - {"messages", "tools", "add_generation_prompt", "raise_exception"})
            raise ChatError(
                f"this model's chat template has no option {', '.join(unknown)}; it reads {', '.join(rest) or 'none'}"
            )


def _roles(messages: Sequence[Message]) -> list[Role]:
    return sorted({message.role for message in messages})


def _check_system_messages(
    rows: Sequence[Row], text: str, render: Callable[[list[Row]], str], opens: bool = False
) -> None:
    """Raise ChatError for a system message that is not in the rendered text: a template may keep the last one only, or
    write it with the next user message.

    Args:
        render: renders other rows in the same place.
        opens: whether the rows open the conversation: that a template writes their first one is checked at the start.
    """
    for index, row in enumerate(rows):
        usual = opens and index == 0 and len(rows) > 1 and all(other["role"] != "system" for other in rows[1:])
        if row["role"] != "system" or usual or row["content"].strip() in text:
            continue
        # A template may also change the text, such as its white space.
        if TURN_SENTINEL not in render([*rows[:index], row | {"content": TURN_SENTINEL}, *rows[index + 1 :]]):
            raise ChatError(
                f"this model's chat template drops the system message {row['content']!r:.60}: write only one, before "
                "the first user message"
            )


def _watched(row: Row) -> Row:
    """The row, or one that tells which keys the template has not read, if it has any that a template may ignore."""
    if len(row) == 2:
        return row
    bookkeeping = ("name", "tool_call_id") if row["role"] == "tool" else ()
    optional = row.keys() - {"role", "content", *bookkeeping}
    return _WatchedRow(row, optional) if optional else row


class _WatchedRow(dict[str, Any]):
    """A message that tells which of some keys the template has not read (``unread``)."""

    def __init__(self, row: Row, unread: Iterable[str]) -> None:
        super().__init__(row)
        self.unread = sorted(unread)

    def _read(self, key: Any) -> None:
        if key in self.unread:
            self.unread.remove(key)

    def __getitem__(self, key: str) -> Any:
        self._read(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._read(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        self.unread.clear()
        return super().__iter__()

    def items(self) -> Any:
        self.unread.clear()
        return super().items()
