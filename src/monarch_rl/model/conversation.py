"""A conversation of a policy with its environment, as token ids that are only appended to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from monarch_rl.errors import ChatError
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.messages import Message, Messages, ParsedReply, as_messages
from monarch_rl.model.tools import Tools, ToolSet, as_tools


class _Turn(NamedTuple):
    """A turn of the policy, and the size of the conversation after it."""

    ids: int
    """Number of ids after the turn."""
    messages: int
    """Number of messages after the turn."""
    sampled: list[int]
    """The ids of the turn."""
    end: int | None
    """The end token of the turn; None if the policy did not sample one."""


class _Prefix(NamedTuple):
    """The beginning of a policy's turn, taken over by a fork."""

    sampled: list[int]
    """The first ids of the turn."""
    messages: list[Message]
    """The messages between the previous turn of the policy and this one."""


class Conversation:
    """Token-in, token-out: sampled ids stay as they were sampled, and nothing is ever tokenised again.

    Alternate :meth:`add`, which returns the ids to pass to the engine, and :meth:`replied`, which takes the ids that it
    sampled.

    Args:
        template: the model's chat template.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.ids: list[int] = []
        """All ids so far, sampled and others. Only appended to."""
        self.messages: list[Message] = []
        """All messages so far; the policy's turns as text, thoughts included."""
        self.tools: ToolSet | None = None
        """The tools that the conversation was opened with."""
        self._unrendered: list[Message] = []
        """Messages from :meth:`read` that are not rendered yet."""
        self._turns: list[_Turn] = []
        """The policy's turns."""
        self._open = False
        """Whether the policy's turn is next."""
        self._prefix: _Prefix | None = None
        """The beginning of the policy's next turn, if this conversation was forked within it."""

    def read(self, messages: Messages) -> None:
        """Add messages without asking for a turn; the next :meth:`add` renders them.

        Raises:
            ChatError: an item is not a message, or its content is not text.
        """
        self._unrendered += as_messages(messages)

    def add(self, messages: Messages = (), tools: Tools | None = None) -> list[int]:
        """Add messages and ask for the policy's turn.

        Args:
            messages: the new messages. They may be empty after a turn that was cut and after :meth:`read`. In a
                conversation that was forked within a turn (:meth:`fork`), only the messages that came before that turn
                are allowed, or none.
            tools: functions or JSON schemas that the policy may call. They are part of the opening, so only the first
                call of a conversation may pass new ones.

        Returns:
            The ids appended to :attr:`ids`, including the prompt for the policy's turn.

        Raises:
            ChatError: the template cannot render the messages; the conversation is unchanged.
        """
        if self._open:
            raise ChatError("the policy's turn is open: call replied(...) before the next add(...)")
        new = [*self._unrendered, *as_messages(messages)]
        if self._prefix is not None:
            if new and new != self._prefix.messages[-len(new) :]:
                raise ChatError(
                    "this conversation was forked in the middle of a policy's turn: add the messages that came before "
                    "that turn, or none"
                )
            self._unrendered, self._open = [], True
            return []
        tool_set = as_tools(tools) if tools is not None else self.tools
        if self.ids and tool_set is not self.tools and tool_set != self.tools:
            raise ChatError("tools are part of a conversation's opening: give them with the first message")
        if self.ids:
            *_, sampled, end = self._turns[-1]
            thinking = end is None and self.template.cut_while_thinking(sampled, tool_set)
            ids = self.template.between(new, tool_set, end, thinking)
        else:
            ids = self.template.opening(new, tool_set)
        self.tools, self._unrendered, self._open = tool_set, [], True
        self.messages += new
        self.ids += ids
        return ids

    def replied(self, token_ids: Sequence[int], finish_reason: str, stop: Sequence[str] = ()) -> ParsedReply:
        """Append the policy's turn as it was sampled.

        Args:
            token_ids: the sampled ids, up to and including the end token or the token that completes a stop string.
                If the conversation was forked within this turn, only the ids after the shared beginning.
            finish_reason: ``stop`` or ``length``. A turn without an end token is closed with the template's text when
                the next message is added.
            stop: the stop strings that the request had.

        Returns:
            The parsed turn, including a shared beginning.
        """
        if not self._open:
            raise ChatError("no turn was asked for: call add(...) before replied(...)")
        sampled = [*self.begun, *token_ids]
        ended = finish_reason == "stop" and bool(sampled) and sampled[-1] in self.template.stop_token_ids
        self._open, self._prefix = False, None
        self.ids += token_ids
        reply = self._with_call_ids(self.template.read(sampled, self.tools, stop))
        self.messages.append(Message("assistant", reply.raw, reply.tool_calls))
        self._turns.append(_Turn(len(self.ids), len(self.messages), sampled, sampled[-1] if ended else None))
        return reply

    def _with_call_ids(self, reply: ParsedReply) -> ParsedReply:
        """The reply with an id for each call: nine letters and digits, which some templates require."""
        if not reply.tool_calls:
            return reply
        first = sum(len(message.tool_calls) for message in self.messages)
        calls = [replace(call, id=f"call{first + index:05d}") for index, call in enumerate(reply.tool_calls)]
        return replace(reply, tool_calls=tuple(calls))

    @property
    def begun(self) -> list[int]:
        """The first ids of the policy's next turn, if this conversation was forked within it; else empty."""
        return [] if self._prefix is None else self._prefix.sampled

    def sampled(self, length: int) -> list[int]:
        """The ids of the policy's turn that ends after the first ``length`` ids. Raises ValueError if none does."""
        return self._turns[self._turn_at(length)].sampled

    def fork(self, length: int | None = None, tokens: int | None = None) -> Conversation:
        """A conversation that shares everything so far and continues independently.

        Args:
            length: share only the first ``length`` ids, which must end with a turn of the policy; None shares all.
            tokens: share only the first ``tokens`` ids of that turn, which the fork then continues as its next turn.

        Raises:
            ValueError: no turn ends after ``length`` ids.
        """
        fork = Conversation(self.template)
        fork.tools = self.tools
        if length is None:
            fork.ids, fork.messages, fork._unrendered = list(self.ids), list(self.messages), list(self._unrendered)
            fork._turns, fork._open, fork._prefix = list(self._turns), self._open, self._prefix
            return fork
        index = self._turn_at(length)
        turn = self._turns[index]
        if tokens is None:
            fork._turns, fork.ids, fork.messages = (
                self._turns[: index + 1],
                self.ids[:length],
                self.messages[: turn.messages],
            )
        else:
            fork._turns, fork.messages = self._turns[:index], self.messages[: turn.messages - 1]
            fork.ids = self.ids[: length - len(turn.sampled) + tokens]
            before = self._turns[index - 1].messages if index else 0
            fork._prefix = _Prefix(turn.sampled[:tokens], fork.messages[before:])
        return fork

    def _turn_at(self, length: int) -> int:
        index = next((index for index, turn in enumerate(self._turns) if turn.ids == length), None)
        if index is None:
            raise ValueError(f"no turn of the conversation ends after {length} ids")
        return index
