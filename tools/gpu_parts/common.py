"""Shared code of the parts of tools/gpu_check.py: the device, results, and models with random weights."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import resource
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from monarch_rl.episode.episode import Episode, Group, Turn
from monarch_rl.generator.gpu import DRIVER_FILE

GIB = 2**30
PACKAGES = ("torch", "torchtitan", "torchmonarch", "sglang", "sglang-kernel", "flashinfer-python", "triton")


class Skipped(Exception):
    """The part cannot run on this machine; the message is the reason."""


@dataclass
class Findings:
    """Results of a part."""

    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def note(self, **figures: Any) -> None:
        """Record measurements, floats with four significant digits. They are also printed at once, because a part that
        is killed leaves nothing else."""
        rounded = {name: float(f"{x:.4g}") if isinstance(x, float) else x for name, x in figures.items()}
        print(json.dumps(rounded), file=sys.stderr, flush=True)
        self.figures |= rounded

    def require(self, holds: bool, problem: str) -> None:
        """Record ``problem`` unless the requirement ``holds``."""
        if not holds:
            self.problems.append(problem)


@dataclass(frozen=True)
class Bench:
    """Environment of a part."""

    device: torch.device
    scratch: Path
    """Temporary folder of the part."""

    @classmethod
    def on(cls, device: str, scratch: Path) -> Bench:
        """Create one for ``device``: auto, cuda or cpu. Raises RuntimeError if there is no such device."""
        if device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("--device cuda: torch finds no GPU")
        on_gpu = device != "cpu" and torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(0)
        return cls(torch.device("cuda", 0) if on_gpu else torch.device("cpu"), scratch)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.on_gpu else f"CPU {platform.machine()}"

    def synchronize(self) -> None:
        """Wait for all work on the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], rounds: int = 3) -> float:
        """Seconds of the fastest of ``rounds`` runs of ``work``, after one for warm-up."""
        found = []
        for _ in range(rounds + 1):
            self.synchronize()
            started = time.perf_counter()
            work()
            self.synchronize()
            found.append(time.perf_counter() - started)
        return min(found[1:])


def versions() -> dict[str, str | None]:
    """Versions of the relevant packages; None if one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    found["torch"] = torch.__version__
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        if DRIVER_FILE.is_file():
            found["driver"] = DRIVER_FILE.read_text().splitlines()[0]
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    return found


def machine() -> dict[str, float | str]:
    """GiB of shared memory and of lockable memory: a container may have less than NCCL and RDMA need."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memlock = "unlimited" if limit == resource.RLIM_INFINITY else limit / GIB
    return {"shm_gib": round(shutil.disk_usage("/dev/shm").total / GIB, 3), "memlock_gib": memlock}


def attention_backend() -> Literal["auto", "triton"]:
    """SGLang's default (``auto``), or ``triton`` if the kernels that it would choose on Hopper are missing: a bundle
    for a machine without network may leave them out, because they are most of the wheel's size."""
    package = importlib.util.find_spec("sgl_kernel")
    folders = list(package.submodule_search_locations or []) if package else []
    has_flash = any(list(Path(folder).rglob("flash_ops*.so")) for folder in folders)
    return "auto" if has_flash else "triton"


# -- models -----------------------------------------------------------------------------------------------------------

_COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3_06B: dict[str, Any] = _COMMON | {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
"""The shape of Qwen/Qwen3-0.6B."""
TINY: dict[str, Any] = _COMMON | {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


_EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def expert_shape(bench: Bench) -> dict[str, Any]:
    """``config.json`` of a small mixture of experts for this device."""
    if bench.on_gpu:
        small = {"vocab_size": 32_000, "tie_word_embeddings": False, "num_hidden_layers": 4}
        return QWEN3_06B | _EXPERTS | small | {"moe_intermediate_size": 256}
    return TINY | _EXPERTS | {"moe_intermediate_size": 32}


def model_shape(bench: Bench) -> dict[str, Any]:
    """``config.json`` of the model that is measured on this device."""
    return QWEN3_06B if bench.on_gpu else TINY


def random_weights(bench: Bench, config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """All Hugging Face tensors of a model, on the CPU, in the dtype of its config. Logits have a spread of about 3
    nats, so that tokens differ in probability."""
    from monarch_rl.model.config import parse_config
    from monarch_rl.model.tensors import expected_tensors

    generator = torch.Generator(bench.device).manual_seed(seed)
    dtype = getattr(torch, config["dtype"])
    width = config["hidden_size"]
    spread = {"model.embed_tokens.weight": 3 / width**0.5, "lm_head.weight": 3 / width**0.5}
    weights = {}
    for name, shape in expected_tensors(parse_config(config)).items():
        sampled = torch.randn(shape, generator=generator, device=bench.device)
        value = 1 + 0.1 * sampled if "norm" in name else sampled * spread.get(name, shape[-1] ** -0.5)
        weights[name] = value.to(dtype).cpu()
    return weights


def make_model(bench: Bench, config: dict[str, Any], name: str = "model") -> Path:
    """Write a Hugging Face folder with random weights, without a tokenizer."""
    from safetensors.torch import save_file

    folder = bench.scratch / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(bench, config), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# -- episodes ---------------------------------------------------------------------------------------------------------


def make_groups(vocabulary: int, groups: int, size: int, prompt: int, answer: int, seed: int = 0) -> list[Group]:
    """Random groups of ``size`` episodes, which share a prompt of ``prompt`` tokens and have 1 to ``answer`` sampled
    tokens each."""
    rng = np.random.default_rng(seed)

    def episode(prompt_ids: np.ndarray) -> Episode:
        count = int(rng.integers(1, answer + 1))
        trainable = np.arange(prompt + count) >= prompt
        turn = Turn(
            np.concatenate([prompt_ids, rng.integers(0, vocabulary, count)]).astype(np.int32),
            np.where(trainable, -np.log(vocabulary), 0).astype(np.float32),
            np.where(trainable, 0, -1).astype(np.int32),
            trainable,
        )
        return Episode([turn], float(rng.integers(0, 2)), "stop")

    prompts = rng.integers(0, vocabulary, (groups, prompt))
    return [Group(g, g, [episode(prompts[g]) for _ in range(size)]) for g in range(groups)]
