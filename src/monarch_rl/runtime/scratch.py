"""Temporary folders that are gone when their processes are, also after SIGKILL. Imports nothing heavy.

    monarch_rl-4x1c9ab2/    in the temporary directory, locked by each process that keeps it

What libraries leave in the temporary directory (SGLang's and Monarch's sockets) lies in such a folder of the host
process. It is removed when the host ends, by the rank that started the host if that was killed, and if both were, by
whoever makes the next one. That rank has a folder, too (:func:`folder_of_process`): its host removes it if the rank was
killed.
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
"""Names of these folders, before they are locked and from then on."""
MARK = 0o1700
"""Mode of these folders from their lock on. Folders that a user has given such a name are not of this mode, and stay.
Unlike a file in the folder, it is there until the folder is gone."""
LOCKED_S = 3600.0
"""Seconds within which a folder that was made is locked, by far."""
AFTER_OTHERS = -200
"""When a process's folder is removed at its exit: ``multiprocessing`` removes at -100 what it has put there."""
MOST_BYTES = 80
"""Of a folder's path: that of a Unix socket has at most 107, and libraries put theirs into folders of their own."""
TEMPORARY = "TMPDIR"
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""Variable with the folder of what torch has compiled, which is to stay; by default in the temporary directory."""


class ScratchFolder:
    """A new folder, kept until this process removes it, as at the end of a ``with`` block, or ends."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) + len(f"/{PREFIX}12345678") > MOST_BYTES:
            parent = Path("/tmp")
        remove_left(parent)
        unlocked = Path(tempfile.mkdtemp(prefix=UNLOCKED, dir=parent))
        self._lock = keep(unlocked)
        with suppress(OSError):  # some file systems have no modes: there nobody removes what is left
            unlocked.chmod(MARK)
        # Others look at this name alone, so nobody takes the folder for one that was left before it is locked.
        self.path = unlocked.rename(parent / unlocked.name.replace(UNLOCKED, PREFIX, 1))

    def __enter__(self) -> ScratchFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove it with all that is in it."""
        remove(self.path)
        os.close(self._lock)

    def variables(self) -> dict[str, str]:
        """Of processes that are to have it as their temporary directory."""
        compiled = os.environ.get(COMPILED) or _compiled()
        self._keep_headers(Path(compiled))
        return {TEMPORARY: str(self.path), COMPILED: compiled}

    def _keep_headers(self, compiled: Path) -> None:
        """torch puts the C++ headers that it has compiled into a folder of the temporary directory, whatever
        :data:`COMPILED` says. They are to stay, too: a link by the name of that folder leads there."""
        with suppress(OSError):  # there is one already, or each run compiles its headers
            compiled.mkdir(parents=True, exist_ok=True)
            (self.path / Path(_compiled()).name).symlink_to(compiled)

    @contextmanager
    def as_temporary_directory(self) -> Iterator[None]:
        """Have this process, and those that it starts in the block, use it as their temporary directory."""
        before = {name: os.environ.get(name) for name in self.variables()}
        try:
            _set(self.variables())
            yield
        finally:
            _set(before)


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Have this process, and those that it starts in the block, use a folder of their own for what is temporary."""
    with ScratchFolder() as folder, folder.as_temporary_directory():
        yield folder.path


@functools.cache
def folder_of_process() -> ScratchFolder:
    """The folder of what a library makes once in a process and needs until its end, as Monarch's client does. It is
    removed at the end of the interpreter, after what ``multiprocessing`` has put there."""
    folder = ScratchFolder()
    Finalize(None, folder.remove, exitpriority=AFTER_OTHERS)
    return folder


def keep(folder: Path) -> int:
    """Lock a folder, beside others that do, as long as the returned descriptor is open."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    with suppress(OSError):  # some file systems lock nothing: there nobody removes what is left either
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def remove(folder: Path) -> None:
    """Remove a folder, as far as that is possible."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_left(parent: Path) -> None:
    """Remove the folders of this user that were made here and nobody keeps: those of processes that were killed."""
    for folder in parent.glob(f"*{PREFIX}*"):
        if MADE_HERE.fullmatch(folder.name):
            with suppress(OSError):  # it is kept, another user's, or gone
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
    """Of a process that was killed before it gave the folder its name."""
    if time.time() - folder.lstat().st_mtime > LOCKED_S:
        folder.rmdir()  # nobody has put anything there


def _set(variables: dict[str, str] | dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    tempfile.tempdir = None  # looked up once, and then remembered


def _compiled() -> str:
    """Where torch keeps what it has compiled, if nobody says."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # as torch does: a container's user may have no entry
        user = f"uid_{os.getuid()}"
    user = re.sub(r'[\\/:*?"<>|]', "_", user)
    return str(Path(tempfile.gettempdir()) / f"torchinductor_{user}")
