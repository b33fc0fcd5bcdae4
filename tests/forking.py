"""Fork servers for tests that start many processes, which are forked with their imports done, as in a run."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from monarch_rl.pipeline.preloads import PRELOADS
from monarch_rl.runtime.forking import fork_client
from monarch_rl.runtime.forking.fork_client import NoForkServer
from monarch_rl.runtime.forking.fork_server import Preload, start_server
from tests import patience
from tests.patience import TICK_S, Impatient, wait_until

TRANSFORMERS = Preload("transformers", ("transformers.models.auto.modeling_auto", "peft"), after="torch")
OF_TESTS = [*PRELOADS, TRANSFORMERS]
ROOT = Path(__file__).parents[1]
AS_LOADED = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
"""Variables that are read while modules are imported: a server and its forked processes have the same values."""


@contextmanager
def forking(preloads: Sequence[Preload]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server during the block, and its name: the value of ``fork_client.ADDRESS_VARIABLE`` for its clients."""
    if torch.accelerator.is_available():  # as in launch_cluster()
        preloads = [preload for preload in preloads if not preload.asks_for_accelerators]
    name = f"monarch_rl-tests-{uuid.uuid4().hex}"
    server = start_server(name, preloads)
    try:
        yield name, server
    finally:
        assert server.stdin is not None
        server.stdin.close()
        patience.exit_code(server)


@cache
def fork_server(preload: str) -> str:
    """The name of a fork server with this preload and the ones that it builds on, which ends with these tests."""
    chain, by_name = [preload], {each.name: each for each in OF_TESTS}
    while after := by_name[chain[0]].after:
        chain.insert(0, after)
    server = ExitStack()
    atexit.register(server.close)
    with environment(AS_LOADED):
        return server.enter_context(forking([by_name[name] for name in chain]))[0]


@contextmanager
def environment(variables: Mapping[str, str], folder: Path | None = None) -> Iterator[None]:
    """With these variables, and this working directory, during the block."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        if folder is not None:
            patch.chdir(folder)
        yield


def run_forked(
    preload: str,
    program: Sequence[str | Path],
    seconds: float,
    variables: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``python PROGRAM...``, forked with its imports done if a fork server is available.

    Args:
        preload: imports of the program. Processes that it starts may be forked, too, with this or an earlier preload.
        program: a script and its arguments.
        seconds: limit after which it is killed, and the test fails.
        variables: additional environment variables.
        folder: its working directory.
    """
    command, given = [str(part) for part in program], AS_LOADED | dict(variables or {})
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch, name) for name in ("out", "err")]
        for file in files:
            file.touch()
        try:
            pid, status = fork_program(preload, command, files, given, folder)
        except NoForkServer:
            with environment(given, folder):
                return patience.run([sys.executable, *command], seconds=seconds)
        try:
            what = lambda: f"the end of {command}: {[file.read_text() for file in files]}"  # noqa: E731
            try:
                wait_until(lambda: select.select([status], [], [], TICK_S)[0], what, seconds, every_s=0.0)
            except Impatient:  # its pid cannot have been reused yet
                os.kill(pid, signal.SIGKILL)
                raise
            code = fork_client.exit_code(status)
        finally:
            os.close(status)
        assert code is not None, "the fork server was lost"
        return subprocess.CompletedProcess(command, code, *(file.read_text() for file in files))


def fork_program(
    preload: str,
    command: Sequence[str],
    files: Sequence[Path],
    variables: Mapping[str, str],
    folder: Path | None = None,
) -> tuple[int, int]:
    """Fork a process that runs ``command``, a script and its arguments, and writes to two ``files``. Returns and
    raises the same as ``fork_client.fork``."""
    asked = {"FORKED_PROGRAM": json.dumps(list(command)), "FORKED_OUT": str(files[0]), "FORKED_ERR": str(files[1])}
    asked |= {fork_client.ADDRESS_VARIABLE: fork_server(preload), **variables}
    with environment(asked, folder):
        return fork_client.fork(preload, "tests.forked", Path(command[0]).name)
