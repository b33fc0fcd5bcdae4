"""Part ``engine``: SGLang starts with the project's arguments, generates, and leaves memory for a version."""

from __future__ import annotations

import asyncio

from tools.gpu_parts.common import Bench, Findings, make_model, model_shape
from tools.gpu_parts.engines import check_completions, generate, prompts, running_engine


def run(bench: Bench, found: Findings) -> None:
    """See the top of this file."""
    asyncio.run(_run(bench, found))


async def _run(bench: Bench, found: Findings) -> None:
    config = model_shape(bench)
    folder = make_model(bench, config)
    count, new_tokens = (256, 512) if bench.on_gpu else (16, 32)
    async with running_engine(bench, found, folder) as engine:
        await generate(engine, prompts(config["vocab_size"], count, 64, seed=1), 8)  # warms up
        completions, seconds = await generate(engine, prompts(config["vocab_size"], count, 64), new_tokens)
    check_completions(found, completions, new_tokens, config["vocab_size"])
    found.note(sequences=count, tokens_per_s=count * new_tokens / seconds)
