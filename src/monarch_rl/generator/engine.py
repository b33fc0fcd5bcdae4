"""One SGLang engine: tokens in, tokens out with log-probs and versions, and commits of new weights in flight.

A commit is: pause in place (running sequences keep their KV cache) -> copy from staging -> checksums of what the
engine now holds -> compare -> continue. If they differ the engine stays paused: it serves a verified version or
nothing. A request keeps going across a commit, and each of its tokens carries the version that drew it.

The prefix cache is kept apart per version: a request that comes after a commit never starts from keys and values of
older weights. One that came in the last moment before it may, like a sequence that was running already.

Use from one event loop. Starting takes 10 s and more, nearly all of it imports in two processes; SGLang's third
process, the detokenizer, is not started, since tokens never become text here.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import psutil
import torch

from monarch_rl.episode import Completion, Sampling
from monarch_rl.generator.scheduler_process import SchedulerTarget, quiet_imports
from monarch_rl.generator.settings import LOADER, GeneratorSettings, engine_arguments
from monarch_rl.weights.manifest import list_names
from monarch_rl.weights.staging import Staging

KILL_SECONDS = 10.0
"""How long a killed engine process may take to be gone."""


class GenerationError(RuntimeError):
    """A request was refused or aborted; the message is the engine's."""


class EngineStopped(RuntimeError):
    """The engine was stopped, or its process ended by itself: no request can be answered."""


class CommitError(RuntimeError):
    """A version could not be loaded; the engine stays paused and serves nothing."""


class WeightMismatch(CommitError):
    """What the engine loaded is not what the trainer has; the engine stays paused and serves nothing."""


@dataclass(frozen=True, slots=True)
class CommitReport:
    """What a commit cost this replica."""

    version: int
    nbytes: int
    """Bytes copied from staging to the engine."""
    paused_seconds: float
    """From the pause to the continuation: decoding stood still at most this long."""
    copy_seconds: float
    """Of those, staging to parameters; the first commit also finds where each tensor lives."""
    checksum_seconds: float
    """Of those, checksums of the engine's parameters."""


