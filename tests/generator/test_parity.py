"""The changes of monarch_rl to SGLang's scheduler on a CPU do not change log-probs.

All engines of these tests compare every forward (``checked_scheduler.py``) and end if one differs: dense Qwen3,
experts, LoRA, two ranks, across commits. This module adds the families that no other test starts, and checks that
comparisons took place.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.engine import Engine
from monarch_rl.generator.parts import ignore_part
from tests.generator.checked_scheduler import PARITY
from tests.generator.conftest import SETTINGS
from tests.generator.helpers import LOGPROB_BOUND, VOCABULARY, LoopThread, make_model, reference_logprobs

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="changes are for machines without one")

LENGTHS = [1, 3, 17, 40, 40, 150, 300]
"""Lengths of the prompts."""


@pytest.fixture(scope="module", params=["llama", "qwen2", "mistral", "deepseek"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def engine(model: Path, run: LoopThread) -> Iterator[Engine]:
    engine = run(Engine.start(str(model), SETTINGS))
    yield engine
    run(engine.shutdown())


def test_every_forward_equals_sglangs_own(engine: Engine, run: LoopThread, model: Path, parity: Path) -> None:
    """Prompts alone and with cached prefixes, and ragged sequences. transformers agrees with the served log-probs, but
    cannot read this DeepSeek, whose agreement with the trainer is tested in ``tests/pipeline``."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCABULARY, length).tolist() for length in LENGTHS]
    longer = [prompt + rng.integers(3, VOCABULARY, 140).tolist() for prompt in prompts]

    async def generate(asked: list[list[int]]) -> list[Completion]:
        samplings = (Sampling(max_new_tokens=2 + 5 * i) for i in range(len(asked)))
        return await asyncio.gather(
            *(engine.generate(*each, ignore_part) for each in zip(asked, samplings, strict=True))
        )

    group = [rng.integers(3, VOCABULARY, 12).tolist()] * 4  # so short that all are computed in one batch
    completions = [*run(generate(prompts)), *run(generate(longer)), *run(generate(group))]
    asked = list(zip(prompts + longer + group, completions, strict=True))
    dense = model.name != "deepseek"
    for (_, sampled), reference in zip(asked, reference_logprobs(model, asked) if dense else (), strict=dense):
        assert np.abs(sampled.logprobs - reference).max() < LOGPROB_BOUND
    compared: dict[str, Any] = json.loads((parity / f"{engine.child_pids[0]}.json").read_text())
    assert compared["plain_layers"] == dense
    assert compared["forwards"].keys() == {"prompt", "prefix", "decode"}
    assert all(count > 0 and largest <= PARITY for count, largest in compared["forwards"].values())
