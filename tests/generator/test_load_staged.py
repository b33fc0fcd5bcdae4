"""The loader on models whose layouts are SGLang's in small: fused, stacked, padded; and on those it must refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from monarch_rl.generator.load_staged import load
from monarch_rl.weights.staging import Staging, decode_specs, encode_specs
from tests.generator.helpers import checksums_of, fill, manifest_of


class Fused(nn.Module):
    """q, k fused by rows; two experts stacked; a padded vocabulary; a scalar per head."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.full((12, 6), torch.nan), requires_grad=False)
        self.experts = nn.Parameter(torch.full((2, 8, 5), torch.nan), requires_grad=False)
        self.vocabulary = nn.Parameter(torch.full((16, 4), torch.nan), requires_grad=False)
        self.loads = 0

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.loads += 1
        for name, tensor in weights:
            if name == "vocabulary":
                self.vocabulary.data[:13].copy_(tensor)
                self.vocabulary.data[13:].fill_(0)
            elif name in ("q", "k"):
                start = 0 if name == "q" else 8
                self.qk.data.narrow(0, start, tensor.shape[0]).copy_(tensor)
            else:
                expert, part = int(name[1]), name[3:]
                self.experts.data[expert].narrow(0, 0 if part == "gate" else 4, 4).copy_(tensor)


def fused_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (8, 6), "k": (4, 6), "vocabulary": (13, 4)}
    shapes |= {f"e{e}.{part}": (4, 5) for e in range(2) for part in ("gate", "up")}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def stage(weights: dict[str, torch.Tensor]) -> Staging:
    staging = Staging(manifest_of(weights))
    fill(staging, weights)
    return staging


def error_of(model: nn.Module, weights: dict[str, torch.Tensor]) -> str:
    staging = stage(weights)
    load(model, staging.named_tensors())
    error = staging.read_report().error
    assert error is not None
    return error


def test_first_load_goes_through_the_model_and_later_ones_by_the_plan() -> None:
    model, staging = Fused(), stage(fused_weights())
    for seed in range(3):
        weights = fused_weights(seed)
        fill(staging, weights)
        staging.reset_report()
        load(model, staging.named_tensors())
        report = staging.read_report()
        assert report.error is None
        assert report.nbytes == sum(x.nbytes for x in weights.values())
        assert dict(zip(staging.manifest.names, staging.checksums.tolist(), strict=True)) == checksums_of(weights)
        assert torch.equal(model.qk.data, torch.cat([weights["q"], weights["k"]]))
        assert torch.equal(model.experts.data[1], torch.cat([weights["e1.gate"], weights["e1.up"]]))
        assert torch.equal(model.vocabulary.data[13:], torch.zeros(3, 4))
    assert model.loads == 1


def test_checksums_are_of_what_the_engine_holds_and_not_of_staging() -> None:
    class Forgetful(Fused):
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(weights)
            self.qk.data[0, 0].fill_(7.0)

    model, weights = Forgetful(), fused_weights()
    staging = stage(weights)
    load(model, staging.named_tensors())
    found = dict(zip(staging.manifest.names, staging.checksums.tolist(), strict=True))
    assert {name for name, value in checksums_of(weights).items() if found[name] != value} == {"q"}


def test_a_parameter_that_moved_voids_the_plan() -> None:
    model, weights = Fused(), fused_weights()
    staging = stage(weights)
    load(model, staging.named_tensors())
    model.qk = nn.Parameter(torch.full((12, 6), torch.nan), requires_grad=False)
    load(model, staging.named_tensors())
    assert model.loads == 2
    assert torch.equal(model.qk.data[:8], weights["q"])


def test_another_staging_area_voids_the_plan() -> None:
    model = Fused()
    load(model, stage(fused_weights(0)).named_tensors())
    second = stage(fused_weights(1))
    load(model, second.named_tensors())
    assert second.read_report().error is None
    assert torch.equal(model.qk.data[:8], fused_weights(1)["q"])


def test_a_tensor_the_engine_does_not_take_is_named() -> None:
    class Tied(Fused):
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            super().load_weights([(name, tensor) for name, tensor in weights if name != "lm_head"])

    error = error_of(Tied(), fused_weights() | {"lm_head": torch.ones(13, 4)})
    assert "lm_head" in error
    assert "tied" in error


def test_a_parameter_that_nothing_fills_is_named() -> None:
    class Larger(Fused):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(3), requires_grad=False)

    assert "no staged tensor fills these parameters of the engine: bias" in error_of(Larger(), fused_weights())


def test_a_parameter_stored_transposed_is_refused() -> None:
    class Transposed(Fused):
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            super().load_weights([(n, t) for n, t in weights if n != "vocabulary"])
            self.vocabulary.data.view(4, 16)[:, :13].copy_(dict(weights)["vocabulary"].t())

    error = error_of(Transposed(), fused_weights())
    assert "vocabulary is not held row by row" in error


def test_a_loader_that_computes_is_refused() -> None:
    class Shifted(Fused):
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(weights)
            self.qk.data.add_(1.0)

    assert "qk (add_)" in error_of(Shifted(), fused_weights())


def test_another_dtype_than_the_engines_is_refused() -> None:
    weights = fused_weights()
    error = error_of(Fused(), weights | {"q": weights["q"].to(torch.bfloat16)})
    assert "(q)" in error
    assert "torch.float32" in error


def test_an_exception_of_the_model_is_reported_and_not_raised() -> None:
    class Broken(Fused):
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            raise KeyError("no such layer")

    assert "no such layer" in error_of(Broken(), fused_weights())


def test_a_report_that_was_never_written_is_not_taken_for_success() -> None:
    staging = stage(fused_weights())
    staging.reset_report()
    with pytest.raises(RuntimeError, match="did not run"):
        staging.read_report()


def test_specs_survive_the_way_to_the_scheduler() -> None:
    specs = manifest_of(fused_weights() | {"s": torch.ones((), dtype=torch.bfloat16)}).tensors
    assert decode_specs(encode_specs(specs)) == specs
