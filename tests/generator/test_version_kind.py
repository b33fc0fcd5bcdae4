from __future__ import annotations

from pkgutil import resolve_name

import pytest

from monarch_rl.generator.settings import GeneratorSettings, engine_arguments
from monarch_rl.generator.version_kind import ALL_WEIGHTS, LOADERS, LORA_ADAPTER, MERGED_WEIGHTS, VersionKind
from monarch_rl.model.config import ModelConfig
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings, Target
from tests.model.configs import qwen3, qwen3_moe

DENSE, SPARSE = qwen3(), qwen3_moe()


@pytest.mark.parametrize(
    ("config", "targets", "kind"),
    [
        (SPARSE, None, ALL_WEIGHTS),
        (None, None, ALL_WEIGHTS),
        (DENSE, ("q_proj", "up_proj"), LORA_ADAPTER),
        (SPARSE, ("q_proj",), LORA_ADAPTER),
        (None, ("up_proj",), LORA_ADAPTER),
        (SPARSE, ("q_proj", "up_proj"), MERGED_WEIGHTS),
    ],
)
def test_adapters_on_experts_are_merged_and_others_are_served(
    config: ModelConfig | None, targets: tuple[Target, ...] | None, kind: VersionKind
) -> None:
    lora = FULL_TRAINING if targets is None else LoraSettings(rank=2, targets=targets)
    assert VersionKind.of(config, lora) is kind


def test_sglang_may_run_every_loader_and_finds_it() -> None:
    assert engine_arguments("m", GeneratorSettings(), 0, on_gpu=False)["custom_weight_loader"] == LOADERS
    assert len(LOADERS) == 5 and all(callable(resolve_name(name)) for name in LOADERS)
