"""SGLang's own classes for the families of ``model/architecture.py``."""

from __future__ import annotations

from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

EntryClass = [Qwen3ForCausalLM, Qwen3MoeForCausalLM, LlamaForCausalLM, DeepseekV3ForCausalLM]
"""Read by SGLang."""
