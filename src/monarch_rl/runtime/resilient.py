"""The base class of a run's actors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch_rl.runtime.lasting_calls import AnswersCalls

if TYPE_CHECKING:

    class Actor:
        """Stands for Monarch's, which has no types: a base class of type ``Any`` would hide unknown endpoints."""

else:
    from monarch.actor import Actor


class ResilientActor(AnswersCalls, Actor):
    """An actor that survives the loss of the actors that it calls and answers."""

    def _handle_undeliverable_message(self, message: Any) -> bool:
        """True: a message to a lost process is no failure of its sender, which is Monarch's default."""
        return True
