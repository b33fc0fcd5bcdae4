"""Forwards what a run prints to its console, and writes it to ``console.log``: no process of the run depends on the
console.

A console may block (Ctrl-S, a pipe that nobody reads), end (``| head``, a lost ssh session) or be full (``> file``). So
the controller replaces its standard output and error, which all processes of the run inherit, by pipes to a process of
their own, which always reads them: this file, run as ``python -IS console_relay.py INPUTS CONSOLES CONTROL LOG``. It
lives until the last process of the run has ended, however that ends, so that no output is lost. Imports only the
standard library.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

LOG = "console.log"
PIPE_BYTES = 2**16
"""Capacity of a pipe."""
CONSOLE_BYTES, LOG_BYTES = 2**20, 2**26
"""Output that waits for a console, or for the disk; more of it is left out, and counted."""
BLOCKED_S = 10.0
"""Seconds of a write after which ``console.log`` says that the console accepts no output."""
DRAIN_S = 2.0
"""Seconds that the controller's exit waits for a console."""
LAST_S = 60.0
"""Seconds for a blocked console, or the disk, to accept the last output after the end of the run's processes."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors after which a later write may succeed."""


class Relay:
    """The controller's view of the relay. Until :meth:`capture` its pipes only hold what processes that have
    :attr:`writers` as their standard streams print.

    A stream that Python does not have is left as it is: another file has its descriptor.
    """

    def __init__(self) -> None:
        streams = [(1, sys.__stdout__), (2, sys.__stderr__)]
        self._replaced = [number for number, stream in streams if stream is not None]
        self.consoles: dict[int, int] = {}
        """The original descriptors of standard output (1) and error (2)."""
        self.screen: TextIO | None = None
        """If standard output is a terminal: shown there, but not in the log."""
        self.log: TextIO | None = None
        """Writes to the log only; None if :attr:`screen` is."""
        self._inputs: list[tuple[int, int, bool]] = []
        """Descriptor of each pipe's read end, the standard stream to which it is forwarded (0: none), and whether it is
        logged. This process holds them, too, so that the pipes outlive a relay that is killed."""
        self._log_path = ""
        self._ended = False
        self.captures = False
        """Whether this process's output is relayed."""
        self.writers: dict[int, int] = {}
        """Descriptors for standard output (1) and error (2) of processes that are started before :meth:`capture`."""
        for number in self._replaced:
            # One pipe for both streams if they are the same file keeps their order.
            same = number == 2 and 1 in self.writers and os.path.sameopenfile(1, 2)
            self.writers[number] = self.writers[1] if same else self._pipe(number, logged=True)

    def capture(self) -> None:
        """Relay what the pipes hold, and from now on the output of this process and of those that it starts."""
        self.captures = True
        self.consoles = {number: os.dup(number) for number in self._replaced}
        if 1 in self._replaced and os.isatty(1):
            encoded: Any = {"buffering": 1, "encoding": sys.stdout.encoding, "errors": "backslashreplace"}
            self.screen = os.fdopen(self._pipe(1, logged=False), "w", **encoded)
            self.log = os.fdopen(self._pipe(0, logged=True), "w", **encoded)
        self._start()
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):
                stream.flush()
                # Text of a model may have characters that a console's encoding lacks.
                stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
        for number in self._replaced:
            os.dup2(self.writers[number], number)
        for writer in set(self.writers.values()):
            os.close(writer)
        self.writers.clear()
        threading.Thread(target=self._watch, name="console-relay", daemon=True).start()

    def _pipe(self, console: int, logged: bool) -> int:
        reader, writer = os.pipe()
        self._inputs.append((reader, console, logged))
        return writer

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptors = json.dumps(self._inputs), json.dumps(list(self.consoles.items())), str(theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-IS", __file__, *descriptors, self._log_path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[*(reader for reader, _, _ in self._inputs), *self.consoles.values(), theirs.fileno()],
                start_new_session=True,  # signals of the terminal do not reach it
            )

    def _send(self, message: str) -> bool:
        try:
            self._control.send(os.fsencode(message))
        except OSError:  # it was killed, and is being restarted
            return False
        return True

    def _watch(self) -> None:
        """On its own thread: start another relay if this one is killed."""
        while True:
            code = self._process.wait()  # waits: for the whole run
            if self._ended:
                return
            try:
                if code >= 0:
                    raise OSError(f"its process ended with exit code {code}")
                self._start()
            except OSError as error:
                self._restore()
                print(f"warning: what the run prints is no longer in {LOG}: {error}", file=sys.stderr)
                return

    def log_to(self, folder: Path) -> None:
        """Write all output, also the earlier one, to ``console.log`` in the run's folder; appends."""
        self._log_path = str(folder.resolve() / LOG)
        self._send(f"log {self._log_path}")

    def sync(self) -> None:
        """Wait until the relay has received all output so far: the pipes have no common order."""
        self._ask("sync")

    def drain(self) -> None:
        """Wait until all output so far was forwarded, at most :data:`DRAIN_S` for a blocked console."""
        self._ask("drain")

    def _ask(self, message: str) -> None:
        for stream in (sys.stdout, sys.stderr, self.screen, self.log):
            with suppress(AttributeError, OSError, ValueError):
                stream.flush()  # type: ignore[union-attr]
        self._control.settimeout(2 * DRAIN_S)
        with suppress(OSError):
            if self._send(message):
                self._control.recv(16)

    def end(self) -> None:
        """Print on the console itself from now on, for a program that is to have a relay of its own."""
        self.drain()
        self._restore()

    def _restore(self) -> None:
        self._ended = True
        for number, console in self.consoles.items():
            os.dup2(console, number)
        for stream in (self.screen, self.log):
            if stream is not None:
                stream.close()
        self._control.close()


