"""One gloo device for all process groups of an engine rank.

gloo gives each group a device, and each device a thread that wakes a hundred times a second. SGLang makes nine groups
and more, most of them of one rank: together they took 1 % of a core of an engine that had nothing to do.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partialmethod
from typing import Any

import torch.distributed as dist


def install() -> None:
    """From now on groups that this process makes share a device."""
    group: Any = dist.ProcessGroupGloo
    group.__init__ = partialmethod(_on_shared_device, group.__init__, group.create_default_device())


def _on_shared_device(
    group: Any,
    original: Any,
    device: Any,
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta | None = None,
    enable_reconfigure: bool = False,  # torch 2.14 has it, 2.13 not
) -> None:
    """Replaces ``ProcessGroupGloo.__init__`` with a time-out, which makes a device."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    if timeout is not None:
        options._timeout = timeout
    if enable_reconfigure:
        options.enable_reconfigure = True
    original(group, store, rank, size, options)
