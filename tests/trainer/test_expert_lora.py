"""Adapters on experts, divided among ranks or not, against the formula in plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.lora_cases import EXPERT_CASES, EXPERT_LAYOUTS
from tests.trainer.programs import check_merged, parameters, run_program, saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models."""
    folder = tmp_path_factory.mktemp("expert_lora")
    run_program("expert_lora_reference.py", "make", folder)
    return folder


@pytest.fixture(params=parameters(EXPERT_LAYOUTS))
def where(request: pytest.FixtureRequest, folder: Path, ran: set[int]) -> str:
    """A layout for which expert_lora_ranks.py and expert_lora_reference.py have written their output."""
    ranks = int(request.param[0])
    if ranks not in ran:
        ran.add(ranks)
        run_program("expert_lora_ranks.py", folder, *map(str, EXPERT_LAYOUTS[ranks]), ranks=ranks)
        run_program("expert_lora_reference.py", "compare", folder, str(ranks))
    return str(request.param)


@pytest.mark.parametrize("case", EXPERT_CASES)
def test_updates_equal_the_formulas(folder: Path, case: str, where: str) -> None:
    expected, found = load_file(folder / f"{case}.{where[0]}.trained"), saved(folder / f"{case}.{where}_adapter")
    start = saved(folder / f"{case}.{where}_start_adapter")
    assert expected.keys() == found.keys()
    moved = 0
    for tensor in expected:
        # In the norm: AdamW's first steps turn a gradient of nearly zero into a whole step of either sign.
        change = (expected[tensor] - start[tensor]).norm()
        assert (found[tensor] - expected[tensor]).norm() <= 0.01 * change, tensor
        moved += int(change > 5e-4 * found[tensor].numel() ** 0.5)
    lora = EXPERT_CASES[case][1]
    if case == "experts_starved":  # an expert without a token moves by weight decay alone
        still = [name for name in expected if ".experts." in name and int(name.split(".experts.")[1].split(".")[0]) > 1]
        assert moved == len(expected) - len(still)
        for name in still:
            assert not found[name].any() if ".lora_B." in name else torch.allclose(found[name], start[name], rtol=1e-3)
    else:
        assert moved == len(expected)
    assert {name.split(".")[-3] for name in expected} == set(lora.targets)


@pytest.mark.parametrize("case", EXPERT_CASES)
def test_trainer_adapters_and_merged_model_give_the_same_logits(folder: Path, case: str, where: str) -> None:
    written = load_file(folder / f"{case}.{where}.logits")
    before = load_file(folder / f"{EXPERT_CASES[case][0]}.logits")["logits"]
    assert (written["formula"] - before).abs().max() > 2e-3
    assert (written["merged"] - written["formula"]).abs().max() < 5e-6
    for path in folder.glob(f"{case}.{where}.rank*"):
        found = load_file(path)["logits"].view(before.shape)
        assert (found - written["formula"]).abs().max() < 5e-6


@pytest.mark.parametrize("case", EXPERT_CASES)
def test_the_merged_weights_equal_the_formula(folder: Path, case: str, where: str) -> None:
    """And all others are unchanged. The sent tensors equal the saved ones: expert_lora_ranks.py compares the bits."""
    kind, lora = EXPERT_CASES[case]
    before, merged, adapters = (saved(folder / x) for x in (kind, f"{case}.{where}", f"{case}.{where}_adapter"))
    check_merged(before, merged, adapters, lora)


@pytest.mark.parametrize("case", EXPERT_CASES)
def test_initial_adapters_do_not_depend_on_the_sharding(folder: Path, case: str, where: str) -> None:
    """And no two experts have equal adapters."""
    first, *others = [saved(path) for path in sorted(folder.glob(f"{case}.*_start_adapter"))]
    assert others
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    random_values = [value for name, value in first.items() if ".lora_A." in name]
    assert len({tuple(value.flatten().tolist()) for value in random_values}) == len(random_values)
    assert all((value * value.shape[1] ** 0.5).abs().max() <= 1 for value in random_values)
    assert not any(value.any() for name, value in first.items() if ".lora_B." in name)
