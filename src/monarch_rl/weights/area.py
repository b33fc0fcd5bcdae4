"""Areas: memory shared by several processes of one machine. A version is written there once and read in place.

On a CPU an area is an anonymous file (``memfd_create``): it has no name that could be left behind, and it is freed with
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
    """A flat buffer of bytes. Its creator must hold a reference for as long as other processes may :func:`attach`."""

    def __init__(self, nbytes: int, device: torch.device | str = "cpu") -> None:
        """Allocate ``nbytes`` (at least 1) zero bytes."""
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
        """Pickled description with which another process of this machine can :func:`attach`.

        Device memory is shared when this is first read. From then on torch keeps the memory, even after the area is
        gone, until another process has attached to it and released it.
        """
        description: Any
        if self._descriptor is not None:
            description = self._file
        else:
            from torch.multiprocessing.reductions import reduce_tensor

            with on_side_stream(self.buffer.device):
                description = reduce_tensor(self.buffer)
        # The unique id is needed because file descriptors and memory addresses are reused, and processes cache their
        # mappings by handle.
        handle = pickle.dumps((description, str(self.buffer.device), uuid.uuid4().hex))
        _made[handle] = self
        return handle

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def attach(handle: bytes) -> torch.Tensor:
    """Map an area: uint8[nbytes], shared with all processes that have mapped it.

    Raises RuntimeError if the process that made the area has ended.
    """
    own = _made.get(handle)
    if own is not None:  # CUDA cannot open a handle in the process that made it
        return own.buffer
    (first, second), device, _ = pickle.loads(handle)
    if isinstance(first, str):
        return _map(first, second)
    # CUDA makes the current stream wait for the work that the creator's stream held when the area was shared. So both
    # sides use a side stream: the default stream may be training.
    with on_side_stream(torch.device(device)):
        mapped: torch.Tensor = first(*second)
    return mapped


def _map(path: str, nbytes: int) -> torch.Tensor:
    storage: Any = torch.UntypedStorage.from_file(path, shared=True, nbytes=nbytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))
