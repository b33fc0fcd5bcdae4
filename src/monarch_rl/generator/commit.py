"""Commits: replacing the weights of an engine while its requests run.

A commit is: pause -> copy from the area that holds the version -> checksums of the engine's parameters -> compare with
the trainer's -> continue. All of it is sent at once, and the scheduler executes it between two steps. If a checksum
differs, the scheduler does not continue, so the engine serves a verified version or nothing.
``GeneratorSettings.in_flight`` decides what happens to running requests:

``continue``    Keys and values of older weights are kept. The new weights sample a token after a commit from a context
                that the old weights have read; its log-prob is that of this distribution.
``recompute``   SGLang moves the sequences back to its queue, empties its cache, and computes the keys and values of
                prompt and sampled tokens again before it continues.
``resume``      Requests are ended, and sent again with their sampled tokens appended to the prompt.
``drain``       The commit waits until no request is running, and new requests wait for the commit.

With the last three, a token's log-prob is that of its version alone, whatever versions sampled the tokens before it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np
import torch

from monarch_rl.errors import CommitError, DeadlineExceeded, StillRunning, WeightMismatch
from monarch_rl.generator.load_report import LoadSheet
from monarch_rl.generator.load_staged import write_order
from monarch_rl.generator.requests import Requests
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.generator.sglang_engine import SglangEngine, io_structs
from monarch_rl.generator.version_kind import VersionKind
from monarch_rl.runtime import timeline
from monarch_rl.runtime.deadlines import within
from monarch_rl.weights.area import Area
from monarch_rl.weights.manifest import Manifest

INTERRUPT_DEADLINE_S = 60.0
"""Seconds within which SGLang must answer the requests that it is told to end: one step, at worst a prefill on a slow
machine."""


@dataclass(frozen=True, slots=True)
class CommitReport:
    """Cost of a commit on this replica. Per-rank times are those of the slowest rank."""

    version: int
    nbytes: int
    """Bytes copied from the area to the engine's parameters, by all ranks together."""
    seconds: float
    """From the call until requests are accepted again."""
    paused_seconds: float
    """Time without decoding, from pause to continuation, by the scheduler's clock."""
    copy_seconds: float
    """Share of ``paused_seconds`` for the copy to the parameters; the first commit also finds where each tensor is."""
    checksum_seconds: float
    """Share of ``paused_seconds`` for the checksums of the parameters."""

    @property
    def messages_seconds(self) -> float:
        """Rest of the pause: SGLang's handling of the calls, the comparison, and waiting for calls to arrive."""
        return self.paused_seconds - self.copy_seconds - self.checksum_seconds

    @property
    def verification_share(self) -> float:
        """Fraction of the pause taken by the checksums."""
        return self.checksum_seconds / self.paused_seconds if self.paused_seconds else 0.0


