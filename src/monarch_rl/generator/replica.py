"""What every actor that hosts an SGLang engine has: requests and their answers, its life and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import torch
from monarch.actor import Port

from monarch_rl.episode.sampling import Completion, GenerationError, Sampling
from monarch_rl.generator.connection import Answering
from monarch_rl.generator.engine import Engine
from monarch_rl.generator.parts import OnPart
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.generator.sglang_engine import EngineStopped
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint, lasting_endpoint, one_way_endpoint
from monarch_rl.runtime.lasting_calls import ResilientActor
from monarch_rl.runtime.process import freeze_heap

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
