"""The memory of the LM head: some tensors of one chunk's logits, however many tokens there are."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monarch_rl.trainer import platform

platform.prepare()

from monarch_rl.trainer.modules import LogprobHead  # noqa: E402
from monarch_rl.trainer.token_logprobs import SampledTokens  # noqa: E402

CHUNK, VOCABULARY, WIDTH = 16, 6000, 4
LOGITS = CHUNK * VOCABULARY * 4
"""Bytes."""
TENSORS = 6
"""Tensors as large as one chunk's logits that may exist at once: logits, their gradients, and intermediate results.
The LM head's weight and its gradients are additional."""


class Peak(TorchDispatchMode):
    """Peak bytes of the storages that operators allocate, and bytes of the largest one."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = self.largest = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live, self.largest = self.live + size, max(self.largest, size)
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self._end, key, size)

    def _end(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def measured(tokens: int, masked: bool, entropy: bool = False) -> Peak:
    """The head's forward and backward pass over ``tokens`` sampled tokens; with ``entropy`` also through entropies."""
    head = LogprobHead(LogprobHead.Config(in_features=WIDTH, out_features=VOCABULARY, chunk=CHUNK))
    hidden = torch.randn(1, tokens, WIDTH, requires_grad=True)
    ids = torch.randint(0, VOCABULARY, (tokens,))
    sets = (torch.ones(tokens, dtype=torch.int64), ids.int()) if masked else None
    head.sampled_tokens = SampledTokens(torch.arange(tokens), ids, 0.7, sampling_masks=sets, entropy_gradient=entropy)
    with Peak() as peak:
        output = head(hidden)
        (output.logprobs + (output.entropies if entropy else 0)).sum().backward()
    assert hidden.grad is not None and head.weight.grad is not None
    return peak


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_memory_does_not_grow_with_the_number_of_tokens(masked: bool, entropy: bool) -> None:
    few, many = measured(2 * CHUNK, masked, entropy), measured(40 * CHUNK, masked, entropy)
    weights = 3 * VOCABULARY * WIDTH * 4
    for peak in (few, many):
        assert peak.largest == LOGITS
        assert LOGITS < peak.most < TENSORS * LOGITS + weights
    # Only a few values per token grow: its hidden state, log-prob, entropy.
    assert many.most - few.most < 0.2 * LOGITS


def test_a_larger_chunk_would_take_more() -> None:
    """Shows that the bound above does not hold by chance."""
    assert measured(CHUNK // 2, masked=False).most < 0.6 * measured(CHUNK, masked=False).most
