"""Temporary folders that are removed when their processes end, even by SIGKILL. Imports nothing heavy.

    monarch_rl-4x1c9ab2/    in the temporary directory, locked by each process that keeps it

Files that libraries leave in the temporary directory (SGLang's and Monarch's sockets) lie in such a folder of the host
process. The host removes it when it ends; if the host is killed, the rank that started it does; and if both are killed,
the next process that creates such a folder does. The starting rank has a folder as well (:func:`folder_of_process`),
which its host removes if the rank is killed.
"""

from __future__ import annotations

import fcntl
import functools
import getpass
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path

PREFIX, UNLOCKED = "monarch_rl-", ".monarch_rl-"
MADE_HERE = re.compile(rf"\.?{PREFIX}[a-z0-9_]{{8}}")
"""Names of these folders, with a leading dot until they are locked."""
MARK = 0o1700
"""Mode of these folders once they are locked. A folder of such a name that a user created does not have this mode, and
is not removed. Unlike a marker file in the folder, the mode lasts until the folder is gone."""
LOCKED_S = 3600.0
"""Seconds after which a folder that is still unlocked counts as left behind: generous, as locking takes a moment."""
AFTER_OTHERS = -200
"""Exit priority of removing a process's folder: after ``multiprocessing``, which removes its own files at -100."""
MOST_BYTES = 80
"""Maximum length of a folder's path in bytes: a Unix socket's path may have 107, and libraries put their sockets into
subfolders."""
TEMPORARY = "TMPDIR"
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""Variable with torch's compilation cache, which must be kept; by default it lies in the temporary directory."""


class ScratchFolder:
    """A new folder, kept until this process ends or removes it, for instance at the end of a ``with`` block."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) + len(f"/{PREFIX}12345678") > MOST_BYTES:
            parent = Path("/tmp")
        remove_left(parent)
        unlocked = Path(tempfile.mkdtemp(prefix=UNLOCKED, dir=parent))
        self._lock = keep(unlocked)
        with suppress(OSError):  # on file systems without modes, folders that are left behind are not removed
            unlocked.chmod(MARK)
        # Renamed only when locked: so no other process takes an unlocked folder of this name for one left behind.
        self.path = unlocked.rename(parent / unlocked.name.replace(UNLOCKED, PREFIX, 1))

    def __enter__(self) -> ScratchFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder and everything in it."""
        remove(self.path)
        os.close(self._lock)

    def variables(self) -> dict[str, str]:
        """Environment variables of processes that use the folder as their temporary directory."""
        compiled = os.environ.get(COMPILED) or _compiled()
        self._keep_headers(Path(compiled))
        return {TEMPORARY: str(self.path), COMPILED: compiled}

    def _keep_headers(self, compiled: Path) -> None:
        """Link torch's folder of precompiled C++ headers to ``compiled``, so that the headers are kept, too: torch puts
        them into the temporary directory whatever the value of :data:`COMPILED`."""
        with suppress(OSError):  # the link exists already; without one, each run compiles its headers
            compiled.mkdir(parents=True, exist_ok=True)
            (self.path / Path(_compiled()).name).symlink_to(compiled)

    @contextmanager
    def as_temporary_directory(self) -> Iterator[None]:
        """Within the block, this process, and those that it starts, use the folder as their temporary directory."""
        before = {name: os.environ.get(name) for name in self.variables()}
        try:
            _set(self.variables())
            yield
        finally:
            _set(before)


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Within the block, this process, and those that it starts, use a new folder as their temporary directory."""
    with ScratchFolder() as folder, folder.as_temporary_directory():
        yield folder.path


@functools.cache
def folder_of_process() -> ScratchFolder:
    """The folder for files that a library creates once per process and needs until its end, as Monarch's client does.
    It is removed when the interpreter exits, after the files of ``multiprocessing``."""
    folder = ScratchFolder()
    Finalize(None, folder.remove, exitpriority=AFTER_OTHERS)
    return folder


def keep(folder: Path) -> int:
    """Lock a folder, shared with other processes that do, while the returned descriptor is open."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    with suppress(OSError):  # on file systems without locks, folders that are left behind are not removed
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def remove(folder: Path) -> None:
    """Remove a folder, as far as possible."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_left(parent: Path) -> None:
    """Remove this user's folders of this kind in ``parent`` that no process keeps: processes that were killed left them
    behind."""
    for folder in parent.glob(f"*{PREFIX}*"):
        if MADE_HERE.fullmatch(folder.name):
            with suppress(OSError):  # it is in use, another user's, or gone
                (_remove_unlocked if folder.name.startswith(UNLOCKED) else _remove_marked)(folder)


def _remove_marked(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == MARK:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(folder)
    finally:
        os.close(descriptor)


def _remove_unlocked(folder: Path) -> None:
    """Remove a folder whose process was killed before it renamed it."""
    if time.time() - folder.lstat().st_mtime > LOCKED_S:
        folder.rmdir()  # it is empty


def _set(variables: dict[str, str] | dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    tempfile.tempdir = None  # tempfile caches the variable's value


def _compiled() -> str:
    """torch's default compilation cache."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # as torch does: in a container the user may have no passwd entry
        user = f"uid_{os.getuid()}"
    user = re.sub(r'[\\/:*?"<>|]', "_", user)
    return str(Path(tempfile.gettempdir()) / f"torchinductor_{user}")
