"""The ids of a conversation, to which is only ever added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from monarch_rl.rollout.tokenizer import Tokenizer
from monarch_rl.tasks.task import Message


class Conversation(Protocol):
    """All tokens of an episode, in their order."""

    ids: list[int]

    def add(self, messages: Sequence[Message]) -> list[int]:
        """Render messages up to where the policy's turn starts; returns the new ids, which are in :attr:`ids` then."""
        ...

    def replied(self, ids: list[int], finish_reason: str) -> None:
        """Add what the policy drew."""
        ...


class TextConversation:
    """By :class:`Tokenizer`: its chat template, or else plain text."""

    __slots__ = ("_ended", "_tokenizer", "ids")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ended = False
        self.ids: list[int] = []

    def add(self, messages: Sequence[Message]) -> list[int]:
        """See :class:`Conversation`."""
        if self.ids:
            new = self._tokenizer.render_reply(list(messages), self._ended)
        else:
            new = self._tokenizer.render(list(messages))
        self.ids += new
        return new

    def replied(self, ids: list[int], finish_reason: str) -> None:
        """See :class:`Conversation`."""
        self.ids += ids
        self._ended = finish_reason == "stop"
