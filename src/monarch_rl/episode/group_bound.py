"""What a group may hold, or one of its episodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupBound:
    """How many sequences there may be, and how many tokens they may have; None is any number."""

    max_sequences: int | None = None
    max_tokens: int | None = None
    """Of all sequences together, prompts included; what they share counts in each of them."""

    @property
    def is_unbounded(self) -> bool:
        """Whether there may be any number of both."""
        return self.max_sequences is None and self.max_tokens is None

    def share(self, episodes: int) -> GroupBound:
        """What each of a group's episodes may become: an equal part, so that none depends on how others go."""
        return GroupBound(
            None if self.max_sequences is None else self.max_sequences // episodes,
            None if self.max_tokens is None else self.max_tokens // episodes,
        )

    def excess(self, sequences: int, tokens: int) -> str | None:
        """What is too much, in words; None if nothing is."""
        if self.max_sequences is not None and sequences > self.max_sequences:
            return f"{sequences} sequences, and may have {self.max_sequences}"
        if self.max_tokens is not None and tokens > self.max_tokens:
            return f"{tokens} tokens, and may have {self.max_tokens}"
        return None


UNBOUNDED = GroupBound()
