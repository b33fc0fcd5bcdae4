"""Forwards what a run prints to its console, and writes it to ``console.log``: no process of the run depends on the
console.

A console may block (Ctrl-S, a pipe that nobody reads), end (``| head``, a lost ssh session) or be full (``> file``). So
the controller replaces its standard output and error, which all processes of the run inherit, by pipes to a process of
their own, which always reads them: this file, run as ``python -IS console_relay.py INPUTS CONSOLES CONTROL LOG``. It
lives until the last process of the run has ended, however that ends, so that no output is lost. Imports only the
standard library, and ``redact.py``.

A line of the log is ``time | process | text``, without what looks like a key. A process that has a name makes a named
pipe in a folder of the controller, rings, and prints into it (``runtime/process.py``, :func:`print_as`); its children
inherit the pipe. Lines of one process keep their order; those of several are in the order in which the relay reads, a
moment after they were printed. Sockets would tell the pid of each writer, but no program could open ``/dev/stdout`` any
more.
"""

from __future__ import annotations

import atexit
import errno
import importlib
import json
import os
import re
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import unquote

LOG = "console.log"
CONSOLE_VARIABLE = "MONARCH_RL_CONSOLE"
"""Environment variable of the run's processes, read by ``runtime/process.py``: the inode numbers of the controller's
pipes for standard output and error, and the folder of named pipes, separated by colons."""
NAMED = "[12]-*"
"""Named pipes of processes: standard stream, process id and name."""
BELL = "bell"
"""Named pipe into which a process writes that there is a new named pipe."""
CONTROLLER, HERE = "controller", "console relay"
"""Names in the log of the process that starts the relay, and of the relay itself."""
LOG_BOUND = 2**26
"""Size of ``console.log`` in bytes beyond which its middle is cut."""
LINE_BYTES = 2**16
"""A longer line is logged in parts."""
MONARCH = b"Monarch internal logs are being written to "
"""Beginning of a line that each process with a client of Monarch prints: logged once, and not shown."""
LEFT_OUT = re.compile(rb"[^|\n]*\| console relay \| ([\d,]+) lines are left out here\n")
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

    Args:
        folder: folder for the named pipes of processes that tell their names, created here and removed by the caller;
            None: the log takes all processes for the controller.
    """

    def __init__(self, folder: Path | None = None) -> None:
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
        self._folder = "" if folder is None else str(folder)
        self._bell: int | None = None
        """Held here, so that rings outlive a relay that is killed."""
        self._held: list[int] = []
        """Named pipes that a killed relay has read."""
        if folder is not None:
            folder.mkdir()
            os.mkfifo(folder / BELL, 0o600)
            self._bell = os.open(folder / BELL, os.O_RDWR | os.O_NONBLOCK)
            inodes = [str(os.fstat(self.writers[n]).st_ino) if n in self.writers else "" for n in (1, 2)]
            os.environ[CONSOLE_VARIABLE] = ":".join([*inodes, self._folder])

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
                [sys.executable, "-IS", __file__, *descriptors, self._log_path, self._folder],
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
            self._hold_named()
            try:
                if code >= 0:
                    raise OSError(f"its process ended with exit code {code}")
                self._start()
            except OSError as error:
                self._restore()
                print(f"warning: what the run prints is no longer in {LOG}: {error}", file=sys.stderr)
                return

    def _hold_named(self) -> None:
        """Keep what is in the named pipes until the next relay reads it, although their processes may end before."""
        earlier, self._held = self._held, []
        for path in Path(self._folder).glob(NAMED) if self._folder else ():
            with suppress(OSError):
                self._held.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        for reader in earlier:
            os.close(reader)

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
        os.environ.pop(CONSOLE_VARIABLE, None)
        if self._bell is not None:
            os.close(self._bell)
        for number, console in self.consoles.items():
            os.dup2(console, number)
        for stream in (self.screen, self.log):
            if stream is not None:
                stream.close()
        self._control.close()


_relay: Relay | None = None


def prepared_relay(folder: Path | None = None) -> Relay:
    """The relay that :func:`relay_output` will use, for processes that are started earlier; does not change where this
    process prints. A new one gets ``folder`` for its named pipes."""
    global _relay
    if _relay is None:
        _relay = Relay(folder)
    return _relay


def relay_output(folder: Path | None = None) -> Relay:
    """Relay the output of this process, and of those that it starts from now on; the existing relay if there is one. A
    new one gets ``folder`` for its named pipes."""
    relay = prepared_relay(folder)
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
        note: makes a line of a text that is written between the output.
        bound: size in bytes beyond which the middle of the file is cut; 0 is none.
    """

    def __init__(
        self,
        name: str,
        descriptor: int | None,
        most: int,
        report: Callable[[str], None],
        note: Callable[[str], bytes],
        bound: int = 0,
    ) -> None:
        self._name, self._descriptor, self._most, self._report = name, descriptor, most, report
        self._note, self._bound = note, bound
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
                data += self._note(f"{left_out:,} bytes were left out while {self._name} accepted no output")
            self._write(data)
            self._writing_since = None

    def _write(self, data: bytes) -> None:
        try:
            if self._path != self._opened:  # an earlier one is of an earlier run of the same program
                self._open()
            assert self._descriptor is not None
            _write_all(self._descriptor, data)
            if self._bound and os.fstat(self._descriptor).st_size > self._bound:
                cut_middle(Path(self._path), self._bound, self._note)
                self._open()
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

    def _open(self) -> None:
        if self._opened and self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._opened = self._path


