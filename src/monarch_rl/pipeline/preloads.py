"""What the hosts of a run import, once, before they fork its processes."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path

from monarch_rl.generator.scheduler_process import ENGINE_PRELOAD
from monarch_rl.observe.console_relay import existing_relay, prepared_relay
from monarch_rl.pipeline.capture import is_capturing
from monarch_rl.rollout.scoring import PRELOAD as SCORING_PRELOAD
from monarch_rl.runtime import host_start
from monarch_rl.runtime.forking.fork_server import Preload
from monarch_rl.runtime.scratch import folder_of_process

PRELOADS: tuple[Preload, ...] = (
    Preload("torch", ("torch", "torch.distributed.tensor", "torch._dynamo")),
    Preload("text", ("monarch_rl.model.transformers_imports",), after="torch"),
    Preload(
        "trainer",
        ("monarch_rl.trainer.policy", "monarch_rl.weights.delta"),
        after="text",
        asks_for_accelerators=True,
    ),
    Preload(SCORING_PRELOAD, ("reasoning_gym.factory", "monarch_rl.rollout.scoring"), after="text"),
    Preload(
        ENGINE_PRELOAD,
        ("monarch_rl.generator.engine", "monarch_rl.generator.launching", "monarch_rl.generator.sglang_imports"),
        after="text",
        asks_for_accelerators=True,
    ),
)
"""Trainer ranks must not import SGLang: it changes transformers. They need nothing of ``text``, but come after it:
engines, which take longest, wait for it, and two cores would otherwise import both at once."""


def console_folder() -> Path | None:
    """Path of a new folder for the named pipes of a console relay, removed when this process ends; None in a rank of
    torchrun that is not the controller, whose output is in no log, and which torchrun may end before anything of a run
    could remove the folder. Raises OSError."""
    if os.environ.get("RANK", "0") != "0":
        return None
    return folder_of_process().path / f"console-{uuid.uuid4().hex[:8]}"  # a program may launch more than one run


def start_host_early() -> None:
    """Start this machine's host for a run that this program is about to launch, where that can be known to be right.

    The imports are most of a run's start-up, and nothing of the run is needed for them.
    """
    if is_capturing() or existing_relay() is not None or not host_start.may_start_early():
        return  # no run will start, or one has started
    with suppress(OSError):  # no room for its temporary directory, for example: the launch tries again, and says so
        host_start.start_early(PRELOADS, prepared_relay(console_folder()).writers)
