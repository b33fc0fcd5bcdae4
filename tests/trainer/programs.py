"""Running the programs of these tests, each in its own processes, and reading their output files."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from monarch_rl.model.lora import LoraSettings
from monarch_rl.runtime.forking import fork_client
from monarch_rl.runtime.forking.fork_client import NoForkServer
from monarch_rl.runtime.network import held_port
from tests import patience
from tests.forking import AS_LOADED, environment, fork_program, run_forked
from tests.patience import TICK_S, Patience
from tests.trainer.moe_cases import layout

ROOT = Path(__file__).parents[2]
Weights = dict[str, torch.Tensor]
PROGRAM_S = 500.0
"""Time limit of a program, below the limit of a test: it takes some 10 s when nothing else runs."""


def run_program(name: str, *arguments: str | Path, ranks: int = 0, limit_s: float = PROGRAM_S) -> None:
    """Run ``tests/trainer/<name>``: alone, or as ``ranks`` ranks. Its errors fail the test.

    Most of such a program's time is imports, so it is forked from a process that has imported them, where possible.
    """
    command = [str(ROOT / "tests" / "trainer" / name), *map(str, arguments)]
    if not ranks:
        done = run_forked("transformers", command, limit_s, folder=ROOT)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return
    with tempfile.TemporaryDirectory() as scratch:
        try:
            _run_forked(command, ranks, limit_s, Path(scratch))
        except NoForkServer:
            _run_spawned(command, ranks, limit_s)


def _run_spawned(command: Sequence[str], ranks: int, limit_s: float) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with environment(AS_LOADED):
        done = patience.run([sys.executable, *torchrun, *command], cwd=ROOT, seconds=limit_s)
    assert done.returncode == 0, done.stderr[-4000:]


def _run_forked(command: Sequence[str], ranks: int, limit_s: float, scratch: Path) -> None:
    logs = [scratch / f"{rank}.log" for rank in range(ranks)]
    running: dict[int, int] = {}
    """pids, by the descriptor that reports how the process ended."""
    with held_port() as port:
        of_all = AS_LOADED | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        try:
            for rank, log in enumerate(logs):
                variables = of_all | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                pid, status = fork_program("trainer", command, [log, log], variables)
                running[status] = pid
            succeeded = _succeed(running, limit_s)
        finally:
            for status, pid in running.items():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.close(status)
    assert succeeded, "\n".join(log.read_text()[-4000:] for log in logs if log.exists())


def _succeed(running: dict[int, int], limit_s: float) -> bool:
    """Wait until all processes have ended well, or one has not. Ended ones are removed."""
    waiting = Patience("the ranks to end", limit_s)
    while running:
        ended, _, _ = select.select(list(running), [], [], TICK_S)
        waiting.tick()
        for status in ended:
            code = fork_client.exit_code(status)
            del running[status]
            os.close(status)
            if code != 0:
                return False
    return True


def saved(folder: Path) -> Weights:
    """All tensors of a folder of safetensors."""
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def parameters(layouts: Mapping[int, tuple[int, ...]], core: bool = False) -> list[Any]:
    """Parameters with readable ids for layouts: numbers of ranks and degrees of expert parallelism on them.

    Args:
        layouts: degrees by numbers of ranks.
        core: layouts of two ranks are core tests.
    """
    two = [pytest.mark.core] if core else []
    return [
        pytest.param(layout(ranks, degree), marks=[pytest.mark.slow] if ranks > 2 else two)
        for ranks, degrees in layouts.items()
        for degree in degrees
    ]


def check_merged(before: Weights, merged: Weights, adapters: Weights, lora: LoraSettings) -> None:
    """``merged`` is ``before`` plus ``alpha / rank * B A`` on the settings' targets, and nothing else has changed."""
    assert before.keys() == merged.keys()
    left = dict(adapters)
    for tensor, weight in before.items():
        module = f"base_model.model.{tensor.removesuffix('.weight')}"
        if tensor.split(".")[-2] in lora.targets and tensor.endswith(".weight"):
            a, b = left.pop(f"{module}.lora_A.weight"), left.pop(f"{module}.lora_B.weight")
            weight = weight + lora.alpha / lora.rank * torch.einsum("or,ri->oi", b, a)
            assert torch.allclose(merged[tensor], weight, rtol=0, atol=1e-7), tensor
        else:
            assert torch.equal(merged[tensor], weight), tensor
    assert not left
