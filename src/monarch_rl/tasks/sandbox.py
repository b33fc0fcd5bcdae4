"""Runs Python code that a model has written, in a sandbox.

    sandbox = Sandbox(seconds=5)
    ran = sandbox.run(reply.text, stdin="3 4\n")
    reward = float(ran.ok and ran.stdout.strip() == "7")

bubblewrap gives the program its own namespaces: no network, no other processes, and no files except a small ``/tmp``
and, read-only, the interpreter and the system's libraries. Resource limits bound its memory, CPU time, files and
processes (it is the only one); a filter of system calls (``sandbox_filter.py``) covers what these limits do not count.
Its output and its run time are bounded, too. docs/tasks.md describes what this protects from, and what it does not.
"""

from __future__ import annotations

import fcntl
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from monarch_rl.errors import SandboxFailed
from monarch_rl.settings.ranges import CheckedSettings, Range
from monarch_rl.tasks.sandbox_filter import seccomp_filter

NOBODY = 65534
"""User id of programs. If this process is root, it really switches to this user, because process limits do not bind
root."""
START_S = 30.0
"""Seconds that the sandbox itself may take to start on a crowded machine; the program's own time starts afterwards."""
ENDING_S = 30.0
"""Seconds that killed processes may take to exit."""
NOT_STARTED = "not started"
SIGNALS_FROM = 128
"""bubblewrap's exit code for signal n is 128 + n. A program that calls ``sys.exit(139)`` therefore looks as if SIGSEGV
had killed it."""
SIGNALS = frozenset(map(int, signal.Signals))
OPEN_FILES = 64
ONE_THREAD = (("OMP_NUM_THREADS", "1"), ("OPENBLAS_NUM_THREADS", "1"), ("MKL_NUM_THREADS", "1"))
"""Needed because a program cannot start another thread."""
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin")
"""Folders with the interpreter's libraries. They are read-only; symbolic links stay links."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_RUNNER = """
import os, resource, sys
memory, cpu, size, files, ready = map(int, sys.argv[1:])
for limit, most in (
    (resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, cpu), (resource.RLIMIT_FSIZE, size),
    (resource.RLIMIT_NOFILE, files), (resource.RLIMIT_NPROC, 1), (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_MSGQUEUE, 0),
):
    resource.setrlimit(limit, (most, most + (limit == resource.RLIMIT_CPU)))
with open("/program.py", encoding="utf-8") as file:
    source = file.read()
