"""Tensor-parallel trainer ranks against one rank: log-probs, entropies, gradients, updates, versions, saved folders."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from monarch_rl.model.config import parse_config
from monarch_rl.model.lora import LoraSettings
from monarch_rl.trainer import platform
from monarch_rl.trainer.settings import TrainerSettings, check_hosts, check_tensor_parallel
from tests.trainer.folders import LLAMA, MOE, QWEN3, make_folder
from tests.trainer.programs import run_program, saved

platform.prepare()

from torchtitan.config import ParallelismConfig  # noqa: E402

from monarch_rl.trainer.model_config import model_config  # noqa: E402

MODELS = {"qwen3": QWEN3, "qwen3_tied": QWEN3 | {"tie_word_embeddings": True}, "llama": LLAMA}
LAYOUTS = {"2x2": 2, "4x2": 4}
"""Ranks and tensor-parallel degree, and the ranks. The second is a mesh of FSDP and tensor parallelism."""
LOGPROB_BOUND = 1e-5
"""Nats, fp32, and for entropies and mask masses too."""
GRADIENT_BOUND = 2e-5
"""Share of the norm of each parameter's gradient, or of a hundredth of the whole gradient's if that is more."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and the output of one rank."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    for seed, (name, config) in enumerate(MODELS.items()):
        make_folder(folder / name, config, seed)
    run_program("tensor_parallel_ranks.py", folder, "1", "1x1", *MODELS, ranks=1)
    return folder


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.core if ranks == 2 else pytest.mark.slow)
        for name, ranks in LAYOUTS.items()
    ]
)
def where(request: pytest.FixtureRequest, folder: Path, ran: set[int]) -> str:
    """A layout for which tensor_parallel_ranks.py has written its output."""
    ranks = LAYOUTS[request.param]
    if ranks not in ran:
        ran.add(ranks)
        run_program("tensor_parallel_ranks.py", folder, "2", request.param, *MODELS, ranks=ranks)
    return str(request.param)


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_entropies_and_gradients_equal_those_of_one_rank(folder: Path, name: str, where: str) -> None:
    """For episodes that share prefixes, at a temperature, in several chunks, with sampling masks and without."""
    expected, found = (load_file(folder / f"{name}.{layout}.values") for layout in ("1x1", where))
    assert expected.keys() == found.keys()
    norms = [value.norm() for tensor, value in expected.items() if tensor.startswith("grad.")]
    total = torch.stack(norms).norm()
    for tensor, value in expected.items():
        difference = found[tensor] - value
        if tensor.startswith("grad."):
            assert difference.norm() < GRADIENT_BOUND * max(value.norm(), 1e-2 * total), tensor
        else:
            assert value.numel() and difference.abs().max() < LOGPROB_BOUND, tensor


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_is_saved_bit_for_bit(folder: Path, name: str, where: str) -> None:
    """The same holds for sent weights: the program compares the shards of each rank's snapshot with the saved weights.
    It also checks that each rank writes its rows."""
    before, after = saved(folder / name), saved(folder / f"{name}.{where}.saved")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)


@pytest.mark.parametrize("name", MODELS)
def test_updates_equal_those_of_one_rank(folder: Path, name: str, where: str) -> None:
    """Weights in the norm; losses and gradient norms within 1e-4, and the same number of tokens."""
    start, expected, found = saved(folder / name), saved(folder / f"{name}.1x1"), saved(folder / f"{name}.{where}")
    for tensor in expected:
        moved = (expected[tensor] - start[tensor]).norm()
        assert moved > 0 and (found[tensor] - expected[tensor]).norm() < 0.01 * moved, tensor
    ours, theirs = (json.loads((folder / f"{name}.{layout}.json").read_text()) for layout in (where, "1x1"))
    # Two shards of a batch share less than one: groups are split.
    counted = ("tokens", "computed_share") if where == "2x2" else ("tokens",)
    for our_step, their_step in zip(ours, theirs, strict=True):
        assert [our_step[name] for name in counted] == [their_step[name] for name in counted]
        for metric in ("loss", "grad_norm", "entropy"):
            assert our_step[metric] == pytest.approx(their_step[metric], rel=1e-4, abs=1e-6), metric


@pytest.mark.parametrize(
    "change, refusal",
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"vocab_size": 101}, "vocab_size 101"),
        ({"intermediate_size": 81}, "intermediate_size 81"),
    ],
)
def test_a_model_that_cannot_be_shared_equally_is_refused(change: dict[str, int], refusal: str) -> None:
    check_tensor_parallel(parse_config(QWEN3), 2)
    check_tensor_parallel(parse_config(QWEN3 | change), 1)
    with pytest.raises(ValueError, match=rf"trainer\.tp 2 .*{refusal}\b"):
        check_tensor_parallel(parse_config(QWEN3 | change), 2)


def test_torchtitan_still_has_no_context_parallelism_for_packed_rows() -> None:
    """When this fails, docs/architecture.md has to be changed."""
    config = model_config(parse_config(QWEN3), logprob_chunk=16, longest=64, half_on_gpu=True)
    parallelism = ParallelismConfig(context_parallel_degree=2)
    with pytest.raises(NotImplementedError, match="Varlen.*CP"):
        config.update_from_config(config=SimpleNamespace(parallelism=parallelism))


def test_experts_lora_and_groups_across_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="experts"):
        check_tensor_parallel(parse_config(MOE), 2)
    with pytest.raises(ValueError, match=r"trainer\.lora .*trainer\.tp 2\b"):
        TrainerSettings(tp=2, lora=LoraSettings(rank=4))
    with pytest.raises(ValueError, match=r"trainer\.compile .*trainer\.tp 2\b"):
        TrainerSettings(tp=2, compile=True)
    check_hosts(TrainerSettings(ranks=12, tp=2), per_host=6)
    with pytest.raises(ValueError, match=r"trainer\.tp 4 .*\b6 devices"):
        check_hosts(TrainerSettings(ranks=12, tp=4), per_host=6)
    with pytest.raises(ValueError, match=r"trainer\.tp 2 .*trainer\.ranks\b.*\b3\b"):
        TrainerSettings(ranks=3, tp=2)
