"""One gloo device for all process groups of an engine rank.

gloo gives each group a device, and each device a thread that wakes a hundred times a second. SGLang makes nine groups
and more, most of them of one rank: together they took 1 % of a core of an engine that had nothing to do.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from functools import cache, partialmethod
from typing import Any

import torch.distributed as dist

_device_lock = threading.Lock()


def install() -> None:
    """From now on groups that this process makes share a device."""
    group: Any = dist.ProcessGroupGloo
    group.__init__ = partialmethod(_on_shared_device, group.__init__)


def _on_shared_device(
    group: Any,
    original: Any,
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta | None = None,
    enable_reconfigure: bool = False,  # torch 2.14 has it, 2.13 not
) -> None:
    """Replaces ``ProcessGroupGloo.__init__`` with a time-out, which makes a device."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    with _device_lock:  # groups may be made in several threads, and `cache` would let each make a device
        options._devices = [_device()]
    if timeout is not None:
        options._timeout = timeout
    if enable_reconfigure:
        options.enable_reconfigure = True
    original(group, store, rank, size, options)


@cache
def _device() -> Any:
    return dist.ProcessGroupGloo.create_default_device()
