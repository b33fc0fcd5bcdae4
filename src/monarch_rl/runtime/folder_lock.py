"""A folder that one process at a time works in: the lock is this process's alone, and ends with it, however it ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path

logger = logging.getLogger("monarch_rl")

LOCK = "lock"
"""The file in the folder."""
_held: dict[Path, int] = {}
"""Descriptors, by folder."""


def take(folder: Path) -> bool:
    """Lock a folder until :func:`release` or the end of this process; whether no other process has it.

    The lock is one of fcntl: processes that this one forks do not have it. Where the file system has none, it is said.
    """
    folder = folder.resolve()
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
        logger.warning("%s cannot be locked (%s): nothing keeps another launch from it", folder, error.strerror)
        return True
    _held[folder] = descriptor
    return True


def release(folder: Path) -> None:
    """Let others take a folder."""
    descriptor = _held.pop(folder.resolve(), None)
    if descriptor is not None:
        os.close(descriptor)