def cut_middle(path: Path, bound: int, note: Callable[[str], bytes]) -> None:
    """Shorten a log to three quarters of ``bound`` bytes: its first half stays, then comes a line with the number of
    lines that are left out, then the newest lines. Readers see the old or the new file. Raises OSError.

    Args:
        note: makes a line of a text.
    """
    fresh = path.with_name(f".{path.name}.new")
    try:
        with path.open("rb") as old, fresh.open("wb") as new:
            left_out, at = 0, 0
            for line in old:
                at += len(line)
                earlier = LEFT_OUT.fullmatch(line)
                if earlier or at > bound // 2:
                    left_out = int(earlier[1].replace(b",", b"")) if earlier else 1
                    break
                new.write(line)
            newest = path.stat().st_size - bound // 4
            for line in old:
                at += len(line)
                if at > newest:
                    new.write(note(f"{left_out:,} lines are left out here") + line)
                    break
                left_out += 1
            new.writelines(old)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another program has made the console non-blocking
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()  # waits: for the console, on a thread of its own


@dataclass
class _Input:
    """A pipe that the relay reads."""

    console: int
    """Standard stream to which its output is forwarded; 0: none."""
    logged: bool
    name: str
    """Name of the process that writes into it."""
    path: Path | None = None
    """If it is a named pipe."""
    began: float = 0.0
    """Unix time of the beginning of the line in :attr:`partial`."""
    partial: bytes = b""
    held: bytes = b""
    """The beginning of a line that may be one of Monarch's, for the console."""
    in_key: bool = False
    """Whether the last line belongs to a private key that may continue."""


