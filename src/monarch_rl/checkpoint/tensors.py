"""The tensors of a checkpoint: torch.distributed.checkpoint writes each rank's shards from a copy in host memory.

A step waits only for :meth:`StagedTensors.stage`. The copy is written on another thread while training continues; there
the ranks coordinate over their own process group. If one rank cannot write, all ranks raise.
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

from monarch_rl.checkpoint.folders import FileSum, file_sum, sum_records
from monarch_rl.errors import CannotWrite
from monarch_rl.runtime.streams import finish_current

Tensors = Mapping[str, torch.Tensor]
"""By name: this rank's shards (DTensor), or a tensor that is equal on all ranks (plain tensor)."""
NICE = 10
"""Niceness of the writing thread, so that training gets the cores first."""


def checkpoint_group(timeout_s: float) -> dist.ProcessGroup:
    """A process group of all ranks for coordination concurrent with training. A collective call of all ranks.

    Args:
        timeout_s: seconds that a rank waits for the others' disks.
    """
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return group


def renewed_group(old: dist.ProcessGroup, timeout_s: float) -> dist.ProcessGroup:
    """Replace a :func:`checkpoint_group` that a late rank may have broken. A collective call of all ranks."""
    dist.destroy_process_group(old)  # after a timeout, gloo delivers no further message between the two ranks
    return checkpoint_group(timeout_s)


class StagedTensors:
    """A copy of tensors in host memory; each :meth:`stage` reuses the same memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[str, torch.Tensor] = {}

    def stage(self, tensors: Tensors) -> None:
        """Copy the tensors; the originals may change when this returns."""
        with torch.no_grad():
            for name, value in tensors.items():
                if name not in self._copies:
                    self._copies[name] = self._host_copy(value)
                local_of(self._copies[name]).copy_(local_of(value), non_blocking=True)
        finish_current(self._device)
        self._copies = {name: self._copies[name] for name in tensors}

    def _host_copy(self, value: torch.Tensor) -> torch.Tensor:
        """Uninitialised host memory for a copy of ``value``."""
        local = local_of(value).detach()
        copy = torch.empty_like(local, device="cpu", pin_memory=local.device.type == "cuda")
        if not isinstance(value, DTensor):
            return copy
        return DTensor(copy, value._spec, requires_grad=False)  # from_local() would move it to the mesh's device

    def write(
        self, folder: Path, root: Path, group: dist.ProcessGroup, check: Callable[[str, torch.Tensor], None]
    ) -> list[FileSum]:
        """Write the copy, and return this rank's files. A collective call of all ranks, each on a thread that does
        nothing else.

        Args:
            folder: folder to write to, below ``root``.
            root: folder to which the paths of the returned files are relative.
            group: a :func:`checkpoint_group`.
            check: raises if a tensor must not be written.

        Raises:
            CannotWrite: this rank or another one could not write.
        """
        _lower_priority()
        # No copy ahead: it would use its own stream, and all tensors are in host memory already.
        writer, rank = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0), dist.get_rank()
        try:
            with torch.no_grad():
                metadata = dcp.save(
                    dict(self._copies), storage_writer=writer, planner=_Planner(check), process_group=group
                )
        except CheckpointException as error:
            failures = (f"trainer rank {rank}: {_last_line(what[0])}" for rank, what in error.failures.items())
            raise CannotWrite("; ".join(failures)) from None
        except (RuntimeError, ValueError, KeyError) as error:  # from the group: a rank is late, or has given up
            raise CannotWrite(
                f"trainer rank {rank} could not coordinate with the other ranks to write: {_last_line(error)}"
            ) from error
        ends: dict[str, list[tuple[int, str]]] = {path.name: [] for path in folder.glob(f"__{rank}_*")}
        for index, stored in metadata.storage_data.items():
            if stored.relative_path in ends:
                ends[stored.relative_path].append((stored.offset + stored.length, index.fqn))
        sums = [file_sum(root, folder / ".metadata")] if rank == 0 else []
        for name, records in sorted(ends.items()):
            sums.append(sum_records(root, folder / name, [(tensor, end) for end, tensor in sorted(records)]))
        return sums


class _Planner(dcp.DefaultSavePlanner):
    """Checks this rank's tensors while planning, where an error is raised on all ranks."""

    def __init__(self, check: Callable[[str, torch.Tensor], None]) -> None:
        super().__init__()
        self._check = check

    def create_local_plan(self) -> Any:
        for name, value in self.state_dict.items():
            self._check(name, value)
        return super().create_local_plan()


def read(tensors: Tensors, folder: Path, group: dist.ProcessGroup) -> None:
    """Load tensors from a checkpoint in place, however many ranks wrote it. A collective call of all ranks.

    Raises:
        ValueError: the checkpoint has other tensors or shapes; names one.
    """
    reader = dcp.FileSystemReader(folder)
    try:
        with torch.no_grad():
            live = {name: value.detach() for name, value in tensors.items()}
            dcp.load(live, storage_reader=reader, process_group=group)
    except CheckpointException as error:
        rank, what = next(iter(error.failures.items()))
        reason = f"trainer rank {rank}: {_last_line(what[0])}"
        raise ValueError(f"{folder} does not fit this run's model or optimiser ({reason})") from None


def names(folder: Path) -> set[str]:
    """Names of the tensors in a checkpoint."""
    return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def local_of(value: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; the tensor itself if it is a plain one."""
    return value.to_local() if isinstance(value, DTensor) else value


def _lower_priority() -> None:
    """Raise the niceness of the calling thread to :data:`NICE`; on Linux niceness is per thread."""
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < NICE:
        os.setpriority(os.PRIO_PROCESS, thread, NICE)


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"
