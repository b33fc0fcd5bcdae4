"""How per-token losses become one number: the weight of each token, so that the loss is a plain sum.

The normalisers are those of the whole batch, over all ranks and micro-batches, so that how a batch is cut does not
change its gradient.
"""

from __future__ import annotations

from typing import Literal

import torch

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def token_weights(
    episode_lengths: torch.Tensor,
    aggregation: Aggregation,
    *,
    batch_tokens: int,
    batch_episodes: int,
    max_tokens: int,
) -> torch.Tensor:
    """The weight of every trainable token of each episode.

    - ``token_mean``: 1 / tokens of the batch (DAPO, arXiv:2503.14476).
    - ``sequence_mean``: 1 / (tokens of the episode x episodes of the batch) (GRPO, arXiv:2402.03300).
    - ``constant``: 1 / (max_tokens x episodes of the batch), free of the bias towards short right and long
      wrong answers (Dr.GRPO, arXiv:2503.20783).

    Args:
        episode_lengths: int[E], trainable tokens of each episode.
        batch_tokens: trainable tokens of the whole batch.
        batch_episodes: episodes of the whole batch.
        max_tokens: tokens that an episode may draw.

    Returns:
        float[E].

    Raises:
        ValueError: unknown aggregation.
    """
    lengths = episode_lengths.to(torch.float32)
    match aggregation:
        case "token_mean":
            return torch.full_like(lengths, 1.0 / max(batch_tokens, 1))
        case "sequence_mean":
            return 1.0 / (lengths.clamp(min=1) * max(batch_episodes, 1))
        case "constant":
            return torch.full_like(lengths, 1.0 / (max_tokens * max(batch_episodes, 1)))
    raise ValueError(f"unknown aggregation {aggregation!r}: token_mean, sequence_mean or constant")
