"""SGLang's engine and its processes: starting them, noticing their end, and ending them.

Starting takes 10 s or more, nearly all of it imports in two processes. SGLang's third process, the detokenizer, is not
started, because engines here return tokens only.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from monarch_rl.errors import EngineStopped
from monarch_rl.generator.error_file import ErrorFile
from monarch_rl.generator.launching import close_sockets, end_processes, launch_engine, take_over_watch
from monarch_rl.generator.scheduler_operations import SchedulerOperations
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.network import held_port


class SglangEngine:
    """A running ``sglang.Engine``. Build with :meth:`launch`; end with :meth:`shutdown`. Use from one event loop."""

    def __init__(
        self,
        engine: Any,
        launcher: ThreadPoolExecutor,
        replica: str,
        ranks: int,
        operations: SchedulerOperations | None,
        errors: ErrorFile,
    ) -> None:
        self.engine = engine
        self._errors = errors
        self.replica = replica
        """The name of the replica that hosts it."""
        self.ranks = ranks
        # SGLang's processes die with the thread that started them, so this thread must live as long as they do.
        self._launcher = launcher
        self._stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the engine has ended; holds the reason."""
        self._processes = take_over_watch(engine)
        for rank, process in enumerate(self._processes):
            name = self.name if ranks == 1 else f"{self.name} (rank {rank})"
            wait_registry.helper(process.pid, name, None if operations is None else operations.reader(rank))
            asyncio.get_running_loop().add_reader(process.sentinel, self._process_ended, process)

    @classmethod
    async def launch(cls, arguments: dict[str, Any], replica: str, ranks: int) -> SglangEngine:
        """Start SGLang's processes.

        Args:
            arguments: SGLang ``ServerArgs``.
            replica: name of the replica, such as ``"generator 0"``.
            ranks: number of tensor-parallel ranks.

        Raises RuntimeError if SGLang does not start.
        """
        launcher = ThreadPoolExecutor(1, thread_name_prefix="sglang-launch")
        operations = SchedulerOperations(ranks) if torch.accelerator.is_available() else None
        errors = ErrorFile()
        # Reserve the port on which SGLang's processes meet seconds from now: several engines may start at once.
        with held_port() as port:
            arguments = arguments | {"nccl_port": port}
            engine = await asyncio.get_running_loop().run_in_executor(launcher, launch_engine, arguments, errors)
        return cls(engine, launcher, replica, ranks, operations, errors)

    @property
    def manager(self) -> Any:
        """SGLang's tokenizer manager, which talks to its scheduler."""
        return self.engine.tokenizer_manager

    @property
    def running_requests(self) -> int:
        """Sequences that the engine decodes at once."""
        return int(self.engine.server_args.max_running_requests)

    @property
    def name(self) -> str:
        """The engine's name in messages about waits."""
        return f"the engine of {self.replica}"

    @property
    def child_pids(self) -> list[int]:
        """Pids of SGLang's processes."""
        return list(self.engine.get_all_child_pids())

    def check(self) -> None:
        """Raise EngineStopped if the engine is gone."""
        if self._stopped.done():
            raise EngineStopped(self._stopped.result())  # waits: it is done

    async def ended(self) -> str:
        """Wait for the end of the engine; returns the reason."""
        return await asyncio.shield(self._stopped)  # waits: as long as the engine lives

    async def or_stopped(self, awaitable: Any, what: str) -> Any:
        """Await ``awaitable``, or raise EngineStopped when the engine ends: SGLang itself would wait forever.

        Args:
            awaitable: completed by an answer of SGLang.
            what: description of the awaited answer, as in ``within``.
        """
        task = asyncio.ensure_future(awaitable)
        try:
            with wait_registry.waiting(what, on=self.name):
                # waits: the caller of this replica keeps the deadline; only it knows how long its request is
                await asyncio.wait({task, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = task.done()
            task.cancel()
        if finished:
            return task.result()
        raise EngineStopped(self._stopped.result())

    async def shutdown(self) -> None:
        """End SGLang's processes; pending requests raise EngineStopped."""
        if not self._stopped.done():
            self._stopped.set_result("the engine was stopped")
        for process in self._processes:
            asyncio.get_running_loop().remove_reader(process.sentinel)
            wait_registry.no_helper(process.pid)
        for task in self.manager.asyncio_tasks:
            task.cancel()
        await asyncio.to_thread(end_processes, self.engine)
        close_sockets(self.engine, self.manager)
        self._launcher.shutdown(wait=False)

    def _process_ended(self, process: Any) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        wait_registry.no_helper(process.pid)
        if not self._stopped.done():
            process.join()  # waits: it has ended
            # A process killed by a signal records no error. A recorded one is then of a rank that failed as a result.
            message = self._errors.first() if process.exitcode >= 0 else ""
            self._stopped.set_result(
                f"{self.replica}: SGLang's process {process.pid} ended unexpectedly, exit code {process.exitcode}"
                + (f": {message}" if message else "; its error is in its output")
            )


def io_structs() -> Any:
    """SGLang's module of request types; the first import takes seconds."""
    from sglang.srt.managers import io_struct

    return io_struct
