"""Saving on every rank of a torchrun job:  saving_ranks.py FOLDER MODEL NAME [kill | full]

Saves the model to FOLDER/NAME in files of 100 kB, in slices of 1,000 elements; with ``kill``, rank 1 is killed after
some of them. Then notes the growth of rank 0's memory, and loads the saved model.

With ``full``, the model has LoRA, so that ranks gather tensors while they write; rank 1 cannot write beyond the first
:data:`ROOM` bytes of a file, then rank 0 not the adapter. Writes the error of each rank.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from monarch_rl.model.lora import LoraSettings
from monarch_rl.trainer import saving
from monarch_rl.trainer.policy import Policy
from monarch_rl.trainer.settings import TrainerSettings

FILE_BYTES = 100_000
ROOM = 30_000
ADAPTER_ROOM = 200_000
"""More than any file of the model, and less than the adapter's."""


def killed_after(writes: int) -> Any:
    """``os.pwrite`` whose process is killed at a later call."""
    original, left = os.pwrite, writes

    def pwrite(*arguments: Any) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    return pwrite


def peak_bytes() -> int:
    """The peak memory of this process since the last call."""
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM:"))
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(line.split()[1])


def save_to_full_disks(folder: Path, model: str) -> None:
    """The kernel refuses writes beyond the limit, in the middle of files, like a full disk."""
    settings = TrainerSettings(ranks=int(os.environ["WORLD_SIZE"]), lora=LoraSettings(rank=64))
    policy = Policy(folder / model, settings, total_steps=1)
    for full_rank, room, file_bytes in ((1, ROOM, FILE_BYTES), (0, ADAPTER_ROOM, ADAPTER_ROOM // 2)):
        message = ""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room if policy.rank == full_rank else soft, hard))
        try:
            saving.save_model(policy.model, folder / f"full_{full_rank}", file_bytes)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        (folder / f"full_{full_rank}.rank{policy.rank}").write_text(message)
        dist.barrier()
    saving.save_model(policy.model, folder / "full_1", FILE_BYTES)


def main(folder: Path, model: str, name: str, kill: bool) -> None:
    torch.set_num_threads(1)
    settings = TrainerSettings(ranks=int(os.environ["WORLD_SIZE"]))
    policy = Policy(folder / model, settings, total_steps=1)
    if kill and policy.rank == 1:
        os.pwrite = killed_after(20)
    saving.CHUNK_ELEMENTS = 1000 if model != "large" else saving.CHUNK_ELEMENTS
    peak_bytes()
    before = peak_bytes()
    file_bytes = FILE_BYTES if model != "large" else saving.FILE_BYTES
    saving.save_model(policy.model, folder / name, file_bytes, end_tokens=(2, 7))
    if policy.rank == 0:
        grown = peak_bytes() - before
        held = sum(parameter.numel() * 4 for parameter in policy.module.parameters())
        (folder / f"{name}.json").write_text(json.dumps({"grown": grown, "model": held}))
    loaded = Policy(folder / name, settings, total_steps=1)
    for (key, saved), value in zip(loaded.model.hf_state().items(), policy.model.hf_state().values(), strict=True):
        assert (
            torch.equal(saved, value)
            if not hasattr(saved, "to_local")
            else torch.equal(
                saved.to_local(),
                value.to_local(),  # type: ignore[attr-defined]
            )
        ), key
    dist.barrier()


if __name__ == "__main__":
    if "full" in sys.argv[4:]:
        save_to_full_disks(Path(sys.argv[1]), sys.argv[2])
    else:
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], "kill" in sys.argv[4:])
