"""One generator replica: a Monarch actor that hosts an SGLang engine and takes new weights while it generates.

Weights arrive in two phases, each with its own endpoint. ``receive`` (the network transfer, long) stores a version next
to the engine while decoding continues; ``commit`` (a local copy and checksums, short) pauses decoding.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypedDict, TypeVar

import numpy as np
import torch
from monarch.actor import Port

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import EngineStopped, GenerationError
from monarch_rl.generator.commit import CommitReport
from monarch_rl.generator.connection import Answering
from monarch_rl.generator.engine import Engine
from monarch_rl.generator.parts import OnPart
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint, one_way_endpoint, persistent_endpoint
from monarch_rl.runtime.persistent_calls import ResilientActor
from monarch_rl.runtime.process import freeze_heap
from monarch_rl.weights.manifest import Manifest
from monarch_rl.weights.transport import Receiver, TransferSettings, make_receiver

# -- base class of all actors that host an SGLang engine --------------------------------------------------------------

T = TypeVar("T")


class Replica(ResilientActor):
    """An actor with an engine. Derived classes start the engine (:meth:`_start`) in an endpoint of their own."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """Done, with the error, when a request failed through no fault of its own."""
        self._answering = Answering(self._generate, GenerationError)
        self._name = "a replica"
        self._devices = 1

    @property
    def _running(self) -> Engine:
        if self._engine is None:
            raise RuntimeError(f"{self._name} has no engine yet: call setup() first")
        return self._engine

    async def _start(self, name: str, model_path: str, settings: GeneratorSettings, index: int, **engine: Any) -> float:
        """Start the engine; returns the seconds that it took. ``engine``: further arguments of :meth:`Engine.start`."""
        if self._engine is not None:
            raise RuntimeError(f"{self._name} has an engine already")
        self._name, self._devices = name, settings.tp
        wait_registry.register(name)
        started = time.perf_counter()
        self._engine = await within(
            settings.start_limit_s(torch.accelerator.is_available()),
            Engine.start(model_path, settings, index, name=name, **engine),
            f"SGLang's engine of {name} to load {model_path}",
            on="the start of an engine",  # its processes are registered only once it has started
            flag="patience",
        )
        wait_registry.register(name, self._engine.requests.waits)
        freeze_heap()
        return time.perf_counter() - started

    @concurrent_endpoint
    async def answer(self, connection: str, port: Port[Any]) -> None:
        """Send the answers of a connection to ``port``. Never returns; raises the error that ends the connection.

        Use it through a :class:`~monarch_rl.generator.dispatcher.Dispatcher`.
        """
        await self._answering.answer(connection, port)

    @one_way_endpoint
    async def generate(self, connection: str, requests: bytes) -> None:
        """Answer a message of requests; long answers are sent in parts. See :meth:`Engine.generate`."""
        self._answering.start(connection, requests)

    async def _generate(self, prompt_ids: list[int], sampling: Sampling, on_part: OnPart) -> Completion:
        return await self._answered(self._running.generate(prompt_ids, sampling, on_part))

    async def _answered(self, answering: Awaitable[T]) -> T:
        """Await an answer of the engine. An error that is not the request's own fault makes :meth:`block_until_lost`
        fail."""
        try:
            return await answering  # waits: the caller keeps the deadline
        except GenerationError:
            raise
        except Exception as error:
            if not self._failed.done():
                self._failed.set_result(error)
            raise

    @persistent_endpoint
    async def ready(self) -> None:
        """Return if this replica is alive. Raises EngineStopped if its engine is not."""
        self._running.check()

    @concurrent_endpoint
    async def block_until_lost(self) -> None:
        """Never returns; raises EngineStopped when the engine has ended, or the error for which a request failed."""
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
    """Counters of a replica since its start."""

    replica: int
    devices: int
    version: int
    """The served version."""
    generated_tokens: int
    finished_requests: int
    turn_prompt_tokens: int
    turn_cached_tokens: int
    turn_reread_tokens: int
    """The fields of :class:`~monarch_rl.generator.requests.TurnReads`."""
    requests_in_flight: int
    busy_seconds: float
    """Seconds in which a request was in the engine and no commit was in progress."""
    request_seconds: float
    """Busy seconds, each multiplied by the number of requests in the engine."""
    last_commit: dict[str, Any]
    """The fields of the last :class:`CommitReport`; empty before the first commit."""
    pid: int
    child_pids: list[int]
    """SGLang's processes."""


@dataclass
class _Weights:
    """The receiving end of the transport."""

    manifest: Manifest
    receiver: Receiver
    deadline_s: float
    received: int | None = None
    """The last version that has arrived completely; None while one is arriving."""


