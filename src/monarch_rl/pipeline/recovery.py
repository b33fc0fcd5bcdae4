"""Generator replicas and rollout workers that are lost are started anew, one by one, while the rest of the run goes on.

A process is lost when it has ended or its engine has (a call that lasts as long as it lives fails), when its work
raised, when the publisher gave it up, or when the watch (``runtime/watch.py``) found that it cannot go on. Then

    a generator        leaves the routing; others draw what it owes; a new one takes its place and its devices, and
                       serves when it holds the newest version, verified
    a rollout worker   leaves its groups to others, which begin them anew in the same slots; a new one takes its place

What is lost more than ``restarts`` times within ``per_s`` seconds is not started again: the run does without it. When
all of a kind are gone it ends, with the first loss as the reason, of which the later ones may be consequences.
Each loss and each return is a line of ``losses.jsonl`` in the run's folder.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch.actor import ActorError

from monarch_rl.pipeline.actor_pool import ActorPool, last_line
from monarch_rl.pipeline.publishing import Publisher
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, DeadlineExceeded, now, within

logger = logging.getLogger("monarch_rl")


@dataclass(frozen=True)
class RecoverySettings:
    """What happens when a generator replica or a rollout worker is lost."""

    restarts: int = 3
    """How often each may be started anew within per-s; once more, and the run goes on without it. 0 is never."""
    per_s: float = 600.0
    """Seconds for which a loss counts."""

    def __post_init__(self) -> None:
        if self.restarts < 0 or self.per_s <= 0:
            raise ValueError(
                f"recovery.restarts must not be negative and recovery.per-s positive, got {self.restarts}, {self.per_s}"
            )


class AllActorsLost(RuntimeError):
    """All processes of a kind are lost; the message has the first cause."""


@dataclass(frozen=True, slots=True)
class _Loss:
    name: str
    cause: Exception
    when: float


class Recovery:
    """Replaces lost processes of the two crews; :meth:`tended` while it should, :meth:`rolling_out` inside that.

    Args:
        folder: of the run, for ``losses.jsonl``; None writes none.
    """

    def __init__(
        self,
        generators: ActorPool,
        workers: ActorPool,
        publisher: Publisher,
        buffer: Any,
        settings: RecoverySettings,
        folder: Path | None = None,
    ) -> None:
        self._generators, self._workers = generators, workers
        self._publisher, self._buffer, self._settings = publisher, buffer, settings
        self._file = folder / "losses.jsonl" if folder is not None else None
        self._told: dict[str, asyncio.Future[Exception]] = {}
        """Where to say that a process is lost, by its name; there while it is thought to live."""
        self._losses: dict[str, deque[_Loss]] = {}
        """By name, those that still count."""
        self._given_up: dict[str, set[int]] = {generators.kind: set(), workers.kind: set()}
        """By kind, those that are not started again."""
        self._first: dict[str, _Loss] = {}
        """By kind, the first of the losses each of which came within ``per_s`` of the one before."""
        self._latest: dict[str, _Loss] = {}
        """By kind, the last one."""
        self._tasks: asyncio.TaskGroup | None = None
        self._playing: dict[int, asyncio.Task[None]] | None = None
        """The workers' runs, while they play."""
        self._lost = self._returned = 0

    # -- for the recipe --------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def tended(self) -> AsyncIterator[None]:
        """Replace what is lost while the block runs.

        Raises:
            AllActorsLost: nobody of a kind is left.
        """
        self._publisher.on_lost = self._publisher_lost
        try:
            async with asyncio.TaskGroup() as self._tasks:
                keepers = [
                    self._tasks.create_task(self._keep(pool, index))
                    for pool in (self._generators, self._workers)
                    for index in pool.handles
                ]
                yield
                for keeper in keepers:
                    keeper.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # the others followed from it
        finally:
            self._publisher.on_lost = None

    @asynccontextmanager
    async def rolling_out(self) -> AsyncIterator[None]:
        """Workers play while the block runs, those that come meanwhile, too; then the buffer is closed."""
        self._playing = {}
        for index in self._workers.handles:
            self._play(index)
        yield
        await within(CALL_DEADLINE_S, self._buffer.close.call_one(), "the buffer to close", on="buffer")
        playing, self._playing = self._playing, None
        await asyncio.gather(*playing.values())  # waits: they end with the buffer; lost ones have ended

    async def recover(self, culprit: str) -> bool:
        """Take note that ``culprit`` (``"generator 1"``, ``"the engine of generator 1"``) cannot go on.

        Returns:
            Whether the run can do without it: it belongs to a crew that others are left of, or can be replaced.
        """
        for pool in (self._generators, self._workers):
            # A process that has not said its name yet goes by its mesh and its rank there.
            found = re.search(rf"\b{pool.kind} (\d+)|^{pool.mesh}(\d+) \d+$", culprit)
            if found is None:
                continue
            culprits = int(found[1] or found[2])
            name, others = pool.name(culprits), any(index != culprits for index in pool.handles)
            if others or (pool.replaceable and len(self._counting(name)) < self._settings.restarts):
                self._tell(name, RuntimeError(f"{culprit} is stopped, or does not go on"))
                return True
        return False

    def metrics(self) -> dict[str, float]:
        """By the names of docs/metrics.md."""
        return {"recovery/lost": float(self._lost), "recovery/returned": float(self._returned)}

    # -- one process -----------------------------------------------------------------------------------------------

    async def _keep(self, pool: ActorPool, index: int) -> None:
        """Wait for the loss of a process and start another one, again and again, until it is given up."""
        while True:
            cause = await self._loss_of(pool, index)
            lost = now()
            await self._take_leave(pool, index, cause)
            while self._may_start_again(pool, index, cause):
                try:
                    await self._start_again(pool, index)
                    break
                except Exception as error:  # counted as a loss: what fails again and again is given up
                    cause = error
                    self._note(pool.name(index), f"did not start: {last_line(error)}", cause=str(error))
            else:
                await pool.stop(index)
                self._give_up(pool, index, cause)
                return
            self._returned += 1
            self._note(pool.name(index), f"is back after {now() - lost:.1f} s", back_after_s=now() - lost)

    async def _loss_of(self, pool: ActorPool, index: int) -> Exception:
        """Why a process is lost, as soon as it is."""
        if pool is self._generators and index in self._publisher.lost:  # before it was tended
            return RuntimeError(self._publisher.lost[index])
        told = self._told[pool.name(index)] = asyncio.get_running_loop().create_future()
        living = asyncio.ensure_future(_life(pool.handles[index]))
        try:
            await asyncio.wait({living, told}, return_when=asyncio.FIRST_COMPLETED)  # waits: as long as it lives
        finally:
            del self._told[pool.name(index)]
            living.cancel()
        if told.done():
            return told.result()
        return living.result()

    def _tell(self, name: str, cause: Exception) -> None:
        told = self._told.get(name)
        if told is not None and not told.done():
            told.set_result(cause)

    def _publisher_lost(self, index: int, why: str) -> None:
        self._tell(self._generators.name(index), RuntimeError(why))

    async def _take_leave(self, pool: ActorPool, index: int, cause: Exception) -> None:
        """See to it that nobody waits for a process that is lost."""
        name = pool.name(index)
        self._lost += 1
        self._note(name, f"is lost: {last_line(cause)}", cause=str(cause))
        pool.handles.pop(index)
        if pool is self._generators:
            await self._publisher.remove_replica(index, last_line(cause))
            return
        await pool.stop(index)  # before its groups go to others: it could still ask for them
        if self._playing is not None and index in self._playing:
            self._playing.pop(index).cancel()
        release = self._buffer.release.call_one(name)
        groups = await within(CALL_DEADLINE_S, release, f"the buffer to take back the groups of {name}", on="buffer")
        if groups:
            logger.warning("%d groups of %s begin anew: %s", len(groups), name, ", ".join(map(str, groups)))

    async def _start_again(self, pool: ActorPool, index: int) -> None:
        if pool is self._workers:
            await self._start_worker(index)
            return
        await pool.stop(index)
        handle = await pool.start(index)
        replace = "to take note of a new generator"
        answers = await self._workers.ask(
            CALL_DEADLINE_S, replace, lambda _, worker: worker.replace.call_one(index, handle)
        )
        for other in self._workers.handles.keys() - answers.keys():  # it would ask the old one again and again
            self._tell(self._workers.name(other), RuntimeError(f"it did not take note of the new generator {index}"))
        await self._publisher.add(index, handle)

    async def _start_worker(self, index: int) -> None:
        await self._workers.stop(index)
        known = dict(self._generators.latest)
        worker = await self._workers.start(index)
        while new := {i: g for i, g in self._generators.latest.items() if known[i] is not g}:  # came meanwhile
            for other, generator in new.items():
                name = self._workers.name(index)
                what = f"{name} to take note of a new generator"
                await within(CALL_DEADLINE_S, worker.replace.call_one(other, generator), what, on=name)
            known |= new
        await self._publisher.update_dispatch()
        if self._playing is not None and index not in self._playing:  # they may have begun to play meanwhile
            self._play(index)

    def _play(self, index: int) -> None:
        assert self._tasks is not None and self._playing is not None, "rolling_out belongs inside tended"
        self._playing[index] = self._tasks.create_task(self._run(index, self._workers.handles[index]))

    async def _run(self, index: int, worker: Any) -> None:
        try:
            await worker.run.call_one()  # waits: as long as the run; lost processes are Monarch's to report
        except Exception as error:
            if isinstance(_origin(error), DeadlineExceeded):  # it waited in vain for somebody else: so does the run
                raise
            self._tell(self._workers.name(index), error)

    # -- how often -------------------------------------------------------------------------------------------------

    def _counting(self, name: str) -> deque[_Loss]:
        """The losses of a process that still count."""
        losses = self._losses.setdefault(name, deque())
        while losses and losses[0].when < now() - self._settings.per_s:
            losses.popleft()
        return losses

    def _may_start_again(self, pool: ActorPool, index: int, cause: Exception) -> bool:
        losses = self._counting(pool.name(index))
        loss = _Loss(pool.name(index), cause, now())
        losses.append(loss)
        latest = self._latest.get(pool.kind)
        if latest is None or latest.when < now() - self._settings.per_s:
            self._first[pool.kind] = loss
        self._latest[pool.kind] = loss
        return pool.replaceable and len(losses) <= self._settings.restarts

    def _give_up(self, pool: ActorPool, index: int, cause: Exception) -> None:
        """Go on without a process, or raise if nobody of its kind is left."""
        given_up = self._given_up[pool.kind]
        given_up.add(index)
        name, losses = pool.name(index), self._losses[pool.name(index)]
        left = [pool.name(other) for other in pool.latest if other not in given_up]
        if left:
            self._note(name, f"is not started again; the run goes on with {', '.join(left)}", given_up=True)
            return
        first = self._first[pool.kind]
        raise AllActorsLost(
            f"no {pool.kind} is left. The first loss was that of {first.name}: {str(first.cause).strip()}"
            + (f"\nThe last one was that of {name}, {len(losses)} times: {last_line(cause)}" if len(losses) > 1 else "")
        )

    def _note(self, name: str, what: str, **values: object) -> None:
        logger.warning("%s %s", name, what)
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps({"time": time.time(), "who": name} | values) + "\n")


def _origin(error: BaseException) -> BaseException:
    """What was raised, beneath Monarch's errors of calls from one actor to the next."""
    while isinstance(error, ActorError):
        error = error.exception
    return error


async def _life(handle: Any) -> Exception:
    """Return what ended a process, when it has ended."""
    try:
        await handle.lives.call_one()  # waits: as long as the run
    except Exception as error:
        return error
    return RuntimeError("it ended by itself")
