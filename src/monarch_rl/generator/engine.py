"""One SGLang engine: tokens in; tokens, log-probs and versions out; commits of new weights in flight.

``requests.py`` implements requests, ``commit.py`` commits, ``sglang_engine.py`` SGLang's processes. Use from one event
loop.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.commit import CommitReport, Commits
from monarch_rl.generator.gpu import check_environment
from monarch_rl.generator.parts import OnPart, ignore_part
from monarch_rl.generator.reading import Readings
from monarch_rl.generator.requests import Requests
from monarch_rl.generator.settings import (
    GeneratorSettings,
    check_served,
    cores_of_ranks,
    engine_arguments,
)
from monarch_rl.generator.sglang_engine import SglangEngine, io_structs
from monarch_rl.generator.sglang_format import ExpertRouteFormat
from monarch_rl.generator.version_kind import VersionKind
from monarch_rl.model.config import find_config
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings, lora_config
from monarch_rl.runtime.machine_memory import check_free, free_memory
from monarch_rl.weights.manifest import Manifest


class Engine:
    """A running SGLang engine. Build with :meth:`start`; end with :meth:`shutdown`."""

    _in_this_process: ClassVar[Engine | None] = None

    def __init__(self, sglang: SglangEngine, requests: Requests, commits: Commits) -> None:
        self._sglang = sglang
        self._commits = commits
        self.requests = requests
        """Requests that generate tokens; holds the served version, the counters and the clock of busy time."""
        self.readings = Readings(sglang, requests.clock)
        """Requests that read given tokens and generate none."""

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
        memory: Mapping[str, int] | None = None,
        **extra: Any,
    ) -> Engine:
        """Start SGLang's processes and load the model.

        Args:
            model_path: Hugging Face folder, or, without ``expert_routes``, a Hub name.
            settings: settings of all replicas.
            replica: index of this replica; its random seed depends on it.
            lora: with a rank above 0, versions are LoRA adapters: the base weights stay, and the first version has an
                adapter of zeros. With adapters on experts, versions are the weights that have adapters, with these
                merged in (:meth:`~monarch_rl.model.lora.LoraSettings.sends_merged`), and the other weights stay.
            expert_routes: whether requests may ask for the expert routes of their tokens. SGLang then stores on the
                host, for every token of its KV cache, 4 bytes per layer and chosen expert.
            name: name of the replica; empty is ``generator 0`` for replica 0.
            version: version number of the model's own weights.
            memory: planned bytes by purpose, which a machine without GPUs must have free; None checks nothing.
            extra: further SGLang ``ServerArgs``.

        Raises ValueError if the model cannot be sharded over ``settings.tp`` ranks or has no expert routes, or if a
        machine with GPUs lacks compilers; RuntimeError if SGLang does not start, or the machine has too little free
        memory.
        """
        on_gpu = torch.accelerator.is_available()
        if on_gpu:
            await asyncio.to_thread(check_environment)
        config = find_config(model_path)
        if config is not None:
            check_served(config, settings, on_gpu)
        elif expert_routes:
            raise ValueError(
                f"--trainer.router-replay needs a local model folder with config.json; {model_path!r} has none. "
                "Download the model first, or set --trainer.router-replay off"
            )
        if memory and not on_gpu:
            check_free(memory, free_memory())
        route_format = ExpertRouteFormat(config) if config is not None and expert_routes else None
        kind = VersionKind.of(config, lora)
        if Engine._in_this_process is not None:
            raise RuntimeError(
                "this process already has an engine, and SGLang's settings are global to a process: start another "
                "engine in another process"
            )
        served_lora = lora if kind.lora_name else FULL_TRAINING
        arguments = engine_arguments(model_path, settings, replica, on_gpu, served_lora) | extra
        arguments |= {"enable_return_routed_experts": expert_routes, "weight_version": str(version)}
        _set_environment(settings, replica, on_gpu)
        sglang = await SglangEngine.launch(arguments, name or f"generator {replica}", settings.tp)
        # In SGLang's deterministic mode all requests without a seed would share one.
        seeds = random.Random(settings.random_seed + replica) if on_gpu and settings.deterministic else None
        requests = Requests(
            sglang,
            version,
            slots=settings.max_running_requests,
            keeps_conversations=settings.in_flight == "continue",
            route_format=route_format,
            seeds=seeds,
        )
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
        # The adapter is pinned and in use as long as the engine lives, so requests need not acquire it.
        acquire = self._sglang.manager.lora_registry.acquire(name)
        self.requests.format.lora = name, await self._sglang.or_stopped(acquire, "the adapter's id")

    @property
    def child_pids(self) -> list[int]:
        """Pids of SGLang's processes."""
        return self._sglang.child_pids

    @property
    def max_commit_delay_s(self) -> float:
        """Longest time in seconds that a commit may wait for running sequences: the drain deadline under ``drain``, 60
        under ``resume``, otherwise 0."""
        return self._commits.max_commit_delay_s

    def check(self) -> None:
        """Raise EngineStopped if the engine is gone."""
        self._sglang.check()

    async def ended(self) -> str:
        """Wait for the end of the engine; returns the reason."""
        return await self._sglang.ended()

    async def generate(self, prompt_ids: list[int], sampling: Sampling, on_part: OnPart = ignore_part) -> Completion:
        """Generate tokens until a stop token or the length limit; waits while a commit is in progress.

        Without stop tokens only the length limit ends the request. With stop tokens, the end tokens of the model's
        config end it, too.

        With a seed, sampling noise depends only on the token position, so a resumed request samples what it would have
        sampled uninterrupted (given the same weights).

        ``on_part`` receives newly sampled tokens every ``part_tokens`` tokens, and when a commit interrupts the
        request; the tail after the last part comes only with the result. Parts have no expert routes.

        Expert routes at position i are those of the forward pass that predicted token i + 1. If SGLang computed keys
        and values again (under ``recompute``, or because its KV cache was full), they are those of the last
        computation.

        Raises GenerationError if the engine refuses or aborts the request, EngineStopped if the engine is gone.
        """
        return await self.requests.generate(prompt_ids, sampling, on_part)

    async def commit(self, version: int, manifest: Manifest, area: bytes, expected: np.ndarray) -> CommitReport:
        """Replace the weights by those in an area, and serve them as ``version``.

        Args:
            version: not lower than ``requests.version``.
            manifest: layout of the version in the area.
            area: handle of an :class:`~monarch_rl.weights.area.Area` on this machine that holds the whole version.
            expected: int64[tensors], the trainer's checksums, in the manifest's order.

        Raises:
            ValueError: the version is older than the served one, the number of checksums is wrong, or the version holds
                only some of the weights and the others were not verified.
            StillRunning: requests did not end in time; the engine still serves the previous version.
            CommitError: the engine could not load the version. It stays paused; a later commit may succeed.
            WeightMismatch: the engine's checksums differ from ``expected``. It stays paused.
            EngineStopped: the engine is gone.
        """
        return await self._commits.commit(version, manifest, area, expected)

    async def verify_base_weights(self, manifest: Manifest, expected: np.ndarray) -> None:
        """Compare the weights that no version holds, because they are not trained, with the trainer's.

        Args:
            manifest: manifest of these weights in the served dtype: with LoRA adapters, all of the model's own weights.
            expected: int64[tensors], the trainer's checksums, in the manifest's order.

        Raises:
            WeightMismatch: the engine holds another model. It stays paused until a verification or a commit succeeds.
            CommitError: the engine stores the weights in another form than the files, so they cannot be compared.
            EngineStopped: the engine is gone.
        """
        await self._commits.verify_base_weights(manifest, expected)

    async def shutdown(self) -> None:
        """End SGLang's processes; requests in flight raise EngineStopped. May be called repeatedly."""
        if Engine._in_this_process is not self:
            return
        Engine._in_this_process = None
        await self._sglang.shutdown()


def _set_environment(settings: GeneratorSettings, replica: int, on_gpu: bool) -> None:
    """Set options that SGLang reads only from the environment."""
    if settings.tp > 1 and not on_gpu:
        cores = sorted(os.sched_getaffinity(0))
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = cores_of_ranks(replica, settings.tp, cores)
    # SGLang's scheduler reports a request's tokens in steps of this many, even if the request is not streamed.
    os.environ["SGLANG_FORCE_STREAM_INTERVAL"] = str(settings.part_tokens)
