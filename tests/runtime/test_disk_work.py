"""File work on a stalled disk: its deadline, its name, and the end of the process."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from monarch_rl.errors import DeadlineExceeded
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.deadlines import on_disk, on_disk_now
from tests.patience import run

STALLED = """
import asyncio, threading
from monarch_rl.runtime.deadlines import on_disk
asyncio.run(on_disk(0.1, "a file", threading.Event().wait))
"""


def test_disk_work_returns_its_result_or_raises_its_error() -> None:
    assert asyncio.run(on_disk(60, "a number", int, "ff", base=16)) == 255
    with pytest.raises(ValueError, match="not a number"):
        asyncio.run(on_disk(60, "a number", int, "not a number"))


def test_late_disk_work_is_reported_as_a_wait_for_the_disk() -> None:
    disk = threading.Event()

    async def late() -> None:
        working = asyncio.ensure_future(on_disk(0.5, "a file", disk.wait))
        await asyncio.sleep(0)
        assert [(wait.what, wait.on) for wait in wait_registry.waits()] == [("a file", "the disk")]
        with pytest.raises(DeadlineExceeded, match="0.5 s.*a file"):
            await working
        disk.set()

    asyncio.run(late())


def test_a_thread_without_an_event_loop_has_the_same_deadline() -> None:
    assert on_disk_now(60, "a number", int, "ff", base=16) == 255
    with pytest.raises(ValueError, match="not a number"):
        on_disk_now(60, "a number", int, "not a number")
    disk = threading.Event()
    with pytest.raises(DeadlineExceeded, match="0.5 s.*a file"):
        on_disk_now(0.5, "a file", disk.wait)
    disk.set()


def test_a_permanently_stalled_disk_does_not_keep_a_process_from_ending() -> None:
    ended = run([sys.executable, "-c", STALLED])
    assert ended.returncode == 1 and "DeadlineExceeded" in ended.stderr
