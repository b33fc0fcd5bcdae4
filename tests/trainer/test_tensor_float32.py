"""When a GPU may multiply in TF32: where the operands are bfloat16 values, which TF32 represents exactly."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.trainer.platform import TF32_OVERRIDE, prepare, tensor_float32

prepare()

from monarch_rl.trainer.batch import MicroBatch  # noqa: E402
from monarch_rl.trainer.policy import Policy  # noqa: E402
from monarch_rl.trainer.token_logprobs import TokenLogprobs  # noqa: E402

DROPPED = 13
"""Bits of float32's 23 that TF32 drops."""


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to the nearest value of TF32, half to even."""
    bits = x.view(torch.int32)
    even = (bits >> DROPPED) & 1
    return ((bits + (1 << (DROPPED - 1)) - 1 + even) >> DROPPED << DROPPED).view(torch.float32)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False), min_size=1))
def test_tf32_has_every_value_of_bfloat16(values: list[float]) -> None:
    halves = torch.tensor(values).bfloat16()
    halves = halves[halves.isfinite()].float()
    assert torch.equal(to_tf32(halves), halves)


def test_tf32_loses_bits_of_other_values() -> None:
    assert not torch.equal(to_tf32(x := torch.tensor([1 / 3])), x)


@pytest.mark.parametrize("enabled, inside", [(True, "high"), (False, "highest")])
def test_tf32_ends_with_its_block_even_on_an_error(enabled: bool, inside: str) -> None:
    with pytest.raises(KeyError), tensor_float32(enabled):
        assert torch.get_float32_matmul_precision() == inside
        raise KeyError
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("enabled, inside", [(True, "high"), (False, "highest")])
def test_the_block_overrides_torchs_initial_setting(enabled: bool, inside: str) -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with tensor_float32(enabled):
            assert torch.get_float32_matmul_precision() == inside
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_variable_that_enables_tf32_everywhere_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv(TF32_OVERRIDE, "1")
    with pytest.warns(UserWarning, match=TF32_OVERRIDE):
        assert prepare() == torch.device("cuda", 0)
    monkeypatch.setenv(TF32_OVERRIDE, "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare()


class Watched(torch.autograd.Function):
    """Notes the precision of the forward and of the backward pass."""

    seen: list[str] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Watched.seen.append(torch.get_float32_matmul_precision())
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        Watched.seen.append(torch.get_float32_matmul_precision())
        return gradients[0]


@pytest.mark.parametrize("half, expected", [(True, "high"), (False, "highest")])
def test_a_policy_uses_tf32_only_in_the_two_passes_of_half_precision(half: bool, expected: str) -> None:
    """The merged weights of LoRA, for example, are computed from float32 values, outside of both."""
    weight = torch.ones(3, requires_grad=True)

    class Module(torch.nn.Module):
        lm_head = torch.nn.Identity()

        def forward(self, *_: Any, **__: Any) -> TokenLogprobs:
            assert self.lm_head.sampled_tokens is not None
            return TokenLogprobs(Watched.apply(weight), torch.zeros(3), torch.ones(3))

    policy: Any = object.__new__(Policy)
    policy.module, policy.temperature, policy._computes_in_half = Module(), 1.0, half
    policy._set_expert_routes, policy._routers = lambda *_: None, []
    policy.settings = type("Settings", (), {"router_replay": "off"})
    batch: Any = object.__new__(MicroBatch)
    for name in ("positions", "attention", "sampled_after", "targets", "sampling_masks", "rows", "notes"):
        setattr(batch, name, None)
    batch.token_ids, batch.supervised = torch.zeros(1, 3), False
    Watched.seen.clear()

    batch.behaviour_logprobs, batch.advantages, batch.columns = torch.zeros(3), torch.zeros(3), {}
    batch.lags = torch.zeros(3, dtype=torch.int64)
    policy._expert_route_sums, policy.device = lambda _: {}, torch.device("cpu")

    def objective(output: Any, _: MicroBatch) -> Any:
        return output.logprobs.sum(), {"tokens": torch.ones(())}

    policy._add_gradient(batch, objective)
    assert Watched.seen == [expected, expected] and weight.grad is not None
    assert torch.get_float32_matmul_precision() == "highest"
