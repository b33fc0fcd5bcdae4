"""One generator replica: a Monarch actor that hosts an SGLang engine and takes new weights while it draws.

Weights arrive in two phases, each an endpoint: ``receive`` (the network, long; decoding goes on) puts a version beside
the engine, ``commit`` (a local copy and a checksum, short) pauses decoding.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from typing import Any, TypedDict, TypeVar

import numpy as np
import torch
from monarch.actor import Port

from monarch_rl.episode.sampling import Completion, GenerationError, Sampling
from monarch_rl.generator.commit import CommitReport
from monarch_rl.generator.connection import Answering
from monarch_rl.generator.engine import Engine
from monarch_rl.generator.parts import OnPart
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.generator.sglang_engine import EngineStopped
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint, lasting_endpoint, one_way_endpoint
from monarch_rl.runtime.lasting_calls import ResilientActor
from monarch_rl.runtime.process import freeze_heap
from monarch_rl.weights.endpoint import Receiver, TransferSettings
from monarch_rl.weights.manifest import Manifest
from monarch_rl.weights.transport import make_receiver

# -- the base of every actor that hosts an SGLang engine: requests and answers, its life and its end ------------------

T = TypeVar("T")


class Replica(ResilientActor):
    """An actor with an engine. A derived one starts it (:meth:`_start`) in an endpoint of its own."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """Done when a request has failed and it was not the request's own fault."""
        self._answering = Answering(self._draw, GenerationError)
        self._name = "a replica"
        self._devices = 1

    @property
    def _running(self) -> Engine:
        if self._engine is None:
            raise RuntimeError(f"{self._name}: no engine; call setup() first")
        return self._engine

    async def _start(self, name: str, model_path: str, settings: GeneratorSettings, index: int, **engine: Any) -> float:
        """Start the engine; returns the seconds it took. ``engine``: further arguments of :meth:`Engine.start`."""
        if self._engine is not None:
            raise RuntimeError(f"{self._name} has an engine already")
        self._name, self._devices = name, settings.tp
        wait_registry.register(name)
        started = time.perf_counter()
        self._engine = await within(
            settings.start_limit_s(torch.accelerator.is_available()),
            Engine.start(model_path, settings, index, name=name, **engine),
            f"SGLang's engine of {name} to load {model_path}",
            on="the start of an engine",  # its process computes, and is not known before it has
            flag="generator.start-deadline-s",
        )
        wait_registry.register(name, self._engine.waits)
        freeze_heap()
        return time.perf_counter() - started

    @concurrent_endpoint
    async def answer(self, connection: str, port: Port[bytes]) -> None:
        """Answer what is asked on a connection to ``port``. Never return; raise what ends it.

        For :class:`~monarch_rl.generator.dispatcher.Dispatcher`: ask through one.
        """
        await self._answering.answer(connection, port)

    @one_way_endpoint
    async def generate(self, connection: str, requests: bytes) -> None:
        """Draw after every prompt; long answers are sent in parts before. See :meth:`Engine.generate`."""
        self._answering.start(connection, requests)

    async def _draw(self, prompt_ids: list[int], sampling: Sampling, on_part: OnPart) -> Completion:
        return await self._answered(self._running.generate(prompt_ids, sampling, on_part))

    async def _answered(self, answering: Awaitable[T]) -> T:
        """An answer of the engine. An error that is not the request's own fault is what the replica is lost for."""
        try:
            return await answering  # waits: the caller keeps the deadline
        except GenerationError:
            raise
        except Exception as error:
            if not self._failed.done():
                self._failed.set_result(error)
            raise

    @lasting_endpoint
    async def ready(self) -> None:
        """Answer: this replica is alive. Raises EngineStopped if its engine is not."""
        self._running.check()

    @concurrent_endpoint
    async def lives(self) -> None:
        """Never return; raise EngineStopped when the engine has ended, or the error by which a request failed."""
        ended = asyncio.ensure_future(self._running.ended())
        ends: set[asyncio.Future[Any]] = {ended, self._failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)  # waits: as long as the replica lives
        raise EngineStopped(ended.result()) if ended.done() else self._failed.result()

    @concurrent_endpoint
    async def shutdown(self) -> None:
        """End the engine's processes; requests in flight fail."""
        await self._end()

    async def __cleanup__(self, exc: Exception | None) -> None:
        await self._end()

    async def _end(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.shutdown()


# -- the generator ----------------------------------------------------------------------------------------------------

TRANSFER_GRACE_S = 10.0
"""Seconds beyond its own deadline after which a transfer's thread counts as hung."""


class GeneratorStats(TypedDict):
    """Counts of a replica since its start."""

    replica: int
    devices: int
    version: int
    """The one that is served."""
    generated_tokens: int
    finished_requests: int
    turn_prompt_tokens: int
    turn_cached_tokens: int
    turn_reread_tokens: int
    """The fields of :class:`~monarch_rl.generator.requests.TurnReads`."""
    requests_in_flight: int
    busy_seconds: float
    """Seconds in which a request was in the engine and no commit was going on."""
    request_seconds: float
    """Those seconds, each counted once for every request."""
    last_commit: dict[str, Any]
    """The fields of its :class:`CommitReport`; empty before the first."""
    pid: int
    child_pids: list[int]
    """SGLang's processes."""


@dataclass
class _Weights:
    """What a replica needs to receive versions."""

    manifest: Manifest
    receiver: Receiver
    deadline_s: float
    received: int | None = None
    """The version that has arrived completely."""


class Generator(Replica):
    """A replica of the policy. ``setup`` first, then ``generate`` as often and as concurrently as you like."""

    def __init__(self) -> None:
        super().__init__()
        self._weights: _Weights | None = None
        self._last_commit: CommitReport | None = None
        self._transfer_lock = asyncio.Lock()
        self._verified = asyncio.Event()
        """Set once a version was committed: nothing is drawn before."""
        self._replica = 0
        self._name = "generator 0"

    @concurrent_endpoint
    async def setup(
        self,
        model_path: str,
        settings: GeneratorSettings,
        replica: int = 0,
        lora: LoraSettings = FULL_TRAINING,
        expert_routes: bool = False,
    ) -> float:
        """Start the engine with the model's own weights as version 0; returns the seconds it took.

        Args:
            model_path: see :meth:`Engine.start`.
            settings: of all replicas.
            replica: this one's index.
            lora: with a rank, versions are LoRA adapters of these settings, or weights that they are merged into.
            expert_routes: requests may ask by which experts their tokens were read.
        """
        self._replica = replica
        name = f"generator {replica}"
        return await self._start(name, model_path, settings, replica, lora=lora, expert_routes=expert_routes)

    async def _draw(self, prompt_ids: list[int], sampling: Sampling, on_part: OnPart) -> Completion:
        if not self._verified.is_set():
            with wait_registry.waiting("a version that is verified", on="controller"):
                await self._verified.wait()  # waits: the caller keeps the deadline
        return await super()._draw(prompt_ids, sampling, on_part)

    @concurrent_endpoint
    async def weights_setup(self, manifest: Manifest, settings: TransferSettings) -> float:
        """Make the receiving end of the transport. From here on nothing is drawn before a version is committed.

        Versions are those of the trainer that connects now. What still runs under those of another one fails.

        Returns the seconds for which running sequences may hold up a commit.

        Args:
            manifest: of every version to come.
            settings: the transport and its deadlines.
        """
        if self._weights is not None:
            self._weights.receiver.abort("another trainer connects")
            await self._weights.receiver.close()
        async with self._transfer_lock:  # waits: what holds it has a deadline
            receiver = await asyncio.to_thread(make_receiver, manifest, settings, _device())
            self._weights = _Weights(manifest, receiver, settings.deadline_s)
            self._verified.clear()
            if self._engine is not None:
                self._engine.reset_versions()
        return self._engine.hold_s if self._engine is not None else 0.0

    @concurrent_endpoint
    async def weights_connect(self, addresses: list[bytes], position: int, receivers: int) -> None:
        """Meet all senders, which are at ``addresses``, as number ``position`` of ``receivers``; all meet at once."""
        weights = self._weights_ready()
        weights.received = None
        meeting = weights.receiver.connect(addresses, position, receivers)
        what = f"the trainer ranks to meet {self._name}"
        await within(
            weights.deadline_s + TRANSFER_GRACE_S, meeting, what, on="trainer ranks", flag="weights.deadline-s"
        )

    @lasting_endpoint
    async def receive(self, version: int, snapshot: int) -> int:
        """Receive ``version`` while decoding goes on; returns the bytes that came.

        Args:
            version: that is sent.
            snapshot: index of the trainer's snapshot that holds it.
        """
        return await self._receive(version, snapshot)

    async def _receive(self, version: int, snapshot: int) -> int:
        async with self._transfer_lock:
            weights = self._weights_ready()  # another trainer may have connected before the lock was free
            weights.received = None
            transfer = weights.receiver.receive(version, snapshot)
            what = f"version {version} from the trainer ranks ({self._name})"
            limit_s = weights.deadline_s + TRANSFER_GRACE_S
            nbytes = sum(await within(limit_s, transfer, what, on="trainer ranks", flag="weights.deadline-s"))
            weights.received = version
            return nbytes

    @lasting_endpoint
    async def weights_abort(self, why: str) -> None:
        """End a transfer under way, because a member is lost: ``receive`` or ``weights_connect`` fails at once."""
        if self._weights is not None:
            self._weights.receiver.abort(why)

    @lasting_endpoint
    async def commit(self, version: int, snapshot: int, checksums: np.ndarray) -> CommitReport:
        """Serve the version that was received from ``snapshot``; see :meth:`Engine.commit`."""
        return await self._commit(version, snapshot, checksums)

    async def _commit(self, version: int, snapshot: int, checksums: np.ndarray) -> CommitReport:
        async with self._transfer_lock:
            weights = self._weights_ready()
            if weights.received != version:
                raise RuntimeError(
                    f"{self._name} cannot commit version {version}: what it received is "
                    f"{'nothing complete' if weights.received is None else f'version {weights.received}'}"
                )
            area = weights.receiver.area(snapshot)
            self._last_commit = await self._running.commit(version, weights.manifest, area, checksums)
        self._verified.set()
        return self._last_commit

    @concurrent_endpoint
    async def verify_base_weights(self, manifest: Manifest, checksums: np.ndarray) -> None:
        """Raise if the weights that are not trained are not the trainer's; see :meth:`Engine.verify_base_weights`."""
        await self._running.verify_base_weights(manifest, checksums)

    @lasting_endpoint
    async def stats(self) -> GeneratorStats:
        """Counts since the start."""
        engine = self._running
        return {
            "replica": self._replica,
            "devices": self._devices,
            "version": engine.version,
            "generated_tokens": engine.generated_tokens,
            "finished_requests": engine.finished_requests,
            "turn_prompt_tokens": engine.turn_reads.prompt_tokens,
            "turn_cached_tokens": engine.turn_reads.cached_tokens,
            "turn_reread_tokens": engine.turn_reads.reread_tokens,
            "requests_in_flight": engine.clock.requests,
            "busy_seconds": engine.clock.seconds,
            "request_seconds": engine.clock.request_seconds,
            "last_commit": asdict(self._last_commit) if self._last_commit else {},
            "pid": os.getpid(),
            "child_pids": engine.child_pids,
        }

    async def _end(self) -> None:
        """End the engine's processes and the transport."""
        weights, self._weights = self._weights, None
        await super()._end()
        if weights is not None:
            await weights.receiver.close()

    def _weights_ready(self) -> _Weights:
        if self._weights is None:
            raise RuntimeError(f"{self._name}: no receiver of versions; call weights_setup() first")
        return self._weights


def _device() -> torch.device:
    """This process sees one accelerator, or none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device(accelerator.type, 0) if accelerator is not None else torch.device("cpu")
