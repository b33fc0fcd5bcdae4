"""Starting, monitoring and ending SGLang's processes."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from monarch_rl.generator.error_file import ErrorFile
from monarch_rl.generator.scheduler_process import ENGINE_PRELOAD, SchedulerTarget, few_models, quiet_imports
from monarch_rl.generator.settings import rename_in
from monarch_rl.runtime.forking.fork_context import ForkContext

KILL_SECONDS = 10.0
"""Seconds within which a killed engine process must be gone."""


def launch_engine(arguments: dict[str, Any], errors: ErrorFile) -> Any:
    """Start a token-only ``sglang.Engine``; if that fails, end the processes that were started.

    Args:
        arguments: SGLang ``ServerArgs``.
        errors: receives the schedulers' errors. If a scheduler fails during the start, its error is appended to the
            message of the raised exception.
    """
    quiet_imports()
    few_models()
    import sglang.srt.entrypoints.engine as sglang_engine

    managers: list[Any] = []

    def init_tokenizer_manager(*args: Any) -> Any:
        result = sglang_engine.Engine.init_tokenizer_manager_func(*args)
        managers.append(result[0])
        return result

    class TokenEngine(sglang_engine.Engine):
        init_tokenizer_manager_func = staticmethod(init_tokenizer_manager)
        run_scheduler_process_func = SchedulerTarget(errors)

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *_: Any, **__: Any) -> tuple[list[Any], list[str]]:
            """Start none: with ``skip_tokenizer_init`` the scheduler answers directly."""
            return [], []

        @classmethod
        def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
            """Take the processes from the fork server, if there is one."""
            original, sglang_engine.mp = sglang_engine.mp, ForkContext(ENGINE_PRELOAD, "engine")
            try:
                return super()._launch_scheduler_processes(*args, **kwargs)
            finally:
                sglang_engine.mp = original

    before = multiprocessing.active_children()
    try:
        with _root_logger_restored():
            return TokenEngine(**arguments)
    except BaseException as error:
        rename_in(error)
        if message := errors.first():
            error.args = (f"{error}\nSGLang's process failed with {message}",)
        for process in multiprocessing.active_children():
            if process not in before:
                process.kill()
        close_sockets(*managers)
        raise


@contextmanager
def _root_logger_restored() -> Iterator[None]:
    """Restore the root logger afterwards: SGLang sets its own level and handlers, but this process logs, too."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def take_over_watch(engine: Any) -> list[Any]:
    """Stop SGLang's watchdog, which would end this whole process by SIGQUIT; returns the processes that it watched."""
    watchdog = engine.tokenizer_manager._subprocess_watchdog
    watchdog.stop()
    return list(watchdog._processes)


def close_sockets(*owners: Any) -> None:
    """Close the sockets that SGLang leaves open.

    Otherwise garbage collection would block forever: on a socket, until a process that is gone reads the last messages;
    or, if the collector reaches their context first, until the sockets are closed.
    """
    import zmq

    for owner in owners:
        for value in vars(owner).values():
            if isinstance(value, zmq.Socket):
                value.close(linger=0)


def end_processes(engine: Any) -> None:
    """Kill only the engine's processes; SGLang's own shutdown would kill every child of this process.

    Raises RuntimeError if a process still exists after ``KILL_SECONDS``.
    """
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
        raise RuntimeError(f"SGLang's processes {[p.pid for p in alive]} still exist {KILL_SECONDS} s after a kill")
