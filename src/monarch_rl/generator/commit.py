"""Commits: the weights of an engine are replaced while its requests run.

A commit is: pause -> copy from the area that holds the version -> checksums of what the engine now holds -> compare
with the trainer's -> continue. All of it is sent at once and done by the scheduler between two steps; if a checksum
differs the scheduler does not continue, so that the engine serves a verified version or nothing. What becomes of
running requests is ``GeneratorSettings.in_flight``:

``continue``    keys and values of older weights are kept; a token after a commit is drawn by the new weights from a
                past that the old ones have read. Its log-prob is that of this draw.
``recompute``   SGLang takes the sequences back into its queue, empties its cache, and computes keys and values of
                prompt and drawn tokens again before it draws on.
``resume``      requests are ended, keeping what they drew, and asked again with that as a part of the prompt.
``drain``       the commit waits until no request is running, and new ones wait for the commit.

Under the last three a token's log-prob is what its version alone gives, whatever came before it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np
import torch

from monarch_rl.generator.load_report import LoadSheet
from monarch_rl.generator.load_staged import write_order
from monarch_rl.generator.requests import EngineRequests
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.generator.sglang_engine import SglangEngine, io_structs
from monarch_rl.generator.version_kind import VersionKind
from monarch_rl.runtime.deadlines import DeadlineExceeded, within
from monarch_rl.weights.area import Area
from monarch_rl.weights.endpoint import StillServing
from monarch_rl.weights.manifest import Manifest

INTERRUPT_DEADLINE_S = 60.0
"""Seconds that SGLang may take to answer requests that are ended: one step, at worst a prefill on a slow machine."""


class CommitError(RuntimeError):
    """A version could not be loaded; the engine stays paused and serves nothing."""


class StillRunning(StillServing):
    """The running sequences did not end in time; the version before is served on."""


class WeightMismatch(CommitError):
    """What the engine loaded is not what the trainer has; the engine stays paused and serves nothing."""


@dataclass(frozen=True, slots=True)
class CommitReport:
    """What a commit cost this replica. Times of ranks are those of the slowest."""

    version: int
    nbytes: int
    """Bytes copied from the area to the engine's parameters, by all its ranks."""
    seconds: float
    """From the call until requests are taken again."""
    paused_seconds: float
    """From the pause to the continuation, by the scheduler's clock: decoding stood still this long."""
    copy_seconds: float
    """Of those, area to parameters; the first commit also finds where each tensor lives."""
    checksum_seconds: float
    """Of those, checksums of the parameters where they lie."""

    @property
    def messages_seconds(self) -> float:
        """Of the pause: SGLang's handling of the calls, the comparison, and waiting for a call on its way."""
        return self.paused_seconds - self.copy_seconds - self.checksum_seconds

    @property
    def verification_share(self) -> float:
        """Share of the pause that the checksums took."""
        return self.checksum_seconds / self.paused_seconds if self.paused_seconds else 0.0


