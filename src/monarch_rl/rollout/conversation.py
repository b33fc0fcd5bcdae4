"""The ids of a conversation, to which is only ever added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from monarch_rl.rollout.tokenizer import Tokenizer
from monarch_rl.tasks.task import Message


class Turn(Protocol):
    """What a turn of the policy says."""

    @property
    def text(self) -> str:
        """Without special tokens; up to the first stop string."""
        ...


class Conversation(Protocol):
    """All tokens of an episode, in their order. What was drawn stays as it was drawn."""

    ids: list[int]

    def read(self, messages: Sequence[Message], /) -> None:
        """Put messages into the conversation without asking for a turn; the next :meth:`add` renders them."""
        ...

    def add(self, messages: Sequence[Message] = ()) -> list[int]:
        """Put messages into the conversation, and ask for the policy's turn; returns the ids that it grew by."""
        ...

    def replied(self, token_ids: Sequence[int], finish_reason: str, stop: Sequence[str] = ()) -> Turn:
        """Append the policy's turn as it was drawn.

        Args:
            token_ids: those drawn, up to and with the end token or the token in which a stop string ends.
            finish_reason: ``stop`` or ``length``.
            stop: the stop strings that were asked for.
        """
        ...


@dataclass(frozen=True, slots=True)
class Text:
    """A turn that is nothing but text."""

    text: str


class TextConversation:
    """By :class:`Tokenizer`: its chat template, or else plain text."""

    __slots__ = ("_ended", "_tokenizer", "_unsaid", "ids")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._unsaid: list[Message] = []
        self._ended = False
        self.ids: list[int] = []

    def read(self, messages: Sequence[Message], /) -> None:
        """See :class:`Conversation`."""
        self._unsaid += messages

    def add(self, messages: Sequence[Message] = ()) -> list[int]:
        """See :class:`Conversation`."""
        messages, self._unsaid = [*self._unsaid, *messages], []
        new = self._tokenizer.render_reply(messages, self._ended) if self.ids else self._tokenizer.render(messages)
        self.ids += new
        return new

    def replied(self, token_ids: Sequence[int], finish_reason: str, stop: Sequence[str] = ()) -> Text:
        """See :class:`Conversation`."""
        self.ids += token_ids
        stopped = finish_reason == "stop" and len(token_ids) > 0
        self._ended = stopped and token_ids[-1] in self._tokenizer.stop_token_ids
        text = self._tokenizer.decode(list(token_ids))
        ends = [end for string in stop if (end := text.find(string)) >= 0]
        return Text(text[: min(ends)] if ends else text)
