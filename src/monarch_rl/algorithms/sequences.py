"""Sums and means over the tokens of each sequence. Pure functions over tokens [N]."""

from __future__ import annotations

import torch


def sequence_means(values: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """The mean over a token's whole sequence, at each token.

    Args:
        values: float[N].
        sequences: int64[N], the sequence of each token: any numbers from 0 on.

    Returns:
        float[N].
    """
    counts = torch.bincount(sequences)
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add(0, sequences, values)
    return (sums / counts.clamp(min=1))[sequences]


def whole_sequences(tokens: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """bool[N]: tokens of sequences all of whose tokens are in ``tokens``, bool[N]."""
    return sequence_means((~tokens).float(), sequences) == 0
