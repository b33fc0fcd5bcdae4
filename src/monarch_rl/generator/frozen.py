"""Engines of frozen models, which are never trained: judges, reference and teacher models, opponents.

Requests come through a :class:`~monarch_rl.generator.dispatcher.Dispatcher`, which retries those of a lost engine.
``rollout/frozen.py`` has the handle that recipes use, ``pipeline/frozen.py`` starts and replaces engines.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
import torch
from safetensors import safe_open

from monarch_rl.episode.sampling import TopLogprobs
from monarch_rl.generator.actor import Replica
from monarch_rl.generator.settings import GeneratorSettings, resolve_dtype
from monarch_rl.model.config import read_frozen
from monarch_rl.model.tensors import expected_tensors
from monarch_rl.rollout.settings import RolloutSettings, template_options
from monarch_rl.runtime.endpoint import concurrent_endpoint, persistent_endpoint
from monarch_rl.settings.cli import NotAFlag
from monarch_rl.settings.ranges import FOREVER_S, CheckedSettings, Range
from monarch_rl.weights.area import Area
from monarch_rl.weights.checksum import tensor_checksum
from monarch_rl.weights.manifest import Manifest, lay_out


@dataclass(frozen=True)
class FrozenSettings(CheckedSettings, flags="frozen"):
    """A frozen model: its engines and its requests. Defaults are those of generators unless stated otherwise."""

    replicas: Annotated[int, Range(1, 100_000)] = 1
    """Engines, one process mesh each, each with a whole copy of the model."""
    tp: Annotated[int, Range(1, 1024)] = 1
    """Engine ranks per replica (tensor parallel), each with its own device."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Served dtype. `auto` is bfloat16 on a GPU, float32 on a CPU."""
    context_length: Annotated[int, Range(0, 100_000_000, "0 is the model's own")] = 0
    """Maximum tokens of prompt and answer together; 0 takes the model's own limit."""
    max_running_requests: Annotated[int | None, Range(1, 65_536)] = None
    """Requests that a replica computes at once; more wait in the engine. None is 256 on a GPU, and 128 on a CPU."""
    max_total_tokens: Annotated[int, Range(0, 10**9, "0 is automatic")] = 0
    """Tokens in the KV cache of a replica. 0 is what fits a GPU, and 65,536 on a CPU."""
    memory_fraction: Annotated[float, Range(0, 0.99, "0 is automatic")] = 0.0
    """Share of a GPU's memory for weights and KV cache; 0 computes it. No effect on a CPU."""
    max_new_tokens: Annotated[int, Range(1, 2**31 - 1)] = 256
    """Maximum new tokens of an answer, unless the request sets its own limit."""
    chat_options: str | None = None
    """Variables of the model's chat template, as a JSON object: {"enable_thinking": false}. None sets none, but for the
    policy's own folder takes rollout.chat-options."""
    tool_parser: str | None = None
    """SGLang's name of the format in which the model writes tool calls, such as hermes; empty: detected from the
    template. None is empty, but for the policy's own folder takes rollout.tool-parser."""
    request_deadline_s: Annotated[float, Range(0.1, FOREVER_S)] = 600.0
    """Seconds that a request may take, including the wait for the replacement of a lost replica; after that the episode
    fails."""
    request_losses: Annotated[int, Range(0, 1_000_000)] = 2
    """How many replicas may be lost during a request, which is then sent to another one. One more loss fails the
    episode: a request that crashes engines must not crash all of them."""
    start_deadline_s: NotAFlag[Annotated[float | None, Range(30, FOREVER_S)]] = None
    """Seconds within which an engine must start. None is as for a generator."""

    def chat(self, otherwise: RolloutSettings) -> tuple[dict[str, Any], str]:
        """Variables of the chat template, and the format of tool calls.

        Args:
            otherwise: settings whose values replace those that are None here.

        Raises:
            ValueError: ``chat_options`` is not a JSON object.
        """
        parser = otherwise.tool_parser if self.tool_parser is None else self.tool_parser
        if self.chat_options is None:
            return otherwise.template_options, parser
        return template_options(self.chat_options, self.flag("chat_options")), parser

    @property
    def engine(self) -> GeneratorSettings:
        """Settings with which the engines are started."""
        return GeneratorSettings(
            replicas=self.replicas,
            tp=self.tp,
            dtype=self.dtype,
            context_length=self.context_length,
            max_running_requests=self.max_running_requests,
            max_total_tokens=self.max_total_tokens,
            memory_fraction=self.memory_fraction,
            start_deadline_s=self.start_deadline_s,
            in_flight="drain",
        )


class FrozenStats(TypedDict):
    """Counters of a frozen engine since its start."""

    requests: int
    """Answered requests."""
    read_tokens: int
    """Tokens of prompts, and of sequences whose log-probs or rewards were requested."""
    drawn_tokens: int
    """Generated tokens."""
    busy_seconds: float
    """Seconds in which a request was in the engine."""
    devices: int
    pid: int
    child_pids: list[int]
    """SGLang's processes."""


