"""The fork server of a host: it starts processes that have their imports done.

Most of a run's start-up is imports, the same ones in many processes. So the host starts this server first; it imports
once, and forks. It never has threads and never touches a device, which makes forking safe. (Importing Monarch starts
threads, so each process imports Monarch itself.)

Servers form a tree: each stage is forked from the previous one, imports more modules (its preload), and serves its own
Unix socket. A request contains a descriptor of its owner (pidfd), the environment, the standard files and what to run.
The forked process

- takes over the environment, and everything else that it would inherit from its owner, before it looks for devices. The
  server refuses an environment that differs in variables that are read while modules load (:data:`LOADED`): such a
  process is started without the server;
- is killed by its server when its owner ends, and by the kernel when its server ends;
- is waited for by its server, which reports its exit code to the owner, and ends the process group that it made.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import pickle
import random
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from monarch_rl.runtime.forking.fork_client import FIXED_FDS, NUMBER, REFUSED, address_of, close_all, take_claim
from monarch_rl.runtime.forking.lazy_compile import compiled_on_first_call
from monarch_rl.runtime.process import (
    die_with_parent,
    end_group,
    end_quickly,
    exit_code_of,
    prepare_titles,
    print_as_titled,
    set_owner,
    show_title,
)

logger = logging.getLogger("monarch_rl")

LOADED = (
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "LD_", "MALLOC_", "PYTHON", "TORCH_", "TORCHINDUCTOR_", "TRITON_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "XDG_CACHE_HOME"),
)
"""Name prefixes of the variables that libraries read when they are loaded. SGLang's are not included: it sets some for
its scheduler, however that is started, and reads them later (the exception is in ``scheduler_process.py``)."""
SET_WHEN_LOADED = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables with these prefixes that the libraries set themselves when loaded, and read for each compilation."""
MAX_FDS = 250
"""Maximum number of descriptors in a request; Linux allows 253."""


@dataclass(frozen=True)
class Preload:
    """Modules that are imported before processes are forked."""

    name: str
    modules: tuple[str, ...]
    after: str = ""
    """Name of the preload that it builds upon, if any."""
    asks_for_accelerators: bool = False
    """Importing these modules queries accelerators, so they are preloaded only on machines without any."""


def preloads_to_text(preloads: Sequence[Preload]) -> str:
    """Serialize ``preloads`` for a command line."""
    return json.dumps([asdict(preload) for preload in preloads])


def preloads_from_text(text: str) -> list[Preload]:
    """The inverse of :func:`preloads_to_text`."""
    return [Preload(**values) for values in json.loads(text)]


def start_server(name: str, preloads: Sequence[Preload]) -> subprocess.Popen[bytes]:
    """Start a fork server. It ends when its standard input is closed and all processes that it forked have ended.

    Requests may be sent at once; they are answered when the modules are imported.

    Args:
        name: value of :data:`~monarch_rl.runtime.forking.fork_client.ADDRESS_VARIABLE` in its client processes.
        preloads: sets of modules to import; each comes after the one that it builds upon.
    """
    with ExitStack() as ours:
        listeners = []
        for preload in preloads:
            listener = ours.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(address_of(name, preload.name))
            listener.listen(128)
            listeners.append(listener.fileno())
        return subprocess.Popen(
            [sys.executable, "-m", __name__, preloads_to_text(preloads), json.dumps(listeners), str(os.getpid())],
            stdin=subprocess.PIPE,
            pass_fds=listeners,
        )


@dataclass(frozen=True)
class Request:
    """A process to fork."""

    module: str
    """Module whose ``forked`` is run."""
    title: str
    owner: int
    """pid"""
    environment: dict[str, str] | None
    """None is the server's."""
    folder: str
    group: int
    """Process group to join."""
    standard: tuple[int, ...]
    fds: tuple[int, ...]


@dataclass(frozen=True)
class _Child:
    pid: int
    pidfd: int
    owner: int
    """pidfd of its owner."""
    status: int
    """Pipe to its owner."""


