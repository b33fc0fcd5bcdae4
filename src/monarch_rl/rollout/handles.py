"""What a worker calls on other actors: protocols, because this room imports neither the buffer nor the generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from monarch_rl.episode.episode import Ticket
from monarch_rl.episode.failure import Failure
from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.runtime.endpoint import concurrent_endpoint

BUFFER_DEADLINE_S = 60.0
"""Seconds for a call of the buffer that waits for nobody else."""


class BufferHandle(Protocol):
    """The handle of the buffer actor: those of its endpoints that a worker calls."""

    @concurrent_endpoint
    async def admit_many(self, worker: str, limit: int, timeout_s: float, /) -> list[Ticket]:
        """Wait for slots and start up to ``limit`` groups in them; none at the end of the run."""
        ...

    @concurrent_endpoint
    async def reserve(self, group_id: int, attempt: int, nbytes: int, worker: str, timeout_s: float, /) -> None:
        """Wait until a complete group of ``nbytes`` may be put."""
        ...

    @concurrent_endpoint
    async def submit(self, *groups: bytes) -> None:
        """Hand in complete groups, each packed (``pack_group``)."""
        ...

    @concurrent_endpoint
    async def submit_if_room(self, *groups: bytes) -> list[bool]:
        """Hand in those complete groups that there is room for; says which."""
        ...

    @concurrent_endpoint
    async def drop(self, group_id: int, reason: str, tokens: int, attempt: int, /) -> None:
        """End a group that cannot be trained, for which ``tokens`` were drawn."""
        ...

    @concurrent_endpoint
    async def note_failure(self, failure: Failure, /) -> None:
        """Take note of the first failure of a kind."""
        ...


class GeneratorHandle(Protocol):
    """What an episode needs of the generators."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        """Draw one turn after ``prompt_ids``. ``group`` is the same for prompts that share a prefix.

        Raises:
            DeadlineExceeded: the turn took too long; the message says who did not answer.
        """
        ...


class DispatchedGenerators(GeneratorHandle, Protocol):
    """Several replicas behind one handle; crosses processes, so it must pickle."""

    def update_replicas(self, paused: Sequence[int], lost: Sequence[int]) -> None:
        """Send no new requests to the ``paused`` replicas, and ask others for what the ``lost`` ones owe."""
        ...

    def replace(self, replica: int, handle: Any) -> None:
        """From now on ``replica`` is the one behind ``handle``, whose type is the generators' own affair."""
        ...
