"""recipes/grpo.py, whose trainer rank 1 blocks its loop once FOLDER/go is there: ``blocked.py FOLDER ARGUMENTS...``

It writes FOLDER/blocked first.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import grpo  # noqa: E402

from monarch_rl.pipeline import run, start  # noqa: E402
from monarch_rl.settings.cli import cli  # noqa: E402
from monarch_rl.trainer.actor import Trainer  # noqa: E402

FOLDER = Path(sys.argv[1])


class BlockedTrainer(Trainer):
    """A trainer whose rank 1 blocks its event loop."""

    @property
    def snapshots(self) -> Any:
        found = super().snapshots
        if found.rank == 1 and (FOLDER / "go").exists():
            (FOLDER / "blocked").write_text("now")
            time.sleep(600)
        return found


if __name__ == "__main__":
    start.Trainer = BlockedTrainer  # type: ignore[misc]
    run.launch(grpo.train, cli(grpo.Settings, args=sys.argv[2:]), grpo.task)
