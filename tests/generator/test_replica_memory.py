"""The memory planned for a replica, against the memory of a real engine, and its consequences on GPUs."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from monarch_rl.episode.sampling import Sampling
from monarch_rl.generator import launching
from monarch_rl.generator.engine import Engine
from monarch_rl.generator.scheduler_process import SchedulerTarget, run_scheduler
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.model.config import parse_config
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings
from monarch_rl.model.sizes import trained_model
from monarch_rl.model.tensors import expected_tensors
from monarch_rl.pipeline.memory import CACHE, CPU_CHUNK, GPU_CONTEXT, VERSIONS, WEIGHTS, replica_memory, version_bytes
from monarch_rl.weights.transport import TransferSettings
from tests.generator.helpers import LoopThread, Staging, checksums_of

TOLERANCE = 0.1
CONFIG = parse_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 4000,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    }
)
SETTINGS = GeneratorSettings(max_running_requests=16, max_total_tokens=8192)
ARRIVING = TransferSettings(bucket_mib=1)
"""The area is mapped into the engine; buckets are the actor's: next to none in this test."""
BEFORE = "MEMORY_BEFORE"


def status_bytes(pid: int | str, *names: str) -> int:
    """Bytes of a process, by field names of its status file."""
    lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line[1]) << 10 for line in lines if line[0].rstrip(":") in names)


class MeasuredTarget(SchedulerTarget):
    """A scheduler that first writes its process's memory that no file backs, after all imports."""

    @staticmethod
    def run(*args: Any, **kwargs: Any) -> None:
        import sglang.srt.models.qwen3  # noqa: F401

        Path(os.environ[BEFORE]).write_text(str(status_bytes("self", "RssAnon", "RssShmem")))
        run_scheduler(*args, **kwargs)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG.raw))
    tensors = {name: torch.randn(shape) * 0.02 for name, shape in expected_tensors(CONFIG).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def before(tmp_path: Path) -> Iterator[Path]:
    """A file with the bytes of the scheduler's process before it loads a model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BEFORE, str(tmp_path / "before"))
        patch.setattr(launching, "SchedulerTarget", MeasuredTarget)
        yield tmp_path / "before"


def test_a_replica_uses_the_planned_memory(model: Path, before: Path, run: LoopThread) -> None:
    """An engine that commits a version and reads a prompt that fills a batch."""
    weights = load_file(model / "model.safetensors")
    staging = Staging(weights, areas=1)
    staging.fill(1, weights)

    async def measured() -> int:
        engine = await Engine.start(str(model), SETTINGS)
        try:
            (pid,) = engine.child_pids
            await staging.commit(engine, 1, checksums_of(weights))
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM counts from here (man 5 proc)
            await engine.generate([i % 4000 for i in range(CPU_CHUNK)], Sampling(max_new_tokens=8))
            return status_bytes(pid, "VmHWM") - status_bytes(pid, "RssFile")
        finally:
            await engine.shutdown()

    most = run(measured()) - int(before.read_text())
    planned = replica_memory(trained_model(CONFIG, FULL_TRAINING), SETTINGS, ARRIVING, on_gpu=False, tokens=8192)
    total = sum(planned.values())
    print(
        {name: round(n / 1e6, 1) for name, n in planned.items()},
        f"planned {total / 1e6:.1f}, measured {most / 1e6:.1f} MB",
    )
    assert most == pytest.approx(total, rel=TOLERANCE)


def test_versions_take_the_memory_of_their_transport() -> None:
    """docs/weights.md, "What it costs"; a bucket is 1 MiB, of 4 MiB at most with ``delta``."""
    size = 100 << 20
    for transport, delta, versions, buckets in (
        ("collective", False, 1, 2),
        ("collective", True, 3, 2),
        ("rdma", False, 2, 4),
        ("rdma", True, 4, 4),
        ("shared_memory", False, 0, 0),
        ("auto", False, 2, 4),
    ):
        settings = TransferSettings(transport, bucket_mib=1, delta=delta)  # type: ignore[arg-type]
        assert version_bytes(size, settings) == versions * size + (buckets << 20)


def test_engine_ranks_share_weights_and_cache_but_not_versions() -> None:
    model = trained_model(CONFIG, FULL_TRAINING)
    one, four, eight = (
        replica_memory(model, GeneratorSettings(tp=tp), ARRIVING, on_gpu=True, tokens=1000, device_bytes=80 << 30)
        for tp in (1, 4, 8)
    )
    assert four[WEIGHTS] == pytest.approx(one[WEIGHTS] / 4, rel=0.01) and four[CACHE] == one[CACHE] // 4
    assert eight[CACHE] == four[CACHE]  # 4 heads
    assert one[VERSIONS] == four[VERSIONS] == eight[VERSIONS] == model.version * 2 + (2 << 20)
    assert eight["CUDA contexts"] - one["CUDA contexts"] == 7 * GPU_CONTEXT


def test_versions_of_adapters_are_small() -> None:
    model = trained_model(CONFIG, LoraSettings(rank=8))
    planned = replica_memory(model, SETTINGS, ARRIVING, on_gpu=False, tokens=1000)
    sides = [(512, 512), (512, 256), (512, 256), (512, 512), (512, 2048), (512, 2048), (2048, 512)]
    assert model.lora == model.version == 12 * 8 * sum(inputs + outputs for inputs, outputs in sides)
    assert planned[VERSIONS] < 0.1 * planned[WEIGHTS]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the plan of a GPU is checked before anything is spawned")
def test_an_engine_does_not_start_on_a_machine_without_its_planned_memory() -> None:
    with pytest.raises(RuntimeError, match=r"an engine needs 1048576\.00 GiB .* for the weights"):
        asyncio.run(Engine.start("a Hub name", SETTINGS, memory={"the weights": 1 << 50}))
