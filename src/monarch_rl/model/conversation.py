"""A conversation of a policy with its surroundings, as ids that only ever grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.messages import ChatError, Message, Messages, ParsedReply, as_messages
from monarch_rl.model.tools import Tools, ToolSet, as_tools


class _Turn(NamedTuple):
    """What a conversation was right after a turn of the policy."""

    ids: int
    """Ids that it had."""
    messages: int
    """Messages that it had."""
    drawn: list[int]
    """The ids of the turn."""
    end: int | None
    """The end token of the turn, if it drew one."""


class _Begun(NamedTuple):
    """A turn of the policy that a fork has the beginning of."""

    drawn: list[int]
    """Its first ids."""
    said: list[Message]
    """What was said before it, since the turn before."""


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
        self._turns: list[_Turn] = []
        """The policy's turns."""
        self._open = False
        """Whether the policy's turn is next."""
        self._begun: _Begun | None = None
        """The turn that is next, where it goes on from its beginning."""

    def read(self, messages: Messages) -> None:
        """Put messages into the conversation without asking for a turn; they are rendered with the next :meth:`add`.

        Raises:
            ChatError: something is no message, or not text.
        """
        self._unsaid += as_messages(messages)

    def add(self, messages: Messages = (), tools: Tools | None = None) -> list[int]:
        """Put messages into the conversation, and ask for the policy's turn.

        Args:
            messages: what is said; nothing at all is possible after a turn that was cut or after :meth:`read`. If the
                turn has begun (:meth:`fork`), nothing else can be said than was said before it.
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
        if self._begun is not None:
            if new and new != self._begun.said[-len(new) :]:
                raise ChatError(
                    "the policy is in the middle of a turn, from which it was forked: give it what it was given before "
                    "that turn, or nothing"
                )
            self._unsaid, self._open = [], True
            return []
        tool_set = as_tools(tools) if tools is not None else self.tools
        if self.ids and tool_set is not self.tools and tool_set != self.tools:
            raise ChatError("tools stand in the opening of a conversation: give them with the first message")
        if self.ids:
            *_, drawn, end = self._turns[-1]
            thinking = end is None and self.template.cut_while_thinking(drawn, tool_set)
            ids = self.template.between(new, tool_set, end, thinking)
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
            token_ids: those drawn, up to and with the end token or the token in which a stop string ends; where the
                turn had begun, those after its beginning.
            finish_reason: ``stop`` or ``length``. A turn that does not end with an end token is closed as the template
                closes it, once there is a next message.
            stop: the stop strings that were asked for.

        Returns:
            What the turn says, its beginning included.
        """
        if not self._open:
            raise ChatError("no turn was asked for: call add(...) before replied(...)")
        drawn = [*self.begun, *token_ids]
        ended = finish_reason == "stop" and bool(drawn) and drawn[-1] in self.template.stop_token_ids
        self._open, self._begun = False, None
        self.ids += token_ids
        reply = self._numbered(self.template.read(drawn, self.tools, stop))
        self.messages.append(Message("assistant", reply.raw, reply.tool_calls))
        self._turns.append(_Turn(len(self.ids), len(self.messages), drawn, drawn[-1] if ended else None))
        return reply

    def _numbered(self, reply: ParsedReply) -> ParsedReply:
        """The same, with an id for each call: nine letters and digits, which is what some templates ask for."""
        first = sum(len(message.tool_calls) for message in self.messages)
        calls = [replace(call, id=f"call{first + index:05d}") for index, call in enumerate(reply.tool_calls)]
        return replace(reply, tool_calls=tuple(calls))

    @property
    def begun(self) -> list[int]:
        """The first ids of the policy's next turn, where that goes on from its beginning; else none."""
        return [] if self._begun is None else self._begun.drawn

    def drawn(self, length: int) -> list[int]:
        """The ids of the turn of the policy that ends after this many ids. Raises ValueError if none ends there."""
        return self._turns[self._turn_at(length)].drawn

    def fork(self, length: int | None = None, tokens: int | None = None) -> Conversation:
        """A conversation that shares everything so far and goes on by itself.

        Args:
            length: share only this many ids, which end with a turn of the policy; None shares all.
            tokens: share only this many ids of that turn, which is the next one then, and has begun with them.

        Raises:
            ValueError: no turn ends there.
        """
        fork = Conversation(self.template)
        fork.tools = self.tools
        if length is None:
            fork.ids, fork.messages, fork._unsaid = list(self.ids), list(self.messages), list(self._unsaid)
            fork._turns, fork._open, fork._begun = list(self._turns), self._open, self._begun
            return fork
        place = self._turn_at(length)
        turn = self._turns[place]
        if tokens is None:
            fork._turns, fork.ids, fork.messages = (
                self._turns[: place + 1],
                self.ids[:length],
                self.messages[: turn.messages],
            )
        else:
            fork._turns, fork.messages = self._turns[:place], self.messages[: turn.messages - 1]
            fork.ids = self.ids[: length - len(turn.drawn) + tokens]
            before = self._turns[place - 1].messages if place else 0
            fork._begun = _Begun(turn.drawn[:tokens], fork.messages[before:])
        return fork

    def _turn_at(self, length: int) -> int:
        place = next((place for place, turn in enumerate(self._turns) if turn.ids == length), None)
        if place is None:
            raise ValueError(f"no turn of the conversation ends after {length} ids")
        return place
