"""The watch: it detects processes that cannot continue and runs in which nothing advances, reports why, and acts.

It runs on its own thread and event loop in the controller, so it also notices a controller whose event loop is blocked.
Every ``stall_s / 5`` seconds it polls the monitors of all processes (``runtime/monitor.py``) and inspects each process
from outside. It acts on

- a culprit: a process that for ``stall_s`` seconds was stopped, or neither answered nor was at work, or had an event
  loop that did not run while it was not at work; or whose GPU operation exceeded its limit
  (``runtime/device_work.py``); or whose loss went unnoticed for 2.5 times as long. The watch acts even if other
  processes still advance, because they will need what the culprit holds;
- a stall: nothing has advanced for :data:`STUCK_FACTOR` times ``stall_s``, or for three times the longest pause of the
  run so far, no process that the trainer waits for uses the CPU or waits for something outside the run, and none is
  starved. The run advances when a step is trained, a group is submitted, a version is published, tokens are sampled, or
  the rollout of a held-out item ends, but not when a group is dropped (a run that samples tokens but only drops groups
  is ended by ``pipeline/failures.py``). It is not a stall, but a warning, if the recipe's own code calls nothing
  meanwhile.

A process that uses the CPU is at work for any length of time, and so is one that is ready to use it but gets no core: a
machine that starves the run causes a warning, not a stall. The deadlines of the processes that wait for it bound the
delay (:class:`~monarch_rl.runtime.deadlines.Patience`). CPU use does not show whether a GPU works or hangs, because
PyTorch polls it either way, so a process with a device reports its GPU operation and the time limit for it. Services
outside the run, such as an environment's, have their own deadlines.

When it acts, the watch logs one message that follows the waits from the trainer to the culprit, with the stacks of the
processes in between, and writes it to ``stall-*.txt`` in the run's folder; then it calls ``recover``. The culprit is
killed in any case, so that no process waits for it. If ``recover`` could not replace it, the run ends with
:class:`Stalled`.
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

from monarch_rl.errors import DeadlineExceeded, Stalled
from monarch_rl.runtime import starvation, wait_registry
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import Patience, on_disk, within
from monarch_rl.runtime.wait_registry import CONTROLLER
from monarch_rl.watch.process_poller import ASK_DEADLINE_S, LAG_ALARM_S, LoopLag, ProcessPoller
from monarch_rl.watch.span_collector import SpanCollector
from monarch_rl.watch.stall import Process, RunPicture, describe_chain, list_processes

logger = logging.getLogger("monarch_rl")

STALL_S = 15.0
"""Default ``stall_s``: a thousand times the duration of an answer, and less than the 20 s after which Monarch reports a
silent process as lost, with less detail (``cluster.py``)."""
STUCK_FACTOR = 2
"""A run in which nothing advances, but no process is a culprit, gets this many times ``stall_s``."""
POLLS = 5
"""Number of polls per ``stall_s``."""
FAILED_POLLS = 5
"""Consecutive failed polls after which the watch gives up. A single one may fail because a process is just ending."""
STARVED_WARN_EVERY_S = 600.0
"""Minimum seconds between two warnings that the machine starves the run."""
WATCH = "the watch"
"""Name of the watch as a caller of the process monitors. The next watch in this process replaces it there."""
END_S = 20.0
"""Seconds for the controller to leave its loop cleanly; then its process exits."""
RECOVER_DEADLINE_S = 5.0
"""Seconds for ``recover`` to decide whether the run can continue. The replacement itself comes later."""

Recover = Callable[[str, str, int | None], Awaitable[bool]]
"""Takes a culprit's name, its state, in words that complete a sentence beginning with the name, and the group of the
episode that blocks it, if known; returns whether the run can continue."""


class Watch:
    """The watch of one run; see the top of this file. :func:`watched` creates, starts and stops it."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        stall_s: float,
        recover: Recover | None,
        grace_s: float = 0.0,
        timeline: bool = False,
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
        self._spans = SpanCollector(cluster, folder) if timeline else None
        self._pauses = Patience(math.inf, floor_s=STUCK_FACTOR * stall_s, factor=3.0)
        self._pauses.record(0.0)  # compilation and warm-up use the CPU, so the first step needs no longer limit
        self._last_advance = time.monotonic()
        self._picture = RunPicture()
        """The last one."""
        self._heartbeat = wait_registry.Heartbeat()
        """Heartbeat of the watch's own event loop."""
        self._pause_reported = False
        """Whether the current pause of the run has been logged."""
        self._starved_warned_at = -math.inf
        self._ended = threading.Event()
        self._deciding, self._left = threading.Lock(), False
        """Whether the run has ended on its own, so that the watch must not end it."""
        self._exit_timer: threading.Timer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main_loop, self._main_task = asyncio.get_running_loop(), asyncio.current_task()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    # -- for the controller ----------------------------------------------------------------------------------------

    def loop_lag(self) -> dict[str, float]:
        """Metrics of event-loop lag since the last call, by kind of actor, in milliseconds: see docs/metrics.md."""
        return self._lag.metrics()

    def lost_spans(self) -> int:
        """Number of spans of work and waits so far that are not in the run's timeline."""
        return 0 if self._spans is None else self._spans.lost

    def timeline_cpu_s(self) -> float:
        """CPU seconds since the last call that all processes spent on the run's timeline."""
        return 0.0 if self._spans is None else self._spans.cpu_s()

    def state_of(self, name: str) -> str:
        """How a process was silent or blocked at the last poll; completes a sentence that begins with its name. Empty
        if it was not."""
        process = self._picture.processes.get(name)
        if process is None or max(process.silent_s, process.blocked_s) < LAG_ALARM_S:
            return ""
        return process.describe(LAG_ALARM_S)

    def start(self) -> None:
        starvation.warn_if_not_counted()
        self._thread.start()

    def leave(self) -> Stalled | None:
        """Declare that the run has ended, so that the watch no longer ends it. Returns why, if the watch has ended
        it."""
        with self._deciding:
            self._left = True
            return self.stalled

    def stop(self) -> None:
        """End the watch. Blocks for a moment."""
        self._ended.set()
        self._thread.join(3 * ASK_DEADLINE_S)
        if self._exit_timer is not None:  # the rest of the shutdown has its own deadlines
            self._exit_timer.cancel()

    async def explain(self, error: Exception) -> None:
        """Log the context of an error that ends the run: all waits if a deadline was exceeded, else the processes that
        have ended. Other processes fail because of these, which Monarch may only report minutes later."""
        if self._loop is None:
            return
        late = isinstance(error, DeadlineExceeded) or isinstance(getattr(error, "exception", None), DeadlineExceeded)
        reporting = asyncio.run_coroutine_threadsafe(self._report_waits() if late else self._report_ended(), self._loop)
        try:
            await within(3 * ASK_DEADLINE_S, asyncio.wrap_future(reporting), "a report of the watch", on=CONTROLLER)
        except Exception as failed:  # it must not hide the error that ends the run
            logger.error("the watch could not report on the error that ends the run: %s", failed)

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
            logger.exception("the watch has failed: from now on only the deadlines of waits end a stall")

    async def _watch(self) -> None:
        self._loop = asyncio.get_running_loop()
        wait_registry.name_loop(WATCH)
        beating = self._loop.create_task(self._heartbeat.run())
        failed = 0
        self._add_new()
        while not self._ended.is_set():
            await asyncio.to_thread(self._ended.wait, self._interval_s)
            try:
                await self._poll()
                self._add_new()
                failed = 0
            except Exception as error:
                failed += 1
                if failed == FAILED_POLLS or self.stalled is not None:  # never end a run twice
                    raise
                logger.warning("a poll of the watch has failed; it continues", exc_info=error)
        beating.cancel()
        self._poller.close()
        if self._spans is not None:
            await self._spans.close()

    def _add_new(self) -> None:
        self._poller.add_new()
        if self._spans is not None:
            self._spans.add_new()

    async def _poll(self) -> None:
        # Checked before and after the picture: its times are wrong if they include a stop of this process.
        if self._did_not_run() or self._ended.is_set():
            return
        picture = self._picture = await self._poller.picture()
        if self._did_not_run() or self._ended.is_set():
            return
        self._note_progress(picture)
        self._warn_if_starved(picture)
        await self._check(picture)

    def _did_not_run(self) -> bool:
        """Whether this process was stopped or starved since the last call, so that it missed what the others did; if
        so, restarts all timers. A slow picture or report does not count, because the loop runs meanwhile."""
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
        if starved and now - self._starved_warned_at >= STARVED_WARN_EVERY_S:
            self._starved_warned_at = now
            worst = starved[0]
            logger.warning(
                "the machine gives the run too little CPU: %s was ready to run but had no core for %.0f %% of the last "
                "%g s. Starved processes in total: %d. This is not a stall: the run continues, with longer deadlines",
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
                "nothing has advanced for %.0f s, because the recipe's own code has not called the run since then. The "
                "run continues when it does",
                paused_s,
            )
            return
        message = await self._report(picture, paused_s)
        replaced = [culprit for culprit in culprits if await self._try_recover(culprit)]
        if culprits and replaced == culprits:
            await asyncio.gather(*(self._poller.kill(culprit) for culprit in culprits))
            self._reset_timers()
            return
        await self._end(message, culprits)

    async def _report(self, picture: RunPicture, paused_s: float) -> str:
        """Log the chain with the stacks of its processes, write the full report to a file, and return the message."""
        chain = picture.chain()
        message = f"{describe_chain(chain, self._stall_s)}. Nothing has advanced for {paused_s:.0f} s."
        involved = {link.process.name: link.process for link in chain}
        involved |= {process.name: process for process in picture.culprits()}
        reading = [self._poller.stacks(process) for process in involved.values()]
        texts = await asyncio.gather(*reading, return_exceptions=True)  # the report is useful without stacks, too
        stacks = "\n".join(f"--- {name}\n{text}" for name, text in zip(involved, texts, strict=True))
        all_processes = list_processes(picture.processes.values(), self._stall_s)
        path = self._folder / f"stall-{time.strftime('%H%M%S')}.txt"
        text = f"{message}\n\nAll processes and what they wait for:\n{all_processes}\n\nStacks:\n{stacks}\n"
        try:
            write = partial(path.write_text, text, encoding="utf-8", errors="backslashreplace")
            await on_disk(ASK_DEADLINE_S, f"the report {path}", write)
            where = f"Every process and its waits are in {path}."
        except OSError as error:  # the disk is full, or the folder is gone: the run must end nevertheless
            where = f"The report could not be written to {path} ({error}):\n{all_processes}\n"
        logger.error("the run cannot continue: %s\n%s Stacks:\n%s", message, where, stacks)
        return message

    async def _try_recover(self, process: Process) -> bool:
        culprit, state = process.name, process.describe(self._stall_s)
        group = process.report.blocking_group if process.report is not None else None
        if self._recover is None or culprit == CONTROLLER:  # a controller that hangs cannot run ``recover``
            return False
        on_main = asyncio.run_coroutine_threadsafe(_awaited(self._recover(culprit, state, group)), self._main_loop)
        try:
            what = f"{culprit} to be replaced"
            return await within(RECOVER_DEADLINE_S, asyncio.wrap_future(on_main), what, on=CONTROLLER)
        except Exception as error:
            logger.error("%s could not be replaced: %s", culprit, error)
            return False

    async def _end(self, message: str, culprits: list[Process]) -> None:
        """End the run. Kills the culprits once the run's calls are cancelled, because stopped processes would delay the
        end."""
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
    return await awaitable  # waits: _try_recover enforces the deadline


