"""The head's entropies and log-probs: values and gradients, against the definition in float64."""

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


def of_definition(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """-sum of p log p over the ids in the mask."""
    if mask is not None:
        logits = logits.masked_fill(~mask, -1e30)
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_equal_the_definition(masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, generator=generator, dtype=torch.float64) * 3
    ids = torch.randint(0, 11, (5,), generator=generator)
    upstream = torch.randn(5, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 11, generator=generator) < 0.5
    mask[torch.arange(5), ids] = True
    sets = (mask.sum(-1), mask.nonzero()[:, 1].int()) if masked else None
    both = [logits.clone().requires_grad_(), logits.clone().requires_grad_()]
    found = logprobs_of(both[0], ids, sets, entropy_gradient=True).entropies
    expected = of_definition(both[1], mask if masked else None)
    torch.testing.assert_close(found, expected)
    for entropies in (found, expected):
        (entropies * upstream).sum().backward()
    assert both[0].grad is not None and both[0].grad.abs().sum() > 0
    torch.testing.assert_close(both[0].grad, both[1].grad)


def test_entropies_have_no_gradient_unless_requested() -> None:
    logits = torch.randn(3, 7, requires_grad=True)
    assert not logprobs_of(logits, torch.zeros(3, dtype=torch.int64), None).entropies.requires_grad


def test_a_head_in_half_precision_computes_in_float32() -> None:
    """Weights and hidden states have bfloat16's precision; nothing after them is rounded to it, in any chunk."""
    generator, tokens, vocabulary = torch.Generator().manual_seed(0), 9, 31
    head = LogprobHead(LogprobHead.Config(in_features=8, out_features=vocabulary, chunk=4))
    with torch.no_grad():
        head.weight.normal_(generator=generator)
    hidden = torch.randn(1, tokens, 8, generator=generator).bfloat16().requires_grad_()
    ids = torch.randint(0, vocabulary, (tokens,), generator=generator)
    head.bfloat16().sampled_tokens = SampledTokens(torch.arange(tokens), ids, 1.0, None)
    found = head(hidden)
    assert {values.dtype for values in found if values is not None} == {torch.float32}
    exact = (hidden.detach()[0].double() @ head.weight.detach().double().T).log_softmax(-1)
    torch.testing.assert_close(found.logprobs.double(), exact.gather(1, ids[:, None])[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropies.double(), -(exact.exp() * exact).sum(-1), rtol=0, atol=1e-5)
