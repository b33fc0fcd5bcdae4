"""Running the programs of these tests, each in processes of its own, and reading what they wrote."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from monarch_rl.model.lora import LoraSettings
from monarch_rl.runtime import fork_client
from monarch_rl.runtime.fork_client import NoForkServer
from monarch_rl.runtime.fork_server import Preload
from monarch_rl.runtime.network import held_port
from tests.forking import forking
from tests.trainer.moe_cases import layout

ROOT = Path(__file__).parents[2]
Weights = dict[str, torch.Tensor]
PROGRAM_S = 240.0
"""Seconds for a program on shared cores: some 10 when nothing else runs."""


def run_program(name: str, *arguments: str | Path, ranks: int = 0, limit_s: float = PROGRAM_S) -> None:
    """Run ``tests/trainer/<name>``: alone, or as ``ranks`` ranks. Its errors fail the test.

    Most of such a program's time is imports, so it is forked from a process that has them behind it, where it can be.
    """
    python_path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    with _environment({"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}), tempfile.TemporaryDirectory() as scratch:
        try:
            _run_forked(name, list(map(str, arguments)), ranks, limit_s, Path(scratch))
        except NoForkServer:
            _run_anew(name, list(map(str, arguments)), ranks, limit_s)


def _run_anew(name: str, arguments: Sequence[str], ranks: int, limit_s: float) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *torchrun, f"tests/trainer/{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=limit_s)
    assert done.returncode == 0, done.stderr.decode()[-4000:]


def _run_forked(name: str, arguments: Sequence[str], ranks: int, limit_s: float, scratch: Path) -> None:
    preload = "trainer" if ranks else "transformers"
    logs = [scratch / f"{rank}.log" for rank in range(max(ranks, 1))]
    program = json.dumps([str(ROOT / "tests" / "trainer" / name), *arguments])
    variables = {"FORKED_PROGRAM": program, fork_client.ADDRESS_VARIABLE: _fork_server()}
    running: dict[int, int] = {}
    """pids, by the descriptor that tells how the process ended."""
    with held_port() as port:
        if ranks:
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        try:
            for rank, log in enumerate(logs):
                as_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
                with _environment(variables | as_rank | {"FORKED_LOG": str(log)}):
                    pid, status = fork_client.fork(preload, "tests.trainer.forked", f"{name} {rank}")
                running[status] = pid
            succeeded = _succeed(running, limit_s)
        finally:
            for status, pid in running.items():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.close(status)
    assert succeeded, "\n".join(log.read_text()[-4000:] for log in logs if log.exists())


def _succeed(running: dict[int, int], limit_s: float) -> bool:
    """Wait until all processes have ended well, or one has not. Those that have ended are removed."""
    deadline = time.monotonic() + limit_s
    while running:
        ended, _, _ = select.select(list(running), [], [], max(0.0, deadline - time.monotonic()))
        assert ended, f"not done after {limit_s:g} s"
        for status in ended:
            code = fork_client.exit_code(status)
            del running[status]
            os.close(status)
            if code != 0:
                return False
    return True


@cache
def _fork_server() -> str:
    """The name of a fork server that ends with these tests."""
    preloads = [
        Preload("torch", ("torch", "torch.distributed.tensor")),
        Preload("trainer", ("monarch_rl.trainer.policy",), after="torch", asks_for_accelerators=True),
        Preload("transformers", ("transformers.models.auto.modeling_auto", "peft"), after="torch"),
    ]
    server = contextlib.ExitStack()
    atexit.register(server.close)
    return server.enter_context(forking(preloads))[0]


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def saved(folder: Path) -> Weights:
    """All tensors of a folder of safetensors."""
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def parameters(layouts: Mapping[int, tuple[int, ...]]) -> list[Any]:
    """Layouts by name, given the numbers of ranks and the degrees of expert parallelism on them."""
    return [
        pytest.param(layout(ranks, degree), marks=[pytest.mark.slow] if ranks > 2 else [])
        for ranks, degrees in layouts.items()
        for degree in degrees
    ]


def check_merged(before: Weights, merged: Weights, adapters: Weights, lora: LoraSettings) -> None:
    """``merged`` is ``before`` and on the settings' targets ``alpha / rank * B A``, and nothing else has changed."""
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
