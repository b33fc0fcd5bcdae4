"""Calls that the members of a meeting answer only together: once one of them is lost, the others are told to stop.

Members of a transfer wait for each other. One that is gone would hold up the rest until the transfer's deadline; on
GPUs nobody but the controller hears that it is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.pipeline.replicas import Replica
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, within
from monarch_rl.runtime.endpoint import concurrent_endpoint

T = TypeVar("T")


class Member(Protocol):
    """An actor that takes part in transfers."""

    @concurrent_endpoint
    async def weights_abort(self, why: str) -> None:
        """End a transfer under way."""


@dataclass(eq=False)
class JointCall:
    """One of several calls that are answered together."""

    name: str
    """Who is asked."""
    what: str
    """Completes the sentence "waited for <name> ..."."""
    answer: Awaitable[Any]
    """The call itself."""
    members: Sequence[Member]
    """The actors that the call is made to."""
    replica: Replica | None = None
    """If it is made to one."""
    lost: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Why the replica is lost; done when it is."""


class JointCalls:
    """The calls under way of one meeting."""

    def __init__(self) -> None:
        self._under_way: list[JointCall] = []

    def lose(self, replica: Replica, why: str) -> None:
        """Do not wait for this replica any more."""
        for call in self._under_way:
            if call.replica is replica and not call.lost.done():
                call.lost.set_result(why)

    async def run(self, calls: list[JointCall], deadline_s: float) -> list[Any]:
        """Await all calls, each within ``deadline_s``; once one has failed, tell the others' actors to abort.

        Returns:
            The answer to each call, or what it raised.
        """
        self._under_way = calls
        waits = [asyncio.ensure_future(_answer_or_loss(call, deadline_s)) for call in calls]
        try:
            # waits: until each call's own deadline
            await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
            failed = [error for wait in waits if wait.done() and (error := wait.exception())]
            late = [call for call, wait in zip(calls, waits, strict=True) if not wait.done()]
            aborts = [abort for call in late for abort in _aborts(call, last_line(failed[0]))]
            # waits: until each call's own deadline
            answers = await asyncio.gather(*waits, *aborts, return_exceptions=True)
            return answers[: len(waits)]
        finally:
            self._under_way = []
            for wait in waits:
                wait.cancel()


def _aborts(call: JointCall, why: str) -> list[Awaitable[None]]:
    """Tell all that are called to end what they do."""
    what = f"{call.name} to abort a transfer"
    return [within(CALL_DEADLINE_S, member.weights_abort.call_one(why), what, on=call.name) for member in call.members]


async def _answer_or_loss(call: JointCall, deadline_s: float) -> Any:
    """The answer to a call. Raises RuntimeError if its replica is lost meanwhile: one that hangs never answers."""
    answer = asyncio.ensure_future(within(deadline_s, call.answer, f"{call.name} {call.what}", on=call.name))
    try:
        # waits: until the call's deadline
        await asyncio.wait({answer, call.lost}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        late = not answer.done()
        answer.cancel()
    if late:
        raise RuntimeError(f"{call.name} is lost: {call.lost.result()}")
    return answer.result()
