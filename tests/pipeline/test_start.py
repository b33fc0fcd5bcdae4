from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from monarch_rl.generator.gpu import ON_SHARED_DEVICES
from monarch_rl.generator.scheduler_process import ENGINE_PRELOAD
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.model.config import read_config
from monarch_rl.pipeline import start
from monarch_rl.pipeline.start import start_generators
from monarch_rl.runtime.devices import Devices
from monarch_rl.runtime.forking.preloading import ForkServer
from tests.model.configs import qwen3
from tests.recipe.running import random_model


def test_replicas_that_do_not_fit_memory_together_are_refused_before_any_is_spawned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replica alone would find enough memory, because all look before any has allocated."""
    model = read_config(random_model(tmp_path / "model"))
    settings = GeneratorSettings(replicas=4, max_total_tokens=1000)
    free: list[int] = []
    monkeypatch.setattr(start, "free_memory", lambda: free[-1])

    def spawn(*_: Any, **__: Any) -> None:
        raise InterruptedError("spawned")

    def start_error(free_bytes: int, devices: Devices) -> str:
        free.append(free_bytes)
        cluster = SimpleNamespace(devices=devices, num_hosts=devices.num_hosts, spawn=spawn, fork_server=ForkServer())
        with pytest.raises((RuntimeError, InterruptedError)) as ended:
            asyncio.run(start_generators(cast(Any, cluster), model, settings, first_device=1))
        return str(ended.value)

    host = Devices("cpu", 1, 8)
    needed = next(nbytes for nbytes in range(0, 2**30, 2**18) if start_error(nbytes, host) == "spawned")
    assert "an engine needs" in (message := start_error(needed // 2, host)) and "4 of them" in message
    assert start_error(needed // 2, Devices("cpu", 2, 8)) == start_error(0, Devices("cuda", 1, 8)) == "spawned"


@pytest.mark.parametrize("shared", [False, True])
def test_engines_on_shared_devices_skip_sglangs_check_of_balanced_memory(shared: bool, tmp_path: Path) -> None:
    """SGLang would refuse to start several ranks if trainer ranks use different amounts of memory on their devices.
    Engines are spawned after their imports."""
    spawned, imported = list[Any](), list[str]()

    class Importing(ForkServer):
        async def imported(self, preload: str) -> None:
            imported.append(preload)

    def spawn(*_: Any, env: Any, **__: Any) -> None:
        assert imported == [ENGINE_PRELOAD]
        spawned.append(env)
        raise InterruptedError("spawned")

    cluster = SimpleNamespace(devices=Devices("cuda", 1, 4), num_hosts=1, spawn=spawn, fork_server=Importing())
    settings = GeneratorSettings(replicas=1, tp=2)
    with pytest.raises(InterruptedError, match="spawned"):
        asyncio.run(start_generators(cast(Any, cluster), qwen3(), settings, first_device=0, shared=shared))
    assert spawned == [ON_SHARED_DEVICES if shared else None]


def test_sglang_still_reads_the_variable_for_shared_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, SGLang has removed the check or renamed its variable."""
    from sglang.srt.environ import envs

    ((name, value),) = ON_SHARED_DEVICES.items()
    monkeypatch.delenv(name, raising=False)
    assert getattr(envs, name).get() is True
    monkeypatch.setenv(name, value)
    assert getattr(envs, name).get() is False