class _Forked(BaseException):
    """Raised in a process that was just forked, to leave the server's code."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.request = request


class Stage:
    """One server of the tree. It serves until the pipe ``alive`` is closed and all processes that it forked have ended.

    Args:
        listener: socket on which requests arrive.
        alive: descriptor of a pipe that the host holds open.
    """

    def __init__(self, listener: socket.socket, alive: int) -> None:
        self._listener, self._alive = listener, alive
        self._connections: dict[int, socket.socket] = {}
        self._children: dict[int, _Child] = {}
        """By pidfd."""
        self._owners: dict[int, _Child] = {}
        """Children by the pidfd of their owner, for owners that are alive."""
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._poll.register(alive, select.POLLIN)
        self._ending = False

    def serve(self) -> None:
        """Serve until the end. Raises :class:`_Forked` in each forked process."""
        while not (self._ending and not self._children):
            for descriptor, _ in self._poll.poll():  # waits: as long as the host lives
                if descriptor == self._listener.fileno():
                    self._accept()
                elif descriptor == self._alive:
                    self._poll.unregister(self._alive)
                    self._ending = True
                elif descriptor in self._connections:
                    self._answer(self._connections.pop(descriptor))
                elif descriptor in self._owners:
                    self._poll.unregister(descriptor)
                    signal.pidfd_send_signal(self._owners.pop(descriptor).pidfd, signal.SIGKILL)
                elif descriptor in self._children:
                    self._reap(self._children.pop(descriptor))

    def _accept(self) -> None:
        try:
            connection = self._listener.accept()[0]  # waits: not at all, a connection is ready
        except OSError as error:  # too many open files: retry, because earlier clients may end
            logger.warning("the fork server cannot accept a request: %s", error)
            time.sleep(0.1)
            return
        self._connections[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)

    def _answer(self, connection: socket.socket) -> None:
        """Fork a process for a request, or refuse."""
        self._poll.unregister(connection)
        with connection:
            _, fds, flags, _ = socket.recv_fds(connection, 16, MAX_FDS)
            if flags & socket.MSG_CTRUNC:
                logger.warning("a process is started without the fork server: too many open files")
            if len(fds) < FIXED_FDS or flags & socket.MSG_CTRUNC or not _same_user(connection):
                close_all(*fds)
                return
        text, owner, status, claim, *standard = fds[:FIXED_FDS]
        with open(text, "rb") as file:
            texts: tuple[Any, ...] = pickle.load(file)
        request = Request(*(*texts, tuple(standard), tuple(fds[FIXED_FDS:])))
        differing = differing_when_loaded(os.environ, request.environment or os.environ)
        if differing:
            logger.warning("%s is started without the fork server: %s differ", request.module, ", ".join(differing))
            _report(status, REFUSED)
        if differing or not take_claim(claim):  # the owner took the claim if it waited too long
            close_all(owner, status, claim, *request.standard, *request.fds)
            return
        os.close(claim)
        server = os.getpid()

        def refuse(error: OSError) -> None:
            logger.warning("%s is started without the fork server: %s", request.module, error)
            _report(status, REFUSED)
            close_all(owner, status, *request.standard, *request.fds)

        try:
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes: earlier children stay alive
            refuse(error)
            return
        if pid == 0:
            die_with_parent(signal.SIGKILL, server)
            self._close_all()
            close_all(owner, status)
            raise _Forked(request)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:  # too many open files: earlier children stay alive
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)  # waits: it was killed
            refuse(error)
            return
        child = _Child(pid, pidfd, owner, status)
        self._children[child.pidfd] = self._owners[child.owner] = child
        self._poll.register(child.pidfd, select.POLLIN)
        self._poll.register(child.owner, select.POLLIN)
        _report(status, pid)
        close_all(*request.standard, *request.fds)

    def _reap(self, child: _Child) -> None:
        """Report to the owner how a child has ended."""
        _, status = os.waitpid(child.pid, 0)  # waits: it has ended
        end_group(child.pid)
        _report(child.status, os.waitstatus_to_exitcode(status))
        self._poll.unregister(child.pidfd)
        if self._owners.pop(child.owner, None) is not None:
            self._poll.unregister(child.owner)
        close_all(child.pidfd, child.owner, child.status)

    def _close_all(self) -> None:
        self._listener.close()
        for connection in self._connections.values():
            connection.close()
        for child in self._children.values():
            close_all(child.pidfd, child.owner, child.status)
        os.close(self._alive)


def differing_when_loaded(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Names of the variables that differ and that libraries read when they are loaded."""
    names = {name for name in {*ours, *theirs} if name.startswith(LOADED)}.difference(SET_WHEN_LOADED)
    return sorted(name for name in names if ours.get(name) != theirs.get(name))


