"""Make `.venv` hold exactly `tools/cpu.lock` and this project, or find at once that it already does.

Called by `tools/setup.sh`; needs only the standard library, and never touches the environment it is called from.

A stamp in `.venv`, written last, says what was installed: the folder, the hash of the lock, the hash of pyproject.toml.
If it fits, nothing is done. Another lock: pip installs what differs and removes what left the lock. Another
pyproject.toml: only the project is installed again. No stamp (never made, or interrupted), another folder, or a Python
that is gone: `.venv` is deleted and made again, because a package that was interrupted half-way can look installed. To
change to another Python, delete `.venv`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
COMPILER = "ziglang==0.17.1"  # a C compiler as a wheel, for machines without one: pycosat has no wheel
INSTALL_SECONDS = 3600  # for one pip command: 1 GB over a slow line
PROGRESS_SECONDS = 10.0  # between two lines of progress where the output is not a terminal


class SetupError(Exception):
    """The environment could not be made; the message says why and what to do."""


@dataclass(frozen=True)
class Stamp:
    """What a finished set-up installed."""

    root: str
    lock: str
    project: str
    packages: list[str]

    @staticmethod
    def wanted(root: Path) -> Stamp:
        """Return the stamp that the files under `root` ask for."""
        lock = (root / "tools" / "cpu.lock").read_bytes()
        names = [line.split("==")[0] for line in lock.decode().splitlines() if "==" in line and line[0] != "#"]
        return Stamp(
            root=str(root),
            lock=hashlib.sha256(lock).hexdigest(),
            project=hashlib.sha256((root / "pyproject.toml").read_bytes()).hexdigest(),
            packages=names,
        )

    @staticmethod
    def read(path: Path) -> Stamp | None:
        """Return the stamp in the file, or None where there is none that can be read."""
        try:
            return Stamp(**json.loads(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        partial.replace(path)


def plan(found: Stamp | None, wanted: Stamp) -> list[str]:
    """Return the steps that lead from the environment found to the one wanted: of `create`, `lock`, `project`."""
    if found is None or found.root != wanted.root:
        return ["create", "lock", "project"]
    steps = []
    if found.lock != wanted.lock:
        steps.append("lock")
    if found.project != wanted.project or steps:
        steps.append("project")
    return steps


class Environment:
    """The project's `.venv` under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / ".venv"
        self.python = self.folder / "bin" / "python"
        self.stamp = self.folder / "monarch_rl.stamp"
        self.log = self.folder / "setup.log"

    def bring_up(self) -> list[str]:
        """Do what is missing and return the steps taken. Raises SetupError."""
        wanted = Stamp.wanted(self.root)
        if not plan(self._found(), wanted):
            return []
        with self._alone():
            found = self._found()
            steps = plan(found, wanted)  # another set-up may have finished while this one waited
            if not steps:
                return []
            begin = time.monotonic()
            if "create" in steps:
                self._create()
                found = None
            self.stamp.unlink(missing_ok=True)
            if "lock" in steps:
                self._install_lock(found, wanted)
            self._install_project()
            wanted.write(self.stamp)
            say(f"ready in {time.monotonic() - begin:.0f} s: {self.folder}")
            return steps

    def _found(self) -> Stamp | None:
        return Stamp.read(self.stamp) if self.python.exists() else None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let one set-up of this folder work at a time; wait for the other as long as one pip command may take."""
        path = self.root / ".cache" / "setup.lock"
        path.parent.mkdir(exist_ok=True)
        deadline = time.monotonic() + INSTALL_SECONDS
        with path.open("w") as file:
            waiting = False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise SetupError(f"waited {INSTALL_SECONDS} s for another set-up that holds {path}") from None
                    if not waiting:
                        say(f"another set-up of {self.root} is running; waiting for it")
                    waiting = True
                    time.sleep(0.5)
            yield

    def _create(self) -> None:
        say(f"making {self.folder} with Python {platform.python_version()} ({sys.executable})")
        if self.folder.exists():
            shutil.rmtree(self.folder)
        done = subprocess.run(
            [sys.executable, "-m", "venv", str(self.folder)],
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            raise SetupError(
                f"`{sys.executable} -m venv` failed:\n{done.stdout}{done.stderr}"
                "On Debian and Ubuntu: apt-get install python3-venv"
            )

    def _install_lock(self, found: Stamp | None, wanted: Stamp) -> None:
        lock = self.root / "tools" / "cpu.lock"
        compiler = self._compiler()
        torch = [line for line in lock.read_text(encoding="utf-8").splitlines() if line.startswith("torch==")]
        if torch and not self._offers(torch[0]):
            index = os.environ.get("MONARCH_RL_TORCH_INDEX", TORCH_CPU_INDEX)
            say(f"{torch[0]} is not in pip's configured sources; taking it, and nothing else, from {index}")
            self._pip(torch[0], ["install", "--no-deps", "--index-url", index, *torch])
        installs = [["install", "--no-deps", "-r", str(part)] for part in self._parts(lock)]
        self._pip(
            f"the {len(wanted.packages)} packages of {lock.name}",
            *installs,
            total=len(wanted.packages),
            variables=compiler,
        )
        shutil.rmtree(self.folder / "compiler", ignore_errors=True)  # 400 MB that nothing else needs
        gone = sorted(set(found.packages) - set(wanted.packages)) if found else []
        if gone:
            self._pip("removing what left the lock", ["uninstall", "--yes", *gone])

    def _parts(self, lock: Path) -> list[Path]:
        """Divide the lock: a pip for each core, up to 4, as pip spends its time on one core (most of it compiles)."""
        lines = lock.read_text(encoding="utf-8").splitlines()
        options = [line for line in lines if line.startswith("-")]
        packages = [line for line in lines if line and line[0] not in "#-"]
        parts = []
        for index in range(count := min(4, os.cpu_count() or 1, len(packages))):
            parts.append(self.folder / f"lock-{index}.txt")
            parts[-1].write_text("\n".join([*options, *packages[index::count]]) + "\n", encoding="utf-8")
        return parts

    def _install_project(self) -> None:
        # setuptools comes with the lock, so nothing is fetched to build the project
        arguments = ["install", "--no-deps", "--no-build-isolation", "--editable", str(self.root)]
        self._pip("monarch_rl itself", arguments)

    def _offers(self, requirement: str) -> bool:
        """Say whether pip's configured sources have `requirement`. Raises SetupError when they cannot be asked."""
        say(f"asking pip's configured sources for {requirement}")
        command = [str(self.python), "-m", "pip", "install", "--dry-run", "--no-deps", requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
        if done.returncode != 0 and "No matching distribution found" not in done.stderr:
            raise SetupError(f"{' '.join(command)} failed:\n{tail(done.stderr)}")
        return done.returncode == 0

    def _compiler(self) -> dict[str, str]:
        """Return the variables that let pip build C: none where there is a compiler, else those of one from a wheel."""
        if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
            raise SetupError(
                f"{sys.executable} has no C headers (Python.h), which building pycosat (for reasoning-gym) needs. "
                "On Debian and Ubuntu: apt-get install python3-dev"
            )
        if any(shutil.which(name) for name in os.environ.get("CC", "cc gcc clang").split()):
            return {}
        say("no C compiler found; using one from a wheel to build pycosat")
        folder = self.folder / "compiler"
        self._pip("C compiler", ["install", "--no-deps", "--target", str(folder), COMPILER])
        zig = folder / "ziglang" / "zig"
        return {"CC": f"{zig} cc", "LDSHARED": f"{zig} cc -shared"}

    def _pip(
        self, what: str, *calls: list[str], total: int | None = None, variables: dict[str, str] | None = None
    ) -> None:
        """Run pip, once for each list of arguments, all at a time: their output goes into the log, a count of packages
        onto the screen.

        Raises SetupError with the end of the output of the first that fails.
        """
        say(what)
        python = [str(self.python), "-m", "pip", "--no-input"]
        commands = [[*python, *arguments, "--disable-pip-version-check"] for arguments in calls]
        outputs = [self.folder / f"pip-{index}.log" for index in range(len(commands))]
        processes = []
        try:
            for command, output in zip(commands, outputs, strict=True):
                with output.open("wb") as file:
                    processes.append(
                        subprocess.Popen(
                            command,
                            stdin=subprocess.DEVNULL,
                            stdout=file,
                            stderr=subprocess.STDOUT,
                            env={**os.environ, **(variables or {})},
                        )
                    )
            self._watch(processes, outputs, what, total)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            with self.log.open("a", encoding="utf-8") as log:
                for command, output in zip(commands, outputs, strict=True):
                    log.write(f"\n$ {' '.join(command)}\n{_text(output)}")
                    output.unlink(missing_ok=True)

    def _watch(self, processes: list[subprocess.Popen[Any]], outputs: list[Path], what: str, total: int | None) -> None:
        """Wait for every pip; show what they do every second on a terminal, and now and then elsewhere."""
        begin = shown = time.monotonic()
        terminal = sys.stderr.isatty()
        while True:
            running = [process for process in processes if process.poll() is None]
            for process, output in zip(processes, outputs, strict=True):
                if process.returncode:
                    raise SetupError(f"pip failed ({what}):\n{tail(_text(output))}\nAll of it: {self.log}")
            if not running:
                break
            try:
                running[0].wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                now = time.monotonic()
                if now - begin > INSTALL_SECONDS:
                    raise SetupError(f"pip ({what}) did not end in {INSTALL_SECONDS} s; its log: {self.log}") from None
                if terminal or now - shown >= PROGRESS_SECONDS:
                    shown = now
                    line = f"  {now - begin:4.0f} s  {progress([_text(output) for output in outputs], total)}"
                    if terminal:
                        print(f"\r{line[:79]:<79}", end="", file=sys.stderr, flush=True)
                    else:
                        print(line, file=sys.stderr, flush=True)
        if terminal:
            print(f"\r{'':<79}\r", end="", file=sys.stderr, flush=True)


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="replace") if path.exists() else ""


