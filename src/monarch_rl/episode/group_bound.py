"""The maximum size of a group, or of one of its episodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupBound:
    """Maximum number of sequences and of tokens; None: unlimited."""

    max_sequences: int | None = None
    max_tokens: int | None = None
    """Total over all sequences, prompts included; shared tokens count in every sequence that has them."""

    @property
    def is_unbounded(self) -> bool:
        """Whether neither is limited."""
        return self.max_sequences is None and self.max_tokens is None

    def share(self, episodes: int) -> GroupBound:
        """The bound of each of a group's episodes: equal parts, so that no episode's limit depends on the others."""
        return GroupBound(
            None if self.max_sequences is None else self.max_sequences // episodes,
            None if self.max_tokens is None else self.max_tokens // episodes,
        )

    def excess(self, sequences: int, tokens: int) -> str | None:
        """Which limit is exceeded, as words that follow "has"; None if neither is."""
        if self.max_sequences is not None and sequences > self.max_sequences:
            return f"{sequences} sequences, but may have at most {self.max_sequences}"
        if self.max_tokens is not None and tokens > self.max_tokens:
            return f"{tokens} tokens, but may have at most {self.max_tokens}"
        return None


UNBOUNDED = GroupBound()
