"""An engine's readings of given tokens, against transformers: log-probs at a temperature, top tokens, rewards."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import GenerationError, WeightMismatch
from monarch_rl.generator.engine import Engine
from monarch_rl.generator.frozen import file_checksums, file_version
from monarch_rl.generator.tempered import row_divisors
from monarch_rl.model.config import read_frozen
from monarch_rl.model.folder import resolve_frozen
from monarch_rl.model.tensors import check_folder
from tests.generator.conftest import SETTINGS, EngineKeeper
from tests.generator.helpers import (
    LOGPROB_BOUND,
    TRANSFORMERS,
    LoopThread,
    Reading,
    next_version,
    reference_reading,
    weights_in,
)

RNG = np.random.default_rng(5)
SEQUENCES = [RNG.integers(3, 500, length).tolist() for length in (1, 2, 37, 900, 950, 980)]
"""The last three together have more rows than SGLang normalises in one call, which is 2,048."""
ASKED = [(0, 0, 1.0), (1, 1, 0.7), (2, 0, 2.0), (2, 36, 1.0), (3, 0, 0.5), (4, 0, 1.0), (5, 300, 1.7), (3, 898, 0.5)]
"""Sequence, first place, temperature."""


def tempered(reading: Reading, temperature: float) -> np.ndarray:
    """float64[n, vocabulary]: log-probs of the next token after each."""
    logits = reading.logprobs.astype(np.float64) / temperature
    return logits - np.logaddexp.reduce(logits, -1, keepdims=True)


def expected(reading: Reading, ids: list[int], start: int, temperature: float) -> np.ndarray:
    rows = np.arange(max(1, start), len(ids))
    values = tempered(reading, temperature)[rows - 1, np.array(ids)[rows]] if len(rows) else np.zeros(0)
    return values if start else np.concatenate([[0.0], values])


@pytest.fixture(scope="module")
def readings(models: dict[str, Path]) -> list[Reading]:
    folder = models["qwen3"]
    return reference_reading(folder, [(ids, [0] * len(ids)) for ids in SEQUENCES], {0: weights_in(folder)})


@pytest.fixture
def engine(engines: EngineKeeper, models: dict[str, Path]) -> Engine:
    return engines.under(SETTINGS, models["qwen3"])


def test_log_probs_are_at_the_requests_temperature_whatever_runs_in_the_same_batch(
    engine: Engine, run: LoopThread, readings: list[Reading], models: dict[str, Path]
) -> None:
    """All in one batch with requests that sample at other temperatures, whose own log-probs stay right."""
    samplings = [Sampling(24, 0.5), Sampling(24, 1.0), Sampling(24, 1.6)]

    async def ask() -> tuple[list[np.ndarray], list[Completion]]:
        reading = [engine.readings.logprobs(SEQUENCES[i], start, temperature) for i, start, temperature in ASKED]
        sampling_requests = [engine.generate([5, 6, 7], sampling) for sampling in samplings]
        answers = await asyncio.gather(*reading, *sampling_requests)
        return answers[: len(ASKED)], answers[len(ASKED) :]  # type: ignore[return-value]

    before = engine.readings.tokens, engine.readings.requests
    values, sampled = run(ask())
    for value, (index, start, temperature) in zip(values, ASKED, strict=True):
        ids = SEQUENCES[index]
        assert value.dtype == np.float32 and value.shape == (len(ids) - start,)
        right = expected(readings[index], ids, start, temperature)
        assert np.abs(value - right).max() < LOGPROB_BOUND / min(1.0, temperature), (index, start, temperature)
    assert engine.readings.requests - before[1] == len(ASKED)
    assert engine.readings.tokens - before[0] == sum(len(SEQUENCES[index]) for index, *_ in ASKED)
    sequences = [[5, 6, 7, *completion.token_ids.tolist()] for completion in sampled]
    weights = {0: weights_in(models["qwen3"])}
    after = reference_reading(models["qwen3"], [(ids, [0] * len(ids)) for ids in sequences], weights)
    for ids, completion, sampling, reading in zip(sequences, sampled, samplings, after, strict=True):
        right = expected(reading, ids, 3, sampling.temperature)
        assert np.abs(completion.logprobs - right).max() < LOGPROB_BOUND / min(1.0, sampling.temperature)


def test_the_most_likely_tokens(engine: Engine, run: LoopThread, readings: list[Reading]) -> None:
    for index, start, temperature in ((2, 1, 1.0), (2, 30, 0.6), (3, 880, 1.0)):
        ids = SEQUENCES[index]
        top = run(engine.readings.top_logprobs(ids, 7, start, temperature))
        assert top.token_ids.shape == top.logprobs.shape == (len(ids) - start, 7)
        assert top.token_ids.dtype == np.int32 and top.logprobs.dtype == np.float32
        rows = tempered(readings[index], temperature)[start - 1 : -1]
        right = -np.sort(-rows, -1)[:, :7]
        assert np.abs(top.logprobs - right).max() < LOGPROB_BOUND / temperature
        given = rows[np.arange(len(rows)), ids[start:]]
        assert np.abs(top.given - given).max() < LOGPROB_BOUND / temperature and top.given.dtype == np.float32
        found = np.take_along_axis(rows, top.token_ids, -1)
        assert np.abs(found - right).max() < LOGPROB_BOUND / temperature, (
            "apart from ties, the ids equal the reference's"
        )


def test_a_refused_request_does_not_affect_others(engine: Engine, run: LoopThread) -> None:
    for asked, message in (
        (engine.readings.logprobs([]), r"start 0 .*\b0 given tokens"),
        (engine.readings.logprobs([5, 6], 2), r"start 2 .*\b2 given tokens"),
        (engine.readings.logprobs([5, 6], 0, 0.0), "temperature 0.0"),
        (engine.readings.top_logprobs([5, 6], 3, 0), "position 0"),
        (engine.readings.top_logprobs([5, 6], 0), r"\bof 0 tokens"),
        (engine.readings.logprobs([5] * 2000), "context"),
    ):
        with pytest.raises(GenerationError, match=message):
            run(asked)
    assert len(run(engine.readings.logprobs([5, 6, 7]))) == 3
    assert engine.requests.clock.requests == 0


def test_an_engines_parameters_equal_its_folders(engine: Engine, run: LoopThread, models: dict[str, Path]) -> None:
    """Checksums of the files are compared with those of the parameters: one element of another folder is found."""
    folder = models["qwen3"]
    run(engine.verify_base_weights(*file_checksums(folder, "float32")))
    other = folder.with_name("qwen3-changed")
    other.mkdir(exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    (other / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(WeightMismatch, match=r"model\.norm\.weight"):
        run(engine.verify_base_weights(*file_checksums(other, "float32")))
    run(engine.verify_base_weights(*file_checksums(folder, "float32")))
    assert len(run(engine.readings.logprobs([5, 6, 7]))) == 3


def test_an_engine_serves_another_folder_of_the_same_shapes(
    engine: Engine, run: LoopThread, models: dict[str, Path]
) -> None:
    """And its own folder again at the end, because other tests share it."""
    folder, ids = models["qwen3"], SEQUENCES[2]
    other = folder.with_name("qwen3-later")
    other.mkdir(exist_ok=True)
    (other / "config.json").write_text((folder / "config.json").read_text())
    weights = next_version(weights_in(folder), 7)
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    before = run(engine.readings.logprobs(ids))
    for source, held in ((other, weights), (folder, weights_in(folder))):
        manifest, area, checksums = file_version(source, "float32")
        run(engine.commit(engine.requests.version + 1, manifest, area.handle, checksums))
        (reading,) = reference_reading(folder, [(ids, [0] * len(ids))], {0: held})
        values = run(engine.readings.logprobs(ids))
        assert np.abs(values - expected(reading, ids, 0, 1.0)).max() < LOGPROB_BOUND
        assert (np.abs(values - before).max() > 1e-2) == (source == other)


def test_rows_are_divided_by_the_temperature_of_requests_that_ask_for_their_own_tokens() -> None:
    temperatures = torch.tensor([[0.5], [2.0], [1.0]])
    assert row_divisors(temperatures, [0, -1, 3], [0, 1, 2, 2, 2]) is None, "the sampler divides rows that are sampled"
    divisors = row_divisors(temperatures, [0, 2, 1], [0, 1, 1, 2])
    assert divisors is not None and divisors[:, 0].tolist() == [1.0, 2.0, 2.0, 1.0]


# ---- reward heads ----------------------------------------------------------------------------------------------------


def with_head(source: Path, folder: Path, architecture: str, labels: int) -> Path:
    """A model with a random reward head in place of its LM head."""
    folder.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": [architecture], "id2label": {str(i): f"L{i}" for i in range(labels)}, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    weights.pop("lm_head.weight", None)
    weights["score.weight"] = torch.randn(labels, config["hidden_size"], generator=torch.Generator().manual_seed(3))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("kind", "architecture", "labels"),
    [("qwen3", "Qwen3ForSequenceClassification", 1), ("llama", "LlamaForSequenceClassification", 3)],
)
def test_a_reward_head_rates_the_last_token_as_transformers_does(
    engines: EngineKeeper, run: LoopThread, models: dict[str, Path], kind: str, architecture: str, labels: int
) -> None:
    folder = with_head(models[kind], models[kind].with_name(f"{kind}-reward"), architecture, labels)
    config = read_frozen(folder)
    assert config.reward_labels == labels and resolve_frozen(str(folder)) == config
    check_folder(config)
    engine = engines.under(SETTINGS, folder)
    run(engine.verify_base_weights(*file_checksums(folder, "float32")))

    async def ask() -> list[np.ndarray]:
        return list(await asyncio.gather(*(engine.readings.rewards(ids) for ids in SEQUENCES[1:4])))

    rewards = run(ask())
    right = TRANSFORMERS.ask("transformers_rewards", [folder], [[ids] for ids in SEQUENCES[1:4]])
    assert np.abs(np.array(rewards) - np.array(right)).max() < 1e-4
    assert np.abs(rewards[0] - rewards[1]).min() > 1e-3, "the rewards distinguish the sequences"
    with pytest.raises(GenerationError):
        run(engine.readings.rewards([5] * 2000))
    assert rewards[0].dtype == np.float32 and rewards[0].shape == (labels,)