class Commits:
    """Loads and verifies versions, one at a time.

    Args:
        sglang: the engine.
        requests: the engine's requests, which are held back during a commit.
        kind: what the versions consist of.
        settings: the replica's settings.
    """

    def __init__(
        self, sglang: SglangEngine, requests: Requests, kind: VersionKind, settings: GeneratorSettings
    ) -> None:
        self._sglang = sglang
        self._requests = requests
        self._kind = kind
        self._in_flight = settings.in_flight
        self._drain_deadline_s = settings.drain_deadline_s
        self._rest_verified = False
        self._sheets: list[LoadSheet] = []
        """Two sheets, used alternately: a rank may still be reading one commit's sheet while the next is prepared."""
        self._lock = asyncio.Lock()

    @property
    def max_commit_delay_s(self) -> float:
        """See :attr:`monarch_rl.generator.engine.Engine.max_commit_delay_s`."""
        return {"drain": self._drain_deadline_s, "resume": INTERRUPT_DEADLINE_S}.get(self._in_flight, 0.0)

    async def commit(self, version: int, manifest: Manifest, area: bytes, expected: np.ndarray) -> CommitReport:
        """See :meth:`monarch_rl.generator.engine.Engine.commit`."""
        async with self._lock:
            served = self._requests.version
            if version < served:
                raise ValueError(f"version {version} is older than version {served}, which is served")
            if self._kind.rest_verified_first and not self._rest_verified:
                raise ValueError(
                    f"version {version} holds only the weights that have adapters, and the other weights have not been "
                    "compared with the trainer's: verify the base weights before the first version"
                )
            sheet = self._next_sheet(manifest)
            sheet.ask(expected)
            started = time.perf_counter()
            self._requests.hold_new()
            await self._settle_running(version)
            self._requests.version = version
            refused = f"version {version} is not served"
            await self._load(self._kind.loader, area, sheet, f"version {version}", refused, version)
            cost, seconds = sheet.report(), time.perf_counter() - started
            return CommitReport(
                version, cost.nbytes, seconds, cost.paused_seconds, cost.copy_seconds, cost.checksum_seconds
            )

    async def verify_base_weights(self, manifest: Manifest, expected: np.ndarray) -> None:
        """See :meth:`monarch_rl.generator.engine.Engine.verify_base_weights`."""
        async with self._lock:
            # The verifier uses only the area's size: no page of this one is ever touched.
            sheet, area = LoadSheet(manifest, self._sglang.ranks), Area(manifest.nbytes)
            sheet.ask(expected)
            self._requests.hold_new()
            self._rest_verified = False
            refused = f"{self._sglang.replica} does not hold the model whose adapter is trained"
            await self._load(self._kind.verifier, area.handle, sheet, "base weights", refused)
            self._rest_verified = True

    async def _load(
        self, loader: str, area: bytes, sheet: LoadSheet, what: str, refused: str, version: int | None = None
    ) -> None:
        """Run a loader on all ranks, and serve if their weights are the trainer's.

        Args:
            loader: dotted name of the loader.
            area: handle of the area that holds the version.
            sheet: the sheet on which the ranks report.
            what: the loaded object, in messages about waits.
            refused: beginning of the error message if the weights are refused.
            version: the version that is loaded; None if none is.
        """
        clock = self._requests.clock
        clock.pause()
        loading = self._replace_weights(loader, area, sheet.handle)
        with timeline.span("swap of weights", self._sglang.replica, version):
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
        """With ``drain`` and ``resume``, wait until no request is in SGLang. New requests are held back already."""
        if self._in_flight not in ("resume", "drain"):
            return
        deadline = self.max_commit_delay_s
        remedy = "Allow more time (--patience), limit answers to fewer tokens"
        if self._in_flight == "resume":
            self._requests.interrupt_running()
            remedy = "The engine was told to end them and did not"
        what = f"requests to end before version {version}"
        try:
            idle = within(deadline, self._requests.idle.wait(), what, on=self._sglang.name)
            await self._sglang.or_stopped(idle, what)
        except DeadlineExceeded as error:
            self._requests.serve()
            raise StillRunning(
                f"version {version} is not served, version {self._requests.version} is: {self._requests.running} "
                f"requests still run {deadline:g} s after new ones were held back. {remedy}, or let sequences continue "
                "across commits (generator.in-flight)."
            ) from error

    async def _replace_weights(self, loader: str, area: bytes, sheet: bytes) -> list[str]:
        """Have the scheduler run ``loader`` between two steps; returns SGLang's error messages."""
        # Pause, load and continuation are sent without waiting for answers in between, so the scheduler never waits for
        # this process during a commit: the scheduler itself refuses to continue with unverified weights.
        io, manager, version = io_structs(), self._sglang.manager, str(self._requests.version)
        retained_tokens = self._requests.next_retained_tokens()
        update = io.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[
                _serialized_order(r, area, sheet, retained_tokens) for r in range(self._sglang.ranks)
            ],
            load_format=loader,
            flush_cache=self._in_flight == "recompute",
            weight_version=version,
        )
        mode = "retract" if self._in_flight == "recompute" else "in_place"
        manager.auto_create_handle_loop()
        # waits: commit() cancels all of these when the engine is gone, and its caller keeps the deadline
        await manager.pause_generation(io.PauseGenerationReqInput(mode=mode))
        # The manager's own methods hold a lock until the scheduler has answered; these communicators do not.
        calls = [
            asyncio.ensure_future(manager.begin_weight_update_communicator(io.BeginWeightUpdateReqInput())),
            asyncio.ensure_future(manager.update_weights_from_tensor_communicator(update)),
            asyncio.ensure_future(manager.end_weight_update_communicator(io.EndWeightUpdateReqInput())),
        ]
        await asyncio.sleep(0)  # each call sends its message when it first runs
        await manager.continue_generation(io.ContinueGenerationReqInput())  # waits: as above
        # SGLang does not report the continuation, but answers this call only after it.
        await manager.update_weight_version(io.UpdateWeightVersionReqInput(new_version=version))  # waits: as above
        answered = await asyncio.gather(*calls)  # waits: as above
        answers = [answer for answers in answered for answer in answers]
        return [f"SGLang reported: {answer.message}" for answer in answers if not answer.success]


def _serialized_order(rank: int, area: bytes, sheet: bytes, retained_tokens: int) -> bytes:
    from sglang.srt.utils import MultiprocessingSerializer

    # An empty tensor travels in the message itself; any other is sent through a separate socket.
    named = [(write_order(rank, area, sheet, retained_tokens), torch.empty(0, dtype=torch.uint8))]
    return bytes(MultiprocessingSerializer.serialize(named))
