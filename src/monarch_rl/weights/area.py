"""Memory that several processes of one machine hold at once: a version is written there once and read in place.

On a CPU an area is an anonymous file (``memfd_create``): it has no name that could be left behind and ends with the
last process that maps it. On a GPU it is device memory shared by CUDA IPC.
"""

from __future__ import annotations

import os
import pickle
import uuid
from typing import Any
from weakref import WeakValueDictionary

import torch

_made: WeakValueDictionary[bytes, Area] = WeakValueDictionary()
"""The areas of this process, by handle."""


class Area:
    """A flat run of bytes. Who made it must keep it as long as others may :func:`attach`."""

    def __init__(self, nbytes: int, device: torch.device | str = "cpu") -> None:
        """Zeros. ``nbytes`` is at least 1."""
        device = torch.device(device)
        self._descriptor: int | None = None
        if device.type == "cpu":
            self._descriptor = os.memfd_create("monarch_rl-weights", os.MFD_CLOEXEC)
            os.ftruncate(self._descriptor, nbytes)
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            self.buffer = _map(path, nbytes)
            description: Any = (path, nbytes)
        else:
            from torch.multiprocessing.reductions import reduce_tensor

            self.buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            description = reduce_tensor(self.buffer)
        self.handle = pickle.dumps((description, uuid.uuid4().hex))
        """What another process of this machine needs to :func:`attach`. No other area ever has the same: the numbers of
        files and places of memory are used again, and who keeps what it attached to goes by the handle."""
        _made[self.handle] = self

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def attach(handle: bytes) -> torch.Tensor:
    """The area's bytes, uint8[nbytes], shared with all others that hold it.

    Raises RuntimeError if the process that made the area is gone.
    """
    own = _made.get(handle)
    if own is not None:  # CUDA opens a handle in other processes only
        return own.buffer
    (first, second), _ = pickle.loads(handle)
    return _map(first, second) if isinstance(first, str) else first(*second)


def _map(path: str, nbytes: int) -> torch.Tensor:
    storage: Any = torch.UntypedStorage.from_file(path, shared=True, nbytes=nbytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))
