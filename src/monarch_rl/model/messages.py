"""The data types of a conversation (messages, tool calls, parsed replies), and the one reading of messages in all their
spellings: policy, judges, supervised rows, evaluations and environments of other libraries use :func:`as_messages`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, Protocol, TypeAlias, get_args

from monarch_rl.errors import ChatError
from monarch_rl.values import lone_surrogate, plain

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
ROLES = get_args(Role)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call, as the policy wrote it."""

    name: str
    """Name of the tool; "" if the call cannot be parsed."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """JSON values by argument name."""
    id: str = ""
    """Unique within the conversation."""
    error: str = ""
    """Why the call cannot be executed, worded for the model; "" if it can."""

    def answer(self, content: str) -> Message:
        """The message that answers this call. ``content`` is the tool's result, or :attr:`error`."""
        return Message("tool", content, name=self.name or None, tool_call_id=self.id or None)


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a conversation."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls in an assistant message."""
    name: str | None = None
    """In a tool message: the tool that answers."""
    tool_call_id: str | None = None
    """In a tool message: the call that it answers."""
    thinking: str = ""
    """In an assistant message: the thought before its content, ``reasoning_content`` in OpenAI's form."""
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Other keys, as JSON values. A chat template that does not read one of them refuses the message."""
    failed: str = field(default="", compare=False)
    """In an answer of ``run_tools``: the exception of a tool that raised, or why else it gave no result; "" if it gave
    one. No template reads it."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """The content of a policy's turn, parsed from the sampled ids, which do not change."""

    raw: str
    """The whole text with thoughts, calls and special tokens, but without the end token."""
    text: str
    """The text without thoughts, calls and special tokens, cut before the first stop string."""
    thinking: str = ""
    """The text between the template's thinking tags."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls, in order. Check ``error`` before executing one."""


class MessageLike(Protocol):
    """Any other object with a role and content, such as a pydantic model or a dataclass."""

    @property
    def role(self) -> str:
        """One of :data:`Role`."""
        ...

    @property
    def content(self) -> Any:
        """Text, content parts that are text, or None beside tool calls."""
        ...


AnyMessage: TypeAlias = Message | MessageLike | Mapping[str, Any]
Messages: TypeAlias = str | AnyMessage | Iterable[AnyMessage]
"""One message or several. A plain string is a user message; a message may be a mapping or an object, in OpenAI's
form."""


def system(content: str) -> Message:
    """A system message: instructions before the conversation."""
    return Message("system", content)


def user(content: str) -> Message:
    """A user message."""
    return Message("user", content)


def assistant(content: str) -> Message:
    """An assistant turn that is given rather than sampled, such as a few-shot example in the opening."""
    return Message("assistant", content)


def tool(content: str, name: str | None = None, tool_call_id: str | None = None) -> Message:
    """A tool's answer. :meth:`ToolCall.answer` fills in the name and the id."""
    return Message("tool", content, name=name, tool_call_id=tool_call_id)


def as_messages(messages: Messages) -> list[Message]:
    """Convert to a list of checked messages.

    Mappings and objects are equivalent (pydantic models and dataclasses with all their fields), as are arguments of
    calls as a mapping and as JSON text, text and content parts, and ``reasoning_content``, ``reasoning`` and
    ``thinking``. Keys without a value (None, empty) are left out.

    Raises:
        ChatError: an item is not a message, has an unknown role, holds an image or other content that is not text, or
            text that is not Unicode. Names the index and the role of the message.
    """
    if isinstance(messages, str):
        return [_checked(user(messages), 0)]
    several: Any = [messages] if isinstance(messages, Mapping) or hasattr(messages, "role") else messages
    if not isinstance(several, Iterable):
        raise ChatError(f"{messages!r:.80} is not a message: use user(...), system(...) or tool(...)")
    return [_checked(message, index) for index, message in enumerate(several)]


def text_of(messages: Iterable[Message]) -> str:
    """The contents of messages, without what a chat template adds."""
    return "\n".join(message.content for message in messages)


