"""The watch over a run: it sees a process that cannot go on, or a run in which nothing advances, says why, and acts.

It runs on a thread of its own in the controller, with an event loop of its own, so that a controller whose loop is
blocked is seen, too. Every ``stall_s / 5`` seconds it asks all processes how they are (``runtime/lookout.py``) and
looks at each from outside. It acts

- on a culprit: a process that for ``stall_s`` seconds was stopped, or neither answered nor used the CPU, or had an
  event loop that did not turn while it did not use the CPU; or whose loss nobody noticed for 2.5 times as long.
  Whatever else still advances: what the culprit holds is missed later;
- on a stall: nothing has advanced for :data:`STUCK_FACTOR` times ``stall_s``, or three times the longest pause that the
  run has made so far, and nobody whom the trainer waits for works or waits for something outside the run. Progress is:
  a step trained, a group put or dropped, a version published, tokens drawn, a held-out item played.

A process that uses the CPU is at work, whatever it does and however long; what it holds up is bounded by the deadline
of whoever waits for it (:class:`~monarch_rl.runtime.deadlines.Patience`). A GPU at work needs the CPU, too: PyTorch
waits for it by polling. What is outside the run, such as an environment's service, has deadlines of its own.

Acting is: one message that follows the waits from the trainer to the culprit, with the stacks of the processes on the
way, logged and written to ``stall-*.txt`` in the run's folder; then ``recover`` is asked. The culprit is killed in any
case, so that nobody waits for it; if ``recover`` could not help, the run ends with :class:`Stalled`.
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
from pathlib import Path

from monarch_rl.runtime import presence
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import DeadlineExceeded, Patience, within
from monarch_rl.runtime.sight import ASK_DEADLINE_S, LoopLag, Sight
from monarch_rl.runtime.stall import CONTROLLER, Picture, Process, listed, told

logger = logging.getLogger("monarch_rl")

STALL_S = 15.0
"""Default: a thousand times what an answer takes, and less than the 20 s after which Monarch gives a silent process up
with less to say (``cluster.py``)."""
STUCK_FACTOR = 2
"""Nothing is broken where a run is merely stuck, so it is given more time."""
LOOKS = 5
"""Looks in ``stall_s``."""
END_S = 20.0
"""Seconds for the controller to leave its loop in order; after that its process ends at once."""
RECOVER_DEADLINE_S = 5.0
"""Seconds for ``recover`` to say whether the run can go on; what it does about it comes after."""

Recover = Callable[[str], Awaitable[bool]]
"""Takes a culprit's name; true if the run can go on."""


class Stalled(RuntimeError):
    """The run could not go on; the message says who waited for what, down to the cause."""


