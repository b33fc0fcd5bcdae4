"""SGLang's classes for the families of ``model/architecture.py``."""

from __future__ import annotations

from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Same as SGLang's class, whose module also imports models that read images: 0.4 CPU-seconds per start."""


EntryClass = [
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    Qwen2ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    DeepseekV3ForCausalLM,
]
"""Read by SGLang."""