def _exit_at_once(message: str, limit_s: float) -> None:
    logger.error("the run has not ended %g s after a stall was found: ending it at once. %s", limit_s, message)
    os._exit(1)


@asynccontextmanager
async def watched(
    cluster: Cluster,
    folder: Path,
    stall_s: float = STALL_S,
    recover: Recover | None = None,
    grace_s: float = 0.0,
    timeline: bool = False,
) -> AsyncIterator[Watch]:
    """Watch the run while the block runs.

    Args:
        cluster: cluster whose processes are watched, including those spawned later.
        folder: folder for ``stall-*.txt``.
        stall_s: seconds after which a process that cannot continue is a culprit.
        recover: called to replace a culprit, or to continue without it, before the run is ended because of it. Runs on
            the event loop of the block. Without it the run ends.
        grace_s: seconds that the block may take to end, in addition to :data:`END_S`.
        timeline: whether to write the timeline of all processes to ``folder``: see ``watch/span_collector.py``.

    Raises:
        Stalled: the run could not continue.
        ValueError: ``stall_s`` is not positive.
    """
    wait_registry.register(CONTROLLER)
    watch = Watch(cluster, folder, stall_s, recover, grace_s, timeline)
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
    """Stop ``watch``. If the watch has cancelled this task, the cancellation may arrive only now; it must not replace
    the exception that is being raised."""
    stalled = watch.leave()
    stopping = asyncio.ensure_future(asyncio.to_thread(watch.stop))
    try:
        await asyncio.wait([stopping])  # waits: for a thread that ends within a deadline
    except asyncio.CancelledError:
        await asyncio.wait([stopping])  # waits: the same
        if stalled is None:
            raise