class Engine:
    """A running SGLang engine. Build with :meth:`start`; end with :meth:`shutdown`."""

    _in_this_process: ClassVar[Engine | None] = None

    def __init__(
        self, engine: Any, launcher: ThreadPoolExecutor, replica: int, seeds: random.Random | None, places: int
    ) -> None:
        self._engine = engine
        self._replica = replica
        # Requests queue here and not in SGLang: one that waits there across a commit would start from the
        # prefix cache of the version at which it came.
        self._places = asyncio.Semaphore(places)
        # SGLang's processes die with the thread that started them, so that thread must live as long as they do.
        self._launcher = launcher
        self._seeds = seeds
        self._version = 0
        self._serving = asyncio.Event()
        self._serving.set()
        self._stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the engine is no more; holds the reason."""
        self._commit_lock = asyncio.Lock()
        self.clock = BusyClock()
        self.generated_tokens = 0
        self.finished_requests = 0
        self._processes = _take_over_watch(engine)
        for process in self._processes:
            asyncio.get_running_loop().add_reader(process.sentinel, self._process_ended, process)

    @classmethod
    async def start(cls, model_path: str, settings: GeneratorSettings, replica: int = 0, **extra: Any) -> Engine:
        """Start SGLang's processes and load the model as version 0.

        Args:
            model_path: Hugging Face folder or Hub name.
            settings: of all replicas.
            replica: this one's index; its random seed depends on it.
            extra: further SGLang ``ServerArgs``.
        """
        if Engine._in_this_process is not None:
            raise RuntimeError("there is an engine in this process already; SGLang keeps its settings per process")
        on_gpu = torch.accelerator.is_available()
        arguments = engine_arguments(model_path, settings, replica, on_gpu) | extra
        launcher = ThreadPoolExecutor(1, thread_name_prefix="sglang-launch")
        engine = await asyncio.get_running_loop().run_in_executor(launcher, _launch, arguments)
        # In SGLang's deterministic mode requests without a seed would all share one.
        seeds = random.Random(settings.random_seed + replica) if on_gpu and settings.deterministic else None
        Engine._in_this_process = cls(engine, launcher, replica, seeds, settings.max_running_requests)
        return Engine._in_this_process

    @property
    def version(self) -> int:
        """The version that is served, or that was being loaded when a commit failed."""
        return self._version

    @property
    def child_pids(self) -> list[int]:
        """SGLang's processes."""
        return list(self._engine.get_all_child_pids())

    def check(self) -> None:
        """Raise EngineStopped if the engine is gone."""
        if self._stopped.done():
            raise EngineStopped(self._stopped.result())

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """Draw tokens until a stop token or the length limit; waits while a commit is going on.

        Without stop tokens only the length ends it; with some, the end tokens of the model's config do so too.

        Raises GenerationError if the engine refuses or aborts the request, EngineStopped if it is gone.
        """
        async with self._places:
            # Held here and not by SGLang: the prefix cache's version must be that of the weights it is used with.
            while not self._serving.is_set():
                await self._or_stopped(self._serving.wait())
            self.check()
            return await self._draw(prompt_ids, sampling)

    async def _draw(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        self.clock.enter()
        try:
            answer = await self._or_stopped(
                self._engine.async_generate(
                    input_ids=prompt_ids,
                    sampling_params=self._sampling_params(sampling),
                    return_logprob=True,
                    cache_salt=str(self._version),
                )
            )
        except ValueError as error:
            raise GenerationError(str(error)) from error
        finally:
            self.clock.leave()
        completion = to_completion(answer)
        self.generated_tokens += len(completion.token_ids)
        self.finished_requests += 1
        return completion

    async def _or_stopped(self, awaitable: Any) -> Any:
        """SGLang's requests wait for ever once its processes are gone."""
        task = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait({task, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = task.done()
            task.cancel()
        if finished:
            return task.result()
        raise EngineStopped(self._stopped.result())

    def _process_ended(self, process: Any) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        if not self._stopped.done():
            process.join()
            self._stopped.set_result(
                f"generator {self._replica}: SGLang's process {process.pid} ended by itself, exit code "
                f"{process.exitcode}; what it said last is in its output"
            )

    def _sampling_params(self, sampling: Sampling) -> dict[str, Any]:
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": list(sampling.stop_token_ids),
            # SGLang switches all stop tokens on or off at once. With them on, the model's own end token stops too.
            "ignore_eos": not sampling.stop_token_ids,
        }
        seed = sampling.seed
        if seed is None and self._seeds is not None:
            seed = self._seeds.getrandbits(63)
        if seed is not None:
            params["sampling_seed"] = seed
        return params

    async def commit(self, version: int, staging: Staging, expected: dict[str, int]) -> CommitReport:
        """Replace the weights by those in ``staging`` and serve them as ``version``.

        Args:
            version: not lower than the version served.
            staging: holds all of the version.
            expected: the trainer's checksum of each tensor, signed 64-bit.

        Raises:
            CommitError: the engine could not load them. It stays paused; a later commit may succeed.
            WeightMismatch: its checksums differ from ``expected``. It stays paused.
            EngineStopped: it is gone.
        """
        async with self._commit_lock:
            if version < self._version:
                raise ValueError(f"version {version} is older than version {self._version}, which is served")
            started = time.perf_counter()
            self._serving.clear()
            self.clock.pause()
            self._version = version
            await self._or_stopped(self._load(version, staging))
            loaded = staging.read_report()
            if loaded.error is not None:
                raise CommitError(f"version {version} could not be loaded: {loaded.error}")
            compare(version, staging, expected)
            await self._engine.tokenizer_manager.continue_generation(_io().ContinueGenerationReqInput())
            self._serving.set()
            self.clock.resume()
            paused = time.perf_counter() - started
            return CommitReport(version, loaded.nbytes, paused, loaded.copy_seconds, loaded.checksum_seconds)

    async def _load(self, version: int, staging: Staging) -> None:
        """Pause, and let the scheduler run ``load_staged.load``."""
        from sglang.srt.utils import MultiprocessingSerializer

        io, manager = _io(), self._engine.tokenizer_manager
        staging.reset_report()
        await manager.pause_generation(io.PauseGenerationReqInput(mode="in_place"))
        request = io.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(staging.named_tensors())],
            load_format=LOADER,
            flush_cache=False,
            weight_version=str(version),
        )
        answers = [await manager.begin_weight_update(io.BeginWeightUpdateReqInput(), None)]
        answers.append(await manager.update_weights_from_tensor(request, None))
        answers.append(await manager.end_weight_update(io.EndWeightUpdateReqInput(), None))
        failures = [message for success, message in answers if not success]
        if failures:
            raise CommitError(f"version {version} could not be loaded: SGLang said {'; '.join(failures)}")

    async def shutdown(self) -> None:
        """End SGLang's processes; requests in flight raise EngineStopped. May be called twice."""
        if Engine._in_this_process is not self:
            return
        Engine._in_this_process = None
        if not self._stopped.done():
            self._stopped.set_result("the engine was stopped")
        for process in self._processes:
            asyncio.get_running_loop().remove_reader(process.sentinel)
        manager = self._engine.tokenizer_manager
        for task in manager.asyncio_tasks:
            task.cancel()
        await asyncio.to_thread(_end_processes, self._engine)
        self._launcher.shutdown(wait=False)


