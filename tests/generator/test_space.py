"""Compilers of engines: in an environment below a folder whose path has a space, and one that fails."""

from __future__ import annotations

import multiprocessing
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_rl.episode.sampling import Sampling
from monarch_rl.errors import EngineStopped
from monarch_rl.generator.engine import Engine
from monarch_rl.generator.error_file import ErrorFile
from monarch_rl.generator.scheduler_process import SchedulerTarget
from monarch_rl.offline.play import LocalEngine
from monarch_rl.pipeline.preloads import PRELOADS
from monarch_rl.runtime.forking.fork_client import ADDRESS_VARIABLE
from tests import patience
from tests.forking import forking
from tests.generator.conftest import FORKED, SETTINGS
from tests.generator.helpers import LoopThread, make_model

DEADLINE_S = 600.0
"""Deadline of a request, which must not pass."""
PROMPT, SAMPLING = [5, 6, 7], Sampling(4)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This environment's packages in a folder with a space, from which new interpreters import theirs."""
    packages = tmp_path / "a folder" / "site-packages"
    packages.parent.mkdir()
    packages.symlink_to(Path(torch.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", str(packages), prepend=":")
    return packages


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SGLang compiles a part of its routing, on every machine."""
    return make_model(tmp_path_factory.mktemp("model") / "deepseek", "deepseek")


def use_compiler(patch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    """Make programs started from here compile with a shell script, in which ``$real`` is the true compiler, into a
    cache folder of its own.

    Returns the file with all arguments of the compiler, one per line.
    """
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    compiler, arguments = folder / "bin" / "g++", folder / "arguments"
    compiler.parent.mkdir()
    compiler.write_text(
        f"#!/bin/sh\nreal={shutil.which('g++')}\nprintf '%s\\n' \"$@\" >> {shlex.quote(str(arguments))}\n{script}\n"
    )
    compiler.chmod(0o755)
    # By the path, because a fork server has already read CXX.
    patch.setenv("PATH", str(compiler.parent), prepend=":")
    patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "compiled code"))
    return arguments


class CompilingTarget(SchedulerTarget):
    """In the process of a scheduler, before SGLang is imported: compiles a function, and exits with 0 if that works."""

    @staticmethod
    def run(*_: Any, **__: Any) -> None:
        values = torch.arange(8.0)
        assert torch.equal(torch.compile(lambda x: (x * 2 + 1).relu())(values), values * 2 + 1)


@pytest.mark.slow
@pytest.mark.core
def test_a_schedulers_process_compiles_where_paths_have_spaces(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = use_compiler(monkeypatch, tmp_path, 'exec $real "$@" -O0')
    # Fewer compiler calls: none for headers, which pay off after several kernels, none to test vector instructions.
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
    errors = ErrorFile()
    process = multiprocessing.get_context("spawn").Process(target=CompilingTarget(errors))  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.syspath_prepend(packages)  # a spawned process is given it
        process.start()
    patience.wait_until(lambda: not process.is_alive(), "a process that compiles", seconds=300)
    assert (process.exitcode, errors.first()) == (0, "")
    assert f"-L{packages}/torch/lib" in arguments.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_engine_compiles_where_paths_have_spaces(
    packages: Path, deepseek: Path, run: LoopThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = use_compiler(monkeypatch, tmp_path, 'exec $real "$@"')

    async def scenario() -> int:
        engine = await Engine.start(str(deepseek), SETTINGS)
        try:
            return len((await LocalEngine(engine, DEADLINE_S).generate(PROMPT, SAMPLING, 0)).token_ids)
        finally:
            await engine.shutdown()

    with forking([preload for preload in PRELOADS if preload.name in FORKED]) as (name, _):
        monkeypatch.setenv(ADDRESS_VARIABLE, name)
        assert run(scenario()) == SAMPLING.max_new_tokens
    assert f"-L{packages}/torch/lib" in arguments.read_text().splitlines()


@pytest.mark.core
def test_a_compiler_failure_is_reported_immediately_by_the_requests(
    deepseek: Path, run: LoopThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the error of the engine's own process, which ends: no deadline passes, and no poll is needed."""
    use_compiler(monkeypatch, tmp_path, 'case "$*" in --version) exec $real "$@"; esac\necho no quartz >&2; exit 1')

    async def scenario() -> None:
        engine = await Engine.start(str(deepseek), SETTINGS)
        try:
            named = r"(?s)exit code 1: .*CppCompileError.*no quartz"
            with pytest.raises(EngineStopped, match=named):
                await LocalEngine(engine, DEADLINE_S).generate(PROMPT, SAMPLING, 0)
            with pytest.raises(EngineStopped, match=named):
                engine.check()
        finally:
            await engine.shutdown()

    run(scenario())
