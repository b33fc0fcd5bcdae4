"""The watch over a run: it finds a process that cannot go on, or a run in which nothing advances, says why, and acts.

It runs on a thread of its own in the controller, with its own event loop, so it also notices a controller whose loop is
blocked. Every ``stall_s / 5`` seconds it polls the monitors of all processes (``runtime/monitor.py``) and inspects each
process from outside. It acts on

- a culprit: a process that for ``stall_s`` seconds was stopped, or neither answered nor was at work, or had an event
  loop that did not run while it was not at work; or whose device did not end a piece of work in its time
  (``runtime/device_work.py``); or whose loss went unnoticed for 2.5 times as long. It acts even if other processes
  still advance: they will miss what the culprit holds;
- a stall: nothing has advanced for :data:`STUCK_FACTOR` times ``stall_s``, or for three times the longest pause of the
  run so far, no process that the trainer waits for uses the CPU or waits for something outside the run, and none is
  starved. Progress is: a step trained, a group put, a version published, tokens drawn, a held-out item played. A
  dropped group is none (a run that only drops groups, but draws for them, is ended by ``pipeline/failures.py``). It is
  no stall if the recipe's own code asks for nothing meanwhile, which is said in a warning.

A process that uses the CPU is at work, for however long, and so is one that is ready to use it and gets no core: a
machine that starves the run is no stall, and is said in a warning. What it delays is bounded by the deadlines of those
who wait for it (:class:`~monarch_rl.runtime.deadlines.Patience`). A GPU at work needs the CPU, too: PyTorch polls it,
also one that hangs. So a process with a device says what it waits for, and how long that may take.
What is outside the run, such as an environment's service, has deadlines of its own.

To act, it logs one message that follows the waits from the trainer to the culprit, with the stacks of the processes in
between, and writes it to ``stall-*.txt`` in the run's folder; then it calls ``recover``. The culprit is killed in any
case, so that nobody waits for it; if ``recover`` could not replace it, the run ends with :class:`Stalled`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from monarch_rl.runtime import starvation, wait_registry
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import DeadlineExceeded, Patience, on_disk, within
from monarch_rl.runtime.wait_registry import CONTROLLER
from monarch_rl.watch.process_poller import ASK_DEADLINE_S, LoopLag, ProcessPoller
from monarch_rl.watch.stall import Process, RunPicture, describe_chain, list_processes

logger = logging.getLogger("monarch_rl")

STALL_S = 15.0
"""Default: a thousand times what an answer takes, and less than the 20 s after which Monarch reports a silent process
as lost, with less detail (``cluster.py``)."""
STUCK_FACTOR = 2
"""A run that is merely stuck gets this many times ``stall_s``, because nothing is broken."""
POLLS = 5
"""Polls in ``stall_s``."""
FAILED_POLLS = 5
"""Polls that may fail one after another before the watch gives up: a single one may meet a process that just ends."""
STARVED_SAID_EVERY_S = 600.0
"""Seconds between two warnings that the machine starves the run, at least."""
WATCH = "the watch"
"""Name of the watch as a caller of the processes' monitors: the next one in this process takes its place there."""
END_S = 20.0
"""Seconds for the controller to leave its loop cleanly; then its process exits."""
RECOVER_DEADLINE_S = 5.0
"""Seconds for ``recover`` to say whether the run can go on. The replacement itself comes later."""

Recover = Callable[[str], Awaitable[bool]]
"""Takes a culprit's name; true if the run can go on."""


class Stalled(RuntimeError):
    """The run could not go on. The message says who waited for what, down to the cause."""


