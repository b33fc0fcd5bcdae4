"""SGLang's processes: their start, who watches them, their end."""

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
"""How long a killed engine process may take to be gone."""


def launch_engine(arguments: dict[str, Any], errors: ErrorFile) -> Any:
    """A ``sglang.Engine`` of tokens only, made with these ``ServerArgs``; ends what it started if it fails.

    Args:
        errors: gets what its schedulers fail with, and ends the message of the error if one does so here.
    """
    quiet_imports()
    few_models()
    import sglang.srt.entrypoints.engine as sglang_engine

    managers: list[Any] = []

    def init_tokenizer_manager(*args: Any) -> Any:
        made = sglang_engine.Engine.init_tokenizer_manager_func(*args)
        managers.append(made[0])
        return made

    class TokenEngine(sglang_engine.Engine):
        init_tokenizer_manager_func = staticmethod(init_tokenizer_manager)
        run_scheduler_process_func = SchedulerTarget(errors)

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *_: Any, **__: Any) -> tuple[list[Any], list[str]]:
            """None: with ``skip_tokenizer_init`` the scheduler answers directly."""
            return [], []

        @classmethod
        def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
            """With processes of the fork server, where there is one."""
            original, sglang_engine.mp = sglang_engine.mp, ForkContext(ENGINE_PRELOAD, "engine")
            try:
                return super()._launch_scheduler_processes(*args, **kwargs)
            finally:
                sglang_engine.mp = original

    before = multiprocessing.active_children()
    try:
        with _logging_kept():
            return TokenEngine(**arguments)
    except BaseException as error:
        rename_in(error)
        if said := errors.first():
            error.args = (f"{error}\nSGLang's process failed with {said}",)
        for process in multiprocessing.active_children():
            if process not in before:
                process.kill()
        close_sockets(*managers)
        raise


@contextmanager
def _logging_kept() -> Iterator[None]:
    """Undo what SGLang does to the root logger: it sets its own level and handlers, and this process logs too."""
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
    """Close the sockets that SGLang leaves open.

    Once they are garbage, collecting them waits forever: for a process that is gone to read what was written last, or,
    where the collector comes to their context first, for them to be closed.
    """
    import zmq

    for owner in owners:
        for value in vars(owner).values():
            if isinstance(value, zmq.Socket):
                value.close(linger=0)


def end_processes(engine: Any) -> None:
    """Kill the engine's processes only: SGLang's own shutdown kills every child of this process.

    Raises RuntimeError if one is still there ``KILL_SECONDS`` later.
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
        raise RuntimeError(f"SGLang's processes {[p.pid for p in alive]} are still there {KILL_SECONDS} s after a kill")