class FrozenEngine(Replica):
    """A replica of a frozen model. Call ``setup`` first; send requests through a dispatcher."""

    _dtype = "auto"

    @concurrent_endpoint
    async def setup(
        self,
        name: str,
        model_path: str,
        settings: GeneratorSettings,
        index: int,
        memory: Mapping[str, int] | None = None,
    ) -> np.ndarray:
        """Start the engine and verify its weights; returns their checksums, int64[tensors].

        SGLang itself loads the folder. Then the checksum of every tensor in the folder's files is compared with that of
        the engine's parameters.

        Args:
            name: name of this process, such as ``"frozen judge 0"``.
            model_path: Hugging Face folder.
            settings: settings of all replicas.
            index: index of this replica.
            memory: see :meth:`~monarch_rl.generator.engine.Engine.start`.

        Raises:
            WeightMismatch: the engine's weights differ from the files.
        """
        await self._start(name, model_path, settings, index, memory=memory)
        self._dtype = settings.dtype
        manifest, checksums = await asyncio.to_thread(file_checksums, Path(model_path), settings.dtype)
        await self._running.verify_base_weights(manifest, checksums)
        return checksums

    @persistent_endpoint
    async def load(self, model_path: str) -> np.ndarray:
        """Serve the weights of another folder once running requests have ended; verified as in :meth:`setup`.

        Returns their checksums, int64[tensors].

        Raises:
            CommitError, WeightMismatch, OSError, SafetensorError: the weights could not be loaded; the replica is lost.
        """
        # Unreadable files, too, must end the replica: it must not continue with the previous weights.
        return await self._answered(self._load(Path(model_path)))

    async def _load(self, folder: Path) -> np.ndarray:
        manifest, area, checksums = await asyncio.to_thread(file_version, folder, self._dtype)
        engine = self._running
        await engine.commit(engine.requests.version + 1, manifest, area.handle, checksums)
        return checksums

    @persistent_endpoint
    async def logprobs(self, ids: list[int], start: int, temperature: float) -> np.ndarray:
        """See :meth:`~monarch_rl.generator.reading.Readings.logprobs`."""
        return await self._answered(self._running.readings.logprobs(ids, start, temperature))

    @persistent_endpoint
    async def top_logprobs(self, ids: list[int], k: int, start: int, temperature: float) -> TopLogprobs:
        """See :meth:`~monarch_rl.generator.reading.Readings.top_logprobs`."""
        return await self._answered(self._running.readings.top_logprobs(ids, k, start, temperature))

    @persistent_endpoint
    async def rewards(self, ids: list[int]) -> np.ndarray:
        """See :meth:`~monarch_rl.generator.reading.Readings.rewards`."""
        return await self._answered(self._running.readings.rewards(ids))

    @persistent_endpoint
    async def stats(self) -> FrozenStats:
        """Counters since the start."""
        engine = self._running
        return {
            "requests": engine.requests.finished_requests + engine.readings.requests,
            "read_tokens": engine.requests.prompt_tokens + engine.readings.tokens,
            "drawn_tokens": engine.requests.generated_tokens,
            "busy_seconds": engine.requests.clock.seconds,
            "devices": self._devices,
            "pid": os.getpid(),
            "child_pids": engine.child_pids,
        }


def file_checksums(folder: Path, dtype: str) -> tuple[Manifest, np.ndarray]:
    """The manifest of a folder's tensors in the served dtype, and their checksums, int64[tensors].

    Reads the files tensor by tensor; the engine has just read them, so they are in the page cache.
    """
    manifest = _manifest(folder, dtype)
    sums = {name: int(tensor_checksum(tensor)) for name, tensor in _tensors(folder, manifest)}
    return manifest, np.array([sums[name] for name in manifest.names], np.int64)


def file_version(folder: Path, dtype: str) -> tuple[Manifest, Area, np.ndarray]:
    """The tensors of a folder as a version that an engine can commit, and their checksums, int64[tensors]."""
    manifest = _manifest(folder, dtype)
    area, sums = Area(manifest.nbytes), dict[str, int]()
    specs = dict(zip(manifest.names, manifest.tensors, strict=True))
    for name, tensor in _tensors(folder, manifest):
        specs[name].view(area.buffer).copy_(tensor)
        sums[name] = int(tensor_checksum(tensor))
    return manifest, area, np.array([sums[name] for name in manifest.names], np.int64)


def _manifest(folder: Path, dtype: str) -> Manifest:
    served = getattr(torch, resolve_dtype(dtype, torch.accelerator.is_available()))
    specs, nbytes = lay_out((name, shape, served) for name, shape in expected_tensors(read_frozen(folder)).items())
    return Manifest(specs, nbytes, ())


def _tensors(folder: Path, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each tensor in the served dtype, file by file."""
    names = set(manifest.names)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in names & set(file.keys()):
                yield name, file.get_tensor(name).to(manifest.tensors[0].dtype)
