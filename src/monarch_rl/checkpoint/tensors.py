"""The tensors of a checkpoint: each rank's shards by torch.distributed.checkpoint, out of a copy in its memory.

A step pays for :meth:`StagedTensors.stage` alone. The copy is written on another thread while training goes on; ranks
agree there over a group of their own. One that cannot write says so to the others, which then raise, too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from monarch_rl.checkpoint.folders import FileSum, file_sum
from monarch_rl.runtime.streams import finish_current

Tensors = Mapping[str, torch.Tensor]
"""By name: this rank's shards (DTensor), or what all ranks hold alike (a plain tensor)."""
NICE = 10
"""By how much writing gives way to training where both want a core."""


class CannotWrite(OSError):
    """A rank could not write its shards; says which, and why."""


def checkpoint_group(timeout_s: float) -> dist.ProcessGroup:
    """A group of all ranks for what is agreed on beside training. All ranks make it together.

    Args:
        timeout_s: that one rank may wait for the others' disks.
    """
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return group


def renewed_group(old: dist.ProcessGroup, timeout_s: float) -> dist.ProcessGroup:
    """A :func:`checkpoint_group` in the place of one that a late rank may have broken: after its timeout gloo takes no
    further message between two ranks. All ranks make it together."""
    dist.destroy_process_group(old)
    return checkpoint_group(timeout_s)


class StagedTensors:
    """A copy of tensors on the host, made anew by each :meth:`stage` in the same memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[str, torch.Tensor] = {}

    def stage(self, tensors: Tensors) -> None:
        """Copy; the originals may change when this returns."""
        with torch.no_grad():
            for name, value in tensors.items():
                if name not in self._copies:
                    self._copies[name] = self._room_for(value)
                local_of(self._copies[name]).copy_(local_of(value), non_blocking=True)
        finish_current(self._device)
        self._copies = {name: self._copies[name] for name in tensors}

    def _room_for(self, value: torch.Tensor) -> torch.Tensor:
        local = local_of(value).detach()
        room = torch.empty_like(local, device="cpu", pin_memory=local.device.type == "cuda")
        if not isinstance(value, DTensor):
            return room
        return DTensor(room, value._spec, requires_grad=False)  # from_local() would move it to the mesh's device

    def write(
        self, folder: Path, root: Path, group: dist.ProcessGroup, check: Callable[[str, torch.Tensor], None]
    ) -> list[FileSum]:
        """Write the copy to ``folder``, below ``root``; returns this rank's files. All ranks call it together, on a
        thread that does nothing else.

        Args:
            check: raises if a tensor must not be written.

        Raises:
            CannotWrite: this rank, or another one, could not write.
        """
        _give_way()
        # A copy ahead would be made on a stream of its own; all is on the host already.
        writer, rank = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0), dist.get_rank()
        try:
            with torch.no_grad():
                dcp.save(dict(self._copies), storage_writer=writer, planner=_Planner(check), process_group=group)
        except CheckpointException as error:
            failures = (f"trainer rank {rank}: {_last_line(what[0])}" for rank, what in error.failures.items())
            raise CannotWrite("; ".join(failures)) from None
        except (RuntimeError, ValueError, KeyError) as error:  # of the group: a rank is late, or has given up
            raise CannotWrite(
                f"trainer rank {rank} did not write together with the others: {_last_line(error)}"
            ) from error
        mine = sorted(folder.glob(f"__{rank}_*")) + ([folder / ".metadata"] if rank == 0 else [])
        return [file_sum(root, path) for path in mine]


class _Planner(dcp.DefaultSavePlanner):
    """Checks this rank's tensors where an error is one that all ranks hear of."""

    def __init__(self, check: Callable[[str, torch.Tensor], None]) -> None:
        super().__init__()
        self._check = check

    def create_local_plan(self) -> Any:
        for name, value in self.state_dict.items():
            self._check(name, value)
        return super().create_local_plan()


def read(tensors: Tensors, folder: Path, group: dist.ProcessGroup) -> None:
    """Fill tensors, in place, with those of a checkpoint, however many ranks wrote it. All ranks call it together.

    Raises:
        ValueError: the checkpoint has others, or other shapes; names one.
    """
    reader = dcp.FileSystemReader(folder)
    try:
        with torch.no_grad():
            live = {name: value.detach() for name, value in tensors.items()}
            dcp.load(live, storage_reader=reader, process_group=group)
    except CheckpointException as error:
        rank, what = next(iter(error.failures.items()))
        reason = f"trainer rank {rank}: {_last_line(what[0])}"
        raise ValueError(f"{folder} does not fit this run's model or optimizer ({reason})") from None


def names(folder: Path) -> set[str]:
    """Of the tensors in a checkpoint."""
    return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def local_of(value: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return value.to_local() if isinstance(value, DTensor) else value


def _give_way() -> None:
    """Let others have the cores first: Linux has a niceness for each thread."""
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < NICE:
        os.setpriority(os.PRIO_PROCESS, thread, NICE)


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"
