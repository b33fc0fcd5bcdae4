"""The data types of a conversation: messages, tool calls and parsed replies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, get_args

from monarch_rl.errors import ChatError

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


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
    """Any other object with a role and text content."""

    @property
    def role(self) -> str:
        """One of :data:`Role`."""
        ...

    @property
    def content(self) -> str:
        """The text."""
        ...


AnyMessage: TypeAlias = Message | MessageLike | Mapping[str, Any]
Messages: TypeAlias = str | AnyMessage | Iterable[AnyMessage]
"""One message or several. A plain string is a user message; a message may be a mapping, as in data sets."""


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

    Raises:
        ChatError: an item is not a message, has an unknown role, or holds an image or other content that is not text.
    """
    if isinstance(messages, str):
        return [user(messages)]
    several: Any = [messages] if isinstance(messages, Mapping) or hasattr(messages, "role") else messages
    if not isinstance(several, Iterable):
        raise ChatError(f"{messages!r:.80} is not a message: use user(...), system(...) or tool(...)")
    return [_checked(message if isinstance(message, Message) else _from_mapping(message)) for message in several]


def _from_mapping(row: Any) -> Message:
    if hasattr(row, "role") and hasattr(row, "content"):
        return Message(row.role, row.content)
    if not isinstance(row, Mapping) or "role" not in row:
        raise ChatError(f"{row!r:.80} is not a message: it needs role and content")
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
        raise ChatError(f"{call!r:.80} is not a tool call: it needs a function with name and arguments") from error


def _checked(message: Message) -> Message:
    if message.role not in get_args(Role):
        raise ChatError(f"a message has role {message.role!r:.40}; roles are {', '.join(get_args(Role))}")
    if not isinstance(message.content, str):
        raise ChatError(
            f"a {message.role} message holds {message.content!r:.80}, which is not text. Images, audio and video are "
            "not supported: describe them in words, or leave the item out"
        )
    return message
