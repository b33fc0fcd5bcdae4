from __future__ import annotations

import pytest

from monarch_rl.model.lora import LoraSettings
from monarch_rl.trainer.settings import check_lora
from tests.model.configs import qwen3

CONFIG = qwen3(num_hidden_layers=1)


def test_a_rank_above_the_smallest_matrix_is_refused() -> None:
    check_lora(CONFIG, LoraSettings())
    check_lora(CONFIG, LoraSettings(rank=32))
    check_lora(CONFIG, LoraSettings(rank=64, targets=("q_proj", "up_proj")))
    message = r"trainer\.lora\.rank 33 .*model\.layers\.0\.self_attn\.k_proj\.weight .*\[32, 64\]"
    with pytest.raises(ValueError, match=message):
        check_lora(CONFIG, LoraSettings(rank=33))