def _same_user(connection: socket.socket) -> bool:
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.getuid())


def _report(status: int, number: int) -> None:
    try:
        os.write(status, NUMBER.pack(number))
    except BrokenPipeError:  # the owner is gone, so nobody needs the number
        return


def main() -> NoReturn:
    """Serve the preloads on the command line on their sockets. Standard input is the host's pipe."""
    preloads = preloads_from_text(sys.argv[1])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the host sends it to all its children; the server must end last
    die_with_parent(signal.SIGKILL, int(sys.argv[3]))
    prepare_titles()
    alive = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sockets = [socket.socket(fileno=descriptor) for descriptor in json.loads(sys.argv[2])]
    listeners = {preload.name: listener for preload, listener in zip(preloads, sockets, strict=True)}
    try:
        stages = _fork_stages("", preloads, listeners, alive)
        _wait_for(stages)
    except _Forked as forked:
        request = forked.request
    else:
        os._exit(0)
    become(request)


def _fork_stages(
    after: str, preloads: Sequence[Preload], listeners: Mapping[str, socket.socket], alive: int
) -> list[int]:
    """Fork the stages that build directly upon ``after``, and close all sockets here; returns their pids."""
    server, pids = os.getpid(), []
    for preload in preloads:
        if preload.after == after:
            pid = os.fork()
            if pid == 0:
                die_with_parent(signal.SIGKILL, server)
                _run_stage(preload, preloads, listeners, alive)
            pids.append(pid)
    for listener in listeners.values():
        listener.close()
    return pids


def _run_stage(
    preload: Preload, preloads: Sequence[Preload], listeners: Mapping[str, socket.socket], alive: int
) -> NoReturn:
    """Import, fork the next stages, and serve. A stage that fails closes its socket, so that no client waits for it."""
    above = {below.name: listeners[below.name] for below in preloads if _builds_upon(below, preload.name, preloads)}
    for name, other in listeners.items():
        if name != preload.name and name not in above:
            other.close()
    show_title(f"fork server, {preload.name}")
    try:
        gc.disable()  # imported objects do not become garbage
        with compiled_on_first_call():
            for module in preload.modules:
                importlib.import_module(module)
                _check_forkable(module)
    except Exception as error:
        logger.warning("processes import %s themselves: %s: %s", preload.name, type(error).__name__, error)
        os._exit(1)
    gc.freeze()  # so that no collection in a forked process copies these pages
    gc.enable()
    stages = _fork_stages(preload.name, preloads, above, alive)
    Stage(listeners[preload.name], alive).serve()
    _wait_for(stages)
    os._exit(0)


def _builds_upon(preload: Preload, name: str, preloads: Sequence[Preload]) -> bool:
    """Whether ``preload`` builds upon the one called ``name``, directly or through others."""
    by_name = {each.name: each for each in preloads}
    while preload.after:
        if preload.after == name:
            return True
        preload = by_name[preload.after]
    return False


def _check_forkable(module: str) -> None:
    """Raise if this process has threads or has opened a device: neither survives a fork."""
    threads = len(os.listdir("/proc/self/task"))
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own descriptor
            if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/nvidia"):
                raise RuntimeError(f"{module} opens a device when it is imported")
    if threads > 1:
        raise RuntimeError(f"{module} starts threads when it is imported")


def _wait_for(pids: Sequence[int]) -> None:
    for pid in pids:
        os.waitpid(pid, 0)  # waits: for the host's whole life


def become(request: Request) -> NoReturn:
    """Turn a process that was just forked into the requested one."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    show_title(request.title)
    with suppress(PermissionError):  # the owner is in a session of its own
        os.setpgid(0, request.group)
    with suppress(ProcessLookupError):  # the owner has ended, so this process is about to be killed
        for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_STACK):
            resource.setrlimit(limit, resource.prlimit(request.owner, limit))
        os.sched_setaffinity(0, os.sched_getaffinity(request.owner))
    for number, descriptor in enumerate(request.standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request.folder)
    if request.environment is not None:
        os.environ.clear()
        os.environ.update(request.environment)
    print_as_titled(request.title)
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # else all forked processes generate the same random numbers
    set_owner(request.owner)
    run = importlib.import_module(request.module).forked
    end_quickly(exit_code_of(lambda: run(request.fds)))


if __name__ == "__main__":
    main()
