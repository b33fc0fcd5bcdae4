"""A ``multiprocessing`` context whose processes are forked by the host's fork server, if there is one."""

from __future__ import annotations

import functools
import io
import logging
import os
from collections.abc import Sequence
from multiprocessing import context, forkserver, popen_forkserver, reduction, resource_tracker, spawn, util
from multiprocessing.popen_spawn_posix import Popen as SpawnPopen
from typing import Any

from monarch_rl.runtime.forking.fork_client import NoForkServer, fork, in_memory
from monarch_rl.runtime.process import end_group, show_title

logger = logging.getLogger("monarch_rl")


class ForkContext(context.SpawnContext):
    """Like ``multiprocessing.get_context("spawn")``, but processes start with the modules of ``preload`` imported.

    They end when the process that started them ends. Unlike spawned processes they do not import its main module again,
    which is Monarch's. Without a fork server, processes are spawned.

    Args:
        server: name of the fork server, for the controller: without it, NoForkServer is raised. "" is the one in this
            process's environment.
    """

    def __init__(self, preload: str, title: str = "", server: str = "") -> None:
        super().__init__()
        self._preload, self._title, self._server = preload, title, server

    @property
    def Process(self) -> Any:  # type: ignore[override]  # a class in the base class
        """Creates a process; takes the arguments of ``multiprocessing.Process``."""
        return functools.partial(ForkedProcess, preload=self._preload, title=self._title, server=self._server)


class ForkedProcess(context.SpawnProcess):
    """A process with the modules of ``preload``; also takes the arguments of ``multiprocessing.Process``.

    ``ps`` shows it as ``monarch_rl::{title}``.
    """

    def __init__(self, *args: Any, preload: str, title: str, server: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.preload, self.title, self.server = preload, title, server

    def run(self) -> None:
        show_title(self.title)  # for a spawned process; a forked one has it already
        super().run()

    @staticmethod
    def _Popen(process: Any) -> Any:
        try:
            return _ForkPopen(process)
        except NoForkServer as reason:
            if process.server:  # spawning would import the controller's main module, which is the recipe, again
                raise
            logger.debug("%s is spawned: %s", process.name, reason)
            return _SpawnPopen(process)


class _SpawnPopen(SpawnPopen):
    """Ends the process group that the process made when it has ended, as the fork server does."""

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        ended = self.returncode is not None
        code = super().poll(flag)
        if code is not None and not ended:
            end_group(self.pid)
        return code


class _ForkPopen(popen_forkserver.Popen):
    """The standard library's client of a fork server, connected to ours."""

    _fds: list[int]
    """Descriptors to pass to the process; filled by the base class."""

    def _launch(self, process: Any) -> None:
        preparation = spawn.get_preparation_data(process.name)
        preparation = {name: value for name, value in preparation.items() if not name.startswith("init_main")}
        pickled = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(preparation, pickled)
            reduction.dump(process, pickled)
        finally:
            context.set_spawning_popen(None)
        data, owner = in_memory(pickled.getvalue()), os.pidfd_open(os.getpid())
        try:
            tracker = resource_tracker.getfd()
            assert tracker is not None  # it was just started
            fds = [data, owner, tracker, *self._fds]
            self.pid, self.sentinel = fork(process.preload, __name__, process.title, fds, server=process.server)
        finally:
            os.close(data)
            os.close(owner)
        self.finalizer = util.Finalize(self, os.close, (self.sentinel,))


def forked(fds: Sequence[int]) -> int:
    """In the forked process: run the pickled process object; returns the exit code."""
    data, owner, tracker, *inherited = fds
    standard: Any = forkserver._forkserver  # type: ignore[attr-defined]  # where unpickling looks up descriptors
    standard._inherited_fds = inherited
    of_resources: Any = resource_tracker._resource_tracker
    of_resources._fd = tracker
    return spawn._main(data, owner)
