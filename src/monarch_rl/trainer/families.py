"""What torchtitan builds each family of models from: one record for each of ``model/architecture.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, parallelize_deepseekv3
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from monarch_rl.model.architecture import DEEPSEEK_V3, LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, Architecture
from monarch_rl.trainer.gqa import gqa_layers
from monarch_rl.trainer.mla import deepseek_layers
from monarch_rl.trainer.modules import HalfRotaryEmbedding


class LlamaStateDictAdapter(Llama3StateDictAdapter):
    """torchtitan's Llama names, without its permutation: see :class:`HalfRotaryEmbedding`."""

    def _permute(self, w: torch.Tensor, *_shape: int) -> torch.Tensor:
        return w

    def _reverse_permute(self, w: torch.Tensor, *_shape: int) -> torch.Tensor:
        return w

    def _validate_hf_rope_config(self, expected_rope_cls: type) -> None:
        super()._validate_hf_rope_config(HalfRotaryEmbedding.Config)


class Qwen2StateDictAdapter(LlamaStateDictAdapter):
    """A Llama's names, and those of the biases of queries, keys and values."""

    def __init__(self, model_config: Llama3Model.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        for letter in "qkv":
            name = f"model.layers.{{}}.self_attn.{letter}_proj.bias"
            self.from_hf_map[name] = f"layers.{{}}.attention.qkv_linear.w{letter}.bias"


@dataclass(frozen=True)
class TitanFamily:
    """torchtitan's classes and functions for a family."""

    model: type[Decoder]
    layers: Callable[..., list[TransformerBlock.Config]]
    """``(config.json, longest=..., half_on_gpu=...) -> blocks``; the config has passed ``model/features.py``."""
    parallelize: Callable[..., Decoder]
    """Shards the model over the ranks."""
    state_dict_adapter: type[StateDictAdapter]
    """Between the model's names of tensors and Hugging Face's."""


_QWEN3 = TitanFamily(
    Qwen3Model,
    partial(gqa_layers, block=Qwen3TransformerBlock),
    parallelize_qwen3,
    Qwen3StateDictAdapter,
)
_LLAMA = TitanFamily(
    Llama3Model,
    partial(gqa_layers, block=Llama3TransformerBlock),
    parallelize_llama,
    LlamaStateDictAdapter,
)
FAMILIES: dict[Architecture, TitanFamily] = {
    QWEN3: _QWEN3,
    QWEN3_MOE: _QWEN3,
    QWEN2: replace(_LLAMA, state_dict_adapter=Qwen2StateDictAdapter),
    LLAMA: _LLAMA,
    MISTRAL: _LLAMA,
    DEEPSEEK_V3: TitanFamily(
        DeepSeekV3Model,
        deepseek_layers,
        parallelize_deepseekv3,
        DeepSeekV3StateDictAdapter,
    ),
}
