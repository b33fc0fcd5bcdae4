"""Limits on what episodes' code does to its worker process (``rollout/process_limits.py``)."""

from __future__ import annotations

import _signal
import asyncio
import pickle
import signal
import sys

import pytest

from monarch_rl.rollout.process_limits import refuse_alarms, survive_exits


def test_a_refused_function_is_pickled_for_a_process_that_has_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (signal, _signal):
        for name in ("alarm", "setitimer"):
            monkeypatch.setattr(module, name, getattr(module, name))
    refuse_alarms()
    with pytest.raises(RuntimeError, match="in_scorer"):
        signal.alarm(60)
    sent = [pickle.dumps(function) for function in (signal.alarm, _signal.alarm, signal.setitimer)]
    monkeypatch.undo()
    assert [pickle.loads(function) for function in sent] == [signal.alarm, signal.alarm, signal.setitimer]


def test_an_exit_on_the_main_thread_still_ends_the_process() -> None:
    async def leave() -> None:
        survive_exits(asyncio.get_running_loop())
        await asyncio.sleep(0)
        sys.exit(3)

    with pytest.raises(SystemExit):
        asyncio.run(leave())