class BusyClock:
    """Seconds in which at least one request was in the engine and no commit was going on."""

    def __init__(self) -> None:
        self._requests = 0
        self._paused = False
        self._since: float | None = None
        self._total = 0.0

    @property
    def requests(self) -> int:
        return self._requests

    @property
    def seconds(self) -> float:
        return self._total + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def enter(self) -> None:
        self._requests += 1
        self._update()

    def leave(self) -> None:
        self._requests -= 1
        self._update()

    def pause(self) -> None:
        self._paused = True
        self._update()

    def resume(self) -> None:
        self._paused = False
        self._update()

    def _update(self) -> None:
        busy = self._requests > 0 and not self._paused
        if busy and self._since is None:
            self._since = time.perf_counter()
        elif not busy and self._since is not None:
            self._total += time.perf_counter() - self._since
            self._since = None


def to_completion(answer: dict[str, Any]) -> Completion:
    """Read SGLang's answer to one request. Raises GenerationError if the request was aborted."""
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    if reason["type"] not in ("stop", "length"):
        raise GenerationError(f"the engine ended the request with {reason}")
    tokens = np.asarray(answer["output_ids"], np.int32)
    logprobs = np.fromiter((entry[0] for entry in meta["output_token_logprobs"]), np.float32, len(tokens))
    versions = np.full(len(tokens), -1, np.int32)
    for span in meta["weight_versions"]:
        versions[span["start"] : span["end"]] = int(span["version"])
    if (versions < 0).any():
        raise GenerationError(f"SGLang gave no version for some of {len(tokens)} tokens: {meta['weight_versions']}")
    return Completion(tokens, logprobs, versions, reason["type"])


def compare(version: int, staging: Staging, expected: dict[str, int]) -> None:
    """Raise WeightMismatch if the checksums that the loader wrote are not those ``expected``."""
    found = dict(zip(staging.manifest.names, staging.checksums.tolist(), strict=True))
    wrong = [name for name in found if found[name] != expected.get(name)]
    wrong += [f"{name} (not in the manifest)" for name in expected if name not in found]
    if wrong:
        raise WeightMismatch(
            f"version {version}: {len(wrong)} of {len(found)} tensors differ from the trainer's: "
            f"{list_names(wrong)}. The engine stays paused."
        )


def _io() -> Any:
    from sglang.srt.managers import io_struct

    return io_struct


def _launch(arguments: dict[str, Any]) -> Any:
    quiet_imports()
    import sglang.srt.entrypoints.engine as sglang_engine

    class TokenEngine(sglang_engine.Engine):
        run_scheduler_process_func = SchedulerTarget()

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *_: Any, **__: Any) -> tuple[list[Any], list[str]]:
            """None: with ``skip_tokenizer_init`` the scheduler answers directly."""
            return [], []

    before = multiprocessing.active_children()
    try:
        return TokenEngine(**arguments)
    except BaseException:
        for process in multiprocessing.active_children():
            if process not in before:
                process.kill()
        raise


def _take_over_watch(engine: Any) -> list[Any]:
    """Stop SGLang's watchdog, which ends this whole process by SIGQUIT; returns the processes it watched."""
    watchdog = engine.tokenizer_manager._subprocess_watchdog
    watchdog.stop()
    return list(watchdog._processes)


def _end_processes(engine: Any) -> None:
    """SGLang's own shutdown kills every child of this process; this ends only the engine's."""
    atexit.unregister(engine.shutdown)
    victims = []
    for pid in engine.get_all_child_pids():
        try:
            process = psutil.Process(pid)
            victims += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    for process in victims:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(victims, timeout=KILL_SECONDS)
    if alive:
        raise RuntimeError(f"SGLang's processes {[p.pid for p in alive]} are still there {KILL_SECONDS} s after a kill")
