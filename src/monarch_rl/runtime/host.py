"""The host process of one machine: it serves as a Monarch host and owns every process of the run there.

It is the reaper of its descendants (PR_SET_CHILD_SUBREAPER), so processes whose parent died, such as an engine's
workers, remain its descendants. Its standard input is a pipe that the starter holds open. When the pipe closes, because
the run has ended or the starter was killed, it kills its remaining descendants, removes their temporary directory
(``scratch.py``) and ends.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from monarch_rl.errors import HostLost
from monarch_rl.runtime import scratch
from monarch_rl.runtime.forking.fork_client import ADDRESS_VARIABLE
from monarch_rl.runtime.forking.fork_server import Preload, preloads_from_text, preloads_to_text, start_server
from monarch_rl.runtime.forking.preloading import ForkServer
from monarch_rl.runtime.network import HOST_ADDRESS_VARIABLE, LOOPBACK, free_port, loopback_interface
from monarch_rl.runtime.process import adopt_orphans, end_quickly, exit_code_of, print_as, signal_name
from monarch_rl.runtime.starvation import HOST_PID_VARIABLE

if TYPE_CHECKING:
    import psutil

logger = logging.getLogger("monarch_rl")

SERVE = b"s"
"""Sent to a host when it is to serve."""
GRACE_S = 2.0
"""Seconds for processes to end on their own before they are killed."""


class HostProcess:
    """The host process of this machine, seen from the rank that started it."""

    def __init__(
        self,
        ip: str | None,
        environment: Mapping[str, str],
        preloads: Sequence[Preload] = (),
        outputs: Mapping[int, int] = MappingProxyType({}),
        early: bool = False,
    ) -> None:
        """Start a host that is reachable at ``ip``, or, if that is None, only from this machine (through an abstract
        Unix socket). With ``preloads`` it has a fork server. ``outputs`` are descriptors for its standard output (1)
        and error (2), in place of this process's. An ``early`` one does nothing but import until :meth:`serve`."""
        self.address = f"tcp://{ip}:{free_port()}" if ip else f"ipc://@monarch_rl-{uuid.uuid4().hex}"
        """Its Monarch address: an element of ``attach_to_workers(workers=...)``."""
        variables = {HOST_ADDRESS_VARIABLE: ip or LOOPBACK}
        if ip is None and "GLOO_SOCKET_IFNAME" not in environment:
            # Otherwise gloo listens on the address that the machine's name resolves to.
            variables["GLOO_SOCKET_IFNAME"] = loopback_interface()
        self.fork_server = ForkServer()
        """The host's fork server; without preloads it has none."""
        if preloads:
            names = frozenset(preload.name for preload in preloads)
            self.fork_server = ForkServer(f"monarch_rl-fork-{uuid.uuid4().hex}", names)
            variables[ADDRESS_VARIABLE] = self.fork_server.name
        self.scratch = scratch.ScratchFolder()
        """The temporary directory of its processes."""
        arguments = [self.address, preloads_to_text(preloads), str(self.scratch.path)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "monarch_rl.runtime.host", *arguments],
            env={**environment, **variables, **self.scratch.variables()},
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=outputs.get(1),
            stderr=outputs.get(2),
            start_new_session=True,  # Ctrl-C in a terminal reaches the controller only, which ends the run cleanly
        )
        self._ending = False
        if not early:
            self.serve()

    def serve(self) -> None:
        """Have it serve as a Monarch host. Raises BrokenPipeError if it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(SERVE)

    def lost(self) -> HostLost | None:
        """Why the process ended before it was asked to; None if it did not."""
        code = self._process.poll()
        if not code or self._ending:
            return None
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        hint = ": check the kernel log (dmesg) for an out-of-memory kill" if code == -signal.SIGKILL else ""
        return HostLost(
            f"the host process {self._process.pid} of this machine {how}{hint}. It owned every process of the run on "
            "this machine, so all of them have ended"
        )

    def when_lost(self, call: Callable[[HostLost], None]) -> None:
        """Have ``call`` called on another thread as soon as the process is lost."""

        def watch() -> None:
            with suppress(ChildProcessError):  # another thread has reaped it
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)  # waits: for the whole run
            lost = self.lost()
            if lost is not None:
                call(lost)

        threading.Thread(target=watch, name="host-lost", daemon=True).start()

    def expect_end(self) -> None:
        """From now on, treat any end of the process as expected."""
        self._ending = True

    def end(self, seconds: float) -> None:
        """Close the pipe and wait until the process and its descendants have ended; kill them after ``seconds``."""
        lost = self.lost()
        self.expect_end()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            import psutil

            logger.error("the host process %d did not end within %g s: killing it", self._process.pid, seconds)
            descendants = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            self._process.wait(seconds)
            for process in descendants:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        if lost is not None:
            self._kill_orphans()
        self.scratch.remove()

    def kill(self) -> None:
        """End a host at once that hosts nothing yet: its fork server ends with it."""
        self.expect_end()
        self._process.kill()
        self._process.wait()  # waits: it was killed
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.scratch.remove()

    def leave(self) -> None:
        """In a fork of the starter: close this process's copy of the pipe, so that the host ends with the starter."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _kill_orphans(self) -> None:
        """Kill the processes that a lost host leaves behind: those not tied to it or to another of its processes."""
        import psutil

        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(HOST_PID_VARIABLE) == str(self._process.pid) and not _is_tracker(process):
                    process.kill()


