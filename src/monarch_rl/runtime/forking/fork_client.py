"""Client of this machine's fork server (``fork_server.py``), and proxy for a forked process.

Imports only the standard library. The program ``python -IS fork_client.py PRELOAD MODULE`` is a proxy for the forked
process: Monarch signals the process that it started by pid and waits for its exit status, but the forked process is a
child of the server. So the proxy forwards signals and ends in the same way as the forked process, which is killed if
the proxy is. Without a server that can fork, the proxy becomes ``python -m MODULE`` itself.
"""

from __future__ import annotations

import array
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

ADDRESS_VARIABLE = "MONARCH_RL_FORK_SERVER"
"""Environment variable with the name of this host's fork server, for all processes of the host. Not for users."""
ANSWER_S = 300.0
"""Seconds for a server to answer: before its first answer it does its imports, which take ten CPU-seconds."""
STAND_IN_ANSWER_S = 10.0
"""The same for a proxy. Monarch gives a process 30 s from its start to introduce itself. After this deadline the proxy
starts its program without the server, which takes two CPU-seconds, and ten more if it imports SGLang. So the controller
waits for the imports on its own machine before it spawns a run's meshes (``preloading.ForkServer``)."""
NUMBER = struct.Struct("q")
"""Format in which a server reports the pid of a process and later its exit code."""
REFUSED = 0
"""Reported in place of a pid if the server cannot fork this process; its log says why."""
FIXED_FDS = 7
"""Number of descriptors that every request has: text, owner, status, claim, and standard input, output and error."""


class NoForkServer(RuntimeError):
    """No process can be forked, so it must be started without the fork server."""


def address(preload: str) -> str | None:
    """Address in Linux's abstract namespace that forks processes with ``preload``; None on a host without a server."""
    server = os.environ.get(ADDRESS_VARIABLE)
    return address_of(server, preload) if server else None


def address_of(server: str, preload: str) -> str:
    """Address at which the fork server named ``server`` forks processes with ``preload``."""
    return f"\0{server}/{preload}"


def fork(
    preload: str, module: str, title: str = "", fds: Sequence[int] = (), answer_s: float = ANSWER_S, server: str = ""
) -> tuple[int, int]:
    """Fork a process that has the modules of ``preload``, and is killed when this process or the server ends.

    It inherits this process's environment (the server's, if ``server`` is given), working directory, process group and
    standard files.

    Args:
        preload: name of a set of modules that the server has imported.
        module: name of the module whose ``forked(fds)`` the process runs; the function returns the exit code.
        title: process title that ``ps`` shows, after ``monarch_rl::``.
        fds: descriptors to pass to the process.
        answer_s: seconds for the server to answer. A process that it has not begun to fork by then is never forked.
        server: name of the server; "" is the one of this process's environment. The controller is no process of a
            host, and has another environment.

    Returns:
        The pid, and a descriptor that becomes readable once the process has ended: :func:`exit_code` reads it.

    Raises:
        NoForkServer: there is no server, it refused, or it is busy, for instance with its imports.
        TimeoutError: the server began to fork the process and did not finish.
    """
    where = address_of(server, preload) if server else address(preload)
    if where is None:
        raise NoForkServer("this host has no fork server")
    environment = None if server else dict(os.environ)
    request = (module, title, os.getpid(), environment, os.getcwd(), os.getpgrp())
    try:
        owner, text = os.pidfd_open(os.getpid()), in_memory(pickle.dumps(request))
    except OSError as error:  # some sandboxes forbid it
        raise NoForkServer(f"a process cannot be handed to the fork server: {error}") from error
    claim, (status, status_writer) = new_claim(), os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(answer_s)
        try:
            connection.connect(where)
            sent = array.array("i", [text, owner, status_writer, claim, 0, 1, 2, *fds])
            connection.sendmsg([b"fork"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
        except OSError as error:
            close_all(status, claim)
            raise NoForkServer(f"the fork server is gone: {error}") from error
        finally:
            close_all(text, owner, status_writer)
        answered = _readable(status, answer_s)
        late = not answered and take_claim(claim)
        os.close(claim)
        if late:
            os.close(status)
            raise NoForkServer(f"the fork server did not answer within {answer_s:g} s")
        if not answered and not _readable(status, ANSWER_S):
            os.close(status)
            raise TimeoutError(f"waited {ANSWER_S:g} s for the fork server to fork a process")
        pid = read_number(status)
    if not pid:
        os.close(status)
        raise NoForkServer("the fork server ended" if pid is None else "the fork server refused; its log says why")
    return pid, status


def new_claim() -> int:
    """A token for the right to start the process, which either the server or the client takes: a pipe with one byte."""
    reader, writer = os.pipe2(os.O_NONBLOCK)
    os.write(writer, b"1")
    os.close(writer)
    return reader


def take_claim(claim: int) -> bool:
    """Take the right to start the process; returns whether the caller got it, which is true for the first one only."""
    return bool(os.read(claim, 1))


def _readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1e3))


def close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def exit_code(status: int) -> int | None:
    """Wait for a forked process to end; returns its exit code, negative for a signal; None if the server was lost."""
    return read_number(status)


def read_number(descriptor: int) -> int | None:
    """The next number from a server; None at the end of the pipe."""
    data = os.read(descriptor, NUMBER.size)  # waits: the caller has polled, or waits for the process's whole life
    return NUMBER.unpack(data)[0] if data else None


def in_memory(content: bytes) -> int:
    """A file descriptor from which ``content`` can be read."""
    descriptor = os.memfd_create("monarch_rl-fork")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def main() -> None:
    """Be the proxy of a forked process; see the top of this file."""
    preload, module = sys.argv[1:]
    try:
        title = os.environ.get("HYPERACTOR_PROCESS_NAME", module)
        pid, status = fork(preload, module, title, answer_s=STAND_IN_ANSWER_S)
    except NoForkServer:
        os.execv(sys.executable, [sys.executable, "-m", module])

    def forward(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    code = exit_code(status)
    if code is None:  # the server was killed, and the process with it
        code = -signal.SIGKILL
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