class _Program:
    def __init__(
        self, inputs: list[tuple[int, int, bool]], consoles: dict[int, int], control: int, log: str, folder: str
    ) -> None:
        self._log = Sink(
            LOG, None, LOG_BYTES, self._to_consoles, lambda what: _line(time.time(), HERE, what), LOG_BOUND
        )
        if log:
            self._log.open_later(log)
        names = {1: "standard output", 2: "standard error"}
        self._consoles = {
            n: Sink(names[n], descriptor, CONSOLE_BYTES, self._to_log, _note) for n, descriptor in consoles.items()
        }
        self._inputs = {reader: _Input(console, logged, CONTROLLER) for reader, console, logged in inputs}
        self._control = socket.socket(fileno=control)
        sys.path.append(str(Path(__file__).parent))  # which -I leaves out
        redaction = importlib.import_module("redact")
        self._redact, self._secrets = redaction.redact_line, redaction.secrets_in(os.environ)
        self._monarch = set[bytes]()
        """The lines of Monarch that were logged."""
        self._poll = select.poll()
        for descriptor in (*self._inputs, self._control.fileno()):
            self._poll.register(descriptor, select.POLLIN)
        self._folder, self._bell = Path(folder), -1
        if folder:
            with suppress(OSError):  # the controller has ended, and its folder with it
                self._bell = os.open(self._folder / BELL, os.O_RDWR | os.O_NONBLOCK)
                self._poll.register(self._bell, select.POLLIN)
                self._open_named()

    def _to_log(self, what: str) -> None:
        self._log.put(_line(time.time(), HERE, f"{what}; the run continues"))

    def _to_consoles(self, what: str) -> None:
        for sink in self._consoles.values():
            sink.put(_note(f"{what}; the run continues"))

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
        if self._bell in found:  # first: the pipe into which that process printed before may end now
            with suppress(BlockingIOError):
                os.read(self._bell, PIPE_BYTES)
            found |= dict.fromkeys(self._open_named(), 0)
        # The controller last: what it prints is often about something that another process has just printed.
        for reader in sorted(self._inputs, key=lambda reader: self._inputs[reader].name == CONTROLLER):
            if reader in found:
                self._forward(reader)
        if self._control.fileno() in found:  # later, since each read above has taken all that came before the message
            self._obey()

    def _open_named(self) -> list[int]:
        """Read also the named pipes that are new in the folder; returns their descriptors."""
        known, opened = {source.path for source in self._inputs.values()}, []
        for path in self._folder.glob(NAMED):
            if path in known:
                continue
            with suppress(OSError):
                reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                # If its process has ended, only a writer that comes and goes makes this known.
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                console, _, name = path.name.split("-", 2)
                self._inputs[reader] = _Input(int(console), True, unquote(name), path)
                self._poll.register(reader, select.POLLIN)
                opened.append(reader)
        return opened

    def _forward(self, reader: int) -> None:
        source = self._inputs[reader]
        try:
            data = os.read(reader, PIPE_BYTES)
        except BlockingIOError:  # a named pipe that is still empty
            return
        if not data:
            self._end(reader, source)
            return
        if source.console and (shown := _shown(source, data)):
            self._consoles[source.console].put(shown)
        if source.logged:
            self._log_lines(source, data)

    def _end(self, reader: int, source: _Input) -> None:
        if source.partial:
            self._log_lines(source, b"\n")
        del self._inputs[reader]
        self._poll.unregister(reader)
        if source.path is not None:
            os.close(reader)
            with suppress(OSError):
                source.path.unlink(missing_ok=True)

    def _log_lines(self, source: _Input, data: bytes) -> None:
        """Log the lines that ``data`` completes, with the time at which each began."""
        now = time.time()
        began = source.began if source.partial else now
        *lines, source.partial = (source.partial + data).split(b"\n")
        if len(source.partial) > LINE_BYTES:
            lines.append(source.partial)
            source.partial = b""
        for line in lines:
            self._log_line(began, source, line)
            began = now
        source.began = began

    def _log_line(self, at: float, source: _Input, line: bytes) -> None:
        # Of a line that a program has written over, such as a progress bar, what stays on a screen.
        text = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]
        if text.startswith(MONARCH):
            if text in self._monarch:
                return
            self._monarch.add(text)
        left, source.in_key = self._redact(text.decode(errors="surrogateescape"), self._secrets, source.in_key)
        self._log.put(_stamp(at, source.name) + left.encode(errors="surrogateescape") + b"\n")

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


def _shown(source: _Input, data: bytes) -> bytes:
    """What the console gets of an input: all but Monarch's lines. An incomplete line that may become one, as it is
    written in several parts, is held back."""
    if not source.held and MONARCH[:16] not in data:
        return data
    lines = (source.held + data).splitlines(keepends=True)
    source.held = b""
    last, beginning = lines[-1], MONARCH[:16]
    if not last.endswith(b"\n") and last.startswith(beginning) and last[: len(MONARCH)] == MONARCH[: len(last)]:
        source.held = lines.pop()
    return b"".join(line for line in lines if not line.startswith(MONARCH))


def _stamp(at: float, name: str) -> bytes:
    milliseconds = int(at * 1000)  # of which both parts are taken, so that they agree
    second = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(milliseconds // 1000))
    return f"{second}.{milliseconds % 1000:03} | {name} | ".encode()


def _line(at: float, name: str, text: str) -> bytes:
    """A line of the log."""
    return _stamp(at, name) + text.encode() + b"\n"


def _note(what: str) -> bytes:
    """On a console, on a line of its own, although the output before it may end in the middle of one."""
    return f"\n[{what}]\n".encode()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a batch system signals all processes of a job
    inputs, consoles, control, log, folder = sys.argv[1:]
    _Program(json.loads(inputs), dict(json.loads(consoles)), int(control), log, folder).run()
    os._exit(0)  # a thread may still wait for a console


if __name__ == "__main__":
    main()