class Watch:
    """The watch of one run; see the top of this file. :func:`watched` makes, starts and stops it."""

    def __init__(
        self, cluster: Cluster, folder: Path, stall_s: float, recover: Recover | None, grace_s: float = 0.0
    ) -> None:
        if stall_s <= 0:
            raise ValueError(f"stall_s must be positive, got {stall_s}")
        self.stalled: Stalled | None = None
        """Why the run was ended."""
        self._folder, self._stall_s, self._recover = folder, stall_s, recover
        self._end_s = END_S + grace_s
        self._interval_s = stall_s / POLLS
        self._lag = LoopLag()
        self._poller = ProcessPoller(cluster, stall_s, self._interval_s, self._lag)
        self._pauses = Patience(math.inf, floor_s=STUCK_FACTOR * stall_s, factor=3.0)
        self._pauses.record(0.0)  # compilation and warm-up use the CPU, so the first step needs no longer limit
        self._last_advance = time.monotonic()
        self._heartbeat = wait_registry.Heartbeat()
        """Of the watch's own loop."""
        self._pause_reported = False
        """The present pause has been logged."""
        self._starved_said_at = -math.inf
        self._ended = threading.Event()
        self._deciding, self._left = threading.Lock(), False
        """Whether the run has ended by itself, so that the watch does not end it any more."""
        self._exit_timer: threading.Timer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main_loop, self._main_task = asyncio.get_running_loop(), asyncio.current_task()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    # -- for the controller ----------------------------------------------------------------------------------------

    def loop_lag(self) -> dict[str, float]:
        """Metrics of event-loop lag since the last call, by kind of actor, in milliseconds: see docs/metrics.md."""
        return self._lag.metrics()

    def start(self) -> None:
        starvation.warn_if_not_counted()
        self._thread.start()

    def leave(self) -> Stalled | None:
        """The run has ended. Returns why, if the watch has ended it; from here on it does not."""
        with self._deciding:
            self._left = True
            return self.stalled

    def stop(self) -> None:
        """End the watch. Blocks for a moment."""
        self._ended.set()
        self._thread.join(3 * ASK_DEADLINE_S)
        if self._exit_timer is not None:  # the rest of the end has deadlines of its own
            self._exit_timer.cancel()

    async def explain(self, error: Exception) -> None:
        """Log what the watch knows of an error that ends the run: who waits for whom, if a deadline has passed, else
        the processes that have ended. Others fail because of these, and Monarch may report them minutes later."""
        if self._loop is None:
            return
        late = isinstance(error, DeadlineExceeded) or isinstance(getattr(error, "exception", None), DeadlineExceeded)
        reporting = asyncio.run_coroutine_threadsafe(self._report_waits() if late else self._report_ended(), self._loop)
        try:
            await within(3 * ASK_DEADLINE_S, asyncio.wrap_future(reporting), "a report of the watch", on=CONTROLLER)
        except Exception as failed:  # it must not hide the error that ends the run
            logger.error("no report could be made: %s", failed)

    async def _report_waits(self) -> None:
        await self._report(await self._poller.picture(), time.monotonic() - self._last_advance)

    async def _report_ended(self) -> None:
        picture = await self._poller.picture()
        for process in picture.processes.values():
            if process.lost:
                logger.error("%s (process %s) has ended", process.name, process.pid)

    # -- on the watch's own thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except Exception:
            logger.exception("the watch over the run has failed: only the deadlines of waits will end a stall")

    async def _watch(self) -> None:
        self._loop = asyncio.get_running_loop()
        wait_registry.name_loop(WATCH)
        beating = self._loop.create_task(self._heartbeat.run())
        failed = 0
        self._poller.add_new()
        while not self._ended.is_set():
            await asyncio.to_thread(self._ended.wait, self._interval_s)
            try:
                await self._poll()
                self._poller.add_new()
                failed = 0
            except Exception as error:
                failed += 1
                if failed == FAILED_POLLS or self.stalled is not None:  # never end a run twice
                    raise
                logger.warning("a poll of the watch over the run has failed; it goes on", exc_info=error)
        beating.cancel()
        self._poller.close()

    async def _poll(self) -> None:
        # Asked before and after the picture: one whose times include a stop of this process is wrong.
        if self._did_not_run() or self._ended.is_set():
            return
        picture = await self._poller.picture()
        if self._did_not_run() or self._ended.is_set():
            return
        self._note_progress(picture)
        self._warn_if_starved(picture)
        await self._check(picture)

    def _did_not_run(self) -> bool:
        """Whether this process was stopped or starved since the last call, so that it does not know what the others
        did meanwhile; then all times start again. A picture or a report that takes long is none: the loop runs."""
        lost_s = sum(self._heartbeat.take_lags()) + self._heartbeat.overdue_s()
        if lost_s <= self._stall_s / 2:
            return False
        self._reset_timers(lost_s)
        return True

    def _reset_timers(self, lost_s: float = 0.0) -> None:
        self._last_advance = time.monotonic()
        self._poller.reset_silence(lost_s)

    def _note_progress(self, picture: RunPicture) -> None:
        now, advanced = time.monotonic(), self._last_advance
        for process in picture.processes.values():
            report = process.report
            if report is not None and report.progress:
                age = report.now - max(progress.last for progress in report.progress.values()) + process.silent_s
                advanced = max(advanced, now - age - self._interval_s)
        if advanced > self._last_advance:
            if advanced - self._last_advance > 1.0:  # shorter pauses are too many to record
                self._pauses.record(advanced - self._last_advance)
            self._last_advance, self._pause_reported = advanced, False

    def _warn_if_starved(self, picture: RunPicture) -> None:
        starved, now = picture.starved(), time.monotonic()
        if starved and now - self._starved_said_at >= STARVED_SAID_EVERY_S:
            self._starved_said_at = now
            worst = starved[0]
            logger.warning(
                "the machine gives the run too little CPU: %s was ready to run and had no core for %.0f %% of the last "
                "%g s. Starved processes in all: %d. This is no stall: the run goes on, with longer deadlines",
                worst.name,
                100 * worst.queued_share,
                self._stall_s,
                len(starved),
            )

    async def _check(self, picture: RunPicture) -> None:
        culprits = picture.culprits()
        paused_s = time.monotonic() - self._last_advance
        stuck = paused_s >= self._pauses.limit_s
        if not culprits and (not stuck or self._pause_reported):
            return
        if not culprits and picture.at_work():
            self._pause_reported = True
            sentence = describe_chain(picture.chain(), self._stall_s)
            logger.warning("nothing has advanced for %.0f s, but a process is at work: %s", paused_s, sentence)
            return
        if not culprits and picture.recipe_waits():
            self._pause_reported = True
            logger.warning(
                "nothing has advanced for %.0f s: the recipe's own code has asked the run for nothing since. The run "
                "goes on when it does",
                paused_s,
            )
            return
        message = await self._report(picture, paused_s)
        replaced = [culprit for culprit in culprits if await self._try_recover(culprit.name)]
        if culprits and replaced == culprits:
            await asyncio.gather(*(self._poller.kill(culprit) for culprit in culprits))
            self._reset_timers()
            return
        await self._end(message, culprits)

    async def _report(self, picture: RunPicture, paused_s: float) -> str:
        """Log the chain with the stacks of its processes, write all that is known to a file, return the message."""
        chain = picture.chain()
        message = f"{describe_chain(chain, self._stall_s)}. Nothing has advanced for {paused_s:.0f} s."
        involved = {link.process.name: link.process for link in chain}
        involved |= {process.name: process for process in picture.culprits()}
        reading = [self._poller.stacks(process) for process in involved.values()]
        texts = await asyncio.gather(*reading, return_exceptions=True)  # without them there is still a culprit
        stacks = "\n".join(f"--- {name}\n{text}" for name, text in zip(involved, texts, strict=True))
        everybody = list_processes(picture.processes.values(), self._stall_s)
        path = self._folder / f"stall-{time.strftime('%H%M%S')}.txt"
        text = f"{message}\n\nAll processes and what they wait for:\n{everybody}\n\nStacks:\n{stacks}\n"
        try:
            write = partial(path.write_text, text, encoding="utf-8", errors="backslashreplace")
            await on_disk(ASK_DEADLINE_S, f"the report {path}", write)
            where = f"Every process and its waits are in {path}."
        except OSError as error:  # the disk is full, or the folder is gone: the run must end all the same
            where = f"The report could not be written to {path} ({error}):\n{everybody}\n"
        logger.error("the run does not go on: %s\n%s Stacks:\n%s", message, where, stacks)
        return message

    async def _try_recover(self, culprit: str) -> bool:
        if self._recover is None or culprit == CONTROLLER:  # a controller that hangs cannot run ``recover``
            return False
        on_main = asyncio.run_coroutine_threadsafe(_awaited(self._recover(culprit)), self._main_loop)
        try:
            what = f"{culprit} to be replaced"
            return await within(RECOVER_DEADLINE_S, asyncio.wrap_future(on_main), what, on=CONTROLLER)
        except Exception as error:
            logger.error("%s could not be replaced: %s", culprit, error)
            return False

    async def _end(self, message: str, culprits: list[Process]) -> None:
        """End the run. Kill the culprits once its calls are cancelled: stopped processes would delay the end."""
        with self._deciding:
            if self._left:
                return
            self.stalled = Stalled(message)
            self._exit_timer = threading.Timer(self._end_s, _exit_at_once, (message, self._end_s))
            self._exit_timer.daemon = True
            self._exit_timer.start()
            if self._main_task is not None:
                self._main_loop.call_soon_threadsafe(self._main_task.cancel)
        await asyncio.to_thread(self._ended.wait, ASK_DEADLINE_S)
        for process in culprits:
            if process.name != CONTROLLER:
                await self._poller.kill(process)
        self._ended.set()


