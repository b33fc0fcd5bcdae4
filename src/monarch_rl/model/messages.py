"""What a conversation is made of: messages, tool calls, and what a policy's turn says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, get_args

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


class ChatError(ValueError):
    """Messages, options or tools that cannot be used with this model's chat template. Says what to change."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool, as the policy wrote it."""

    name: str
    """"" where the call cannot be read."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """JSON values by name."""
    id: str = ""
    """Unique within its conversation."""
    error: str = ""
    """Why the call cannot be carried out, in words for the model; "" if it can be."""

    def answer(self, content: str) -> Message:
        """The tool's answer to this call, or :attr:`error`, as the message to hand to the policy next."""
        return Message("tool", content, name=self.name or None, tool_call_id=self.id or None)


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a conversation."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant's message."""
    name: str | None = None
    """Of a tool's message: the tool that answers."""
    tool_call_id: str | None = None
    """Of a tool's message: the call that it answers."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """What a turn of the policy says. All of it is read from the ids drawn, which stay as they are."""

    raw: str
    """The whole text, with thoughts, calls and special tokens, but without the end token."""
    text: str
    """What is left without thoughts, calls, special tokens, and the stop string with what follows it."""
    thinking: str = ""
    """What stands between the template's thinking tags."""
    tool_calls: tuple[ToolCall, ...] = ()
    """In order. Check ``error`` before carrying one out."""


class MessageLike(Protocol):
    """Whatever else has a role and content."""

    @property
    def role(self) -> str:
        """As in :class:`Message`."""
        ...

    @property
    def content(self) -> str:
        """Its text."""
        ...


AnyMessage: TypeAlias = Message | MessageLike | Mapping[str, Any]
Messages: TypeAlias = str | AnyMessage | Iterable[AnyMessage]
"""Text, which is a user's message, a message, or several. A message may be a mapping, as data sets hold them."""


def system(content: str) -> Message:
    """What the model is told before the conversation."""
    return Message("system", content)


def user(content: str) -> Message:
    """What the user says."""
    return Message("user", content)


def assistant(content: str) -> Message:
    """A turn that is not drawn but given, such as an example in the opening."""
    return Message("assistant", content)


def tool(content: str, name: str | None = None, tool_call_id: str | None = None) -> Message:
    """What a tool answers; :meth:`ToolCall.answer` fills in name and id."""
    return Message("tool", content, name=name, tool_call_id=tool_call_id)


def as_messages(messages: Messages) -> list[Message]:
    """The messages, checked.

    Raises:
        ChatError: something is no message, has an unknown role, or holds an image or anything else that is not text.
    """
    if isinstance(messages, str):
        return [user(messages)]
    several: Any = [messages] if isinstance(messages, Mapping) or hasattr(messages, "role") else messages
    if not isinstance(several, Iterable):
        raise ChatError(f"{messages!r:.80} is no message: use user(...), system(...) or tool(...)")
    return [_checked(message if isinstance(message, Message) else _from_mapping(message)) for message in several]


def _from_mapping(row: Any) -> Message:
    if hasattr(row, "role") and hasattr(row, "content"):
        return Message(row.role, row.content)
    if not isinstance(row, Mapping) or "role" not in row:
        raise ChatError(f"{row!r:.80} is no message: it needs role and content")
    calls = row.get("tool_calls") or ()
    content: Any = row.get("content")
    if isinstance(content, list | tuple) and all(isinstance(part, Mapping) and "text" in part for part in content):
        content = "".join(part["text"] for part in content)
    return Message(
        row["role"],
        "" if content is None and calls else content,
        tuple(_call_from_mapping(call) for call in calls),
        row.get("name"),
        row.get("tool_call_id"),
    )


def _call_from_mapping(call: Any) -> ToolCall:
    try:
        function = call.get("function", call)
        return ToolCall(function["name"], function["arguments"], call.get("id") or "")
    except (AttributeError, KeyError, TypeError) as error:
        raise ChatError(f"{call!r:.80} is no tool call: it needs a function with name and arguments") from error


def _checked(message: Message) -> Message:
    if message.role not in get_args(Role):
        raise ChatError(f"a message has role {message.role!r:.40}; roles are {', '.join(get_args(Role))}")
    if not isinstance(message.content, str):
        raise ChatError(
            f"a message of role {message.role} holds {message.content!r:.80}, which is not text. Images, audio and "
            "video are not supported: describe them in words, or leave the item out"
        )
    return message