class Watch:
    """The watch of one run; see the top of this file. Made, started and ended by :func:`watched`."""

    def __init__(self, cluster: Cluster, folder: Path, stall_s: float, recover: Recover | None) -> None:
        if stall_s <= 0:
            raise ValueError(f"stall_s must be positive, got {stall_s}")
        self.stalled: Stalled | None = None
        """Why the run was ended."""
        self._folder, self._stall_s, self._recover = folder, stall_s, recover
        self._interval_s = stall_s / LOOKS
        self._lag = LoopLag()
        self._sight = Sight(cluster, stall_s, self._interval_s, self._lag)
        self._pauses = Patience(math.inf, floor_s=STUCK_FACTOR * stall_s, factor=3.0)
        self._pauses.saw(0.0)  # what compiles and warms up uses the CPU, so that the first step needs no more
        self._advanced = self._looked = time.monotonic()
        self._told = False
        """The present pause was spoken of."""
        self._ended = threading.Event()
        self._last: threading.Timer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    # -- for the controller ----------------------------------------------------------------------------------------

    def loop_lag(self) -> dict[str, float]:
        """Metrics of event-loop lag since the last call, by kind of actor, in milliseconds: see docs/metrics.md."""
        return self._lag.metrics()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the watch. Blocks for a moment."""
        self._ended.set()
        self._thread.join(3 * ASK_DEADLINE_S)
        if self._last is not None:  # what comes has deadlines of its own
            self._last.cancel()

    async def tell(self) -> None:
        """Log and write a report of who waits for whom now, for a run that a deadline ends."""
        if self._loop is None:
            return
        telling = asyncio.run_coroutine_threadsafe(self._tell(), self._loop)
        try:
            await within(3 * ASK_DEADLINE_S, asyncio.wrap_future(telling), "a stall report", on=CONTROLLER)
        except Exception as error:  # the error that ends the run must come through
            logger.error("no stall report could be made: %s", error)

    async def _tell(self) -> None:
        await self._report(await self._sight.picture(), time.monotonic() - self._advanced)

    # -- on the watch's own thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except Exception:
            logger.exception("the watch over the run has failed: a stall ends by the deadlines of its waits alone")

    async def _watch(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not self._ended.is_set():
            self._sight.meet_new()
            await asyncio.to_thread(self._ended.wait, self._interval_s)
            late = time.monotonic() - self._looked > self._interval_s + self._stall_s / 2
            self._looked = time.monotonic()
            if late:  # this process itself was stopped, or starved: what others did meanwhile is not known
                self._forgive()
            elif not self._ended.is_set():
                picture = await self._sight.picture()
                self._note_progress(picture)
                await self._judge(picture)
        self._sight.close()

    def _forgive(self) -> None:
        self._advanced = self._looked = time.monotonic()
        self._sight.forgive()

    def _note_progress(self, picture: Picture) -> None:
        now, advanced = time.monotonic(), self._advanced
        for process in picture.processes.values():
            found = process.glimpse
            if found is not None and found.marks:
                age = found.now - max(mark.last for mark in found.marks.values()) + process.silent_s
                advanced = max(advanced, now - age - self._interval_s)
        if advanced > self._advanced:
            if advanced - self._advanced > 1.0:  # pauses shorter than that are legion
                self._pauses.saw(advanced - self._advanced)
            self._advanced, self._told = advanced, False

    async def _judge(self, picture: Picture) -> None:
        culprits = picture.culprits()
        paused = time.monotonic() - self._advanced
        stuck = paused >= self._pauses.limit_s
        if not culprits and (not stuck or self._told):
            return
        if not culprits and picture.at_work():
            self._told = True
            sentence = told(picture.chain(), self._stall_s)
            logger.warning("nothing has advanced for %.0f s, but somebody is at work: %s", paused, sentence)
            return
        message = await self._report(picture, paused)
        spared = [culprit for culprit in culprits if await self._recovered(culprit.name)]
        if culprits and spared == culprits:
            await asyncio.gather(*(self._sight.kill(culprit) for culprit in culprits))
            self._forgive()
            return
        await self._end(message, culprits)

    async def _report(self, picture: Picture, paused: float) -> str:
        """Log the chain with the stacks of those on it, write all that is known to a file; returns the message."""
        chain = picture.chain()
        message = f"{told(chain, self._stall_s)}. Nothing has advanced for {paused:.0f} s."
        involved = {link.process.name: link.process for link in chain}
        involved |= {process.name: process for process in picture.culprits()}
        texts = await asyncio.gather(*[self._sight.stacks(process) for process in involved.values()])
        stacks = "\n".join(f"--- {name}\n{text}" for name, text in zip(involved, texts, strict=True))
        path = self._folder / f"stall-{time.strftime('%H%M%S')}.txt"
        everybody = listed(picture.processes.values(), self._stall_s)
        path.write_text(f"{message}\n\nAll processes and what they wait for:\n{everybody}\n\nStacks:\n{stacks}\n")
        shown = "the run does not go on: %s\nEvery process and its waits are in %s. Stacks:\n%s"
        logger.error(shown, message, path, stacks)
        return message

    async def _recovered(self, culprit: str) -> bool:
        if self._recover is None or culprit == CONTROLLER:  # it could not even be asked
            return False
        on_main = asyncio.run_coroutine_threadsafe(_awaited(self._recover(culprit)), self._main)
        try:
            what = f"{culprit} to be replaced"
            return await within(RECOVER_DEADLINE_S, asyncio.wrap_future(on_main), what, on=CONTROLLER)
        except Exception as error:
            logger.error("%s could not be replaced: %s", culprit, error)
            return False

    async def _end(self, message: str, culprits: list[Process]) -> None:
        """End the run. Culprits are killed once its calls are given up: what is stopped would hold the end up."""
        self.stalled = Stalled(message)
        self._last = threading.Timer(END_S, _end_at_once, (message,))
        self._last.daemon = True
        self._last.start()
        if self._task is not None:
            self._main.call_soon_threadsafe(self._task.cancel)
        await asyncio.to_thread(self._ended.wait, ASK_DEADLINE_S)
        for process in culprits:
            if process.name != CONTROLLER:
                await self._sight.kill(process)
        self._ended.set()


async def _awaited(awaitable: Awaitable[bool]) -> bool:
    return await awaitable  # waits: _recovered keeps the deadline


def _end_at_once(message: str) -> None:
    logger.error("not ended %g s after a stall was found: ending at once. %s", END_S, message)
    os._exit(1)


@asynccontextmanager
async def watched(
    cluster: Cluster, folder: Path, stall_s: float = STALL_S, recover: Recover | None = None
) -> AsyncIterator[Watch]:
    """Watch over the run while the block runs.

    Args:
        cluster: whose processes are watched, new ones as they are spawned.
        folder: where ``stall-*.txt`` is written.
        stall_s: seconds after which a process that cannot go on is a culprit.
        recover: asked to replace a culprit, or to do without it, before the run is ended for it, on the event loop of
            the block; by default it ends.

    Raises:
        Stalled: the run could not go on.
        ValueError: ``stall_s`` is not positive.
    """
    presence.register(CONTROLLER)
    watch = Watch(cluster, folder, stall_s, recover)
    watch.start()
    try:
        yield watch
    except Exception as error:
        if watch.stalled is not None:
            raise watch.stalled from error
        if isinstance(error, DeadlineExceeded) or isinstance(getattr(error, "exception", None), DeadlineExceeded):
            await watch.tell()
        raise
    except asyncio.CancelledError:
        if watch.stalled is None:
            raise
        raise watch.stalled from None
    finally:
        await asyncio.to_thread(watch.stop)
        presence.unregister(CONTROLLER)
