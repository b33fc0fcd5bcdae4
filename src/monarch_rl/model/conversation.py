"""A conversation of a policy with its surroundings, as ids that only ever grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.messages import ChatError, Message, Messages, ParsedReply, as_messages
from monarch_rl.model.tools import Tools, ToolSet, as_tools


class Conversation:
    """Token-in, token-out: what was drawn stays as it was drawn, and nothing is ever tokenised again.

    Ask for the ids to hand to the engine with :meth:`add`, tell what it drew with :meth:`replied`, and so on.

    Args:
        template: of the model.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.ids: list[int] = []
        """All ids so far, drawn and not. Only appended to."""
        self.messages: list[Message] = []
        """All messages so far; the policy's turns as text, thoughts included."""
        self.tools: ToolSet | None = None
        """What the conversation was opened with."""
        self._unsaid: list[Message] = []
        """Read, but not rendered yet."""
        self._drawn: list[int] = []
        """The policy's last turn."""
        self._end: int | None = None
        """The end token of that turn, if it drew one."""
        self._open = False
        """Whether the policy's turn is next."""

    def read(self, messages: Messages) -> None:
        """Put messages into the conversation without asking for a turn; they are rendered with the next :meth:`add`.

        Raises:
            ChatError: something is no message, or not text.
        """
        self._unsaid += as_messages(messages)

    def add(self, messages: Messages = (), tools: Tools | None = None) -> list[int]:
        """Put messages into the conversation, and ask for the policy's turn.

        Args:
            messages: what is said; nothing at all is possible after a turn that was cut or after :meth:`read`.
            tools: functions or JSON schemas that the policy may call; they stand in the opening, so only the first call
                of a conversation may name new ones.

        Returns:
            The ids that :attr:`ids` grew by, up to and with the prompt for the policy's turn.

        Raises:
            ChatError: the template cannot render the messages; the conversation is as it was before.
        """
        if self._open:
            raise ChatError("the policy's turn is open: call replied(...) before the next add(...)")
        new = [*self._unsaid, *as_messages(messages)]
        tool_set = as_tools(tools) if tools is not None else self.tools
        if self.ids and tool_set is not self.tools and tool_set != self.tools:
            raise ChatError("tools stand in the opening of a conversation: give them with the first message")
        if self.ids:
            thinking = self._end is None and self.template.cut_while_thinking(self._drawn, tool_set)
            ids = self.template.between(new, tool_set, self._end, thinking)
        else:
            if self.template.system and (not new or new[0].role != "system"):
                new.insert(0, Message("system", self.template.system))
            ids = self.template.opening(new, tool_set)
        self.tools, self._unsaid, self._open = tool_set, [], True
        self.messages += new
        self.ids += ids
        return ids

    def replied(self, token_ids: Sequence[int], finish_reason: str, stop: Sequence[str] = ()) -> ParsedReply:
        """Append the policy's turn as it was drawn.

        Args:
            token_ids: those drawn, up to and with the end token or the token in which a stop string ends.
            finish_reason: ``stop`` or ``length``. A turn that does not end with an end token is closed as the template
                closes it, once there is a next message.
            stop: the stop strings that were asked for.

        Returns:
            What the turn says.
        """
        if not self._open:
            raise ChatError("no turn was asked for: call add(...) before replied(...)")
        self._drawn = list(token_ids)
        ended = finish_reason == "stop" and bool(self._drawn) and self._drawn[-1] in self.template.stop_token_ids
        self._end = self._drawn[-1] if ended else None
        self._open = False
        self.ids += self._drawn
        reply = self._numbered(self.template.read(self._drawn, self.tools, stop))
        self.messages.append(Message("assistant", reply.raw, reply.tool_calls))
        return reply

    def _numbered(self, reply: ParsedReply) -> ParsedReply:
        """The same, with an id for each call: nine letters and digits, which is what some templates ask for."""
        first = sum(len(message.tool_calls) for message in self.messages)
        calls = [replace(call, id=f"call{first + index:05d}") for index, call in enumerate(reply.tool_calls)]
        return replace(reply, tool_calls=tuple(calls))

    def fork(self) -> Conversation:
        """A conversation that shares everything so far and goes on by itself."""
        fork = Conversation(self.template)
        fork.ids, fork.messages, fork._unsaid = list(self.ids), list(self.messages), list(self._unsaid)
        fork.tools, fork._drawn, fork._end, fork._open = self.tools, self._drawn, self._end, self._open
        return fork
