"""Endpoints of other actors that a worker calls, as protocols: this package imports neither the buffer nor the
generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from monarch_rl.episode.episode import Ticket
from monarch_rl.episode.failure import Failure
from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.runtime.endpoint import concurrent_endpoint

BUFFER_DEADLINE_S = 60.0
"""Deadline in seconds of a buffer call that waits for no other party."""


class BufferHandle(Protocol):
    """The endpoints of the buffer actor that a worker calls."""

    @concurrent_endpoint
    async def admit_many(self, worker: str, limit: int, timeout_s: float, /) -> list[Ticket]:
        """Wait for slots and start up to ``limit`` groups in them; returns an empty list at the end of the run."""
        ...

    @concurrent_endpoint
    async def reserve(self, group_id: int, attempt: int, nbytes: int, worker: str, timeout_s: float, /) -> None:
        """Wait until a complete group of ``nbytes`` may be submitted."""
        ...

    @concurrent_endpoint
    async def submit(self, *groups: bytes) -> None:
        """Submit complete groups, each from ``serialize_group``."""
        ...

    @concurrent_endpoint
    async def submit_if_room(self, *groups: bytes) -> list[bool]:
        """Submit the complete groups that there is room for; returns per group whether the buffer took it."""
        ...

    @concurrent_endpoint
    async def drop(self, group_id: int, reason: str, tokens: int, attempt: int, /) -> None:
        """End a group that cannot be trained, for which ``tokens`` were sampled."""
        ...

    @concurrent_endpoint
    async def note_failure(self, failure: Failure, /) -> None:
        """Report the first failure of a kind."""
        ...


class GeneratorHandle(Protocol):
    """The methods of the generators that an episode uses."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        """Generate one turn after ``prompt_ids``. ``group`` is the same for prompts that share a prefix.

        Raises:
            DeadlineExceeded: the turn took too long; the message names the party that did not answer.
        """
        ...


class DispatchedGenerators(GeneratorHandle, Protocol):
    """Several replicas behind one handle, which resends the requests of lost ones (``generator/dispatcher.py``). It
    crosses processes, so it must pickle."""

    async def generate_group(
        self, prompt_ids: list[int], samplings: Sequence[Sampling], group: int
    ) -> list[Completion | Exception]:
        """Generate one turn after ``prompt_ids`` for each sampling, in one request to one replica.

        Returns completions, and the errors of requests that failed by themselves. Raises as :meth:`generate` does.
        """
        ...

    def update_replicas(self, paused: Sequence[int], lost: Sequence[int]) -> None:
        """Send no new requests to the ``paused`` replicas, and resend the unanswered requests of the ``lost`` ones to
        others."""
        ...

    def replace(self, replica: int, handle: Any) -> None:
        """Use ``handle`` for ``replica`` from now on. Its type is private to the generators."""
        ...
