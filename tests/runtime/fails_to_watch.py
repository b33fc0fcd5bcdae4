"""What a stage imports whose kernel has no descriptor left for the first process that it forks.

A limit of the process cannot bring that about: the request that was just read has left room for one.
"""

import errno
import os

real_pidfd_open = os.pidfd_open


def pidfd_open(pid: int) -> int:
    """Fail once."""
    os.pidfd_open = real_pidfd_open  # type: ignore[assignment]
    raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))


os.pidfd_open = pidfd_open  # type: ignore[assignment]
