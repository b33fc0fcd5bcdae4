"""Recovery: lost generators, frozen engines and rollout workers are replaced while the rest of the run continues.

A request that a lost replica had not answered is retried in ``generator/dispatcher.py``; a run that ended is resumed in
``pipeline/resume.py``.

A process counts as lost when it or its engine has ended (a persistent call to it fails), when its work raised, when the
publisher removed it, or when the watch (``watch/watch.py``) found that it makes no progress. Then

    generator        receives no more requests; other replicas complete its pending ones; a new process takes over its
                     index and devices, and serves once it has loaded and verified the newest version
    frozen engine    receives no more requests; its pending ones are sent again; a new process takes over its index and
                     devices, and serves once its weights are verified
    rollout worker   other workers restart its groups in the same slots; a new process takes over its index

A process that is lost more than ``restarts`` times within ``per_s`` seconds is removed, and the run continues without
it. When all processes of a kind are removed, the run ends. It reports the first loss, which may have caused the others.
Each loss and each return is a line of ``failures.jsonl`` in the run's folder.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from monarch.actor import ActorError

from monarch_rl.buffer.actor import Buffer
from monarch_rl.episode.failure import Failure
from monarch_rl.errors import AllActorsLost, DeadlineExceeded
from monarch_rl.generator.actor import Generator
from monarch_rl.observe.disk_thread import DiskThread
from monarch_rl.observe.lines import LineFile
from monarch_rl.pipeline.actor_pool import ANSWER_DEADLINE_S, ActorPool, last_line
from monarch_rl.pipeline.frozen import FrozenPool
from monarch_rl.pipeline.publishing import Publisher
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, lose, now, within
from monarch_rl.runtime.endpoint import concurrent_endpoint
from monarch_rl.runtime.killed import advice
from monarch_rl.settings.cli import NotAFlag
from monarch_rl.settings.ranges import FOREVER_S, CheckedSettings, Range

logger = logging.getLogger("monarch_rl")

FAILURES_FILE = "failures.jsonl"
"""File in the run's folder with a line for each loss and each return."""


@dataclass(frozen=True)
class RecoverySettings(CheckedSettings, flags="recovery"):
    """What happens when a generator replica, a frozen engine or a rollout worker is lost."""

    restarts: Annotated[int, Range(0, 1_000_000, "0 is never")] = 3
    """Times that each process may be restarted within 10 minutes; 0 is never. After one more loss the run continues
    without it."""
    per_s: NotAFlag[Annotated[float, Range(0, FOREVER_S, above=True)]] = 600.0
    """Seconds for which a loss counts towards `restarts`."""


class Living(Protocol):
    """An actor whose end can be awaited."""

    @concurrent_endpoint
    async def block_until_lost(self) -> None:
        """Never return; raise when the process has ended or cannot work."""


L = TypeVar("L", bound=Living)


class _Stuck(RuntimeError):
    """The watch has found a process that cannot continue.

    Args:
        group: group of the episode that blocks it, if known.
    """

    def __init__(self, why: str, group: int | None) -> None:
        super().__init__(why)
        self.group = group


def _blocking(cause: Exception) -> tuple[int, Failure] | None:
    """The group whose episode has blocked its worker, and how it failed; None if the worker was lost otherwise."""
    if not isinstance(cause, _Stuck) or cause.group is None:
        return None
    report = (
        f"{cause}. The group of its episode is dropped. Await asyncio.to_thread(...) for blocking calls, and give them "
        "deadlines of their own."
    )
    return cause.group, Failure("episode blocked its worker", report=report)


