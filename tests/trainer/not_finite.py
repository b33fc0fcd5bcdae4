"""A trainer rank that is given a model with a value that is not finite:  not_finite.py FOLDER

Loads each model in the folder, and writes what it says to ``<model>.said``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist

from monarch_rl.runtime.network import held_port
from monarch_rl.trainer.policy import Policy
from monarch_rl.trainer.settings import TrainerSettings


def main(folder: Path) -> None:
    with held_port() as port:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        for model in [path for path in folder.iterdir() if path.is_dir()]:
            try:
                Policy(model, TrainerSettings(ranks=1), total_steps=1)
                said = ""
            except ValueError as error:
                said = str(error)
            (folder / f"{model.name}.said").write_text(said)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