_relay: Relay | None = None


def prepared_relay() -> Relay:
    """The relay that :func:`relay_output` will use, for processes that are started earlier; does not change where this
    process prints."""
    global _relay
    if _relay is None:
        _relay = Relay()
    return _relay


def relay_output() -> Relay:
    """Relay the output of this process, and of those that it starts from now on; the existing relay if there is one."""
    relay = prepared_relay()
    if not relay.captures:
        relay.capture()
        atexit.register(relay.drain)  # else a shell's prompt may come before the last lines
    return relay


def existing_relay() -> Relay | None:
    return _relay if _relay is not None and _relay.captures else None


def end_relay() -> None:
    """End the relay of this process, if there is one."""
    global _relay
    if _relay is not None and _relay.captures:
        atexit.unregister(_relay.drain)
        _relay.end()
        _relay = None


# -- the process ------------------------------------------------------------------------------------------------------


class Sink:
    """Writes to one descriptor on a thread of its own, which may block.

    Args:
        name: for messages.
        descriptor: None waits for :meth:`open_later`.
        most: bytes that may wait.
        report: called with what happens to the descriptor, such as the loss of a console.
    """

    def __init__(self, name: str, descriptor: int | None, most: int, report: Callable[[str], None]) -> None:
        self._name, self._descriptor, self._most, self._report = name, descriptor, most, report
        self._path = self._opened = ""
        self._queue: deque[bytes] = deque()
        self._queued = self._left_out = 0
        """Bytes."""
        self._changed = threading.Condition()
        self._lost = self._refused = self._blocked = self._full = False
        self._writing_since: float | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, data: bytes) -> None:
        """Queue output. Never blocks."""
        with self._changed:
            if self._lost:
                return
            if self._queued + len(data) > self._most:
                self._full = True  # until it is emptied, so that nothing is missing in the middle of what it holds
            if self._full:
                self._left_out += len(data)
                return
            self._queue.append(data)
            self._queued += len(data)
            self._changed.notify()

    def open_later(self, path: str) -> None:
        """Append to the file at ``path``."""
        with self._changed:
            self._path = path
            self._changed.notify()

    @property
    def busy(self) -> bool:
        """Whether output waits that may still be written."""
        waiting = bool(self._queue) or self._writing_since is not None
        return waiting and not self._lost and (self._descriptor is not None or bool(self._path))

    def look(self) -> None:
        """Report if the current write blocks."""
        since = self._writing_since
        if since is not None and not self._blocked and time.monotonic() - since > BLOCKED_S:
            self._blocked = True
            self._report(f"{self._name} has accepted no output for {BLOCKED_S:g} s (Ctrl-S, or a reader that waits?)")

    def _run(self) -> None:
        while not self._lost:
            with self._changed:
                while not self._queue or (self._descriptor is None and not self._path):
                    self._changed.wait()  # waits: for output of the run
                self._writing_since = time.monotonic()
                data = b"".join(self._queue)
                left_out, self._left_out, self._full = self._left_out, 0, False
                self._queue.clear()
                self._queued = 0
            if left_out:
                data += f"\n[{left_out:,} bytes were left out while {self._name} accepted no output]\n".encode()
            self._write(data)
            self._writing_since = None

    def _write(self, data: bytes) -> None:
        try:
            if self._path != self._opened:  # an earlier one is of an earlier run of the same program
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                self._opened = self._path
            assert self._descriptor is not None
            _write_all(self._descriptor, data)
        except OSError as error:
            if not self._refused:
                self._report(f"{self._name} cannot be written ({error.strerror})")
            self._refused = True
            self._left_out += len(data)
            self._lost = error.errno not in FULL
            return
        if self._refused or self._blocked:
            self._report(f"{self._name} accepts output again")
        self._refused = self._blocked = False


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another program has made the console non-blocking
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()  # waits: for the console, on a thread of its own