_fork_server: subprocess.Popen[bytes] | None = None
"""This host's fork server, if it has one."""


def _end_descendants() -> None:
    """Ask the children of this process to end; after :data:`GRACE_S` seconds kill all remaining descendants.

    Only the children are asked: most grandchildren clean up and end when their parent has ended.
    """
    import psutil

    if _fork_server is not None and _fork_server.stdin is not None:
        _fork_server.stdin.close()
    _send(signal.SIGTERM, psutil.Process().children())
    grace = time.monotonic() + GRACE_S
    while (remaining := running_descendants()) and time.monotonic() < grace + GRACE_S:
        if time.monotonic() > grace:
            victims = [process for process in remaining if not _is_tracker(process)]
            if victims:
                logger.warning("killing processes left behind by the run: %s", [process.pid for process in victims])
            _send(signal.SIGKILL, victims)
        time.sleep(0.05)


def running_descendants() -> list[psutil.Process]:
    """The descendants of this process that have not ended; empty only if there are none. Requires that this process
    adopts orphans."""
    import psutil

    def look() -> list[psutil.Process]:
        return [process for process in psutil.Process().children(recursive=True) if _is_running(process)]

    # One look misses the descendants of a process that ends meanwhile. By the second, this process has adopted them.
    return look() or look()


def _send(number: signal.Signals, processes: Iterable[psutil.Process]) -> None:
    import psutil

    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _is_running(process: psutil.Process) -> bool:
    import psutil

    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_tracker(process: psutil.Process) -> bool:
    """Whether it is a resource tracker of ``multiprocessing``. Trackers must not be killed: they remove the semaphores
    of other processes once those have ended, and then end; nothing else has the semaphores' names."""
    import psutil

    try:
        return any("multiprocessing.resource_tracker" in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _end_with_starter(folder: Path) -> None:
    sys.stdin.buffer.read()
    _end_descendants()
    _remove_scratch(folder)
    os._exit(0)


def _remove_scratch(folder: Path) -> None:
    """Remove this host's folder, and its starter's if that was killed."""
    scratch.remove(folder)
    scratch.remove_left(folder.parent)


def main() -> None:
    """Serve as a Monarch host at the address on the command line, until it is shut down or its starter ends."""
    adopt_orphans()
    print_as("host")
    os.environ[HOST_PID_VARIABLE] = str(os.getpid())
    preloads, folder = preloads_from_text(sys.argv[2]), Path(sys.argv[3])
    scratch.keep(folder)
    if preloads:  # before this process has threads
        global _fork_server
        _fork_server = start_server(os.environ[ADDRESS_VARIABLE], preloads)
    if sys.stdin.buffer.read(1) != SERVE:  # waits: for a launch, or the end of the starter
        _end_with_starter(folder)
    threading.Thread(target=_end_with_starter, args=(folder,), name="end-with-starter", daemon=True).start()
    from monarch.actor import run_worker_loop_until_shutdown

    run_worker_loop_until_shutdown(address=sys.argv[1], ca="trust_all_connections")
    _end_descendants()
    _remove_scratch(folder)


if __name__ == "__main__":
    end_quickly(exit_code_of(main))
