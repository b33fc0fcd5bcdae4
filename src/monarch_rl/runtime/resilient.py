"""The base class of a run's actors."""

from __future__ import annotations

from typing import Any

from monarch.actor import Actor


class ResilientActor(Actor):
    """An actor that survives the loss of the actors that it calls and answers."""

    def _handle_undeliverable_message(self, message: Any) -> bool:
        """Return True, so that a message to a lost process does not end its sender. By Monarch's default it does."""
        return True
