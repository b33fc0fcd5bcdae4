"""Parameters of engine ranks, joined into Hugging Face tensors by SGLang's rules, not by the commit code."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from monarch_rl.pipeline.start import save
from tests.generator.helpers import EXPERT_WIDTH, HEAD_DIM, HEADS, KV_HEADS, VOCABULARY, weights_in
from tests.pipeline.system import InspectedGenerator, System

ROWS, COLUMNS = 0, 1
"""Dimensions along which a tensor is split among ranks."""


def read_ranks(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Each rank's parameters as SGLang's ``save_sharded_model`` wrote them, by rank."""
    files = {int(re.findall(r"\d+", path.name)[0]): path for path in folder.glob("*.safetensors")}
    return [load_file(files[rank]) for rank in range(len(files))]


async def check_engine_weights(system: System[InspectedGenerator], scratch: Path) -> dict[str, torch.Tensor]:
    """Check that the joined parameters of all engine ranks equal the trainer's full tensors bit for bit.

    Args:
        scratch: parent folder of the files that are written.

    Returns:
        The trainer's tensors, by name.
    """
    folder = Path(tempfile.mkdtemp(dir=scratch))
    await save(system.trainer, folder / "trainer")
    trained = weights_in(folder / "trainer")
    for index, generator in enumerate(system.generators):
        ranks = folder / f"generator{index}"
        ranks.mkdir()
        await generator.save_ranks.call_one(str(ranks))
        held = join_ranks(read_ranks(ranks))
        if "lm_head.weight" not in trained:  # a tied one: SGLang writes what lies in one place under its first name
            held["model.embed_tokens.weight"] = held.pop("lm_head.weight")
        assert held.keys() == trained.keys()
        wrong = [name for name in held if not same_bits(held[name], trained[name])]
        assert not wrong, f"generator {index}: {wrong}"
    return trained


def join_ranks(ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of a Qwen3 or Qwen3-MoE of :mod:`tests.generator.helpers` from the parameters of all ranks.

    q, k and v lie in one parameter, gate and up in another; each rank has its heads or columns of each of them.
    All experts of a layer lie in two parameters; each rank has its columns of every expert, padded. The vocabulary is
    padded before it is split. Norms and routers are on every rank, and must be the same on all.
    """
    joined = {}
    for name in ranks[0]:
        parts = [rank[name] for rank in ranks]
        module = name.split(".")[-2]
        if module == "qkv_proj":
            rows = [heads * HEAD_DIM // len(ranks) for heads in (HEADS, KV_HEADS, KV_HEADS)]
            for letter, shards in zip("qkv", zip(*(part.split(rows) for part in parts), strict=True), strict=True):
                joined[name.replace("qkv_proj", f"{letter}_proj")] = torch.cat(shards, ROWS)
        elif module == "gate_up_proj":
            for half, shards in zip(("gate", "up"), zip(*(part.chunk(2) for part in parts), strict=True), strict=True):
                joined[name.replace("gate_up_proj", f"{half}_proj")] = torch.cat(shards, ROWS)
        elif module == "experts":
            joined |= _join_experts(name, parts)
        elif module in ("o_proj", "down_proj"):
            joined[name] = torch.cat(parts, COLUMNS)
        elif module in ("embed_tokens", "lm_head"):
            joined[name] = torch.cat(parts, ROWS)[:VOCABULARY]
        else:
            assert "norm" in module or module == "gate", f"how do ranks share {name}?"
            assert not [rank for rank, part in enumerate(parts) if not same_bits(part, parts[0])], name
            joined[name] = parts[0]
    return joined


def _join_experts(name: str, parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """From each rank's ``w13_weight`` [experts, gate and up, width] or ``w2_weight`` [experts, width, columns]."""
    prefix, _, kind = name.rpartition(".")
    joined = {}
    for expert, held in enumerate(zip(*parts, strict=True)):
        if kind == "w2_weight":
            joined[f"{prefix}.{expert}.down_proj.weight"] = _unpadded(held, COLUMNS)
            continue
        assert kind == "w13_weight", name
        for half, shards in zip(("gate", "up"), zip(*(part.chunk(2) for part in held), strict=True), strict=True):
            joined[f"{prefix}.{expert}.{half}_proj.weight"] = _unpadded(shards, ROWS)
    return joined


def _unpadded(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """An expert's matrix from the equal parts of all ranks, each of which is padded with zeros."""
    share = EXPERT_WIDTH // len(parts)
    for part in parts:
        assert not part.narrow(dim, share, part.shape[dim] - share).any()
    return torch.cat([part.narrow(dim, 0, share) for part in parts], dim)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether both have the same bits: 0 and -0 differ, and a NaN equals itself."""
    alike = (first.shape, first.dtype) == (second.shape, second.dtype)
    return alike and torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
