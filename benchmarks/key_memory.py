"""Memory of gathered keys: bytes per token that a layer saves for the backward pass, with and without shared prefixes.

    python benchmarks/key_memory.py

Layers of the trainer as on a GPU (bfloat16, the varlen kernel), in the shapes of published models, on tensors without
data. Two micro-batches compute equally many tokens; queries of the second one gather ``KEYS_PER_TOKEN`` times as many
keys, as many as a plan may have (``algorithms/packing.py``). No activation checkpointing: with it, a layer needs as
much memory while it is recomputed, but only one layer at a time. The last line is JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import tyro
from torch.autograd.graph import saved_tensors_hooks

from monarch_rl.trainer import platform

platform.prepare()

from monarch_rl.algorithms.packing import KEYS_PER_TOKEN  # noqa: E402
from monarch_rl.model.config import parse_config  # noqa: E402
from monarch_rl.trainer import attention  # noqa: E402
from monarch_rl.trainer.attention_layout import AttentionLayout, Segment  # noqa: E402
from monarch_rl.trainer.model_config import model_config  # noqa: E402

ONE_LAYER = {"vocab_size": 1000, "num_hidden_layers": 1, "max_position_embeddings": 4096, "rope_theta": 1e6}
GQA = ONE_LAYER | {"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6, "head_dim": 128}
LLAMA = ONE_LAYER | {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
MLA = ONE_LAYER | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}


def gqa(hidden: int, inner: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Shape of a Qwen3 or Llama."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner}
    return sizes | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}


MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B (GQA, 8 of 16 heads)": GQA | gqa(1024, 3072, 16, 8),
    "Qwen3-4B (GQA, 8 of 32 heads)": GQA | gqa(2560, 9728, 32, 8),
    "Llama-3-8B (GQA, 8 of 32 heads)": LLAMA | gqa(4096, 14336, 32, 8),
    "Llama-2-7B (MHA, 32 heads)": LLAMA | gqa(4096, 11008, 32, 32),
    "DeepSeek-V3 (MLA, 128 heads), a dense layer": MLA,
}


@dataclass(frozen=True)
class Settings:
    """Memory of gathered keys (see the top of this file)."""

    tokens: int = 4096
    """Tokens that a micro-batch computes."""
    branches: int = 2 * KEYS_PER_TOKEN - 1
    """Answers after a shared prompt of half of the tokens; each gathers the prompt."""


class _Kernel(torch.autograd.Function):
    """Saves the tensors that flash attention saves: its inputs, its output, and a float32 per query and head."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        output = q.new_empty(*q.shape[:2], v.shape[-1])
        ctx.save_for_backward(q, k, v, output, q.new_empty(*q.shape[:2], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        raise NotImplementedError


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_arguments: Any, **_settings: Any) -> torch.Tensor:
    """Replaces the kernel, which only exists on GPUs."""
    return _Kernel.apply(q, k, v)  # type: ignore[no-any-return, no-untyped-call]


def layouts(s: Settings) -> dict[str, AttentionLayout]:
    """Return the layouts of one episode, and of answers after a shared prompt."""
    device, answer = torch.device("meta"), (s.tokens // 2) // s.branches
    prompt = s.tokens - answer * s.branches
    # The prompt is computed by the first answer's segment.
    segments = [Segment(0, np.arange(prompt + answer), prompt + answer)]
    for start in range(prompt + answer, s.tokens, answer):
        segments.append(Segment(start, np.concatenate([np.arange(prompt), np.arange(start, start + answer)]), answer))
    return {
        "alone": AttentionLayout([Segment(0, np.arange(s.tokens), s.tokens)], device),
        "shared": AttentionLayout(segments, device),
    }


def saved_bytes(hf: dict[str, Any], layout: AttentionLayout, tokens: int) -> int:
    """Return the bytes that a layer saves for its backward pass, without parameters, each storage once."""
    with torch.device("meta"):
        config = model_config(parse_config(hf), logprob_chunk=16, longest=tokens, half_on_gpu=True)
        layer = config.layers[0].build().to(torch.bfloat16)
    parameters = {parameter.untyped_storage()._cdata for parameter in layer.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            storages[storage._cdata] = storage
        return tensor

    x = torch.zeros(1, tokens, hf["hidden_size"], dtype=torch.bfloat16, requires_grad=True, device="meta")
    positions = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(x, attention_masks=layout, positions=positions)
    assert output.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


def main(s: Settings) -> None:
    attention.varlen_attn = varlen  # type: ignore[assignment]
    attention.current_flash_attention_impl = lambda: "FA3"  # as on an H100; FA2 has the values of MLA padded
    by_kind = layouts(s)
    assert by_kind["shared"].keys is not None
    keys = len(by_kind["shared"].keys) / s.tokens
    print(f"| model | a layer keeps, bytes a token | the same with {keys:.2f} keys a token |\n|---|---|---|")
    ratios = {}
    for name, hf in MODELS.items():
        alone, shared = (saved_bytes(hf, layout, s.tokens) / s.tokens for layout in by_kind.values())
        ratios[name] = round(shared / alone, 3)
        print(f"| {name} | {alone:,.0f} | {shared / alone:.2f} times as much |")
    print(json.dumps({"benchmark": "key_memory", "keys_per_token": round(keys, 2), "times_as_much": ratios}))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
