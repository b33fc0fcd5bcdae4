"""A recording device module in place of torch.cuda: on a CPU it shows on which stream each operation would run."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from monarch_rl.runtime import streams
from monarch_rl.weights import broadcast_group

DEFAULT = "default"
"""The name of the default stream, on which training computes."""


@dataclass(frozen=True)
class Record:
    """An enqueued operation, or a wait of a thread."""

    thread: str
    stream: str
    """The current stream."""
    op: str
    waits_for: str = ""
    """The stream, or the whole device, that the thread waits for."""


class RecordedDevice:
    """Streams and events. Operations complete at once, except that no event completes while ``hangs`` is set.

    Streams cannot wait for each other: code that tries fails.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.hangs = threading.Event()
        self._current = threading.local()
        self._numbers = itertools.count(1)

    def record(self, op: str, waits_for: str = "") -> None:
        self.records.append(Record(threading.current_thread().name, self.current, op, waits_for))

    @property
    def current(self) -> str:
        """The calling thread's stream."""
        return getattr(self._current, "stream", DEFAULT)

    def Stream(self, device: torch.device) -> _Stream:
        return _Stream(self, f"stream {next(self._numbers)}")

    def current_stream(self, device: torch.device) -> _Stream:
        return _Stream(self, self.current)

    def Event(self) -> _Event:
        return _Event(self)

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self._current.stream = self.current, stream.name
        try:
            yield
        finally:
            self._current.stream = before

    def synchronize(self, device: torch.device) -> None:
        self.record("synchronize", "the device")

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operations of torch on this thread and on threads started in the block."""
        run = threading.Thread.run

        def recorded(thread: threading.Thread) -> None:
            with _Operators(self):
                run(thread)

        with pytest.MonkeyPatch.context() as patch, _Operators(self):
            patch.setattr(threading.Thread, "run", recorded)
            yield

    @contextmanager
    def in_place_of_cuda(self) -> Iterator[None]:
        """Use this device for all streams in the block."""
        with pytest.MonkeyPatch.context() as patch:
            for module in (streams, broadcast_group):
                patch.setattr(module, "device_module", lambda device: self)
            yield


@dataclass(frozen=True)
class _Stream:
    device: RecordedDevice
    name: str

    def synchronize(self) -> None:
        self.device.record("synchronize", self.name)

    def query(self) -> bool:
        return not self.device.hangs.is_set()


class _Event:
    def __init__(self, device: RecordedDevice) -> None:
        self._device = device

    def record(self, stream: _Stream) -> None:
        self._device.record("event", stream.name)

    def query(self) -> bool:
        return not self._device.hangs.is_set()


VIEWS = {"alias", "as_strided", "detach", "lift_fresh", "select", "slice", "split", "split_with_sizes", "view"}
"""Operators that compute nothing."""


class _Operators(TorchDispatchMode):
    def __init__(self, device: RecordedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self._device.record(name)
        return func(*args, **kwargs or {})
