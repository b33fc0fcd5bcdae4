"""Qwen3-MoE and DeepSeek-V3 on trainer ranks against transformers and plain training in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from monarch_rl.model.config import ModelConfig
from monarch_rl.model.folder import resolve_model
from monarch_rl.model.lora import LoraSettings
from monarch_rl.trainer.settings import TrainerSettings, check_experts
from tests.model.configs import deepseek, deepseek_values, qwen3, qwen3_moe
from tests.trainer.batches import LR, STEPS, WEIGHT_DECAY
from tests.trainer.moe_cases import LAYOUTS, MODELS, TRAININGS, layout
from tests.trainer.programs import parameters, run_program, saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the output of moe_reference.py."""
    folder = tmp_path_factory.mktemp("moe")
    run_program("moe_reference.py", folder)
    return folder


@pytest.fixture(params=parameters(LAYOUTS, core=True))
def where(request: pytest.FixtureRequest, folder: Path, ran: set[int]) -> str:
    """A layout for which moe_ranks.py has written its output."""
    ranks = int(request.param[0])
    if ranks not in ran:
        ran.add(ranks)
        run_program("moe_ranks.py", folder, *map(str, LAYOUTS[ranks]), ranks=ranks)
    return str(request.param)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(folder: Path, name: str, where: str) -> None:
    expected = load_file(folder / f"{name}.logits")["logits"]
    for rank in range(int(where[0])):
        found = load_file(folder / f"{name}.{where}.rank{rank}")["logits"].view(expected.shape)
        assert (found - expected).abs().max() < 4e-6


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_is_saved_bit_for_bit(folder: Path, name: str, where: str) -> None:
    before, after = saved(folder / name), saved(folder / f"{name}.{where}.saved")
    assert sum(".experts." in tensor for tensor in before) > 0
    assert before.keys() == after.keys()
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)


@pytest.mark.parametrize("training", TRAININGS)
def test_updates_equal_plain_training(folder: Path, training: str, where: str) -> None:
    """Packed, in micro-batches and on several ranks, or one episode after the other: the same weights."""
    expected, found = saved(folder / training), saved(folder / f"{training}.{where}")
    start = saved(folder / TRAININGS[training])
    assert expected.keys() == found.keys()
    for tensor in expected:
        moved = (found[tensor] - start[tensor]).norm()
        if "starved" in training and starved(tensor):
            # No gradient, not even one of nearly zero: weight decay alone.
            decayed = start[tensor] * (1 - LR * WEIGHT_DECAY) ** STEPS
            assert torch.allclose(found[tensor], decayed, rtol=1e-6, atol=0), tensor
            continue
        if tensor.endswith("e_score_correction_bias"):
            assert torch.equal(found[tensor], start[tensor])
            continue
        # In the norm: AdamW's first steps turn a gradient of nearly zero into a whole step of either sign.
        assert moved > 5e-4 * found[tensor].numel() ** 0.5, tensor
        assert (found[tensor] - expected[tensor]).norm() < 0.01 * moved, tensor


def starved(tensor: str) -> bool:
    """Experts from the third on."""
    return ".experts." in tensor and int(tensor.split(".experts.")[1].split(".")[0]) >= 2


@pytest.mark.parametrize("training", TRAININGS)
def test_expert_parallelism_changes_no_update(folder: Path, training: str, where: str) -> None:
    """Tokens sent to the experts, or experts to the tokens: the same weights, losses and gradient norms.

    Whatever number of tokens experts get (:func:`tests.trainer.moe_ranks.check_counts`): ``moe_starved_trained`` has
    ranks whose experts get none, ``moe_single`` ranks without an episode, and norms above the limit.
    """
    plain = layout(int(where[0]), 1)
    first, second = saved(folder / f"{training}.{plain}"), saved(folder / f"{training}.{where}")
    start = saved(folder / TRAININGS[training])
    for tensor in first:
        moved = (first[tensor] - start[tensor]).norm()
        assert (first[tensor] - second[tensor]).norm() <= 3e-4 * moved, tensor
    steps = [json.loads((folder / f"{training}.{at}.json").read_text()) for at in (plain, where)]
    for one, other in zip(*steps, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-7)


