"""What engine ranks hold, joined to Hugging Face's tensors by SGLang's rules, not by what a commit noted of them."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.generator.helpers import HEAD_DIM, HEADS, KV_HEADS, VOCABULARY

ROWS, COLUMNS = 0, 1
"""Along which a tensor is cut among ranks."""


def read_ranks(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Each rank's parameters as SGLang's ``save_sharded_model`` wrote them, by rank."""
    files = {int(re.findall(r"\d+", path.name)[0]): path for path in folder.glob("*.safetensors")}
    return [load_file(files[rank]) for rank in range(len(files))]


def join_ranks(ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of a dense Qwen3 of :mod:`tests.generator.helpers` from the parameters of all ranks.

    q, k and v lie in one parameter, gate and up in another; each rank has its heads or columns of every one of them.
    Vocabularies are cut after they were padded. Norms are on every rank, and must be the same there.
    """
    joined = {}
    for name in ranks[0]:
        parts = [rank[name] for rank in ranks]
        module = name.split(".")[-2]
        if module == "qkv_proj":
            rows = [heads * HEAD_DIM // len(ranks) for heads in (HEADS, KV_HEADS, KV_HEADS)]
            for letter, cut in zip("qkv", zip(*(part.split(rows) for part in parts), strict=True), strict=True):
                joined[name.replace("qkv_proj", f"{letter}_proj")] = torch.cat(cut, ROWS)
        elif module == "gate_up_proj":
            for one, cut in zip(("gate", "up"), zip(*(part.chunk(2) for part in parts), strict=True), strict=True):
                joined[name.replace("gate_up_proj", f"{one}_proj")] = torch.cat(cut, ROWS)
        elif module in ("o_proj", "down_proj"):
            joined[name] = torch.cat(parts, COLUMNS)
        elif module in ("embed_tokens", "lm_head"):
            joined[name] = torch.cat(parts, ROWS)[:VOCABULARY]
        else:
            assert "norm" in module, f"how is {name} shared by ranks?"
            assert not [rank for rank, part in enumerate(parts) if not same_bits(part, parts[0])], name
            joined[name] = parts[0]
    return joined


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """0 and -0 differ, and a NaN is like itself."""
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
