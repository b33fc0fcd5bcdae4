"""What all actors of a run have in common."""

from __future__ import annotations

from typing import Any

from monarch.actor import Actor


class ResilientActor(Actor):
    """An actor that outlives those that it calls and answers."""

    def _handle_undeliverable_message(self, message: Any) -> bool:
        """True: a message to a process that is lost is no failure of who sent it, as it is Monarch's default."""
        return True
