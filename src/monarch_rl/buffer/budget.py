"""The bytes of complete groups, and those promised to workers, within a limit."""

from __future__ import annotations

from collections.abc import Iterable

from monarch_rl.buffer.order import Live
from monarch_rl.episode.packed import PackedGroup


class ByteBudget:
    """Counts what groups take. A group takes what was promised to its worker, then its own bytes until it is trained.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    @property
    def exceeded(self) -> bool:
        """More is used than the limit: groups of the next batch always have room."""
        return self.used > self.limit

    def in_the_way(self, dispensable: Iterable[Live], nbytes: int) -> list[Live]:
        """The first groups of these without which ``nbytes`` fit; none if they fit, or do not even without all."""
        found, excess, others = list[Live](), self.used + nbytes - self.limit, iter(dispensable)
        while excess > 0 and (live := next(others, None)) is not None:
            found.append(live)
            excess -= live.nbytes
        return found if excess <= 0 else []

    def reserve(self, live: Live, nbytes: int, always: bool) -> bool:
        """Promise ``nbytes`` to a group, once; False if they do not fit, unless the group ``always`` has room."""
        if live.reserved:
            return True
        if self.used + nbytes > self.limit and not always:
            return False
        live.reserved = nbytes
        self.used += nbytes
        return True

    def fill(self, live: Live, group: PackedGroup) -> None:
        """The group is here: its own bytes take the place of those promised."""
        self.used += group.nbytes - live.reserved
        live.reserved, live.group = 0, group

    def withdraw(self, live: Live) -> None:
        """Take a promise back: its worker is lost."""
        self.used -= live.reserved
        live.reserved = 0

    def free(self, live: Live) -> None:
        """The group is gone: trained or dropped."""
        self.used -= live.nbytes
