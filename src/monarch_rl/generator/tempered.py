"""Log-probs of given tokens at the request's temperature. SGLang always computes them at temperature 1.

Runs in SGLang's scheduler. Logits of a request's given tokens are divided by its temperature before normalisation. Rows
from which a token is sampled are not changed, because the sampler divides them itself; nor is any row of a request that
asks for log-probs of sampled tokens only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from monarch_rl.generator.patch import check_parameters, replace_method


def install() -> None:
    """Patch SGLang. Raises RuntimeError if its version is not the expected one."""
    from sglang.srt.layers.logits_processor import LogitsMetadata
    from sglang.srt.layers.logprob_processor import InputLogprobProcessor

    make = LogitsMetadata.from_forward_batch.__func__  # type: ignore[attr-defined]
    check_parameters(make, "cls forward_batch")

    def from_forward_batch(cls: Any, forward_batch: Any) -> Any:
        metadata = make(cls, forward_batch)
        if metadata.extend_return_logprob and forward_batch.sampling_info is not None:
            metadata.temperature = forward_batch.sampling_info.temperatures
        return metadata

    LogitsMetadata.from_forward_batch = classmethod(from_forward_batch)
    replace_method(
        InputLogprobProcessor,
        "forward",
        tempered_forward,
        "pruned_states sample_indices input_logprob_indices token_to_seq_idx lm_head get_logits_fn logits_metadata "
        "skip_chunking_for_dp_attn",
    )


def tempered_forward(
    processor: Any, original: Callable[..., Any], *args: Any, get_logits_fn: Any, logits_metadata: Any, **kwargs: Any
) -> Any:
    """Replaces ``InputLogprobProcessor.forward``: divide logits by temperatures."""
    temperatures = logits_metadata.temperature
    if temperatures is not None:
        divisors = row_divisors(
            temperatures, logits_metadata.extend_logprob_pruned_lens_cpu, kwargs["token_to_seq_idx"]
        )
        if divisors is not None:
            get_logits_fn = _Dividing(get_logits_fn, divisors)
    return original(processor, *args, get_logits_fn=get_logits_fn, logits_metadata=logits_metadata, **kwargs)


def row_divisors(temperatures: torch.Tensor, counts: list[int], sequences: list[int]) -> torch.Tensor | None:
    """Divisor of each row of logits, float32[rows, 1]; None if all are 1.

    Args:
        temperatures: float32[requests, 1].
        counts: for each request, of how many given tokens it asks for log-probs; 0 or less is none.
        sequences: index of each row's request.
    """
    reads = torch.tensor([count > 0 for count in counts], device=temperatures.device)
    divisors = torch.where(reads[:, None], temperatures, torch.ones_like(temperatures))
    if bool((divisors == 1).all()):
        return None
    return divisors[torch.tensor(sequences, device=divisors.device)]


class _Dividing:
    """Computes logits with SGLang and divides them. Must be called for consecutive chunks of rows."""

    def __init__(self, get_logits: Callable[..., torch.Tensor], divisors: torch.Tensor) -> None:
        self._get_logits, self._divisors = get_logits, divisors
        self._next_row = 0

    def __call__(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = slice(self._next_row, self._next_row + len(states))
        self._next_row += len(states)
        return self._get_logits(states, *args, **kwargs) / self._divisors[rows]
