"""An engine whose scheduler comes from the fork server, as in a run."""

from __future__ import annotations

import uuid
from pathlib import Path

import psutil
import pytest

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.engine import Engine
from monarch_rl.pipeline.start import PRELOADS
from monarch_rl.runtime.fork_client import ADDRESS_VARIABLE
from monarch_rl.runtime.fork_server import start_server
from tests.generator.conftest import SETTINGS
from tests.generator.helpers import PART_TOKENS, LoopThread


def test_a_forked_scheduler_takes_what_was_set_after_its_imports(
    models: dict[str, Path], run: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang reads some variables of the environment when it is imported, which the server has done before."""
    name = f"monarch_rl-fork-test-{uuid.uuid4().hex}"
    server = start_server(name, PRELOADS)
    monkeypatch.setenv(ADDRESS_VARIABLE, name)
    parts: list[Completion] = []

    async def draw() -> None:
        engine = await Engine.start(str(models["qwen3"]), SETTINGS)
        try:
            parents = [psutil.Process(pid).parent() for pid in engine.child_pids]
            family = psutil.Process(server.pid).children(recursive=True)
            assert parents and all(parent in family for parent in parents), "forked by the server"
            await engine.generate([5], Sampling(max_new_tokens=4 * PART_TOKENS), parts.append)
        finally:
            await engine.shutdown()

    try:
        run(draw(), 240)
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(60)
    assert [len(part.token_ids) for part in parts] == [PART_TOKENS] * 3