class Recovery:
    """Replaces lost processes inside a :meth:`supervising` block, which must enclose :meth:`rolling_out`.

    Args:
        folder: the run's folder, for ``failures.jsonl``; None writes none.
    """

    def __init__(
        self,
        generators: ActorPool[Generator],
        workers: ActorPool[RolloutWorker],
        publisher: Publisher,
        buffer: Buffer,
        settings: RecoverySettings,
        folder: Path | None = None,
        frozen: Sequence[FrozenPool] = (),
    ) -> None:
        self._generators, self._workers, self._frozen = generators, workers, frozen
        self._publisher, self._buffer, self._settings = publisher, buffer, settings
        self._losses = LostProcesses(settings.per_s, folder / FAILURES_FILE if folder is not None else None)
        self._loss_reports: dict[str, asyncio.Future[Exception]] = {}
        """For each process that is considered alive, by name: resolves to the cause of its loss."""
        self._removed: dict[str, set[int]] = {pool.kind: set(pool.lost) for pool in self._pools}
        """Indices that are not restarted, by kind."""
        self._tasks: asyncio.TaskGroup | None = None
        self._running: dict[int, asyncio.Task[None]] | None = None
        """The workers' ``run`` calls by index, inside :meth:`rolling_out`."""

    @property
    def _pools(self) -> list[ActorPool[Any]]:
        # Frozen models come first: a name such as "frozen generator 0" also matches the kind "generator".
        return [*self._frozen, self._generators, self._workers]

    # -- called by the run -----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def supervising(self, *background: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Replace lost processes while the block runs.

        Args:
            background: coroutines to run concurrently with the block; an error of one ends the block and is raised.

        Raises:
            AllActorsLost: no process of a kind is left.
        """
        self._publisher.replicas.on_lost = self._report_loss
        try:
            async with asyncio.TaskGroup() as self._tasks:
                keeping = [self._keep(pool, index) for pool in self._pools for index in pool.handles]
                supervisors = [self._tasks.create_task(each) for each in (*keeping, *background)]
                yield
                for supervisor in supervisors:
                    supervisor.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # the others are its consequences
        finally:
            self._publisher.replicas.on_lost = None
            self._losses.close()

    @asynccontextmanager
    async def rolling_out(self) -> AsyncIterator[None]:
        """Have all workers, including replacements, roll out groups while the block runs; then close the buffer."""
        self._running = {}
        for index in self._workers.handles:
            self._begin_run(index)
        yield
        await within(CALL_DEADLINE_S, self._buffer.close.call_one(), "the buffer to close", on="buffer")
        running, self._running = self._running, None
        await asyncio.gather(*running.values())  # waits: they end with the buffer; lost ones have ended

    async def recover(self, culprit: str, state: str, group: int | None = None) -> bool:
        """Replace a stuck process, if the run can continue without it.

        Args:
            culprit: the watch's name for the process, such as ``"generator 1"`` or ``"the engine of generator 1"``.
            state: its state, for the cause of the loss: "has blocked its event loop for 15 s at ...".
            group: group of the episode that blocks it. It is dropped, since it would block the next worker, too.

        Returns:
            Whether the run can continue: the process belongs to a pool that has other processes left, or in which it
            can be replaced.
        """
        for pool in self._pools:
            # A process that has not reported its name yet is named by its mesh and its rank there.
            match = re.search(rf"\b{pool.kind} (\d+)|^{pool.mesh}(\d+) \d+$", culprit)
            if match is None:
                continue
            lost = int(match[1] or match[2])
            name, others_left = pool.name(lost), any(index != lost for index in pool.handles)
            if others_left or (pool.replaceable and self._losses.recent(name) < self._settings.restarts):
                self._report_loss(name, _Stuck(f"{culprit} {state}", group))
                return True
        return False

    def metrics(self) -> dict[str, float]:
        """Metrics, named as in docs/metrics.md."""
        return {"recovery/lost": float(self._losses.lost), "recovery/returned": float(self._losses.returned)}

    # -- one process -----------------------------------------------------------------------------------------------

    async def _keep(self, pool: ActorPool[L], index: int) -> None:
        """Replace a process each time it is lost, until it is removed."""
        name = pool.name(index)
        while True:
            cause = await self._loss_of(pool, index)
            lost = now()
            self._losses.note_lost(name, cause)
            lose(name, last_line(cause))
            pool.handles.pop(index)
            await self._detach(pool, index, cause)
            while self._may_restart(pool, index, cause):
                try:
                    await pool.stop(index)
                    await self._replace(pool, index)
                    break
                except Exception as error:  # counts as a loss: a process that fails repeatedly is removed
                    cause = error
                    self._losses.note_failed_start(name, error)
            else:
                await pool.stop(index)
                self._remove(pool, index, cause)
                return
            self._losses.note_returned(name, now() - lost)

    async def _detach(self, pool: ActorPool[Any], index: int, cause: Exception) -> None:
        """Have the other processes stop using a lost one."""
        if pool is self._generators:
            await self._publisher.remove_replica(index, last_line(cause))
        elif isinstance(pool, FrozenPool):
            await pool.note_lost_engine(self._workers)
        else:
            await self._detach_worker(index, cause)

    async def _replace(self, pool: ActorPool[Any], index: int) -> None:
        """Start a replacement for a lost process."""
        if pool is self._generators:
            await self._start_generator(index)
        elif isinstance(pool, FrozenPool):
            await self._start_frozen(pool, index)
        else:
            await self._start_worker(index)

    async def _loss_of(self, pool: ActorPool[L], index: int) -> Exception:
        """Wait until a process is lost; returns why."""
        if pool is self._generators and index in self._publisher.replicas.lost:  # lost before supervision began
            return RuntimeError(self._publisher.replicas.lost[index])
        report = self._loss_reports[pool.name(index)] = asyncio.get_running_loop().create_future()
        end = asyncio.ensure_future(_end_of(pool.handles[index]))
        try:
            await asyncio.wait({end, report}, return_when=asyncio.FIRST_COMPLETED)  # waits: as long as it lives
        finally:
            del self._loss_reports[pool.name(index)]
            end.cancel()
        return report.result() if report.done() else end.result()

    def _report_loss(self, name: str, cause: Exception) -> None:
        report = self._loss_reports.get(name)
        if report is not None and not report.done():
            report.set_result(cause)

    def _may_restart(self, pool: ActorPool[L], index: int, cause: Exception) -> bool:
        """Count a loss; returns whether the process may be restarted."""
        name = pool.name(index)
        self._losses.count(pool.kind, name, cause)
        return pool.replaceable and self._losses.recent(name) <= self._settings.restarts

    def _remove(self, pool: ActorPool[L], index: int, cause: Exception) -> None:
        """Continue without a process. Raises AllActorsLost if no other of its kind is left."""
        removed = self._removed[pool.kind]
        removed.add(index)
        others = [pool.name(other) for other in pool.latest if other not in removed]
        if not others:
            raise AllActorsLost(self._losses.explain(pool.kind, pool.name(index), cause))
        self._losses.note_removed(pool.name(index), others)

    async def _start_generator(self, index: int) -> None:
        handle = await self._generators.start(index)
        what = "to register a new generator"
        answers = await self._workers.ask(
            CALL_DEADLINE_S, what, lambda _, worker: worker.replace.call_one(index, handle)
        )
        missing = sorted(self._workers.handles.keys() - answers.keys())
        self._lose_workers(missing, f"generator {index}")
        await self._publisher.add(index, handle)

    def _lose_workers(self, indices: Sequence[int], engine: str) -> None:
        # A worker that did not register a new engine would keep sending requests to the old one.
        for index in indices:
            self._report_loss(self._workers.name(index), RuntimeError(f"it did not register the new {engine}"))

    async def _start_frozen(self, pool: FrozenPool, index: int) -> None:
        await pool.start(index)
        self._lose_workers(await pool.note_new_engine(self._workers, index), pool.name(index))
        await pool.note_lost_engine(self._workers)

    async def _detach_worker(self, index: int, cause: Exception) -> None:
        """Stop a lost worker, and have other workers restart its groups, except one whose episode has blocked it."""
        name = self._workers.name(index)
        await self._workers.stop(index)  # before its groups are requeued: it might still request them
        if self._running is not None and index in self._running:
            self._running.pop(index).cancel()
        requeue = self._buffer.requeue.call_one(name, _blocking(cause))
        groups = await within(CALL_DEADLINE_S, requeue, f"the buffer to requeue the groups of {name}", on="buffer")
        if groups:
            logger.warning("%d groups of %s are restarted: %s", len(groups), name, ", ".join(map(str, groups)))

    async def _start_worker(self, index: int) -> None:
        registered = dict(self._generators.latest)
        frozen = [dict(pool.latest) for pool in self._frozen]
        worker = await self._workers.start(index)
        # The worker was set up with the handles above; generators may have been replaced meanwhile.
        while new := {i: g for i, g in self._generators.latest.items() if registered[i] is not g}:
            for other, generator in new.items():
                name = self._workers.name(index)
                what = f"{name} to register a new generator"
                await within(CALL_DEADLINE_S, worker.replace.call_one(other, generator), what, on=name)
            registered |= new
        for pool, before in zip(self._frozen, frozen, strict=True):
            for other in [i for i, handle in pool.latest.items() if before[i] is not handle]:
                self._lose_workers(await pool.note_new_engine(self._workers, other), pool.name(other))
            await pool.note_lost_engine(self._workers)
        await self._publisher.replicas.notify_workers()
        if self._running is not None and index not in self._running:  # rolling_out may have started it meanwhile
            self._begin_run(index)

    def _begin_run(self, index: int) -> None:
        assert self._tasks is not None and self._running is not None, "rolling_out belongs inside supervising"
        self._running[index] = self._tasks.create_task(self._run(index, self._workers.handles[index]))

    async def _run(self, index: int, worker: RolloutWorker) -> None:
        try:
            await worker.run.call_one()  # waits: as long as the run; Monarch reports lost processes
        except Exception as error:
            if isinstance(_origin(error), DeadlineExceeded):  # its wait for another process timed out: end the run
                raise
            await self._check_buffer(error)
            self._report_loss(self._workers.name(index), error)

    async def _check_buffer(self, error: Exception) -> None:
        """Raise ``error`` if the buffer is lost: then all workers fail, and none of them is to blame."""
        try:
            call = self._buffer.counts.call_one()
            await within(ANSWER_DEADLINE_S, call, "the buffer to report that it is alive", on="buffer")
        except Exception as lost:
            raise error from lost


def _origin(error: BaseException) -> BaseException:
    """The original error, unwrapped from Monarch's errors of nested actor calls."""
    while isinstance(error, ActorError):
        error = error.exception
    return error


