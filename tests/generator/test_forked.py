"""An engine whose scheduler comes from the fork server, as in a run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.engine import Engine
from tests.generator.conftest import SETTINGS
from tests.generator.helpers import PART_TOKENS, LoopThread


def test_a_forked_scheduler_uses_variables_set_after_its_imports(
    models: dict[str, Path], run: LoopThread, fork_server: subprocess.Popen[bytes]
) -> None:
    """SGLang reads some environment variables when it is imported, which the server did before."""
    parts: list[Completion] = []

    async def generate() -> None:
        engine = await Engine.start(str(models["qwen3"]), SETTINGS)
        try:
            parents = [psutil.Process(pid).parent() for pid in engine.child_pids]
            family = psutil.Process(fork_server.pid).children(recursive=True)
            assert parents and all(parent in family for parent in parents), "forked by the server"
            await engine.generate([5], Sampling(max_new_tokens=4 * PART_TOKENS), parts.append)
        finally:
            await engine.shutdown()

    run(generate())
    assert [len(part.token_ids) for part in parts] == [PART_TOKENS] * 3
