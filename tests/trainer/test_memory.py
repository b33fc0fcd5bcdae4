"""The memory planned for a trainer rank, against the memory of its tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monarch_rl.model.lora import FULL_TRAINING, LoraSettings
from monarch_rl.model.sizes import trained_model
from monarch_rl.pipeline.memory import checkpoint_bytes, snapshot_bytes, trainer_memory
from monarch_rl.trainer.loss_settings import CriticSettings
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.weights.transport import TransferSettings
from tests.trainer.memory_cases import CASES, RANKS, folder_of, make_model
from tests.trainer.programs import run_program

TOLERANCE = 0.1
PROGRAM_S = 1500.0
"""Time limit of all cases together: some 45 s when nothing else runs."""


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Bytes at the peak of a trainer rank, for each case."""
    root = tmp_path_factory.mktemp("memory")
    for name, case in CASES.items():
        make_model(folder_of(root, name), case)
    run_program("memory_ranks.py", root, ranks=RANKS, limit_s=PROGRAM_S)
    found = {}
    for name in CASES:
        ranks = [json.loads(Path(f"{folder_of(root, name)}.rank{rank}.json").read_text()) for rank in range(RANKS)]
        # The profiler may miss more on one rank than on another, so that its record is incomplete.
        assert any(rank["bound"] < 1.2 * rank["peak"] for rank in ranks), f"{name}: too few releases were recorded"
        found[name] = max(rank["peak"] for rank in ranks)
    return found


@pytest.mark.timeout(PROGRAM_S + 60)
@pytest.mark.parametrize("name", CASES)
def test_a_trainer_rank_uses_the_planned_memory(name: str, peaks: dict[str, int]) -> None:
    case = CASES[name]
    model = trained_model(case.config, case.trainer.lora)
    planned = trainer_memory(model, case.trainer, TransferSettings(), on_gpu=False, served=4, keys=case.keys)
    total = sum(planned.values())
    print({purpose: round(nbytes / 1e6, 1) for purpose, nbytes in planned.items()})
    print(f"planned {total / 1e6:.1f}, measured {peaks[name] / 1e6:.1f} MB")
    assert peaks[name] == pytest.approx(total, rel=TOLERANCE)


def test_each_case_covers_another_purpose() -> None:
    """A wrong size for one purpose would be noticed: each takes a third of the memory of some case, or nearly."""
    shares: dict[str, float] = {}
    for case in CASES.values():
        model = trained_model(case.config, case.trainer.lora)
        planned = trainer_memory(model, case.trainer, TransferSettings(), on_gpu=False, served=4)
        for purpose, nbytes in planned.items():
            shares[purpose] = max(shares.get(purpose, 0), nbytes / sum(planned.values()))
    assert {purpose for purpose, share in shares.items() if share < 0.1} == {"rotary cache"}
    assert {p for p, share in shares.items() if share > 0.25} >= {"activations", "logits", "optimiser states"}


def test_snapshots_take_the_memory_of_their_transport() -> None:
    """docs/weights.md, "What it costs": shards of 1, a version of 4."""
    for transport, delta, expected in (
        ("collective", False, 2),
        ("collective", True, 5),
        ("rdma", False, 2),
        ("shared_memory", False, 8),
        ("auto", False, 8),
    ):
        assert snapshot_bytes(1, 4, TransferSettings(transport=transport, delta=delta)) == expected  # type: ignore[arg-type]


def test_an_episode_of_32k_tokens_of_an_8b_fits_80_gb() -> None:
    """With checkpointing: on 8 GPUs, in bfloat16."""
    from tools.memory import MODELS, device_bytes

    settings = TrainerSettings(ranks=8, tokens_per_microbatch=32_768, activation_checkpoint="full", logprob_chunk=512)
    model = trained_model(MODELS["Qwen3-8B"], FULL_TRAINING)
    planned = trainer_memory(model, settings, TransferSettings(), on_gpu=True, served=2)
    assert sum(planned.values()) < 0.95 * device_bytes(80)


def test_a_checkpoints_copy_has_the_trained_weights_and_their_moments() -> None:
    config = next(iter(CASES.values())).config
    full, lora = (trained_model(config, kind) for kind in (FULL_TRAINING, LoraSettings(rank=4)))
    assert checkpoint_bytes(full, TrainerSettings(ranks=1)) == 12 * full.sizes.elements
    assert checkpoint_bytes(full, TrainerSettings(ranks=4)) == 12 * -(-full.sizes.elements // 4)
    with_one = TrainerSettings(ranks=1, critic=CriticSettings(lr=1e-5))
    assert checkpoint_bytes(full, with_one) == 12 * (2 * full.sizes.elements - 1000 * 128 + 128)
    assert checkpoint_bytes(lora, TrainerSettings(ranks=1, lora=LoraSettings(rank=4))) == 12 * lora.lora > 0
