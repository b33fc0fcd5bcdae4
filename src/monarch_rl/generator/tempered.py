"""Log-probs of given tokens at the temperature of their request, which SGLang computes at 1 whatever it says.

Runs in SGLang's scheduler. Logits of a request's own tokens are divided by its temperature before they are normalised.
Rows from which a token is drawn stay as they are, because the sampler divides those itself; so does every row of a
request that asks for log-probs of drawn tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from monarch_rl.generator.patch import check_parameters, replace_method


def install() -> None:
    """Apply it. Raises RuntimeError if SGLang is not the one that this was written for."""
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
    """Replaces ``InputLogprobProcessor.forward``."""
    temperatures = logits_metadata.temperature
    if temperatures is not None:
        divisors = row_divisors(
            temperatures, logits_metadata.extend_logprob_pruned_lens_cpu, kwargs["token_to_seq_idx"]
        )
        if divisors is not None:
            get_logits_fn = _Dividing(get_logits_fn, divisors)
    return original(processor, *args, get_logits_fn=get_logits_fn, logits_metadata=logits_metadata, **kwargs)


def row_divisors(temperatures: torch.Tensor, asked: list[int], sequences: list[int]) -> torch.Tensor | None:
    """What each row of logits is divided by, float32[rows, 1]; None if all are 1.

    Args:
        temperatures: float32[requests, 1].
        asked: of each request, the tokens of its own whose log-probs are asked for; 0 or less is none.
        sequences: the request of each row.
    """
    reads = torch.tensor([count > 0 for count in asked], device=temperatures.device)
    divisors = torch.where(reads[:, None], temperatures, torch.ones_like(temperatures))
    if bool((divisors == 1).all()):
        return None
    return divisors[torch.tensor(sequences, device=divisors.device)]


class _Dividing:
    """Computes logits as SGLang does, and divides them. It is called for one chunk of rows after the other."""

    def __init__(self, get_logits: Callable[..., torch.Tensor], divisors: torch.Tensor) -> None:
        self._get_logits, self._divisors = get_logits, divisors
        self._next_row = 0

    def __call__(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = slice(self._next_row, self._next_row + len(states))
        self._next_row += len(states)
        return self._get_logits(states, *args, **kwargs) / self._divisors[rows]