async def _end_of(handle: Living) -> Exception:
    """Wait for the end of a process; returns its cause."""
    try:
        await handle.block_until_lost.call_one()  # waits: as long as the run
    except Exception as error:
        return error
    return RuntimeError("it ended on its own")


# -- lost processes: how often each was lost, the first cause, and the file ``failures.jsonl`` -------------------------


@dataclass(frozen=True, slots=True)
class LostProcess:
    """The loss of a process, or the failed start of its replacement."""

    name: str
    """The process's name in messages."""
    cause: Exception
    when: float
    """Time of the loss, in seconds of the event loop's clock."""


class LostProcesses:
    """Counts losses per process and per kind, and writes them to a file.

    Args:
        per_s: seconds for which a loss counts.
        file: file to which a JSON object is appended per loss and return; None writes none.
    """

    def __init__(self, per_s: float, file: Path | None) -> None:
        self._per_s, self._file = per_s, None if file is None else LineFile(file)
        self._disk: DiskThread | None = None
        self.lost = self.returned = 0
        """Numbers of lost and of replaced processes."""
        self._recent: dict[str, deque[LostProcess]] = {}
        """The losses of each process that still count, by name."""
        self._first: dict[str, LostProcess] = {}
        """By kind, the first of a series of losses in which each came within ``per_s`` of the previous one."""
        self._latest: dict[str, LostProcess] = {}
        """By kind, the latest loss."""

    def count(self, kind: str, name: str, cause: Exception) -> None:
        """Count a loss of process ``name``, now."""
        self.recent(name)  # forgets the old ones
        loss = LostProcess(name, cause, now())
        self._recent[name].append(loss)
        latest = self._latest.get(kind)
        if latest is None or latest.when < now() - self._per_s:
            self._first[kind] = loss
        self._latest[kind] = loss

    def recent(self, name: str) -> int:
        """How often process ``name`` was lost in the last ``per_s`` seconds."""
        losses = self._recent.setdefault(name, deque())
        while losses and losses[0].when < now() - self._per_s:
            losses.popleft()
        return len(losses)

    def explain(self, kind: str, name: str, cause: Exception) -> str:
        """Why no process of a kind is left. ``name`` is the last one, lost because of ``cause``."""
        first, times = self._first[kind], len(self._recent[name])
        text = f"no {kind} is left. The first loss was that of {first.name}: {str(first.cause).strip()}"
        if times > 1:
            text += f"\nThe last one was that of {name}, {times} times: {last_line(cause)}"
        return text

    # -- the log and the file --------------------------------------------------------------------------------------

    def note_lost(self, name: str, cause: Exception) -> None:
        """Record that a process is lost."""
        self.lost += 1
        self._note(name, f"is lost: {last_line(cause)}{advice(name, str(cause))}", cause=str(cause))

    def note_failed_start(self, name: str, cause: Exception) -> None:
        """Record that the replacement of a lost process did not start."""
        self._note(name, f"did not start: {last_line(cause)}", cause=str(cause))

    def note_returned(self, name: str, seconds: float) -> None:
        """Record that a replacement works, ``seconds`` after the loss."""
        self.returned += 1
        self._note(name, f"is back after {seconds:.1f} s", back_after_s=seconds)

    def note_removed(self, name: str, others: list[str]) -> None:
        """Record that a lost process is not replaced."""
        self._note(name, f"is not restarted; the run continues with {', '.join(others)}", removed=True)

    def close(self) -> None:
        """Finish pending writes, and close the file until the next loss."""
        disk, self._disk = self._disk, None
        if disk is not None:
            disk.close()

    def _note(self, name: str, text: str, **values: object) -> None:
        logger.warning("%s %s", name, text)
        if (file := self._file) is None:
            return
        if self._disk is None:
            self._disk = DiskThread(file.path.name, file.close)
        line = json.dumps({"time": time.time(), "who": name} | values)
        self._disk.begin(lambda: file.append(line), lambda: file.lose(1, "the disk is stalled"))