async def _awaited(awaitable: Awaitable[bool]) -> bool:
    return await awaitable  # waits: _try_recover keeps the deadline


def _exit_at_once(message: str, limit_s: float) -> None:
    logger.error("not ended %g s after a stall was found: ending at once. %s", limit_s, message)
    os._exit(1)


@asynccontextmanager
async def watched(
    cluster: Cluster,
    folder: Path,
    stall_s: float = STALL_S,
    recover: Recover | None = None,
    grace_s: float = 0.0,
) -> AsyncIterator[Watch]:
    """Watch over the run while the block runs.

    Args:
        cluster: its processes are watched, also those that are spawned later.
        folder: where ``stall-*.txt`` is written.
        stall_s: seconds after which a process that cannot go on is a culprit.
        recover: asked to replace a culprit, or to go on without it, before the run ends because of it. Called on the
            event loop of the block. Without it the run ends.
        grace_s: that the block may take on top of :data:`END_S` to end.

    Raises:
        Stalled: the run could not go on.
        ValueError: ``stall_s`` is not positive.
    """
    wait_registry.register(CONTROLLER)
    watch = Watch(cluster, folder, stall_s, recover, grace_s)
    watch.start()
    try:
        yield watch
    except Exception as error:
        if (stalled := watch.leave()) is not None:
            raise stalled from error
        await watch.explain(error)
        raise
    except asyncio.CancelledError:
        if (stalled := watch.leave()) is None:
            raise
        raise stalled from None
    finally:
        await _stopped(watch)
        wait_registry.unregister(CONTROLLER)


async def _stopped(watch: Watch) -> None:
    """Stop ``watch``. If it has cancelled this task, that may come only now, and is not to hide what is raised."""
    stalled = watch.leave()
    stopping = asyncio.ensure_future(asyncio.to_thread(watch.stop))
    try:
        await asyncio.wait([stopping])  # waits: for a thread that ends within a deadline
    except asyncio.CancelledError:
        await asyncio.wait([stopping])  # waits: the same
        if stalled is None:
            raise
