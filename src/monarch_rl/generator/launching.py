"""SGLang's processes: their start, who watches them, their end."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from monarch_rl.generator.scheduler_process import SchedulerTarget, quiet_imports

KILL_SECONDS = 10.0
"""How long a killed engine process may take to be gone."""


def launch_engine(arguments: dict[str, Any]) -> Any:
    quiet_imports()
    import sglang.srt.entrypoints.engine as sglang_engine

    class TokenEngine(sglang_engine.Engine):
        run_scheduler_process_func = SchedulerTarget()

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *_: Any, **__: Any) -> tuple[list[Any], list[str]]:
            """None: with ``skip_tokenizer_init`` the scheduler answers directly."""
            return [], []

    before = multiprocessing.active_children()
    try:
        with _logging_kept():
            return TokenEngine(**arguments)
    except BaseException:
        for process in multiprocessing.active_children():
            if process not in before:
                process.kill()
        raise


@contextmanager
def _logging_kept() -> Iterator[None]:
    """SGLang takes the root logger for its own, at its own level; what this process logs must go where it went."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def take_over_watch(engine: Any) -> list[Any]:
    """Stop SGLang's watchdog, which ends this whole process by SIGQUIT; returns the processes it watched."""
    watchdog = engine.tokenizer_manager._subprocess_watchdog
    watchdog.stop()
    return list(watchdog._processes)


def close_sockets(*owners: Any) -> None:
    """SGLang leaves its sockets open. When they are collected as garbage, whoever runs then would wait for ever until
    what was written last is read by a process that is gone."""
    import zmq

    for owner in owners:
        for value in vars(owner).values():
            if isinstance(value, zmq.Socket):
                value.close(linger=0)


def end_processes(engine: Any) -> None:
    """SGLang's own shutdown kills every child of this process; this ends only the engine's."""
    atexit.unregister(engine.shutdown)
    victims = []
    for pid in engine.get_all_child_pids():
        try:
            process = psutil.Process(pid)
            victims += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    for process in victims:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(victims, timeout=KILL_SECONDS)
    if alive:
        raise RuntimeError(f"SGLang's processes {[p.pid for p in alive]} are still there {KILL_SECONDS} s after a kill")