def progress(outputs: list[str], total: int | None) -> str:
    """Say in a few words how far pip is, from what each of its processes has printed.

    >>> progress(["Collecting absl-py==2.5.1\\n"], 3)
    '1/3 fetching absl-py==2.5.1'
    """
    lines = [line.split() for output in outputs for line in output.splitlines()]
    fetched = [words[1] for words in lines if len(words) > 1 and words[0] in ("Collecting", "Processing")]
    if all("Installing collected packages" in output for output in outputs):
        return f"{len(fetched)} fetched, writing them to disk"
    if any("Building wheels for collected" in output for output in outputs):
        return f"{len(fetched)} fetched, building those without a wheel"
    count = f"{len(fetched)}/{total} " if total else ""
    return f"{count}fetching {fetched[-1].rpartition('/')[2]}" if fetched else "starting"


def tail(text: str, lines: int = 30) -> str:
    """Return the last lines of what pip printed."""
    return "\n".join(text.splitlines()[-lines:])


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


def check_machine() -> None:
    """Raise SetupError where the wheels of the lock cannot work."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SetupError(f"tools/cpu.lock is for Linux on x86_64; this is {sys.platform} on {platform.machine()}.")
    library, version = platform.libc_ver()
    if library == "glibc" and tuple(map(int, version.split("."))) < (2, 34):
        raise SetupError(f"sglang needs glibc 2.34 or newer (as in Debian 12 or Ubuntu 22.04); this is {version}.")


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    try:
        check_machine()
        Environment(root).bring_up()
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a read-only file system, another user's files, a full disk
        print(
            f"setup: {error.filename or root} cannot be used ({error.strerror or error}), and .venv and .cache are "
            f"made in {root}: make that folder writable, or copy it to one that is",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; the next call makes the environment again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