def as_row(message: Message) -> dict[str, Any]:
    """The message as a mapping in OpenAI's form, with the arguments of calls as mappings."""
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        row["tool_calls"] = [
            {"type": "function"}
            | ({"id": call.id} if call.id else {})
            | {"function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    for key in ("name", "tool_call_id"):
        if (value := getattr(message, key)) is not None:
            row[key] = value
    if message.thinking:
        row["reasoning_content"] = message.thinking
    if message.more:
        row |= message.more
    return row


# -- reading messages -------------------------------------------------------------------------------------------------

_THINKING = ("reasoning_content", "reasoning", "thinking")
"""The keys under which APIs and data sets have thoughts."""
_FIELDS = ("role", "content", "tool_calls", "name", "tool_call_id", *_THINKING)
"""The keys of a message that :class:`Message` has fields for."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA = (
    "Write a value as json.dumps(value), and text parts as {'type': 'text', 'text': ...}. Images, audio and video are "
    "not supported: describe them in words, or leave the item out"
)


def _checked(given: Any, index: int) -> Message:
    try:
        message = _normalised(given) if isinstance(given, Message) else _read(given)
        for key in ("content", "thinking", "name", "tool_call_id"):
            if (text := getattr(message, key)) is not None and not isinstance(text, str):
                raise ChatError(f"its {key} is {text!r:.80}, which is not text")
            if text is not None and (problem := lone_surrogate(text)):
                raise ChatError(f"{problem}: remove or replace it")
    except ChatError as error:
        role = given.get("role") if isinstance(given, Mapping) else getattr(given, "role", None)
        raise ChatError(f"message {index}{f' ({role})' if role in ROLES else ''}: {error}") from error
    return message


def _normalised(message: Message) -> Message:
    """A message of the caller's own making, checked."""
    if isinstance(message.role, Enum) or isinstance(message.content, Enum):
        message = replace(message, role=_value(message.role), content=_value(message.content))
    if message.role not in ROLES:
        raise ChatError(f"its role is {message.role!r:.40}; roles are {', '.join(ROLES)}")
    if isinstance(message.content, str) and not message.tool_calls and not message.more:
        return message
    content = _text(message.content, message.role, beside=message.tool_calls or message.thinking)
    try:
        more = plain(message.more)
    except ValueError as error:
        raise ChatError(f"one of its keys cannot be kept: {error}") from error
    return replace(message, content=content, tool_calls=tuple(map(_call, message.tool_calls)), more=more)


def _read(given: Any) -> Message:
    fields = _fields(given, _FIELDS)
    if fields is None or "role" not in fields:
        raise ChatError(f"{given!r:.80} is not a message: it needs role and content")
    given = {key: value for key, value in fields.items() if not _is_empty(value)}
    thoughts = {given[key]: key for key in _THINKING if key in given and isinstance(given[key], str)}
    if len(thoughts) > 1:
        raise ChatError(f"{' and '.join(thoughts.values())} hold different thoughts: leave one out")
    for key in _THINKING:
        if not isinstance(given.get(key, ""), str):
            raise ChatError(f"its {key} is {given[key]!r:.80}, which is not text")
    calls = given.get("tool_calls", ())
    if isinstance(calls, str | Mapping) or not isinstance(calls, Iterable):
        raise ChatError(f"its tool_calls are {calls!r:.80}, which is not a list")
    return _normalised(
        Message(
            given.get("role"),  # type: ignore[arg-type]
            fields.get("content"),  # type: ignore[arg-type]
            tuple(calls),
            given.get("name"),
            given.get("tool_call_id"),
            next(iter(thoughts), ""),
            {key: value for key, value in given.items() if key not in _FIELDS},
        )
    )


def _text(content: Any, role: str, beside: Any) -> str:
    """The text of a message's content, which may be None ``beside`` calls or a thought."""
    if isinstance(content, str):
        return content
    if content is None and beside:
        return ""
    if isinstance(content, Iterable) and not isinstance(content, Mapping | bytes) and not _is_scalar(content):
        # In an answer of a tool, a list of texts is a value of its own, not one text in parts.
        return "".join(part if isinstance(part, str) and role != "tool" else _part(part) for part in content)
    raise ChatError(f"its content is {content!r:.80}, which is not text. {_MEDIA}")


def _part(part: Any) -> str:
    fields = _fields(part, ("type", "text")) or {}
    given = {key: value for key, value in fields.items() if not _is_empty(value)}
    text = given.pop("text", fields.get("text"))
    if given.pop("type", "text") not in _TEXT_PARTS or not isinstance(text, str) or given:
        raise ChatError(f"its content has the part {part!r:.80}, which is not text alone. {_MEDIA}")
    return text


def _call(given: Any) -> ToolCall:
    call = given if isinstance(given, ToolCall) else _read_call(given)
    for text in (call.name, call.id):
        if not isinstance(text, str):
            raise ChatError(f"name or id of the call {call!r:.80} is {text!r:.40}, which is not text")
        if problem := lone_surrogate(text):
            raise ChatError(f"name or id of a call: {problem}: remove or replace it")
    return replace(call, arguments=_arguments(call.name, call.arguments))


def _read_call(call: Any) -> ToolCall:
    fields = _fields(call, ("id", "type", "function", "name", "arguments", "error")) or {}
    given = {key: value for key, value in fields.items() if not _is_empty(value) and key != "index"}
    function = _fields(given.pop("function", {}), ("name", "arguments")) or {}
    function = {key: value for key, value in function.items() if not _is_empty(value)}
    for key in function.keys() & given.keys():
        one, other = function[key], given[key]
        if one != other and (key != "arguments" or _arguments("a tool", one) != _arguments("a tool", other)):
            raise ChatError(f"the call {call!r:.80} and its function have different values of {key}: leave one out")
    function = {key: given.pop(key, function.get(key)) for key in ("name", "arguments")} | function
    name, arguments, identity = function.pop("name"), function.pop("arguments"), given.pop("id", "")
    error = given.pop("error", "")
    if not isinstance(name, str) or given.pop("type", "function") != "function":
        raise ChatError(f"{call!r:.80} is not a tool call: it needs a function with name and arguments")
    if not isinstance(identity, str):
        raise ChatError(f"the id of the call of {name} is {identity!r:.40}, which is not text")
    if others := [key for key, value in (given | function).items() if not _is_empty(value)]:
        raise ChatError(f"the call of {name} has {', '.join(map(str, others))}, which no template reads: leave it out")
    return ToolCall(name, arguments, identity, error)


def _arguments(name: str, given: Any) -> dict[str, Any]:
    """The arguments of a call: a mapping, or JSON text, as in OpenAI's API."""
    try:
        if isinstance(given, str) and given.strip():
            arguments = json.loads(given)
        else:
            arguments = {} if isinstance(given, str) or _is_empty(given) else given
        if isinstance(arguments := plain(arguments), dict):
            return arguments
    except (ValueError, RecursionError) as error:
        raise ChatError(f"the arguments of the call of {name} are not JSON ({error}): {given!r:.80}") from error
    raise ChatError(f"the arguments of the call of {name} are not a JSON object: {given!r:.80}")


def _fields(value: Any, names: Iterable[str]) -> dict[str, Any] | None:
    """The fields of a mapping; of an object its attributes, and the properties among ``names``. None if it has none."""
    if isinstance(value, Mapping):
        fields = dict(value)
    elif callable(getattr(type(value), "model_dump", None)):  # pydantic
        fields = dict(value.model_dump())
    else:
        slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
        own = {*getattr(value, "__dict__", ()), *getattr(value, "_fields", ())}  # the latter of a named tuple
        own.update(*((names,) if isinstance(names, str) else names for names in slots))
        fields = {name: getattr(value, name) for name in sorted(own) if name[0] != "_" and hasattr(value, name)}
    if not isinstance(value, Mapping):
        fields |= {name: getattr(value, name) for name in names if name not in fields and hasattr(value, name)}
    return {key: _value(item) for key, item in fields.items()} or None


def _value(item: Any) -> Any:
    """A member of an enumeration as its value: templates would write ``Role.USER``."""
    return item.value if isinstance(item, Enum) else item


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, Collection) and not _is_scalar(value) and not len(value))


def _is_scalar(value: Any) -> bool:
    """Whether it is an array or tensor without dimensions, which has no length."""
    return getattr(value, "shape", None) == ()