def test_a_checkpoint_is_read_at_another_degree_of_expert_parallelism(folder: Path, where: str) -> None:
    """The same weights bit for bit, and with AdamW's moments the same next update, up to the order of sums."""
    name = f"degree.{where}"
    before, read = saved(folder / f"{name}.saved"), saved(folder / f"{name}.read")
    assert all(torch.equal(value, read[tensor]) for tensor, value in before.items())
    trained, other = saved(folder / f"{name}.saved.trained"), saved(folder / f"{name}.read.trained")
    for tensor, value in trained.items():
        moved = (value - before[tensor]).norm()
        assert moved > 0 and (other[tensor] - value).norm() <= 3e-4 * moved, tensor


@pytest.mark.parametrize("training", TRAININGS)
def test_gradient_norms_equal_plain_training(folder: Path, training: str, where: str) -> None:
    expected, found = (json.loads((folder / f"{name}.json").read_text()) for name in (training, f"{training}.{where}"))
    assert len(found) == len(expected) == STEPS
    for step, plain in zip(found, expected, strict=True):
        assert step["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
        if training == "moe_single":  # the surrogate of reinforcement learning has another value, the same gradient
            assert step["loss"] == pytest.approx(plain["loss"], rel=1e-4)


def test_activation_checkpointing_changes_nothing(folder: Path, where: str) -> None:
    first, second = saved(folder / f"moe_trained.{where}"), saved(folder / f"moe_recomputed.{where}")
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)


def moe(**change: Any) -> ModelConfig:
    sizes = {"num_hidden_layers": 6, "num_experts": 8, "hidden_size": 48, "moe_intermediate_size": 20}
    return qwen3_moe(**sizes | change)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (moe(), (0, 1, 2, 3, 4, 5)),
        (moe(decoder_sparse_step=2), (1, 3, 5)),
        (moe(decoder_sparse_step=2, mlp_only_layers=[0, 3]), (1, 5)),
        (qwen3(num_experts=8), ()),
        (deepseek(num_hidden_layers=6, first_k_dense_replace=2), (2, 3, 4, 5)),
    ],
)
def test_layers_with_experts_follow_the_config(config: ModelConfig, layers: tuple[int, ...]) -> None:
    assert config.sparse_layers == layers


def test_a_deepseek_that_sglang_could_not_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(deepseek_values(moe_layer_freq=1)))
    with pytest.raises(ValueError, match=r"topk_method, scoring_func"):
        resolve_model(str(tmp_path))


def test_a_config_without_the_number_of_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="neither num_experts"):
        moe(num_experts=None)


@pytest.mark.parametrize(
    ("ranks", "degree", "words"),
    [
        (3, 1, r"trainer\.ranks 3\b.*\b8 experts\b"),
        (6, 3, r"trainer\.expert-parallel 3\b.*\b8 experts\b"),
        (10, 1, r"\bhidden_size 48\b"),
        (16, 1, r"\bmoe_intermediate_size 20\b"),
        (16, 2, r"\b8 ranks .*\bmoe_intermediate_size 20\b"),
    ],
)
def test_ranks_that_cannot_share_the_experts_are_refused(ranks: int, degree: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_experts(moe(), TrainerSettings(ranks=ranks, expert_parallel=degree))


@pytest.mark.parametrize(("ranks", "degree", "experts"), [(4, 1, 8), (4, 2, 2), (8, 8, 8), (16, 4, 8)])
def test_ranks_that_can_share_the_experts_are_accepted(ranks: int, degree: int, experts: int) -> None:
    check_experts(moe(num_experts=experts), TrainerSettings(ranks=ranks, expert_parallel=degree))


def test_impossible_expert_parallelism_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expert-parallel 4 .*trainer\.ranks\b.*\b6\b"):
        TrainerSettings(ranks=6, expert_parallel=4)
    with pytest.raises(ValueError, match="no experts"):
        check_experts(qwen3(), TrainerSettings(ranks=2, expert_parallel=2))


def test_impossible_adapters_are_refused() -> None:
    attention = TrainerSettings(lora=LoraSettings(rank=2, targets=("q_proj", "o_proj")))
    check_experts(moe(), attention)
    lora = LoraSettings(rank=2, targets=("q_proj", "gate_proj", "down_proj"))
    for config in (qwen3(), moe()):
        check_experts(config, TrainerSettings(lora=lora))
    words = r"gate_proj, down_proj .*trainer\.ranks 4 .*\b2 experts"
    with pytest.raises(ValueError, match=words):
        check_experts(moe(num_experts=2), TrainerSettings(4, 2, lora=lora))
    with pytest.raises(ValueError, match="DeepSeek-V3"):
        check_experts(deepseek(n_routed_experts=8), attention)
