"""One SGLang engine: tokens in, tokens out with log-probs and versions, and commits of new weights in flight.

A commit is: pause -> copy from the area that holds the version -> checksums of what the engine now holds -> compare
with the trainer's -> continue. All of it is sent at once and done by the scheduler between two steps; if a checksum
differs it does not continue, so that the engine serves a verified version or nothing. A request keeps going across a
commit, and each of its tokens carries the version that drew it. ``GeneratorSettings.in_flight`` says how:

``continue``    keys and values of older weights are kept; a token after a commit is drawn by the new weights from a
                past that the old ones have read. Its log-prob is that of this draw.
``recompute``   SGLang takes the sequences back into its queue, empties its cache, and computes keys and values of
                prompt and drawn tokens anew before it draws on.
``resume``      requests are ended, keeping what they drew, and asked again with that as a part of the prompt.
``drain``       the commit waits until no request is running, and new ones wait for the commit.

Under the last three a token's log-prob is what its version alone gives, whatever came before it.

The prefix cache is kept apart per version: a request that comes after a commit never starts from keys and values of
older weights. One that came in the last moment before it may, like a sequence that was running already.

Use from one event loop. Starting takes 10 s and more, nearly all of it imports in two processes; SGLang's third
process, the detokenizer, is not started, since tokens never become text here.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from monarch_rl.episode.sampling import Completion, GenerationError, Sampling
from monarch_rl.generator.answers import Beside, RouteForm, take_beside, to_completion, to_part
from monarch_rl.generator.clock import BusyClock
from monarch_rl.generator.launching import close_sockets, end_processes, launch_engine, take_over_watch
from monarch_rl.generator.load_report import LoadSheet
from monarch_rl.generator.load_staged import write_order
from monarch_rl.generator.parts import UNFINISHED, Tell, Teller, end_of, join, nobody
from monarch_rl.generator.settings import (
    ADAPTER,
    ADAPTER_LOADER,
    LOADER,
    PART_LOADER,
    PART_VERIFIER,
    VERIFIER,
    GeneratorSettings,
    check_served,
    cores_of_ranks,
    engine_arguments,
)
from monarch_rl.model.folder import sparse_layers
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings, lora_config
from monarch_rl.runtime import presence
from monarch_rl.runtime.deadlines import DeadlineExceeded, within
from monarch_rl.runtime.network import held_port
from monarch_rl.weights.area import Area
from monarch_rl.weights.manifest import Manifest
from monarch_rl.weights.transport import StillServing

INTERRUPT_DEADLINE_S = 60.0
"""How long requests that are ended may take to be answered: one step, at worst a prefill on a slow machine."""


class EngineStopped(RuntimeError):
    """The engine was stopped, or its process ended by itself: no request can be answered."""


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
        """Of the pause: how much of it the checksums took."""
        return self.checksum_seconds / self.paused_seconds if self.paused_seconds else 0.0


class Engine:
    """A running SGLang engine. Build with :meth:`start`; end with :meth:`shutdown`."""

    _in_this_process: ClassVar[Engine | None] = None

    def __init__(
        self,
        engine: Any,
        launcher: ThreadPoolExecutor,
        replica: int,
        seeds: random.Random | None,
        settings: GeneratorSettings,
    ) -> None:
        self._engine = engine
        self._replica = replica
        self._in_flight = settings.in_flight
        self._drain_deadline_s = settings.drain_deadline_s
        # Requests queue here and not in SGLang: one that waits there across a commit would start from the
        # prefix cache of the version at which it came.
        self._places = asyncio.Semaphore(settings.max_running_requests)
        # SGLang's processes die with the thread that started them, so that thread must live as long as they do.
        self._launcher = launcher
        self._seeds = seeds
        self._adapted = False
        """Versions are an adapter's, which requests name."""
        self._in_part = False
        """Versions are some of the weights; the others are verified once, before."""
        self._rest_verified = False
        self._version = 0
        self._ranks = settings.tp
        self._sheets: list[LoadSheet] = []
        """Two, used in turn: a rank may still be reading the verdict of a commit when the next one is prepared."""
        self._serving = asyncio.Event()
        self._serving.set()
        self._stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the engine is no more; holds the reason."""
        self._commit_lock = asyncio.Lock()
        self._running: dict[str, bool] = {}
        """Requests in SGLang, by its id; true if a commit has ended it and it is to be resumed."""
        self._idle = asyncio.Event()
        """Set while there are none."""
        self._idle.set()
        self._tellers: dict[str, Teller] = {}
        """Of the requests in SGLang."""
        self._beside: dict[str, Beside] = {}
        """Of the requests in SGLang."""
        self._expert_routes: RouteForm | None = None
        """If it tells routes."""
        manager = engine.tokenizer_manager
        manager._handle_batch_output = partial(self._tell_parts, manager._handle_batch_output)
        self.clock = BusyClock()
        self.generated_tokens = 0
        self.finished_requests = 0
        self._processes = take_over_watch(engine)
        for rank, process in enumerate(self._processes):
            name = self._name if settings.tp == 1 else f"{self._name} (rank {rank})"
            presence.helper(process.pid, name)
            asyncio.get_running_loop().add_reader(process.sentinel, self._process_ended, process)

    @classmethod
    async def start(
        cls,
        model_path: str,
        settings: GeneratorSettings,
        replica: int = 0,
        lora: LoraSettings = FULL_TRAINING,
        expert_routes: bool = False,
        **extra: Any,
    ) -> Engine:
        """Start SGLang's processes and load the model as version 0.

        Args:
            model_path: Hugging Face folder, or, without ``routes``, a Hub name.
            settings: of all replicas.
            replica: this one's index; its random seed depends on it.
            lora: with a rank, versions are adapters: the model's own weights stay, and version 0 has an adapter of
                zeros. With adapters on experts they are the weights that have adapters, merged
                (:meth:`~monarch_rl.model.lora.LoraSettings.sends_merged`), and the other weights stay.
            routes: requests may ask by which experts their tokens were read. SGLang keeps that on the host for every
                token of its KV cache: 4 bytes a layer and expert.
            extra: further SGLang ``ServerArgs``.

        Raises ValueError if the model cannot be cut for ``settings.tp`` ranks or has no routes to tell, RuntimeError if
        SGLang does not start.
        """
        on_gpu = torch.accelerator.is_available()
        file = Path(model_path) / "config.json"
        config = json.loads(file.read_text()) if file.is_file() else None
        if config is not None:
            check_served(config, settings, on_gpu)
        elif expert_routes:
            raise ValueError(f"routes need a model folder, with config.json in it; {model_path} is none")
        form = RouteForm(config) if config is not None and expert_routes else None
        in_part = config is not None and lora.sends_merged(bool(sparse_layers(config)))
        if in_part:
            lora = FULL_TRAINING  # SGLang is sent weights and hears of no adapter
        if Engine._in_this_process is not None:
            raise RuntimeError("there is an engine in this process already; SGLang keeps its settings per process")
        arguments = engine_arguments(model_path, settings, replica, on_gpu, lora) | extra
        arguments["enable_return_routed_experts"] = expert_routes
        if settings.tp > 1 and not on_gpu:
            cores = sorted(os.sched_getaffinity(0))
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = cores_of_ranks(replica, settings.tp, cores)
        # So often SGLang's scheduler tells what a request has drawn, also of one that is not streamed.
        os.environ["SGLANG_FORCE_STREAM_INTERVAL"] = str(settings.part_tokens)
        launcher = ThreadPoolExecutor(1, thread_name_prefix="sglang-launch")
        with held_port() as port:  # SGLang's processes meet there, seconds from now; engines start side by side
            arguments["nccl_port"] = port
            engine = await asyncio.get_running_loop().run_in_executor(launcher, launch_engine, arguments)
        # In SGLang's deterministic mode requests without a seed would all share one.
        seeds = random.Random(settings.random_seed + replica) if on_gpu and settings.deterministic else None
        Engine._in_this_process = started = cls(engine, launcher, replica, seeds, settings)
        started._expert_routes, started._in_part = form, in_part
        if lora.rank:
            await started._add_adapter(lora, model_path)
        return started

    async def _add_adapter(self, lora: LoraSettings, model_path: str) -> None:
        """Register the policy's adapter; without tensors SGLang fills it with zeros."""
        from sglang.srt.utils import MultiprocessingSerializer

        request = _io().LoadLoRAAdapterFromTensorsReqInput(
            lora_name=ADAPTER,
            config_dict=lora_config(lora, model_path),
            serialized_named_tensors=[MultiprocessingSerializer.serialize({})] * self._ranks,
            pinned=True,
        )
        load = self._engine.tokenizer_manager.load_lora_adapter_from_tensors(request, None)
        answer = await self._or_stopped(load, "the adapter to be loaded")
        if not answer.success:
            await self.shutdown()
            raise RuntimeError(f"generator {self._replica}: SGLang refused the adapter: {answer.error_message}")
        self._adapted = True

    @property
    def version(self) -> int:
        """The version that is served, or that was being loaded when a commit failed."""
        return self._version

    @property
    def child_pids(self) -> list[int]:
        """SGLang's processes."""
        return list(self._engine.get_all_child_pids())

    @property
    def _name(self) -> str:
        return f"the engine of generator {self._replica}"

    def check(self) -> None:
        """Raise EngineStopped if the engine is gone."""
        if self._stopped.done():
            raise EngineStopped(self._stopped.result())  # waits: it is done

    async def ended(self) -> str:
        """Wait for the end of the engine; returns the reason."""
        return await asyncio.shield(self._stopped)  # waits: as long as the engine lives

    async def generate(self, prompt_ids: list[int], sampling: Sampling, tell: Tell = nobody) -> Completion:
        """Draw tokens until a stop token or the length limit; waits while a commit is going on.

        Without stop tokens only the length ends it; with some, the end tokens of the model's config do so too.

        A seed fixes the noise of each draw by the token's place in the sequence. It means the same whatever a commit
        does with running sequences: one that is resumed draws on with the noise that it would have had.

        ``tell`` gets what the request has drawn every ``part_tokens`` tokens and where a commit ends it to resume it.
        What it is told is the beginning of the completion, never all of it, and without routes.

        Routes are those by which the token after each was drawn; where SGLang computed keys and values again on its own
        (``recompute``, or for want of KV cache), those of the last time.

        Raises GenerationError if the engine refuses or aborts the request, EngineStopped if it is gone.
        """
        self._check_sampling(sampling)
        stops, teller = self._stops(sampling), Teller(tell)
        parts: list[Completion] = []
        drawn: list[int] = []
        expert_routes_from = sampling.expert_routes_from
        async with self._places:
            while True:
                # Held here and not by SGLang: the prefix cache's version must be that of the weights it is used with.
                while not self._serving.is_set():
                    await self._or_stopped(self._serving.wait(), "a commit to end")
                self.check()
                left = replace(
                    sampling, max_new_tokens=sampling.max_new_tokens - len(drawn), expert_routes_from=expert_routes_from
                )
                part = await self._draw(prompt_ids + drawn, left, teller)
                parts.append(part)
                drawn += part.token_ids.tolist()
                if expert_routes_from is not None and part.expert_routes is not None:
                    expert_routes_from += len(part.expert_routes)
                reason: str | None = part.finish_reason
                if reason == UNFINISHED:
                    reason = end_of(drawn, sampling, stops)  # the step that ended it may have drawn its last token
                if reason is not None:
                    self.finished_requests += 1
                    return join(parts, reason)
                teller.rest(parts)

    async def _draw(self, prompt_ids: list[int], sampling: Sampling, teller: Teller) -> Completion:
        request, start = uuid.uuid4().hex, sampling.expert_routes_from
        asked = _io().GenerateReqInput(
            input_ids=prompt_ids,
            sampling_params=self._sampling_params(sampling),
            return_logprob=True,
            return_sampling_mask=sampling.truncated,
            return_routed_experts=start is not None,
            routed_experts_start_len=start or 0,
            cache_salt=str(self._version),
            lora_path=ADAPTER if self._adapted else None,
            rid=request,
        )
        self._running[request] = False
        self._tellers[request] = teller
        self._beside[request] = beside = Beside()
        self._idle.clear()
        self.clock.enter()
        try:
            generating = self._engine.tokenizer_manager.generate_request(asked, None)
            answer = await self._or_stopped(anext(generating), f"tokens after {len(prompt_ids)} others")
        except ValueError as error:
            raise GenerationError(str(error)) from error
        finally:
            self.clock.leave()
            del self._tellers[request], self._beside[request]
            interrupted = self._running.pop(request)
            if not self._running:
                self._idle.set()
        if beside.error is not None:
            raise beside.error
        completion = to_completion(answer, interrupted, beside)
        if sampling.truncated and len(completion.token_ids) and completion.kept is None:
            raise GenerationError("SGLang told no kept sets, though it was asked for them")
        if self._expert_routes is not None and start is not None and beside.expert_routes is not None:
            rows = len(prompt_ids) + len(completion.token_ids) - 1 - start
            completion = replace(completion, expert_routes=self._expert_routes.read(beside.expert_routes, rows))
        self.generated_tokens += len(completion.token_ids)
        presence.progress("tokens drawn")
        return completion

    async def _tell_parts(self, handle: Callable[[Any], Awaitable[None]], output: Any) -> None:
        """What SGLang does with a message of its scheduler, and then tell the parts that are in it.

        SGLang's own streaming would send and handle the first token of every request by itself.
        """
        taken = take_beside(output)
        for request, one in zip(output.rids, taken, strict=True):
            if (beside := self._beside.get(request)) is not None:
                beside.add(one)
        await handle(output)  # waits: for nothing but the event loop
        for index, request in enumerate(output.rids):
            beside = self._beside.get(request)
            if output.finished_reasons[index] is not None or beside is None or beside.error is not None:
                continue
            try:
                part = to_part(output, index, taken[index])
            except GenerationError as error:
                beside.error = error  # for _draw to raise: SGLang would end this process for it
                continue
            if len(part.token_ids):
                self._tellers[request].part(part)
                presence.progress("tokens drawn")

    def _stops(self, sampling: Sampling) -> set[int]:
        """The ids that end a request, as :meth:`_sampling_params` asks SGLang for it."""
        if not sampling.stop_token_ids:
            return set()
        return set(sampling.stop_token_ids) | self._engine.tokenizer_manager.model_config.hf_eos_token_id

    async def _or_stopped(self, awaitable: Any, what: str) -> Any:
        """SGLang's requests wait for ever once its processes are gone. ``what`` is as in ``within``."""
        task = asyncio.ensure_future(awaitable)
        try:
            with presence.waiting(what, on=self._name):
                # waits: whoever asks this replica keeps the deadline, as it alone knows how long its request is
                await asyncio.wait({task, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = task.done()
            task.cancel()
        if finished:
            return task.result()
        raise EngineStopped(self._stopped.result())

    def _process_ended(self, process: Any) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        presence.no_helper(process.pid)
        if not self._stopped.done():
            process.join()  # waits: it has ended
            self._stopped.set_result(
                f"generator {self._replica}: SGLang's process {process.pid} ended by itself, exit code "
                f"{process.exitcode}; what it said last is in its output"
            )

    def _check_sampling(self, sampling: Sampling) -> None:
        """Refuse what SGLang would end its scheduler for, or ignore."""
        if sampling.expert_routes_from is not None and self._expert_routes is None:
            raise GenerationError("routes are asked for, but the engine was not started to tell them")
        if sampling.min_p and (sampling.seed is not None or self._seeds is not None):
            raise GenerationError("SGLang draws with min_p only without a seed")

    def _sampling_params(self, sampling: Sampling) -> dict[str, Any]:
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": list(sampling.stop_token_ids),
            # SGLang switches all stop tokens on or off at once. With them on, the model's own end token stops too.
            "ignore_eos": not sampling.stop_token_ids,
        }
        if sampling.truncated:
            params |= {"top_k": sampling.top_k or -1, "top_p": sampling.top_p, "min_p": sampling.min_p}
        seed = sampling.seed
        if seed is None and self._seeds is not None:
            seed = self._seeds.getrandbits(63)
        if seed is not None:
            params["sampling_seed"] = seed
        return params

    @property
    def hold_s(self) -> float:
        """Seconds for which running sequences may hold up a commit."""
        return {"drain": self._drain_deadline_s, "resume": INTERRUPT_DEADLINE_S}.get(self._in_flight, 0.0)

    async def commit(self, version: int, manifest: Manifest, area: bytes, expected: dict[str, int]) -> CommitReport:
        """Replace the weights by those in an area and serve them as ``version``.

        Args:
            version: not lower than the version served.
            manifest: how the version lies in the area.
            area: handle of an :class:`~monarch_rl.weights.area.Area` of this machine that holds all of the version.
            expected: the trainer's checksum of each tensor, signed 64-bit.

        Raises:
            ValueError: the version is older than the one served, ``expected`` is not of the manifest's tensors, or the
                version is some of the weights and the others were not verified.
            StillRunning: requests did not end in time under ``drain``. The version before is served on.
            CommitError: the engine could not load them. It stays paused; a later commit may succeed.
            WeightMismatch: its checksums differ from ``expected``. It stays paused.
            EngineStopped: it is gone.
        """
        async with self._commit_lock:
            if version < self._version:
                raise ValueError(f"version {version} is older than version {self._version}, which is served")
            if self._in_part and not self._rest_verified:
                raise ValueError(
                    f"version {version} holds only the weights that have adapters, and the others are not known to be "
                    "the trainer's: call verify_frozen() first"
                )
            sheet = self._next_sheet(manifest)
            sheet.ask(expected)
            started = time.perf_counter()
            self._serving.clear()
            await self._settle_running(version)
            self._version = version
            loader = ADAPTER_LOADER if self._adapted else PART_LOADER if self._in_part else LOADER
            await self._load(loader, area, sheet, f"version {version}", f"version {version} is not served")
            cost, seconds = sheet.report(), time.perf_counter() - started
            return CommitReport(
                version, cost.nbytes, seconds, cost.stood_seconds, cost.copy_seconds, cost.checksum_seconds
            )

    async def verify_frozen(self, manifest: Manifest, expected: dict[str, int]) -> None:
        """Compare the weights that no version holds, as they are not trained, with the trainer's, where they lie.

        Args:
            manifest: of those weights, in the served dtype: with adapters, all of the model's own.
            expected: the trainer's checksum of each, signed 64-bit.

        Raises:
            WeightMismatch: the engine holds another model. It stays paused, until it is verified or a commit succeeds.
            CommitError: the engine holds them otherwise than they are saved, so that they cannot be compared.
            EngineStopped: it is gone.
        """
        async with self._commit_lock:
            sheet, size = LoadSheet(manifest, self._ranks), Area(manifest.nbytes)  # no page of it is ever touched
            sheet.ask(expected)
            self._serving.clear()
            self._rest_verified = False
            wrong = f"generator {self._replica} does not hold the model whose adapter is trained"
            await self._load(PART_VERIFIER if self._in_part else VERIFIER, size.handle, sheet, "frozen weights", wrong)
            self._rest_verified = True

    async def _load(self, loader: str, area: bytes, sheet: LoadSheet, what: str, otherwise: str) -> None:
        """Let ``loader`` run on all ranks, and serve if what they hold is the trainer's; else raise ``otherwise``."""
        self.clock.pause()
        loading = self._replace_weights(loader, area, sheet.handle)
        failures = await self._or_stopped(loading, f"{what} to be loaded")
        refusal = sheet.judge()
        if refusal is not None:
            error = WeightMismatch if refusal.differs else CommitError
            reasons = "; ".join([refusal.message, *failures])
            raise error(f"{otherwise}: {reasons}. The engine stays paused.")
        self._serving.set()
        self.clock.resume()

    def _next_sheet(self, manifest: Manifest) -> LoadSheet:
        if not self._sheets or self._sheets[0].specs != manifest.tensors:
            self._sheets = [LoadSheet(manifest, self._ranks) for _ in range(2)]
        self._sheets.reverse()
        return self._sheets[0]

    async def _settle_running(self, version: int) -> None:
        """Let no request be in SGLang under ``drain`` and ``resume``; requests that come are held back already."""
        deadline, mend = self.hold_s, "Allow more time (drain_deadline_s), draw fewer tokens a request"
        if self._in_flight == "resume":
            await asyncio.sleep(0)  # a request that was let in just now is sent in its first turn
            self._running = dict.fromkeys(self._running, True)
            self._engine.tokenizer_manager.abort_request(abort_all=True)
            mend = "The engine did not end them, though it was told to"
        if self._in_flight not in ("resume", "drain"):
            return
        try:
            what = f"requests to end before version {version}"
            await self._or_stopped(within(deadline, self._idle.wait(), what, on=self._name), what)
        except DeadlineExceeded as error:
            self._serving.set()
            raise StillRunning(
                f"version {version} is not served, version {self._version} is: {len(self._running)} requests still run "
                f"{deadline:g} s after new ones were held back. {mend}, or let sequences go on across commits "
                "(in_flight)."
            ) from error

    async def _replace_weights(self, loader: str, area: bytes, sheet: bytes) -> list[str]:
        """Let the scheduler run ``loader`` between two steps; returns what SGLang said went wrong.

        Nothing is awaited between the pause and the continuation, so that none of it waits for this process: the
        scheduler itself refuses to continue with weights that are not verified.
        """
        io, manager = _io(), self._engine.tokenizer_manager
        update = io.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[_order(rank, area, sheet) for rank in range(self._ranks)],
            load_format=loader,
            flush_cache=self._in_flight == "recompute",
            weight_version=str(self._version),
        )
        mode = "retract" if self._in_flight == "recompute" else "in_place"
        manager.auto_create_handle_loop()
        # waits: commit() gives all of these up when the engine is gone, and whoever asks for it keeps the deadline
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
        update_version = io.UpdateWeightVersionReqInput(new_version=str(self._version))
        await manager.update_weight_version(update_version)  # waits: as above
        answered = await asyncio.gather(*calls)  # waits: as above
        answers = [answer for answers in answered for answer in answers]
        return [f"SGLang said {answer.message}" for answer in answers if not answer.success]

    async def shutdown(self) -> None:
        """End SGLang's processes; requests in flight raise EngineStopped. May be called twice."""
        if Engine._in_this_process is not self:
            return
        Engine._in_this_process = None
        if not self._stopped.done():
            self._stopped.set_result("the engine was stopped")
        for process in self._processes:
            asyncio.get_running_loop().remove_reader(process.sentinel)
            presence.no_helper(process.pid)
        manager = self._engine.tokenizer_manager
        for task in manager.asyncio_tasks:
            task.cancel()
        await asyncio.to_thread(end_processes, self._engine)
        close_sockets(self._engine, manager)
        self._launcher.shutdown(wait=False)


def _order(rank: int, area: bytes, sheet: bytes) -> bytes:
    from sglang.srt.utils import MultiprocessingSerializer

    # An empty tensor travels in the message itself; any other is sent through a socket of its own.
    named = [(write_order(rank, area, sheet), torch.empty(0, dtype=torch.uint8))]
    return bytes(MultiprocessingSerializer.serialize(named))


def _io() -> Any:
    from sglang.srt.managers import io_struct

    return io_struct