class _Program:
    def __init__(self, inputs: list[tuple[int, int, bool]], consoles: dict[int, int], control: int, log: str) -> None:
        self._log = Sink(LOG, None, LOG_BYTES, self._to_consoles)
        if log:
            self._log.open_later(log)
        names = {1: "standard output", 2: "standard error"}
        self._consoles = {
            n: Sink(names[n], descriptor, CONSOLE_BYTES, self._to_log) for n, descriptor in consoles.items()
        }
        self._inputs = {reader: (console, logged) for reader, console, logged in inputs}
        self._control = socket.socket(fileno=control)
        self._poll = select.poll()
        for descriptor in (*self._inputs, self._control.fileno()):
            self._poll.register(descriptor, select.POLLIN)

    def _to_log(self, what: str) -> None:
        self._log.put(_note(f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {what}"))

    def _to_consoles(self, what: str) -> None:
        for sink in self._consoles.values():
            sink.put(_note(what))

    def run(self) -> None:
        while self._inputs:
            self._read(1000 if self._busy() else None)
            for sink in self._consoles.values():
                sink.look()
        self._wait(LAST_S)

    def _busy(self) -> bool:
        # The log twice: a console that is lost meanwhile has a note written to it before it stops being busy.
        return any(sink.busy for sink in (self._log, *self._consoles.values(), self._log))

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._busy() and time.monotonic() < until:
            time.sleep(0.005)

    def _read(self, timeout_ms: int | None) -> None:
        found = dict(self._poll.poll(timeout_ms))  # waits: for the whole run, which the pipes' end tells
        for reader in [reader for reader in self._inputs if reader in found]:
            self._forward(reader)
        if self._control.fileno() in found:  # later, since each read above has taken all that came before the message
            self._obey()

    def _forward(self, reader: int) -> None:
        console, logged = self._inputs[reader]
        data = os.read(reader, PIPE_BYTES)
        if not data:
            del self._inputs[reader]
            self._poll.unregister(reader)
            return
        if console:
            self._consoles[console].put(data)
        if logged:
            self._log.put(data)

    def _obey(self) -> None:
        with suppress(OSError):
            message = os.fsdecode(self._control.recv(2**16))
            if message.startswith("log "):
                self._log.open_later(message.removeprefix("log "))
            elif message:
                if message == "drain":
                    self._wait(DRAIN_S)
                self._control.send(b"done")
            else:  # the controller has ended; other processes may still print
                self._poll.unregister(self._control)


def _note(what: str) -> bytes:
    """On a line of its own, although the output before it may end in the middle of one."""
    return f"\n[{what}; the run continues]\n".encode()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a batch system signals all processes of a job
    inputs, consoles, control, log = sys.argv[1:]
    _Program(json.loads(inputs), dict(json.loads(consoles)), int(control), log).run()
    os._exit(0)  # a thread may still wait for a console


if __name__ == "__main__":
    main()
