"""Memory shared by several processes of one machine: a version is written there once and read in place.

On a CPU an area is an anonymous file (``memfd_create``). It has no name that could be left behind, and it is freed with
the last process that maps it. On a GPU it is device memory shared by CUDA IPC.
"""

from __future__ import annotations

import os
import pickle
import uuid
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch

from monarch_rl.runtime.streams import on_side_stream

_made: WeakValueDictionary[bytes, Area] = WeakValueDictionary()
"""The areas of this process, by handle."""


class Area:
    """A flat run of bytes. Its creator must keep it for as long as others may :func:`attach`."""

    def __init__(self, nbytes: int, device: torch.device | str = "cpu") -> None:
        """Allocate ``nbytes`` (at least 1) bytes of zeros."""
        device = torch.device(device)
        self._descriptor: int | None = None
        if device.type == "cpu":
            self._descriptor = os.memfd_create("monarch_rl-weights", os.MFD_CLOEXEC)
            os.ftruncate(self._descriptor, nbytes)
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            self.buffer = _map(path, nbytes)
            self._file = path, nbytes
        else:
            self.buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    @cached_property
    def handle(self) -> bytes:
        """What another process of this machine needs to :func:`attach`.

        It contains a unique id: file descriptors and memory addresses are reused, and processes cache their mappings by
        handle. Device memory is shared when this is first read: torch keeps what it has shared, even after the area is
        gone, until another process has attached to it and let it go.
        """
        description: Any
        if self._descriptor is not None:
            description = self._file
        else:
            from torch.multiprocessing.reductions import reduce_tensor

            with on_side_stream(self.buffer.device):
                description = reduce_tensor(self.buffer)
        handle = pickle.dumps((description, str(self.buffer.device), uuid.uuid4().hex))
        _made[handle] = self
        return handle

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def attach(handle: bytes) -> torch.Tensor:
    """Map an area: uint8[nbytes], shared with all processes that hold it.

    Raises RuntimeError if the process that made the area has ended.

    CUDA has the current stream wait for what the maker's stream held when the area was shared. Neither is a default
    one, on which a process may train.
    """
    own = _made.get(handle)
    if own is not None:  # CUDA cannot open a handle in the process that made it
        return own.buffer
    (first, second), device, _ = pickle.loads(handle)
    if isinstance(first, str):
        return _map(first, second)
    with on_side_stream(torch.device(device)):
        mapped: torch.Tensor = first(*second)
    return mapped


def _map(path: str, nbytes: int) -> torch.Tensor:
    storage: Any = torch.UntypedStorage.from_file(path, shared=True, nbytes=nbytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))
