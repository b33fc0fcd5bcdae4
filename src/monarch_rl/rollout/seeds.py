"""Seeds of the engine's draws: a setting's, spread over episodes and over the lines of an episode."""

from __future__ import annotations

import hashlib


def episode_seed(seed: int | None, group_id: int, episode: int) -> int | None:
    """A seed of 31 bits for one episode, the same in every process; None if draws are free."""
    return None if seed is None else _mixed(f"{seed}/{group_id}/{episode}")


def line_seed(seed: int | None, number: int) -> int | None:
    """A seed for a seat or a branch of an episode, or all branches would draw the same.

    Args:
        seed: of the episode, which is that of its first line.
        number: of the line, in the order in which they were begun.
    """
    return seed if seed is None or not number else _mixed(f"{seed}/{number}")


def _mixed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") & 0x7FFFFFFF
