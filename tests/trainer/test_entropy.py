"""Entropies and log-probs that the head computes: values and gradients, against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from monarch_rl.trainer import platform

platform.prepare()

from monarch_rl.trainer.modules import LogprobHead  # noqa: E402
from monarch_rl.trainer.token_logprobs import (  # noqa: E402
    SampledTokens,  # noqa: E402
    logprobs_of,  # noqa: E402
)


def of_definition(logits: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """-sum of p log p over the kept ids."""
    if kept is not None:
        logits = logits.masked_fill(~kept, -1e30)
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("cut", [False, True])
def test_values_and_gradients_are_those_of_the_definition(cut: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, generator=draw, dtype=torch.float64) * 3
    ids, upstream = torch.randint(0, 11, (5,), generator=draw), torch.randn(5, generator=draw, dtype=torch.float64)
    kept = torch.rand(5, 11, generator=draw) < 0.5
    kept[torch.arange(5), ids] = True
    sets = (kept.sum(-1), kept.nonzero()[:, 1].int()) if cut else None
    both = [logits.clone().requires_grad_(), logits.clone().requires_grad_()]
    found = logprobs_of(both[0], ids, sets, entropy_gradient=True).entropies
    expected = of_definition(both[1], kept if cut else None)
    torch.testing.assert_close(found, expected)
    for entropies in (found, expected):
        (entropies * upstream).sum().backward()
    assert both[0].grad is not None and both[0].grad.abs().sum() > 0
    torch.testing.assert_close(both[0].grad, both[1].grad)


def test_without_being_asked_they_have_no_gradient() -> None:
    logits = torch.randn(3, 7, requires_grad=True)
    assert not logprobs_of(logits, torch.zeros(3, dtype=torch.int64), None).entropies.requires_grad


def test_a_head_in_half_precision_computes_in_float32() -> None:
    """What bfloat16 has of weights and hidden states is given; nothing after that is rounded to it, in any chunk."""
    draw, tokens, vocabulary = torch.Generator().manual_seed(0), 9, 31
    head = LogprobHead(LogprobHead.Config(in_features=8, out_features=vocabulary, chunk=4))
    with torch.no_grad():
        head.weight.normal_(generator=draw)
    hidden = torch.randn(1, tokens, 8, generator=draw).bfloat16().requires_grad_()
    ids = torch.randint(0, vocabulary, (tokens,), generator=draw)
    head.bfloat16().sampled_tokens = SampledTokens(torch.arange(tokens), ids, 1.0, None)
    found = head(hidden)
    assert {values.dtype for values in found if values is not None} == {torch.float32}
    exact = (hidden.detach()[0].double() @ head.weight.detach().double().T).log_softmax(-1)
    torch.testing.assert_close(found.logprobs.double(), exact.gather(1, ids[:, None])[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropies.double(), -(exact.exp() * exact).sum(-1), rtol=0, atol=1e-5)
