"""SGLang's classes of reward models, for the families of ``REWARD_MODELS`` (``model/config.py``).

SGLang 0.5.23 gives the heads of Qwen3 and Qwen2 a bias that is in no file, and so is random and different in every
engine. Hugging Face's heads have no bias.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.models.llama_reward import LlamaForSequenceClassification
from sglang.srt.models.qwen2_classification import Qwen2ForSequenceClassification as _Qwen2
from sglang.srt.models.qwen3_classification import Qwen3ForSequenceClassification as _Qwen3
from torch import nn


class Qwen3ForSequenceClassification(_Qwen3):  # type: ignore[misc,unused-ignore]
    """SGLang's class, with a head without bias."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)


class Qwen2ForSequenceClassification(_Qwen2):  # type: ignore[misc,unused-ignore]
    """SGLang's class, with a head without bias."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)


EntryClass = [Qwen3ForSequenceClassification, Qwen2ForSequenceClassification, LlamaForSequenceClassification]
"""Read by SGLang."""