os.write(ready, b"ready")
os.close(ready)
sys.argv = ["/program.py"]
del os, resource, memory, cpu, size, files, ready, limit, most, file
exec(compile(source, "/program.py", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
"""
"""Runs inside the sandbox, before the program. It lowers the limits, which nothing inside can raise again."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Result of a program."""

    stdout: str
    stderr: str
    exit_code: int | None
    """Exit code if the program ended without being killed; None if a limit or a signal ended it. Codes that mean a
    signal (128 + its number) count as that signal."""
    ended: str = ""
    """What ended the program, if it did not exit: "took over 5 s", "printed over 65536 bytes", "ended by SIGSEGV"."""

    @property
    def ok(self) -> bool:
        """Whether it exited without an error. A program can exit like this without having done its work
        (``os._exit(0)``): compare its output."""
        return self.exit_code == 0


@dataclass(frozen=True)
class Sandbox(CheckedSettings, flags="sandbox"):
    """How to run programs. Creating one runs a test program.

    Raises ValueError, saying what is missing, on a machine that cannot isolate programs: they are never run without
    isolation.
    """

    seconds: Annotated[float, Range(0.1, 3600)] = 5.0
    """Time limit of a program in seconds: elapsed time, and, rounded up, CPU time."""
    memory_mib: Annotated[int, Range(64, 1_000_000)] = 512
    """Address space of a program, including the interpreter, which takes about 30."""
    files_mib: Annotated[int, Range(1, 1_000_000)] = 16
    """Size of its /tmp, and of one file in it; both are in memory."""
    output_bytes: Annotated[int, Range(1, 2**30)] = 2**16
    """Maximum bytes that it may print on each of stdout and stderr."""
    python: str = ""
    """Interpreter; empty means the current one, or /usr/bin/python3 if other users cannot access it, for example in
    root's home."""
    _command: tuple[str, ...] = field(default=(), init=False, repr=False)
    """The part of bubblewrap's command line that is the same for all programs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise ValueError(
                "a sandbox needs bubblewrap, but bwrap is not on the PATH: install it (apt install bubblewrap) on "
                "every machine with rollout workers"
            )
        refusals = []
        for python in [self.python] if self.python else _interpreters():
            object.__setattr__(self, "python", python)
            object.__setattr__(self, "_command", _command(bwrap, python, self.files_mib))
            refusal = self._refusal()
            if not refusal:
                return
            refusals.append(f"{python}: {refusal}")
        raise ValueError(
            f"this machine cannot isolate programs ({'; '.join(refusals)}). A sandbox needs bubblewrap 0.7 or newer, "
            "user namespaces, which many containers forbid, and a Python that any user may run"
        )

    def _refusal(self) -> str:
        """Why the current command cannot run a program; empty if it can."""
        try:
            ran = self.run("print(6 * 7)")
        except (SandboxFailed, OSError) as error:
            return str(error)
        return "" if ran.stdout == "42\n" else ran.ended or ran.stderr.strip()[-200:]

    def run(self, code: str, stdin: str = "") -> Ran:
        """Run a program and wait for it. Call it in a scoring process or on a thread, not on an event loop.

        Raises SandboxFailed if the sandbox does not start, and TypeError if ``code`` or ``stdin`` is not text.
        """
        for name, text in ("code", code), ("stdin", stdin):
            if not isinstance(text, str):
                raise TypeError(f"{name} of a program must be text, got {text!r:.80}")
        files = [
            ("program", code.encode(errors="replace")),
            ("stdin", stdin.encode(errors="replace")),
            ("filter", seccomp_filter()),
        ]
        with _memory_files(files) as (program, program_stdin, syscall_filter):
            ready, started = os.pipe()
            try:
                process = self._start(program, program_stdin, syscall_filter, started)
            finally:
                os.close(started)
            try:
                return self._watch(process, ready)
            finally:
                process.kill()  # all processes inside end with it
                process.wait(ENDING_S)
                os.close(ready)
                for stream in (process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()

    def _start(self, program: int, program_stdin: int, syscall_filter: int, started: int) -> subprocess.Popen[bytes]:
        size = self.files_mib * 2**20
        limits = (self.memory_mib * 2**20, math.ceil(self.seconds), size, OPEN_FILES, started)
        inside = [self.python, "-I", "-B", "-c", _RUNNER, *map(str, limits)]
        last = ["--ro-bind-data", str(program), "/program.py", "--remount-ro", "/", "--seccomp", str(syscall_filter)]
        user: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        return subprocess.Popen(
            [*self._command, *last, "--", *inside],
            stdin=program_stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(program, syscall_filter, started),
            **user,
        )

    def _watch(self, process: subprocess.Popen[bytes], ready: int) -> Ran:
        """Read the program's output until it ends or exceeds a limit."""
        assert process.stdout is not None and process.stderr is not None
        printed = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
        ended = self._read(printed, ready, process)
        stdout, stderr = (bytes(data[: self.output_bytes]).decode(errors="replace") for data in printed.values())
        if ended == NOT_STARTED:
            raise SandboxFailed(stderr.strip() or f"the sandbox did not start within {START_S:g} s")
        code = process.returncode
        if not ended and code - SIGNALS_FROM in SIGNALS:
            ended = f"ended by {signal.Signals(code - SIGNALS_FROM).name}"
        return Ran(stdout, stderr, None if ended else code, ended)

    def _read(self, printed: dict[int, bytearray], ready: int, process: subprocess.Popen[bytes]) -> str:
        """Fill ``printed``, by file descriptor; returns which limit the program exceeded, or "" once it has ended."""
        started, until = False, time.monotonic() + START_S
        with selectors.DefaultSelector() as selector:
            for stream in (*printed, ready):
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                events = selector.select(max(0.0, until - time.monotonic()))
                if not events:
                    return f"took over {self.seconds:g} s" if started else NOT_STARTED
                for stream in (key.fd for key, _ in events):
                    data = os.read(stream, 2**16)
                    if not data:
                        selector.unregister(stream)
                    elif stream == ready:
                        started, until = True, time.monotonic() + self.seconds
                    else:
                        printed[stream] += data
                        if len(printed[stream]) > self.output_bytes:
                            return f"printed over {self.output_bytes} bytes"
        try:
            process.wait(max(0.0, until - time.monotonic()) + (0 if started else ENDING_S))
        except subprocess.TimeoutExpired:
            return f"took over {self.seconds:g} s"
        return "" if started else NOT_STARTED


def _command(bwrap: str, python: str, files_mib: int) -> tuple[str, ...]:
    """bubblewrap's arguments, without those of the program."""
    command = [bwrap, "--unshare-user", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox", "--clearenv", "--chdir", "/tmp"]
    for name, value in (("PATH", "/usr/bin:/bin"), ("HOME", "/tmp"), ("LANG", "C.UTF-8"), *ONE_THREAD):
        command += ["--setenv", name, value]
    for folder in map(Path, SYSTEM_FOLDERS):
        if folder.is_symlink():
            command += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.is_dir():
            command += ["--ro-bind", str(folder), str(folder)]
    prefix = Path(python).resolve().parent.parent
    if not any(prefix.is_relative_to(folder) for folder in SYSTEM_FOLDERS):
        command += ["--ro-bind", str(prefix), str(prefix)]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    return (*command, "--size", str(files_mib * 2**20), "--tmpfs", "/tmp")


def _interpreters() -> list[str]:
    """The current interpreter, without its virtual environment, and the system's."""
    own = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
    return list(dict.fromkeys([own, "/usr/bin/python3"]))


@contextmanager
def _memory_files(contents: list[tuple[str, bytes]]) -> Iterator[list[int]]:
    """Sealed files that exist only in memory, open at their beginning; closed after the block."""
    descriptors: list[int] = []
    try:
        for name, content in contents:
            descriptors.append(descriptor := os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            with open(descriptor, "wb", closefd=False) as file:
                file.write(content)
            os.lseek(descriptor, 0, os.SEEK_SET)
            seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
