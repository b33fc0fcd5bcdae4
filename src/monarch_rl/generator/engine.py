"""One SGLang engine: tokens in, tokens out with log-probs and versions, and commits of new weights in flight.

Requests are in ``requests.py``, commits in ``commit.py``, SGLang's processes in ``sglang_engine.py``. Use from one
event loop.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any, ClassVar

import numpy as np
import torch

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.commit import CommitReport, Commits
from monarch_rl.generator.gpu import check_environment
from monarch_rl.generator.memory import free_memory
from monarch_rl.generator.parts import OnPart, ignore_part
from monarch_rl.generator.reading import Readings
from monarch_rl.generator.replica_memory import check_memory
from monarch_rl.generator.requests import BusyClock, EngineRequests, ExpertRouteFormat, TurnReads
from monarch_rl.generator.settings import (
    GeneratorSettings,
    check_served,
    cores_of_ranks,
    engine_arguments,
)
from monarch_rl.generator.sglang_engine import SglangEngine, io_structs
from monarch_rl.generator.version_kind import VersionKind
from monarch_rl.model.architecture import find_architecture
from monarch_rl.model.folder import find_config
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings, lora_config
from monarch_rl.runtime.wait_registry import Wait
from monarch_rl.weights.manifest import Manifest


class Engine:
    """A running SGLang engine. Build with :meth:`start`; end with :meth:`shutdown`."""

    _in_this_process: ClassVar[Engine | None] = None

    def __init__(self, sglang: SglangEngine, requests: EngineRequests, commits: Commits) -> None:
        self._sglang = sglang
        self._requests = requests
        self._commits = commits
        self.readings = Readings(sglang, requests.clock)
        """Its requests for which nothing is drawn."""

    @classmethod
    async def start(
        cls,
        model_path: str,
        settings: GeneratorSettings,
        replica: int = 0,
        lora: LoraSettings = FULL_TRAINING,
        expert_routes: bool = False,
        name: str = "",
        version: int = 0,
        **extra: Any,
    ) -> Engine:
        """Start SGLang's processes and load the model.

        Args:
            model_path: Hugging Face folder, or, without ``expert_routes``, a Hub name.
            settings: of all replicas.
            replica: this one's index; its random seed depends on it.
            lora: with a rank, versions are LoRA adapters: the model's own weights stay, and the first has an adapter of
                zeros. With adapters on experts they are the weights that have adapters, merged
                (:meth:`~monarch_rl.model.lora.LoraSettings.sends_merged`), and the other weights stay.
            expert_routes: requests may ask by which experts their tokens were read. SGLang keeps that on the host for
                every token of its KV cache: 4 bytes a layer and expert.
            name: what the replica calls itself; empty is ``generator 0`` for replica 0.
            version: number of the model's weights.
            extra: further SGLang ``ServerArgs``.

        Raises ValueError if the model cannot be cut for ``settings.tp`` ranks or has no expert routes, or if a machine
        with GPUs lacks compilers; RuntimeError if SGLang does not start, or the machine has too little memory free.
        """
        on_gpu = torch.accelerator.is_available()
        if on_gpu:
            await asyncio.to_thread(check_environment)
        config = find_config(model_path)
        if config is not None:
            _check_model(config, settings, lora, on_gpu)
        elif expert_routes:
            raise ValueError(f"expert routes need a model folder, with config.json in it; {model_path} is none")
        route_format = ExpertRouteFormat(config) if config is not None and expert_routes else None
        kind = VersionKind.of(config, lora)
        if Engine._in_this_process is not None:
            raise RuntimeError("there is an engine in this process already; SGLang keeps its settings per process")
        served_lora = lora if kind.lora_name else FULL_TRAINING
        arguments = engine_arguments(model_path, settings, replica, on_gpu, served_lora) | extra
        arguments |= {"enable_return_routed_experts": expert_routes, "weight_version": str(version)}
        _set_environment(settings, replica, on_gpu)
        sglang = await SglangEngine.launch(arguments, name or f"generator {replica}", settings.tp)
        # In SGLang's deterministic mode requests without a seed would all share one.
        seeds = random.Random(settings.random_seed + replica) if on_gpu and settings.deterministic else None
        continues = settings.in_flight == "continue"
        requests = EngineRequests(sglang, settings.max_running_requests, continues, route_format, seeds)
        requests.version = version
        Engine._in_this_process = started = cls(sglang, requests, Commits(sglang, requests, kind, settings))
        if kind.lora_name:
            await started._add_lora(kind.lora_name, lora, model_path)
        return started

    async def _add_lora(self, name: str, lora: LoraSettings, model_path: str) -> None:
        """Register the policy's LoRA adapter; without tensors SGLang fills it with zeros."""
        from sglang.srt.utils import MultiprocessingSerializer

        request = io_structs().LoadLoRAAdapterFromTensorsReqInput(
            lora_name=name,
            config_dict=lora_config(lora, model_path),
            serialized_named_tensors=[MultiprocessingSerializer.serialize({})] * self._sglang.ranks,
            pinned=True,
        )
        load = self._sglang.manager.load_lora_adapter_from_tensors(request, None)
        answer = await self._sglang.or_stopped(load, "the adapter to be loaded")
        if not answer.success:
            await self.shutdown()
            raise RuntimeError(f"{self._sglang.replica}: SGLang refused the adapter: {answer.error_message}")
        # It is pinned, and in use as long as the engine lives: nothing is acquired for each request.
        acquire = self._sglang.manager.lora_registry.acquire(name)
        self._requests.use_lora(name, await self._sglang.or_stopped(acquire, "the adapter's id"))

    @property
    def version(self) -> int:
        """The version that is served, or that was being loaded when a commit failed."""
        return self._requests.version

    @property
    def child_pids(self) -> list[int]:
        """SGLang's processes."""
        return self._sglang.child_pids

    @property
    def clock(self) -> BusyClock:
        """How long requests were in the engine."""
        return self._requests.clock

    @property
    def generated_tokens(self) -> int:
        """Tokens drawn since the start."""
        return self._requests.generated_tokens

    @property
    def finished_requests(self) -> int:
        """Requests answered since the start."""
        return self._requests.finished_requests

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts of those requests."""
        return self._requests.prompt_tokens

    @property
    def turn_reads(self) -> TurnReads:
        """What was read for turns that continue a conversation, since the start."""
        return self._requests.turn_reads

    @property
    def hold_s(self) -> float:
        """Seconds for which running sequences may hold up a commit."""
        return self._commits.hold_s

    def waits(self) -> list[Wait]:
        """What the requests wait for; may be called on any thread."""
        return self._requests.waits()

    def check(self) -> None:
        """Raise EngineStopped if the engine is gone."""
        self._sglang.check()

    async def ended(self) -> str:
        """Wait for the end of the engine; returns the reason."""
        return await self._sglang.ended()

    async def generate(self, prompt_ids: list[int], sampling: Sampling, on_part: OnPart = ignore_part) -> Completion:
        """Draw tokens until a stop token or the length limit; waits while a commit is going on.

        Without stop tokens only the length ends it; with some, the end tokens of the model's config do so too.

        A seed fixes the noise of each draw by the token's place in the sequence. It means the same whatever a commit
        does with running sequences: one that is resumed draws on with the noise that it would have had.

        ``on_part`` gets what the request has drawn every ``part_tokens`` tokens and where a commit ends it to resume
        it. Its parts are the beginning of the completion, never all of it, and without expert routes.

        Expert routes are those by which the token after each was drawn; where SGLang computed keys and values again on
        its own (under ``recompute``, or after its KV cache was full), those of the last time.

        Raises GenerationError if the engine refuses or aborts the request, EngineStopped if it is gone.
        """
        return await self._requests.generate(prompt_ids, sampling, on_part)

    def reset_versions(self) -> None:
        """Versions to come are another trainer's, which may have gone back to an earlier one: their numbers may have
        been served with other weights. Requests fail, and no later one finds what was read under weights of before."""
        self._requests.reset_versions()

    async def commit(self, version: int, manifest: Manifest, area: bytes, expected: np.ndarray) -> CommitReport:
        """Replace the weights by those in an area and serve them as ``version``.

        Args:
            version: not lower than the version served since :meth:`reset_versions`.
            manifest: how the version lies in the area.
            area: handle of an :class:`~monarch_rl.weights.area.Area` of this machine that holds all of the version.
            expected: int64[tensors], the trainer's checksum of each, in the manifest's order.

        Raises:
            ValueError: the version is older than the one served, ``expected`` is of another number of tensors, or the
                version is some of the weights and the others were not verified.
            StillRunning: requests did not end in time under ``drain``. The version before is served on.
            CommitError: the engine could not load them. It stays paused; a later commit may succeed.
            WeightMismatch: its checksums differ from ``expected``. It stays paused.
            EngineStopped: it is gone.
        """
        return await self._commits.commit(version, manifest, area, expected)

    async def verify_base_weights(self, manifest: Manifest, expected: np.ndarray) -> None:
        """Compare the weights that are not trained, which no version holds, with the trainer's, where they lie.

        Args:
            manifest: of those weights, in the served dtype: with LoRA adapters, all of the model's own.
            expected: int64[tensors], the trainer's checksum of each, in the manifest's order.

        Raises:
            WeightMismatch: the engine holds another model. It stays paused, until it is verified or a commit succeeds.
            CommitError: the engine holds them otherwise than they are saved, so that they cannot be compared.
            EngineStopped: it is gone.
        """
        await self._commits.verify_base_weights(manifest, expected)

    async def shutdown(self) -> None:
        """End SGLang's processes; requests in flight raise EngineStopped. May be called twice."""
        if Engine._in_this_process is not self:
            return
        Engine._in_this_process = None
        await self._sglang.shutdown()


def _check_model(config: dict[str, Any], settings: GeneratorSettings, lora: LoraSettings, on_gpu: bool) -> None:
    """Raises as :meth:`Engine.start` does."""
    check_served(config, settings, on_gpu)
    if not on_gpu and find_architecture(config) is not None:
        check_memory(config, settings, lora, free_memory())


def _set_environment(settings: GeneratorSettings, replica: int, on_gpu: bool) -> None:
    """What SGLang takes from the environment only."""
    if settings.tp > 1 and not on_gpu:
        cores = sorted(os.sched_getaffinity(0))
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = cores_of_ranks(replica, settings.tp, cores)
    # SGLang's scheduler reports what a request has drawn every this many tokens, even if it is not streamed.
    os.environ["SGLANG_FORCE_STREAM_INTERVAL"] = str(settings.part_tokens)
