"""Imported by a stage to simulate that the kernel has no descriptor left for its first forked process.

A limit of the process cannot cause this: reading the request has just freed a descriptor.
"""

import errno
import os

real_pidfd_open = os.pidfd_open


def pidfd_open(pid: int) -> int:
    """Fail once."""
    os.pidfd_open = real_pidfd_open  # type: ignore[assignment]
    raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))


os.pidfd_open = pidfd_open  # type: ignore[assignment]
