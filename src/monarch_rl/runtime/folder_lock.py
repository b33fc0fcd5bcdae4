"""Locks of folders that only one process at a time may use. The lock ends with its process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import threading
from pathlib import Path

logger = logging.getLogger("monarch_rl")

LOCK = "lock"
"""Name of the lock file in the folder."""
_held: dict[Path, int] = {}
"""Descriptors of the lock files, by folder."""
_changing = threading.Lock()
"""Held by all functions: closing any descriptor of a lock file ends this process's lock."""


def take(folder: Path) -> bool:
    """Lock a folder until :func:`release` or the end of this process. Returns False if another process has the lock.

    Uses fcntl's locks, which forked processes do not inherit. Logs a warning if the file system has no locks.
    """
    with _changing:
        return _take(folder.resolve())


def _take(folder: Path) -> bool:
    if folder in _held:
        return True
    descriptor = None
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        if error.errno in (errno.EACCES, errno.EAGAIN) and descriptor is not None:
            return False
        logger.warning(
            "%s cannot be locked (%s): make sure that no other launch uses this folder", folder, error.strerror
        )
        return True
    _held[folder] = descriptor
    return True


def is_held(folder: Path) -> bool | None:
    """Whether any process of this machine has the lock of a folder, without taking it. None if that cannot be told: the
    folder was never locked, is not readable, or its file system has no locks."""
    with _changing:
        return _is_held(folder.resolve())


def _is_held(folder: Path) -> bool | None:
    if folder in _held:
        return True
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        asked = struct.pack("hhqqi", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)  # Linux's struct flock: the whole file
        (kind,) = struct.unpack_from("h", fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return bool(kind != fcntl.F_UNLCK)


def release(folder: Path) -> None:
    """Unlock a folder."""
    with _changing:
        descriptor = _held.pop(folder.resolve(), None)
        if descriptor is not None:
            os.close(descriptor)