class Commits:
    """Loads and verifies versions, one at a time.

    Args:
        sglang: the engine.
        requests: its requests, which it holds back meanwhile.
        kind: of all versions.
        settings: of the replica.
    """

    def __init__(
        self, sglang: SglangEngine, requests: EngineRequests, kind: VersionKind, settings: GeneratorSettings
    ) -> None:
        self._sglang = sglang
        self._requests = requests
        self._kind = kind
        self._in_flight = settings.in_flight
        self._drain_deadline_s = settings.drain_deadline_s
        self._rest_verified = False
        self._sheets: list[LoadSheet] = []
        """Two, used in turn: a rank may still be reading the verdict of a commit when the next one is prepared."""
        self._lock = asyncio.Lock()

    @property
    def hold_s(self) -> float:
        """Seconds for which running sequences may hold up a commit."""
        return {"drain": self._drain_deadline_s, "resume": INTERRUPT_DEADLINE_S}.get(self._in_flight, 0.0)

    async def commit(self, version: int, manifest: Manifest, area: bytes, expected: np.ndarray) -> CommitReport:
        """See :meth:`monarch_rl.generator.engine.Engine.commit`."""
        async with self._lock:
            served = self._requests.version
            if version < served:
                raise ValueError(f"version {version} is older than version {served}, which is served")
            if self._kind.rest_verified_first and not self._rest_verified:
                raise ValueError(
                    f"version {version} holds only the weights that have adapters, and the others are not known to be "
                    "the trainer's: call verify_frozen() first"
                )
            sheet = self._next_sheet(manifest)
            sheet.ask(expected)
            started = time.perf_counter()
            self._requests.hold_new()
            await self._settle_running(version)
            self._requests.version = version
            refused = f"version {version} is not served"
            await self._load(self._kind.loader, area, sheet, f"version {version}", refused)
            cost, seconds = sheet.report(), time.perf_counter() - started
            return CommitReport(
                version, cost.nbytes, seconds, cost.stood_seconds, cost.copy_seconds, cost.checksum_seconds
            )

    async def verify_base_weights(self, manifest: Manifest, expected: np.ndarray) -> None:
        """See :meth:`monarch_rl.generator.engine.Engine.verify_base_weights`."""
        async with self._lock:
            # The verifier takes no more of an area than its size: no page of this one is ever touched.
            sheet, area = LoadSheet(manifest, self._sglang.ranks), Area(manifest.nbytes)
            sheet.ask(expected)
            self._requests.hold_new()
            self._rest_verified = False
            refused = f"{self._sglang.replica} does not hold the model whose adapter is trained"
            await self._load(self._kind.verifier, area.handle, sheet, "frozen weights", refused)
            self._rest_verified = True

    async def _load(self, loader: str, area: bytes, sheet: LoadSheet, what: str, refused: str) -> None:
        """Run ``loader`` on all ranks, and serve if what they hold is the trainer's; else raise ``refused`` and why."""
        clock = self._requests.clock
        clock.pause()
        loading = self._replace_weights(loader, area, sheet.handle)
        failures = await self._sglang.or_stopped(loading, f"{what} to be loaded")
        refusal = sheet.judge()
        if refusal is not None:
            error = WeightMismatch if refusal.differs else CommitError
            reasons = "; ".join([refusal.message, *failures])
            raise error(f"{refused}: {reasons}. The engine stays paused.")
        self._requests.serve()
        clock.resume()

    def _next_sheet(self, manifest: Manifest) -> LoadSheet:
        if not self._sheets or self._sheets[0].specs != manifest.tensors:
            self._sheets = [LoadSheet(manifest, self._sglang.ranks) for _ in range(2)]
        self._sheets.reverse()
        return self._sheets[0]

    async def _settle_running(self, version: int) -> None:
        """Under ``drain`` and ``resume``, wait until no request is in SGLang; new ones are held back already."""
        if self._in_flight not in ("resume", "drain"):
            return
        deadline, remedy = self.hold_s, "Allow more time (generator.drain-deadline-s), draw fewer tokens a request"
        if self._in_flight == "resume":
            self._requests.interrupt_running()
            remedy = "The engine was asked to end them and did not"
        what = f"requests to end before version {version}"
        try:
            idle = within(deadline, self._requests.wait_until_idle(), what, on=self._sglang.name)
            await self._sglang.or_stopped(idle, what)
        except DeadlineExceeded as error:
            self._requests.serve()
            raise StillRunning(
                f"version {version} is not served, version {self._requests.version} is: {self._requests.running} "
                f"requests still run {deadline:g} s after new ones were held back. {remedy}, or let sequences go on "
                "across commits (in_flight)."
            ) from error

    async def _replace_weights(self, loader: str, area: bytes, sheet: bytes) -> list[str]:
        """Let the scheduler run ``loader`` between two steps; returns SGLang's error messages.

        Nothing is awaited between the pause and the continuation, so that none of it waits for this process: the
        scheduler itself refuses to continue with weights that are not verified.
        """
        io, manager, version = io_structs(), self._sglang.manager, str(self._requests.version)
        mask_tokens = self._requests.next_mask_tokens()
        update = io.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[
                _serialized_order(r, area, sheet, mask_tokens) for r in range(self._sglang.ranks)
            ],
            load_format=loader,
            flush_cache=self._in_flight == "recompute",
            weight_version=version,
        )
        mode = "retract" if self._in_flight == "recompute" else "in_place"
        manager.auto_create_handle_loop()
        # waits: commit() cancels all of these when the engine is gone, and its caller keeps the deadline
        await manager.pause_generation(io.PauseGenerationReqInput(mode=mode))
        # The manager's own methods hold a lock until the scheduler has answered; what they call does not.
        calls = [
            asyncio.ensure_future(manager.begin_weight_update_communicator(io.BeginWeightUpdateReqInput())),
            asyncio.ensure_future(manager.update_weights_from_tensor_communicator(update)),
            asyncio.ensure_future(manager.end_weight_update_communicator(io.EndWeightUpdateReqInput())),
        ]
        await asyncio.sleep(0)  # each call sends its message in its first turn
        await manager.continue_generation(io.ContinueGenerationReqInput())  # waits: as above
        # The answer to this comes after the continuation, of which SGLang says nothing.
        await manager.update_weight_version(io.UpdateWeightVersionReqInput(new_version=version))  # waits: as above
        answered = await asyncio.gather(*calls)  # waits: as above
        answers = [answer for answers in answered for answer in answers]
        return [f"SGLang said {answer.message}" for answer in answers if not answer.success]


def _serialized_order(rank: int, area: bytes, sheet: bytes, mask_tokens: int) -> bytes:
    from sglang.srt.utils import MultiprocessingSerializer

    # An empty tensor travels in the message itself; any other is sent through a socket of its own.
    named = [(write_order(rank, area, sheet, mask_tokens), torch.empty(0, dtype=torch.uint8))]
    return bytes(MultiprocessingSerializer.serialize(named))