class Generator(Replica):
    """A replica of the policy. Call ``setup`` first; then any number of concurrent ``generate`` calls are allowed."""

    def __init__(self) -> None:
        super().__init__()
        self._weights: _Weights | None = None
        self._last_commit: CommitReport | None = None
        self._transfer_lock = asyncio.Lock()
        self._verified = asyncio.Event()
        """Set once a version has been committed; nothing is sampled before."""
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
        memory: Mapping[str, int] | None = None,
    ) -> float:
        """Start the engine with the model's own weights as version 0; returns the seconds that it took.

        Args:
            model_path: see :meth:`Engine.start`.
            settings: settings of all replicas.
            replica: index of this replica.
            lora: with a rank above 0, versions are LoRA adapters with these settings, or weights with such adapters
                merged in.
            expert_routes: whether requests may ask for the expert routes of their tokens.
            memory: see :meth:`Engine.start`.
        """
        self._replica = replica
        name = f"generator {replica}"
        return await self._start(
            name, model_path, settings, replica, lora=lora, expert_routes=expert_routes, memory=memory
        )

    async def _generate(self, prompt_ids: list[int], sampling: Sampling, on_part: OnPart) -> Completion:
        if not self._verified.is_set():
            with wait_registry.waiting("a verified version", on="controller"):
                await self._verified.wait()  # waits: the caller keeps the deadline
        return await super()._generate(prompt_ids, sampling, on_part)

    @concurrent_endpoint
    async def weights_setup(self, manifest: Manifest, settings: TransferSettings) -> float:
        """Create the receiving end of the transport, for versions of the trainer that connects now.

        From now on nothing is sampled before a version is committed. Requests that still run under another trainer's
        versions fail.

        Args:
            manifest: manifest of every later version.
            settings: the transport and its deadlines.

        Returns:
            Maximum seconds for which running sequences may delay a commit.
        """
        if self._weights is not None:
            self._weights.receiver.abort("another trainer connects")
            await self._weights.receiver.close()
        async with self._transfer_lock:  # waits: every holder of the lock has a deadline
            receiver = await asyncio.to_thread(make_receiver, manifest, settings, _device())
            self._weights = _Weights(manifest, receiver, settings.deadline_s)
            self._verified.clear()
            if self._engine is not None:
                self._engine.requests.reset_versions()
        return self._engine.max_commit_delay_s if self._engine is not None else 0.0

    @concurrent_endpoint
    async def weights_connect(self, addresses: list[bytes], position: int, receivers: int) -> None:
        """Connect to all senders; all senders and receivers must do so at the same time.

        Args:
            addresses: addresses of the senders.
            position: index of this receiver.
            receivers: number of receivers.
        """
        weights = self._weights_ready()
        weights.received = None
        connecting = weights.receiver.connect(addresses, position, receivers)
        what = f"the trainer ranks to connect to {self._name}"
        await within(weights.deadline_s + TRANSFER_GRACE_S, connecting, what, on="trainer ranks", flag="patience")

    @persistent_endpoint
    async def receive(self, version: int, snapshot: int) -> int:
        """Receive a version while decoding continues; returns the number of bytes received.

        Args:
            version: the version that the trainer sends.
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
            nbytes = sum(await within(limit_s, transfer, what, on="trainer ranks", flag="patience"))
            weights.received = version
            return nbytes

    @persistent_endpoint
    async def weights_abort(self, why: str) -> None:
        """Abort the current transfer because a member is lost: ``receive`` or ``weights_connect`` fails at once."""
        if self._weights is not None:
            self._weights.receiver.abort(why)

    @persistent_endpoint
    async def commit(self, version: int, snapshot: int, checksums: np.ndarray) -> CommitReport:
        """Serve the version received from ``snapshot``; see :meth:`Engine.commit`."""
        return await self._commit(version, snapshot, checksums)

    async def _commit(self, version: int, snapshot: int, checksums: np.ndarray) -> CommitReport:
        async with self._transfer_lock:
            weights = self._weights_ready()
            if weights.received != version:
                raise RuntimeError(
                    f"{self._name} cannot commit version {version}: it has received "
                    f"{'no complete version' if weights.received is None else f'version {weights.received}'}"
                )
            area = weights.receiver.area(snapshot)
            self._last_commit = await self._running.commit(version, weights.manifest, area, checksums)
        self._verified.set()
        return self._last_commit

    @concurrent_endpoint
    async def verify_base_weights(self, manifest: Manifest, checksums: np.ndarray) -> None:
        """Raise if the base weights differ from the trainer's; see :meth:`Engine.verify_base_weights`."""
        await self._running.verify_base_weights(manifest, checksums)

    @persistent_endpoint
    async def stats(self) -> GeneratorStats:
        """Counters since the start."""
        engine = self._running
        requests = engine.requests
        return {
            "replica": self._replica,
            "devices": self._devices,
            "version": requests.version,
            "generated_tokens": requests.generated_tokens,
            "finished_requests": requests.finished_requests,
            "turn_prompt_tokens": requests.turn_reads.prompt_tokens,
            "turn_cached_tokens": requests.turn_reads.cached_tokens,
            "turn_reread_tokens": requests.turn_reads.reread_tokens,
            "requests_in_flight": requests.clock.requests,
            "busy_seconds": requests.clock.seconds,
            "request_seconds": requests.clock.request_seconds,
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
            raise RuntimeError(f"{self._name} is not connected to a trainer yet: call weights_setup() first")
        return self._weights


def _device() -> torch.device:
    """The accelerator of this process, which sees at most one; else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device(accelerator.type, 0) if accelerator is not None else torch.device("cpu")
