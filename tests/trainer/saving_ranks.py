"""Saving on every rank of a torchrun job:  saving_ranks.py FOLDER MODEL NAME [kill]

Saves the model to FOLDER/NAME in files of 100 kB, in pieces of 1,000 elements; with ``kill``, rank 1 is killed when it
has written some. Then notes what rank 0's memory grew by, and loads what was saved.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from monarch_rl.trainer import saving
from monarch_rl.trainer.policy import Policy
from monarch_rl.trainer.settings import TrainerSettings

FILE_BYTES = 100_000


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
    """The most memory that this process had since the last call."""
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM:"))
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(line.split()[1])


def main(folder: Path, model: str, name: str, kill: bool) -> None:
    torch.set_num_threads(1)
    settings = TrainerSettings(ranks=int(os.environ["WORLD_SIZE"]))
    policy = Policy(folder / model, settings, total_steps=1)
    if kill and policy.rank == 1:
        os.pwrite = killed_after(20)
    saving.CHUNK_ELEMENTS = 1000 if model != "large" else saving.CHUNK_ELEMENTS
    peak_bytes()
    before = peak_bytes()
    saving.save_model(policy.model, folder / name, FILE_BYTES if model != "large" else saving.FILE_BYTES)
    if policy.rank == 0:
        grown = peak_bytes() - before
        held = sum(parameter.numel() * 4 for parameter in policy.module.parameters())
        (folder / f"{name}.json").write_text(json.dumps({"grown": grown, "model": held}))
    again = Policy(folder / name, settings, total_steps=1)
    for (key, saved), value in zip(again.model.hf_state().items(), policy.model.hf_state().values(), strict=True):
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
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], "kill" in sys.argv[4:])
